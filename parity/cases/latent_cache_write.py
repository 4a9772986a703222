"""vLLM's captures of latent cache writes in the terms of `jaxattn.latent_cache_write`."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxattn import _latent_cache
from parity.cases import Adapter, Arrays, Output

if TYPE_CHECKING:
    from parity.captures import Capture

_FORMATS = {"auto": "plain", "fp8": "fp8", "fp8_ds_mla": "fp8_ds_mla"}


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments; vLLM's caches were zero, and its float8 cache is typed as bytes."""
    x, params = capture.inputs, capture.params
    slots = jnp.asarray(x["slot_mapping"].astype(np.int32))
    if "k" in x:  # V4: 448 numbers and 64 rotated ones
        cache = jnp.zeros_like(jnp.asarray(capture.outputs["cache"]))
        latent, rotary = x["k"][:, : _latent_cache.NOPE], x["k"][:, _latent_cache.NOPE :]
        more: dict[str, Any] = {"format": "v4", "page": int(params["page"])}
    else:
        latent, rotary, format = x["kv_c"], x["k_pe"], _FORMATS[params["kv_cache_dtype"]]
        cache = jnp.zeros_like(jnp.asarray(expected(capture)["cache"]))
        more = {"format": format} | ({"scale": jnp.asarray(x["scale"])} if format == "fp8" else {})
    return {"latent": jnp.asarray(latent), "rotary": jnp.asarray(rotary), "cache": cache, "slots": slots, **more}


def expected(capture: "Capture") -> Arrays:
    """The captured cache; codes of the plain float8 format as such."""
    cache = capture.outputs["cache" if "cache" in capture.outputs else "kv_cache"]
    return {"cache": cache.view(ml_dtypes.float8_e4m3fn) if capture.params.get("kv_cache_dtype") == "fp8" else cache}


ADAPTER = Adapter(
    arguments=arguments,
    expected=expected,
    outputs={"cache": Output(axes=("page", "row", "entry"), slice_rank=0, rule="exact", contract="exact")},
)
