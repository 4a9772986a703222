"""vLLM's capture of `moe_permute` in the terms of `jaxattn.permute`."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from parity.cases import Adapter, Arrays, Output

if TYPE_CHECKING:
    from parity.captures import Capture


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments; the experts are those that the captured offsets count."""
    x = capture.inputs
    experts = capture.outputs["expert_first_token_offset"].size - 1
    return {"x": jnp.asarray(x["x"]), "topk_ids": jnp.asarray(x["topk_ids"]), "num_experts": experts}


def expected(capture: "Capture") -> Arrays:
    """The captured outputs under our names: int32 offsets, positions as [T, A]."""
    out = capture.outputs
    return {
        "permuted": out["permuted"],
        "offsets": out["expert_first_token_offset"].astype(np.int32),
        "positions": out["inv_permuted_idx"].reshape(capture.inputs["topk_ids"].shape),
    }


def _exact(*axes: str) -> Output:
    return Output(axes=axes, slice_rank=1, rule="exact", contract="exact")


ADAPTER = Adapter(
    arguments=arguments,
    expected=expected,
    outputs={
        "permuted": _exact("row", "dim"),
        "offsets": _exact("expert"),
        "positions": _exact("token", "slot"),
    },
)
