"""vLLM's captures of hyper-connections in the terms of `jaxattn.mhc_post`."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from parity.cases import Adapter, Arrays, Output

if TYPE_CHECKING:
    from parity.captures import Capture


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments; gates and matrix are the captured ones."""
    x, out = capture.inputs, capture.outputs
    return {
        "residual": jnp.asarray(x["residual"]),
        "y": jnp.asarray(x["y"]),
        "post": jnp.asarray(out["post"][..., 0]),
        "comb": jnp.asarray(out["comb"]),
    }


def expected(capture: "Capture") -> Arrays:
    """The updated streams."""
    return {"new_residual": capture.outputs["new_residual"]}


ADAPTER = Adapter(
    arguments=arguments,
    expected=expected,
    outputs={
        "new_residual": Output(axes=("token", "stream", "channel"), slice_rank=2, rule="default", contract="contract"),
    },
)
