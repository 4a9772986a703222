"""vLLM's captures of hyper-connections in the terms of `jaxattn.mhc_head`: the formula of a layer's input."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from parity.cases import Adapter, Arrays, Output

if TYPE_CHECKING:
    from parity.captures import Capture


def arguments(capture: "Capture") -> dict[str, Any]:
    """The weights, scale and bases of the input gates alone."""
    x, params = capture.inputs, capture.params
    C = x["residual"].shape[1]
    return {
        "residual": jnp.asarray(x["residual"]),
        "fn": jnp.asarray(x["fn"][:C]),
        "scale": jnp.asarray(x["scale"][0]),
        "base": jnp.asarray(x["base"][:C]),
        "eps": float(params["pre_eps"]),
        "rms_eps": float(params["rms_eps"]),
    }


def expected(capture: "Capture") -> Arrays:
    """The layer's input."""
    return {"h": capture.outputs["layer_input"]}


ADAPTER = Adapter(
    arguments=arguments,
    expected=expected,
    outputs={"h": Output(axes=("token", "channel"), slice_rank=1, rule="default", contract="contract")},
)
