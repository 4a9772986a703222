"""Writes into a paged key/value cache in numpy, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FP8_MAX, INT8_MAX, FLOOR = 448.0, 127.0, 1e-6


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    write_skipped: bool = False
    """A negative slot counts from the end of the cache."""
    clear: bool = False
    """Slots that no token names are set to zero."""
    multiply: bool = False
    """Numbers are multiplied with the scale."""
    clamp: bool = True
    """float8 codes saturate."""
    truncate: bool = False
    """Codes are cut off instead of rounded."""
    per_token: bool = False
    """All heads of a token share the largest scale."""
    shift: int = 0
    """How far every slot is off."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """Caches, and their scale pages if there are any, from the op's arguments as numpy arrays.

    Args:
        args: of `jaxattn.cache_write`; not with int4 caches.
        wide: compute in float64, without rounding to float8, else in float32.
        on: departures.
    """
    work = np.float64 if wide else np.float32
    P, page = args["k_pages"].shape[:2]
    slots = args["slots"].astype(np.int64)
    named = (slots < P * page) & ((slots >= 0) | on.write_skipped)
    where = (slots[named] + on.shift) % (P * page)
    out: Arrays = {}
    for side, new in (("k", "key"), ("v", "value")):
        pages = args[f"{side}_pages"]
        rows = args[new][named].astype(work)
        codes, scales = _codes(rows, pages.dtype, args.get(f"{side}_scale"), f"{side}_scale_pages" in args, wide, on)
        keep = wide and pages.dtype != np.int8
        out[f"{side}_pages"] = _put(pages.astype(work) if keep else pages, where, codes, on)
        if scales is not None:
            old = args[f"{side}_scale_pages"]
            out[f"{side}_scale_pages"] = _put(old.astype(work) if wide else old, where, scales, on)
    order = ("k_pages", "v_pages", "k_scale_pages", "v_scale_pages")
    return {name: out[name] for name in order if name in out}


def _codes(rows: np.ndarray, dtype, scale, per_head: bool, wide: bool, on: Switches):
    work = rows.dtype.type
    if per_head:
        limit = INT8_MAX if dtype == np.int8 else FP8_MAX
        amax = np.abs(rows).max(-1)
        amax = np.broadcast_to(amax.max(-1, keepdims=True), amax.shape) if on.per_token else amax
        scales = np.maximum(amax / work(limit), work(FLOOR))
        quotient = rows * (scales if on.multiply else work(1) / scales)[..., None]
    elif dtype == FP8:
        number = work(1) if scale is None else np.asarray(scale).astype(rows.dtype).reshape(())
        scales, quotient = None, rows * number if on.multiply else rows / number
    else:
        return rows.astype(rows.dtype if wide else dtype), None
    if dtype == np.int8:
        half = work(0 if on.truncate else 0.5)
        rounded = np.trunc(quotient + np.copysign(half, quotient))
        return np.nan_to_num(np.clip(rounded, -128, 127)).astype(np.int8), scales
    if on.truncate:
        quotient = _toward_zero(quotient)
    if on.clamp:
        quotient = np.clip(quotient, -FP8_MAX, FP8_MAX)
    return quotient if wide else quotient.astype(FP8), scales


def _toward_zero(x: np.ndarray) -> np.ndarray:
    """The float8 code next to x in direction zero."""
    code = np.clip(x, -FP8_MAX, FP8_MAX).astype(FP8)
    above = np.abs(code.astype(x.dtype)) > np.abs(x)
    return np.where(
        above, (code.view(np.uint8) - above).astype(np.uint8).view(FP8).astype(x.dtype), code.astype(x.dtype)
    )


def _put(pages: np.ndarray, where: np.ndarray, rows: np.ndarray, on: Switches) -> np.ndarray:
    pages = np.zeros_like(pages) if on.clear else pages.copy()
    pages.reshape(-1, *pages.shape[2:])[where] = rows
    return pages
