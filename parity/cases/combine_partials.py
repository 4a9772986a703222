"""vLLM's captures of `correct_attn_out` (decode context parallelism) in the terms of `jaxattn.combine_partials`."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from parity.cases import Adapter, Arrays, Output

if TYPE_CHECKING:
    from parity.captures import Capture


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments; the output of a rank whose log-sum-exp calls it empty is NaN."""
    lse = capture.inputs["partial_lse"]
    o = np.array(capture.inputs["partial_o"])
    o[~np.isfinite(lse)] = np.nan
    return {"o": jnp.asarray(o), "lse": jnp.asarray(lse), "return_corrected": True}


def expected(capture: "Capture") -> Arrays:
    """The captured outputs; vLLM leaves the sum over ranks to a collective."""
    return {"corrected": capture.outputs["corrected_o"], "lse": capture.outputs["lse"]}


ADAPTER = Adapter(
    arguments=arguments,
    expected=expected,
    outputs={
        "o": Output(axes=("sequence", "head", "dim"), slice_rank=2, rule="default", contract="contract"),
        "lse": Output(axes=("sequence", "head"), slice_rank=2, rule="lse", contract="contract_lse"),
        "corrected": Output(axes=("rank", "sequence", "head", "dim"), slice_rank=3, rule="exact", contract="contract"),
    },
)
