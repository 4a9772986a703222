"""vLLM's captures of `reshape_and_cache_flash` in the terms of `jaxattn.cache_write`."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from parity.cases import Adapter, Arrays, Output

if TYPE_CHECKING:
    from parity.captures import Capture


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments: caches of zeros, as they were before the captured call; rows without a slot are NaN."""
    x, after = capture.inputs, expected(capture)
    slots = x["slot_mapping"].astype(np.int32)
    args: dict[str, Any] = {"slots": slots, "k_pages": 0 * after["k_pages"], "v_pages": 0 * after["v_pages"]}
    for name in ("key", "value"):
        rows = np.array(x[name])
        rows[slots < 0] = np.nan
        args[name] = rows
    if _quantised(capture):
        args |= {name: x[name] for name in ("k_scale", "v_scale")}
    return {name: jnp.asarray(a) for name, a in args.items()}


def expected(capture: "Capture") -> Arrays:
    """The caches after the call; vLLM keeps float8 codes as bytes."""
    caches = {"k_pages": capture.outputs["k_cache"], "v_pages": capture.outputs["v_cache"]}
    return {k: v.view(ml_dtypes.float8_e4m3fn) if _quantised(capture) else v for k, v in caches.items()}


def _quantised(capture: "Capture") -> bool:
    return str(capture.params["kv_cache_dtype"]).startswith("fp8")


_PAGES = Output(axes=("page", "slot", "head", "dim"), slice_rank=3, rule="exact", contract="exact")
_SCALES = Output(axes=("page", "slot", "head"), slice_rank=3, rule="exact", contract="exact")

ADAPTER = Adapter(
    arguments=arguments,
    expected=expected,
    outputs={"k_pages": _PAGES, "v_pages": _PAGES, "k_scale_pages": _SCALES, "v_scale_pages": _SCALES},
)
