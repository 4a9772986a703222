"""vLLM's captures of the compressor in the terms of `jaxattn.compressor`."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from parity.cases import Adapter, Arrays, Output

if TYPE_CHECKING:
    from parity.captures import Capture


def arguments(capture: "Capture") -> dict[str, Any]:
    """One request from position 0 on, state pages and entries in order; the caches were zero."""
    x, params = capture.inputs, capture.params
    N, ratio = len(x["kv"]), int(params["ratio"])
    positions = np.arange(N, dtype=np.int32)
    slots = np.where((positions + 1) % ratio == 0, positions // ratio, -1).astype(np.int32)
    cache, state = expected(capture)["cache"], capture.outputs["state"]
    args = {name: jnp.asarray(x[name]) for name in ("kv", "score", "ape")}
    return args | {
        "weight": jnp.asarray(x["norm_weight"]),
        "positions": jnp.asarray(positions),
        "request": jnp.zeros(N, jnp.int32),
        "cos_sin": jnp.asarray(x["cos_sin"]),
        "state": jnp.zeros(state.shape, jnp.float32),
        "state_table": jnp.arange(len(state), dtype=jnp.int32)[None],
        "cache": jnp.zeros(cache.shape, jnp.uint8),
        "cache_slots": jnp.asarray(slots),
        "format": "v4" if params["head_dim"] == 512 else "indexer_mxfp4" if params["fp4"] else "indexer_fp8",
        "page": int(params["page"]),
        "eps": float(params["eps"]),
    }


def expected(capture: "Capture") -> Arrays:
    """The cache with its pages as rows of bytes, and the state."""
    cache = capture.outputs["cache"]
    return {"cache": cache.reshape(len(cache), -1), "state": capture.outputs["state"]}


ADAPTER = Adapter(
    arguments=arguments,
    expected=expected,
    outputs={
        "cache": Output(
            axes=("page", "byte"),
            slice_rank=0,
            rule="exact",
            contract="contract_codes",
            note="a softmax and a norm in float32 come before the codes: a number within 1e-7 of the border of two "
            "roundings may fall on either side; none does in these captures",
        ),
        "entries": Output(axes=("page", "row", "dim"), slice_rank=2, rule="default", contract="contract"),
        "state": Output(axes=("page", "row", "column"), slice_rank=0, rule="exact", contract="exact"),
    },
)
