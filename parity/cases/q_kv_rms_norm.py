"""vLLM's capture of the fused norm of both latents in the terms of `jaxattn.q_kv_rms_norm`."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from parity.cases import Adapter, Output

if TYPE_CHECKING:
    from parity.captures import Capture


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments, of the same names."""
    return {name: jnp.asarray(x) for name, x in capture.inputs.items()} | {"eps": float(capture.params["eps"])}


_ROWS = Output(axes=("token", "column"), slice_rank=1, rule="exact", contract="contract")

ADAPTER = Adapter(arguments=arguments, outputs={"q": _ROWS, "kv": _ROWS})
