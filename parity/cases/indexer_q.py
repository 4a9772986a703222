"""vLLM's captures of indexer queries in the terms of `jaxattn.indexer_q`."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from parity.cases import Adapter, Output

if TYPE_CHECKING:
    from parity.captures import Capture


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments with the captured rows of the table."""
    x, params = capture.inputs, capture.params
    return {name: jnp.asarray(x[name]) for name in ("q", "weights", "cos_sin")} | {
        "positions": jnp.arange(len(x["positions"]), dtype=jnp.int32),
        "scales": (float(params["softmax_scale"]), float(params["head_scale"])),
        "format": "mxfp4" if params["fp4"] else "fp8",
    }


ADAPTER = Adapter(
    arguments=arguments,
    outputs={
        "q": Output(axes=("token", "head", "dim"), slice_rank=0, rule="exact", contract="exact"),
        "weights": Output(axes=("token", "head"), slice_rank=0, rule="exact", contract="exact"),
        "scale": Output(axes=("token", "head", "block"), slice_rank=0, rule="exact", contract="exact"),
    },
)
