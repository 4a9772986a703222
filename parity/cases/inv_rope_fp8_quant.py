"""vLLM's capture of the quantized attention output in the terms of `jaxattn.inv_rope_fp8_quant`."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from parity.cases import Adapter, Arrays, Output

if TYPE_CHECKING:
    from parity.captures import Capture


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments with the captured rows of the table."""
    x = capture.inputs
    return {
        "o": jnp.asarray(x["o"]),
        "positions": jnp.arange(len(x["positions"]), dtype=jnp.int32),
        "cos_sin": jnp.asarray(x["cos_sin"]),
        "groups": int(capture.params["n_groups"]),
    }


def expected(capture: "Capture") -> Arrays:
    """Codes and scales."""
    return {"q": capture.outputs["o_fp8"], "scale": capture.outputs["scale"]}


ADAPTER = Adapter(
    arguments=arguments,
    expected=expected,
    outputs={
        "q": Output(axes=("token", "group", "column"), slice_rank=0, rule="exact", contract="exact"),
        "scale": Output(axes=("token", "group", "block"), slice_rank=0, rule="exact", contract="exact"),
    },
)
