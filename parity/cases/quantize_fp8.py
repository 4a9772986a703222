"""vLLM's captures of FP8 quantizers in the terms of `jaxattn.quantize_fp8`."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from parity.cases import Adapter, Arrays, Output

if TYPE_CHECKING:
    from parity.captures import Capture

_UPPER_BOUND = 10.0
"""`scale_ub` of the captures whose parameters say `ub`."""


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments; the capture's parameters name the path of vLLM."""
    x, params = capture.inputs, capture.params
    args: dict[str, Any] = {"x": jnp.asarray(x["x"])}
    if "group" in params:
        return args | {"granularity": "group", "group": int(params["group"]), "ue8m0": bool(params["ue8m0"])}
    if params.get("per_token"):
        return args | {"granularity": "token"} | ({"upper_bound": _UPPER_BOUND} if params.get("ub") else {})
    return args | {"granularity": "tensor"} | ({"scale": jnp.asarray(x["scale"])} if "scale" in x else {})


def expected(capture: "Capture") -> Arrays:
    """The captured outputs; one scale for the tensor has no dimension here."""
    out = dict(capture.outputs)
    return out | ({"scale": out["scale"].reshape(())} if out["scale"].size == 1 else {})


def convention(capture: "Capture", outputs: Arrays) -> Arrays:
    """Our outputs as they are."""
    del capture
    return {name: np.asarray(x) for name, x in outputs.items()}


ADAPTER = Adapter(
    arguments=arguments,
    expected=expected,
    convention=convention,
    outputs={
        "q": Output(axes=("row", "column"), slice_rank=1, rule="exact", contract="exact"),
        "scale": Output(axes=("row", "group"), slice_rank=0, rule="exact", contract="exact"),
    },
)
