"""vLLM's capture of V4's fused norm, rotation and insertion in the terms of `jaxattn.qnorm_rope_kv_insert`."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from parity.cases import Adapter, Arrays, Output

if TYPE_CHECKING:
    from parity.captures import Capture

_PADDED = 64


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments with the captured rows of the table; the cache was zero, q is padded to 64 heads."""
    x, params = capture.inputs, capture.params
    N = len(x["positions"])
    return {
        "q": jnp.asarray(x["q"]),
        "kv": jnp.asarray(x["kv"]),
        "positions": jnp.arange(N, dtype=jnp.int32),
        "cos_sin": jnp.asarray(x["cos_sin"]),
        "cache": jnp.zeros(capture.outputs["cache"].shape, jnp.uint8),
        "slots": jnp.asarray(x["slot_mapping"].astype(np.int32)),
        "page": int(params["page"]),
        "heads": _PADDED,
        "eps": float(params["eps"]),
    }


def convention(capture: "Capture", outputs: Arrays) -> Arrays:
    """The heads that exist, and the largest number of those that do not."""
    H = capture.inputs["q"].shape[1]
    padding = np.abs(outputs["q"][:, H:].astype(np.float64)).max().astype(np.float32)
    return outputs | {"q": outputs["q"][:, :H], "q_pad_absmax": padding.reshape(1)}


ADAPTER = Adapter(
    arguments=arguments,
    convention=convention,
    outputs={
        "q": Output(axes=("token", "head", "dim"), slice_rank=2, rule="exact", contract="contract"),
        "q_pad_absmax": Output(axes=("one",), slice_rank=0, rule="exact", contract="exact"),
        "pages": Output(axes=("page", "row", "dim"), slice_rank=2, rule="default", contract="contract"),
        "cache": Output(axes=("page", "byte"), slice_rank=0, rule="exact", contract="exact"),
    },
)
