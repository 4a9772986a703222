"""Codes and scales of quantised key/value caches: how each mode turns a head of D numbers into bytes, and back.

Every function works on the last axis, in float32, or in float64 for float64 inputs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8, UInt8

from pallas_kernels import _exact

FP8_MAX, INT8_MAX, INT4_MAX = 448.0, 127.0, 15.0
SCALE_FLOOR = 1e-6
_SIGN_SEED = 0x9E3779B9
"""Seed of the rotation's signs in vLLM 0.26.0 `vllm/v1/attention/ops/int4_per_token_head.py`."""


def wide(x: jax.Array):
    """Dtype to compute in: float64 for float64, else float32."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def fp8(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """float8_e4m3fn codes: nearest even, saturating at +-448, NaN (either sign) becomes the code 0x7f.

    float64, the type of truths, is clamped only: a truth that lies near the border of two codes must not choose.
    """
    x = jnp.where(jnp.isnan(x), jnp.nan, jnp.clip(x, -FP8_MAX, FP8_MAX))
    return x if x.dtype == jnp.float64 else x.astype(jnp.float8_e4m3fn)


def per_head_fp8(x: Float[Array, "... D"]) -> tuple[Float[Array, "... D"], Float[Array, "..."]]:
    """Codes and scale `max(amax / 448, 1e-6)`; the codes are of `x * (1 / scale)`."""
    x = x.astype(wide(x))
    scale = jnp.maximum(_exact.divide(jnp.abs(x).max(-1), FP8_MAX), SCALE_FLOOR)
    return fp8(x * _inverse(scale)), scale


def per_head_int8(x: Float[Array, "... D"]) -> tuple[Int8[Array, "... D"], Float[Array, "..."]]:
    """Codes and scale `max(amax / 127, 1e-6)`; `x * (1 / scale)` is rounded half away from zero."""
    x = x.astype(wide(x))
    scale = jnp.maximum(_exact.divide(jnp.abs(x).max(-1), INT8_MAX), SCALE_FLOOR)
    return jnp.clip(_half_away(x * _inverse(scale)), -128, 127).astype(jnp.int8), scale


def per_head_int4(x: Float[Array, "... D"]) -> tuple[UInt8[Array, "... D/2"], Float[Array, "..."]]:
    """Packed codes and scale of an already rotated head.

    `scale = max((max - min) / 15, 1e-6)`, zero point `z = round(-min / scale)` clamped to 0..15, code
    `round(x * (1 / scale) + z)` clamped to 0..15, halves away from zero. The even element of a pair lies in the low
    four bits. The scale's four lowest mantissa bits are replaced by `z`: what is returned holds both.
    """
    x = x.astype(wide(x))
    low, high = x.min(-1), x.max(-1)
    scale = jnp.maximum(_exact.divide(high - low, INT4_MAX), SCALE_FLOOR)
    zero = jnp.clip(_half_away(_exact.divide(-low, scale)), 0, INT4_MAX)
    code = jnp.clip(_half_away(x * _inverse(scale) + zero[..., None]), 0, INT4_MAX).astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(scale.astype(jnp.float32), jnp.int32)
    packed = jax.lax.bitcast_convert_type((bits & -16) | zero.astype(jnp.int32), jnp.float32)
    return code[..., ::2] | (code[..., 1::2] << 4), packed.astype(x.dtype)


def unpack_int4(codes: UInt8[Array, "... D/2"], scale: Float[Array, "..."]) -> Float[Array, "... D"]:
    """The rotated head that `per_head_int4` stored: `(code - z) * scale`, `z` taken from the scale's low bits."""
    bits = jax.lax.bitcast_convert_type(scale.astype(jnp.float32), jnp.int32)
    step = jax.lax.bitcast_convert_type(bits & -16, jnp.float32)
    code = jnp.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], 2 * codes.shape[-1])
    return (code.astype(jnp.float32) - (bits & 15).astype(jnp.float32)[..., None]) * step[..., None]


def rotate(x: Float[Array, "... D"], *, inverse: bool = False) -> Float[Array, "... D"]:
    """`H (s * x)`, or `s * (H x)`: signs and an unnormalised Hadamard matrix; the two together multiply by D.

    In float32 (float64 for float64), rounded to the dtype of `x` once. D must be a power of two.
    """
    D = x.shape[-1]
    signs = jnp.asarray(_signs(D), wide(x))
    y = x.astype(wide(x))
    y = hadamard(y) * signs if inverse else hadamard(y * signs)
    return y.astype(x.dtype)


def hadamard(x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """`H x` with Sylvester's matrix of +-1; D must be a power of two.

    Raises:
        ValueError: it is not.
    """
    D = x.shape[-1]
    if D & (D - 1) or D == 0:
        raise ValueError(f"a Hadamard rotation needs a power of two, got D={D}")
    half = 1
    while half < D:
        y = x.reshape(*x.shape[:-1], D // (2 * half), 2, half)
        a, b = y[..., 0, :], y[..., 1, :]
        x = jnp.stack([a + b, a - b], -2).reshape(x.shape)
        half *= 2
    return x


@functools.cache
def _signs(D: int) -> np.ndarray:
    """+1 where a 24-bit uniform number of the Mersenne Twister, seeded as PyTorch does, lies below one half."""
    draws = np.random.RandomState(_SIGN_SEED).randint(0, 2**32, size=D, dtype=np.uint32)
    return np.where((draws & 0xFFFFFF) < 1 << 23, 1, -1).astype(np.int8)


def _inverse(scale):
    """`1 / scale`, with an axis for the head's numbers."""
    return _exact.divide(jnp.ones_like(scale), scale)[..., None]


def _half_away(x):
    """Nearest integer, halves away from zero, as adding half and cutting off does."""
    return jnp.trunc(jnp.where(x >= 0, x + 0.5, x - 0.5))
