"""TurboQuant's packed slots in numpy, written and read, with switches for faults."""

import functools
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]

BITS = {"k8v4": (8, 4), "4bit_nc": (4, 4), "k3v4_nc": (3, 4), "3bit_nc": (3, 3)}
EPSILON = 1e-8


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    rotate: bool = True
    """Keys are rotated."""
    normalise: bool = True
    """Keys are divided by their norm before they are coded."""
    upper: bool = True
    """A number on a midpoint belongs to the upper level."""
    truncate: bool = False
    """Value codes are cut off instead of rounded."""
    swap_nibbles: bool = False
    """The even of two 4-bit codes lies in the high nibble."""
    bfloat_scales: bool = False
    """Scale and minimum are rounded to bfloat16 first."""
    write_skipped: bool = False
    """A negative slot counts from the end of the cache."""
    shift: int = 0
    """How far every slot is off."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """`pages` from the op's arguments as numpy arrays, computed in float64 or float32."""
    work = np.float64 if wide else np.float32
    pages, slots = args["pages"].copy(), args["slots"].astype(np.int64)
    S = pages.shape[0] * pages.shape[1]
    named = (slots < S) & ((slots >= 0) | on.write_skipped)
    key, value = (args[name][named].astype(work) for name in ("key", "value"))
    pages.reshape(S, *pages.shape[2:])[(slots[named] + on.shift) % S] = packed(key, value, args["preset"], on)
    return {"pages": pages}


@functools.cache
def levels(D: int, bits: int) -> np.ndarray:
    """Centroids of N(0, 1/D), float32, by Lloyd's iteration on a grid, as vLLM stops it."""
    sigma = D**-0.5
    c = sigma * 3.5 * (2 * (np.arange(2**bits) + 0.5) / 2**bits - 1)
    for _ in range(200):
        edges = np.concatenate([[-10.5 * sigma], (c[1:] + c[:-1]) / 2, [10.5 * sigma]])
        x = np.linspace(edges[:-1], edges[1:], 201, axis=1)
        density = np.exp(-(x**2) / (2 * sigma**2))
        density[:, [0, -1]] /= 2
        c = (x * density).sum(1) / density.sum(1)
    return c.astype(np.float32)


def packed(key: np.ndarray, value: np.ndarray, preset: str, on: Switches = NONE) -> np.ndarray:
    """Slots `[..., slot]`."""
    (key_bits, value_bits), D = BITS[preset], key.shape[-1]
    if key_bits == 8:
        parts = [np.clip(key, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)]
    else:
        norm = np.sqrt((key**2).sum(-1, dtype=np.float64)).astype(key.dtype)
        y = key / (norm + key.dtype.type(EPSILON))[..., None] if on.normalise else key
        y = rotated(y) if on.rotate else y
        c = levels(D, key_bits)
        middle = (c[1:] + c[:-1]) / np.float32(2)
        codes = np.searchsorted(middle, y.ravel(), side="right" if on.upper else "left").reshape(y.shape)
        parts = [_pack(codes, key_bits, on), _half(norm)]
    low, high, most = value.min(-1), value.max(-1), 2**value_bits - 1
    step = (high - low) / most if value.dtype == np.float64 else (high - low) * np.float32(1 / most)
    step = np.maximum(step, value.dtype.type(EPSILON))
    exact = (value - low[..., None]) * (1 / step)[..., None]
    codes = np.nan_to_num(np.clip(exact + (0 if on.truncate else 0.5), 0, most)).astype(np.int64)
    if on.bfloat_scales:
        with np.errstate(invalid="ignore"):  # NaN values give NaN scales
            step, low = (x.astype(ml_dtypes.bfloat16).astype(x.dtype) for x in (step, low))
    return np.concatenate([*parts, _pack(codes, value_bits, on), _half(step), _half(low)], -1)


def rotated(x: np.ndarray) -> np.ndarray:
    """`H x / sqrt(D)` by the matrix itself."""
    D = x.shape[-1]
    i = np.arange(D)
    signs = np.where(np.bitwise_count(i[:, None] & i) % 2, -1.0, 1.0)
    return (x.astype(np.float64) @ signs * D**-0.5).astype(x.dtype)


def unpacked(slots: np.ndarray, D: int, preset: str, *, correct: bool = True, swap: bool = False):
    """float64 keys (still rotated) and values of slots."""
    (key_bits, value_bits), at = BITS[preset], 0

    def take(count: int) -> np.ndarray:
        nonlocal at
        at += count
        return np.ascontiguousarray(slots[..., at - count : at])

    def half() -> np.ndarray:
        return take(2).view(np.float16).astype(np.float64)

    if key_bits == 8:
        key = take(D).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    else:
        c = levels(D, key_bits).astype(np.float64)[_unpack(take(D * key_bits // 8), key_bits, swap)]
        length = np.sqrt((c**2).sum(-1, keepdims=True) + 1e-16) if correct else 1
        key = half() * c / length
    codes = _unpack(take(D * value_bits // 8), value_bits, swap)
    step, low = half(), half()
    return key, codes * step + low


def _pack(codes: np.ndarray, bits: int, on: Switches) -> np.ndarray:
    """Bit i of the stream is bit i % 8 of byte i // 8; a code's lowest bit comes first."""
    if bits == 4 and on.swap_nibbles:
        codes = codes.reshape(*codes.shape[:-1], -1, 2)[..., ::-1].reshape(codes.shape)
    stream = (codes[..., None] >> np.arange(bits)) & 1
    return np.packbits(stream.reshape(*codes.shape[:-1], -1).astype(np.uint8), axis=-1, bitorder="little")


def _unpack(packed: np.ndarray, bits: int, swap: bool) -> np.ndarray:
    stream = np.unpackbits(packed, axis=-1, bitorder="little").reshape(*packed.shape[:-1], -1, bits)
    codes = (stream.astype(np.int64) << np.arange(bits)).sum(-1)
    return codes.reshape(*codes.shape[:-1], -1, 2)[..., ::-1].reshape(codes.shape) if swap and bits == 4 else codes


def _half(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(x[..., None].astype(np.float16)).view(np.uint8)
