"""Packed rows of latent caches in numpy, byte by byte."""

import ml_dtypes
import numpy as np

from parity.twins import _codes

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
ROW, SCALES = 576, 8


def bf16(x: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16, as float32."""
    return x.astype(np.float32).astype(BF16).astype(np.float32)


def as_bytes(x: np.ndarray) -> np.ndarray:
    """Bytes of the last axis."""
    return np.ascontiguousarray(x).view(np.uint8).reshape(*x.shape[:-1], -1)


def ds_mla(latent: np.ndarray, rotary: np.ndarray, *, power: bool = False) -> np.ndarray:
    """656-byte rows; with `power` the scales are rounded up to powers of two."""
    groups = bf16(latent).reshape(-1, 4, 128)
    s = np.maximum(np.abs(groups).max(2, keepdims=True) / np.float32(448), np.float32(2.0**-126))
    s = _codes.power_of_two(s) if power else s
    codes = _codes.float8(groups / s, "float8_e4m3fn")
    parts = [as_bytes(codes.reshape(-1, 512)), as_bytes(s[..., 0]), as_bytes(rotary.astype(np.float32).astype(BF16))]
    return np.concatenate(parts, 1)


def v4(
    nope: np.ndarray, rotary: np.ndarray, *, power: str = "ceil", floor: float = 1e-4, unrounded: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """576-byte rows and 8 scale bytes of each.

    Args:
        nope: [N, 448].
        rotary: [N, 64].
        power: how scales become powers of two.
        floor: of amax.
        unrounded: numbers are quantized without rounding to bfloat16 first.
    """
    groups = (nope.astype(np.float32) if unrounded else bf16(nope)).reshape(-1, 7, 64)
    s = np.maximum(np.abs(groups).max(2, keepdims=True), np.float32(floor)) / np.float32(448)
    s = _codes.power_of_two(s, power)
    codes = _codes.float8(groups / s, "float8_e4m3fn").reshape(-1, 448)
    row = np.concatenate([as_bytes(codes), as_bytes(rotary.astype(np.float32).astype(BF16))], 1)
    return row, np.pad((np.frexp(s[..., 0])[1] + 126).astype(np.uint8), ((0, 0), (0, 1)))


def indexer(x: np.ndarray, *, power: str = "ceil") -> tuple[np.ndarray, np.ndarray]:
    """128 codes and 4 bytes of a float32 scale of each key."""
    x = bf16(x)
    s = np.maximum(np.abs(x).max(1, keepdims=True), np.float32(1e-4)) / np.float32(448)
    s = _codes.power_of_two(s, power)
    return as_bytes(_codes.float8(x / s, "float8_e4m3fn")), as_bytes(s)


def put(cache: np.ndarray, slots: np.ndarray, rows: np.ndarray, scales: np.ndarray, page: int) -> np.ndarray:
    """A copy of `cache` [P, bytes] with rows and scales of the named slots."""
    out, (row, scale) = cache.copy(), (rows.shape[1], scales.shape[1])
    for slot, r, s in zip(slots.tolist(), rows, scales, strict=True):
        if 0 <= slot < len(cache) * page:
            i = slot % page
            out[slot // page, i * row : (i + 1) * row] = r
            out[slot // page, page * row + i * scale : page * row + (i + 1) * scale] = s
    return out


def v4_values(cache: np.ndarray, page: int) -> np.ndarray:
    """float32 numbers [P * page, 512] of a V4 cache."""
    P = len(cache)
    rows = cache[:, : page * ROW].reshape(P * page, ROW)
    scales = cache[:, page * ROW : page * (ROW + SCALES)].reshape(P * page, SCALES)
    nope = rows[:, :448].copy().view(E4M3).astype(np.float32).reshape(-1, 7, 64)
    nope = bf16(nope * np.exp2(np.minimum(scales[:, :7], 254).astype(np.float32) - 127)[..., None])
    rotary = rows[:, 448:].copy().view(BF16).astype(np.float32)
    return np.concatenate([nope.reshape(-1, 448), rotary], 1)


def ds_mla_values(cache: np.ndarray) -> np.ndarray:
    """float32 numbers [P * page, 576] of a 656-byte cache."""
    rows = cache.reshape(-1, 656)
    latent = rows[:, :512].copy().view(E4M3).astype(np.float32).reshape(-1, 4, 128)
    latent = bf16(latent * rows[:, 512:528].copy().view(np.float32)[..., None])
    return np.concatenate([latent.reshape(-1, 512), rows[:, 528:].copy().view(BF16).astype(np.float32)], 1)
