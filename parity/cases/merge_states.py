"""vLLM's captures of `merge_attn_states` in the terms of `jaxattn.merge_states`."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from parity.cases import Adapter, Arrays, Output

if TYPE_CHECKING:
    from parity.captures import Capture


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments: log-sum-exps as [T, H]; the output of a side that its infinite one calls empty is NaN."""
    args: dict[str, Any] = {}
    for side in ("prefix", "suffix"):
        lse = np.ascontiguousarray(capture.inputs[f"{side}_lse"].T)
        o = np.array(capture.inputs[f"{side}_o"])
        o[np.isinf(lse)] = np.nan
        args |= {f"{side}_o": jnp.asarray(o), f"{side}_lse": jnp.asarray(lse)}
    if "out_scale" in capture.inputs:
        args["out_scale"] = jnp.asarray(capture.inputs["out_scale"]).reshape(())
    return args


def expected(capture: "Capture") -> Arrays:
    """The captured outputs, `lse` as [T, H]."""
    return {"o": capture.outputs["o"], "lse": np.ascontiguousarray(capture.outputs["lse"].T)}


def convention(capture: "Capture", outputs: Arrays) -> Arrays:
    """Our outputs as they are; no captured row is empty on both sides, where vLLM copies the prefix."""
    del capture
    return outputs


ADAPTER = Adapter(
    arguments=arguments,
    expected=expected,
    convention=convention,
    outputs={
        "o": Output(axes=("token", "head", "dim"), slice_rank=2, rule="exact", contract="contract"),
        "lse": Output(axes=("token", "head"), slice_rank=2, rule="lse", contract="contract_lse"),
    },
)
