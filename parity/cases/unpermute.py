"""vLLM's capture of `moe_unpermute` in the terms of `jaxattn.unpermute`."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from parity.cases import Adapter, Arrays, Output

if TYPE_CHECKING:
    from parity.captures import Capture


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments: between the two calls the rows were multiplied by a number, a power of two."""
    rows = capture.outputs["permuted"].astype(np.float32) * float(capture.params["scale_between"])
    return {
        "y": jnp.asarray(rows.astype(ml_dtypes.bfloat16)),
        "positions": jnp.asarray(expected_positions(capture)),
        "weights": jnp.asarray(capture.inputs["topk_weights"]),
    }


def expected_positions(capture: "Capture") -> np.ndarray:
    """The captured inverse map as [T, A]."""
    return capture.outputs["inv_permuted_idx"].reshape(capture.inputs["topk_ids"].shape)


def expected(capture: "Capture") -> Arrays:
    """The captured sums."""
    return {"o": capture.outputs["o"]}


ADAPTER = Adapter(
    arguments=arguments,
    expected=expected,
    outputs={"o": Output(axes=("token", "dim"), slice_rank=1, rule="default", contract="contract")},
)
