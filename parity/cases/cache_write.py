"""vLLM's captures of `reshape_and_cache_flash` and of its modes with scales per token and head, in the op's terms."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from parity.cases import Adapter, Arrays, Output
from parity.twins import cache_write as twin

if TYPE_CHECKING:
    from parity.captures import Capture

_NEAR = 2.0**-21
"""Relative error of Triton's `x * (1 / scale)`: a reciprocal good to 2^-22 (`div.full.f32`) and two roundings."""


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments: caches of zeros, as they were before the captured call; rows without a slot are NaN."""
    x, after = capture.inputs, expected(capture)
    slots = x["slot_mapping"].astype(np.int32)
    args: dict[str, Any] = {"slots": slots} | {name: 0 * pages for name, pages in after.items()}
    for name in ("key", "value"):
        rows = np.array(x[name])
        rows[slots < 0] = np.nan
        args[name] = rows
    if _mode(capture) == "fp8":
        args |= {name: x[name] for name in ("k_scale", "v_scale")}
    return {name: jnp.asarray(a) for name, a in args.items()}


def expected(capture: "Capture") -> Arrays:
    """The caches after the call; vLLM keeps float8 codes as bytes."""
    out = {}
    for side in ("k", "v"):
        pages = capture.outputs[f"{side}_cache"]
        out[f"{side}_pages"] = pages.view(ml_dtypes.float8_e4m3fn) if _mode(capture) == "fp8" else pages
    for side in ("k", "v"):
        if f"{side}_scale_cache" in capture.outputs:
            out[f"{side}_scale_pages"] = capture.outputs[f"{side}_scale_cache"]
    return out


def convention(capture: "Capture", outputs: Arrays) -> Arrays:
    """Our caches, with the captured code where vLLM's approximate reciprocal decides.

    That is where the quotient lies at the border of two codes and both ours and the captured one are among them.
    """
    if not _mode(capture).endswith("token_head"):
        return outputs
    slots, out = capture.inputs["slot_mapping"], dict(outputs)
    good = slots >= 0
    for side, new in (("k", "key"), ("v", "value")):
        ours, theirs = (x[f"{side}_pages"] for x in (outputs, expected(capture)))
        if ours.dtype != theirs.dtype:  # the truth of a float8 cache is not rounded
            continue
        page = ours.shape[1]
        at = slots[good] // page, slots[good] % page
        rows = capture.inputs[new][good]
        below, above = (twin.nearby(rows, ours.dtype, 1 + e).view(np.uint8) for e in (-_NEAR, _NEAR))
        a, b = (x[at].view(np.uint8) for x in (ours, theirs))
        undecided = (below != above) & ((a == below) | (a == above)) & ((b == below) | (b == above))
        pages = ours.copy()
        pages[at] = np.where(undecided, b, a).view(ours.dtype)
        out[f"{side}_pages"] = pages
    return out


def _mode(capture: "Capture") -> str:
    return str(capture.params["kv_cache_dtype"])


_NOTE = "quotients at the border of two codes: Triton divides approximately, see docs/cache_write.md"
_PAGES = Output(axes=("page", "slot", "head", "dim"), slice_rank=3, rule="exact", contract="exact", note=_NOTE)
_SCALES = Output(axes=("page", "slot", "head"), slice_rank=3, rule="exact", contract="exact")

ADAPTER = Adapter(
    arguments=arguments,
    expected=expected,
    convention=convention,
    outputs={"k_pages": _PAGES, "v_pages": _PAGES, "k_scale_pages": _SCALES, "v_scale_pages": _SCALES},
)
