"""Writes into a paged key/value cache in numpy, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from parity.twins import hadamard_transform

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FP8_MAX, INT8_MAX, INT4_MAX, FLOOR = 448.0, 127.0, 15.0, 1e-6


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
        args: of `jaxattn.cache_write`.
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
        rows = args[new][named]
        rows = (rotated(rows, wide) if pages.dtype == np.uint8 else rows).astype(work)
        codes, scales = _codes(rows, pages.dtype, args.get(f"{side}_scale"), f"{side}_scale_pages" in args, wide, on)
        keep = wide and pages.dtype not in (np.int8, np.uint8)
        out[f"{side}_pages"] = _put(pages.astype(work) if keep else pages, where, codes, on)
        if scales is not None:
            old = args[f"{side}_scale_pages"]
            out[f"{side}_scale_pages"] = _put(old.astype(work) if wide else old, where, scales, on)
    order = ("k_pages", "v_pages", "k_scale_pages", "v_scale_pages")
    return {name: out[name] for name in order if name in out}


def _codes(rows: np.ndarray, dtype, scale, per_head: bool, wide: bool, on: Switches):
    work = rows.dtype.type
    if dtype == np.uint8:
        return _int4(rows, on)
    if per_head:
        limit = INT8_MAX if dtype == np.int8 else FP8_MAX
        amax = np.abs(rows).max(-1)
        amax = np.broadcast_to(amax.max(-1, keepdims=True), amax.shape) if on.per_token else amax
        scales = _scale(amax, limit)
        quotient = rows * (scales if on.multiply else work(1) / scales)[..., None]
    elif dtype == FP8:
        number = work(1) if scale is None else np.asarray(scale).astype(rows.dtype).reshape(())
        scales, quotient = None, rows * number if on.multiply else rows / number
    else:
        return rows.astype(rows.dtype if wide else dtype), None
    if dtype == np.int8:
        half = work(0 if on.truncate else 0.5)
        return np.nan_to_num(np.clip(_away(quotient, half), -128, 127)).astype(np.int8), scales
    if on.truncate:
        quotient = _toward_zero(quotient)
    if on.clamp:
        quotient = np.clip(quotient, -FP8_MAX, FP8_MAX)
    return quotient if wide else quotient.astype(FP8), scales


def _scale(size: np.ndarray, limit: float) -> np.ndarray:
    work = size.dtype.type
    share = size / limit if work is np.float64 else size * work(1 / limit)
    return np.maximum(share, work(FLOOR)).astype(work)


def _away(x: np.ndarray, half: Any = 0.5) -> np.ndarray:
    """Nearest integer, halves away from zero, as adding half and cutting off does."""
    return np.trunc(x + np.copysign(x.dtype.type(half), x))


def _int4(rows: np.ndarray, on: Switches, nudge: float = 1.0):
    """Packed codes and scales of heads that are rotated already; `nudge` multiplies the quotients."""
    work = rows.dtype.type
    low, high = rows.min(-1), rows.max(-1)
    if on.per_token:
        low, high = (np.broadcast_to(f(x, -1, keepdims=True), x.shape) for f, x in ((np.min, low), (np.max, high)))
    scales = _scale(high - low, INT4_MAX)
    inverse = scales if on.multiply else work(1) / scales
    half = 0 if on.truncate else 0.5

    def limited(x):
        return np.nan_to_num(np.clip(_away(x, half), 0, INT4_MAX))

    zero = limited(-low * inverse)
    code = limited(rows * inverse[..., None] * work(nudge) + zero[..., None]).astype(np.uint8)
    bits = scales.astype(np.float32).view(np.int32) & -16 | zero.astype(np.int32)
    return code[..., ::2] | code[..., 1::2] << 4, bits.view(np.float32).astype(rows.dtype)


def rotated(rows: np.ndarray, wide: bool) -> np.ndarray:
    """Signed and rotated heads [T, K, D], not normalised; with vLLM's roundings, or in float64."""
    D = rows.shape[-1]
    flat = rows.reshape(-1, D) * signs(D)
    if wide or D < 16:
        turned = flat.astype(np.float64) @ hadamard_transform.matrix(D)
        return (turned if wide else turned.astype(np.float32).astype(rows.dtype)).reshape(rows.shape)
    turned = hadamard_transform.hadacore(flat.astype(np.float32).astype(ml_dtypes.bfloat16))
    return (turned.astype(np.float32) * np.float32(D**0.5)).astype(rows.dtype).reshape(rows.shape)


def signs(D: int) -> np.ndarray:
    """+-1 from the Mersenne Twister that PyTorch seeds with 0x9E3779B9: 24-bit numbers below one half give +1."""
    draws = np.random.RandomState(0x9E3779B9).randint(0, 2**32, size=D, dtype=np.uint32)
    return np.where((draws & 0xFFFFFF) < 1 << 23, 1.0, -1.0).astype(np.float32)


def nearby(rows: np.ndarray, dtype: Any, factor: float) -> np.ndarray:
    """Codes of rows [T, K, D] with scales per token and head, were every quotient `factor` times as large."""
    if dtype == np.uint8:
        x = rotated(rows, False).astype(np.float32)
        return _int4(x.astype(np.float64), NONE, factor)[0] if x.size else np.zeros((*x.shape[:-1], 0), np.uint8)
    x = rows.astype(np.float32)
    limit = INT8_MAX if dtype == np.int8 else FP8_MAX
    quotient = x.astype(np.float64) / _scale(np.abs(x).max(-1), limit)[..., None] * factor
    if dtype == np.int8:
        return np.clip(_away(quotient), -128, 127).astype(np.int8)
    return np.clip(quotient, -FP8_MAX, FP8_MAX).astype(FP8)


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
