"""Codes and scales of quantised key/value caches: how each mode turns a head of D numbers into bytes, and back.

Every function works on the last axis, in float32, or in float64 for float64 inputs.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
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
    """Codes and scale `max(amax * (1 / 448), 1e-6)`; the codes are of `x * (1 / scale)`."""
    x = x.astype(wide(x))
    scale = _scale(jnp.abs(x).max(-1), FP8_MAX)
    return fp8(x * _inverse(scale)), scale


def per_head_int8(x: Float[Array, "... D"]) -> tuple[Int8[Array, "... D"], Float[Array, "..."]]:
    """Codes and scale `max(amax * (1 / 127), 1e-6)`; `x * (1 / scale)` is rounded half away from zero."""
    x = x.astype(wide(x))
    scale = _scale(jnp.abs(x).max(-1), INT8_MAX)
    return jnp.clip(_half_away(_product(x, _inverse(scale))), -128, 127).astype(jnp.int8), scale


def per_head_int4(x: Float[Array, "... D"]) -> tuple[UInt8[Array, "... D/2"], Float[Array, "..."]]:
    """Packed codes and scale of an already rotated head.

    `scale = max((max - min) * (1 / 15), 1e-6)`, zero point `z = round(-min * (1 / scale))` clamped to 0..15, code
    `round(x * (1 / scale) + z)` clamped to 0..15, halves away from zero. The even element of a pair lies in the low
    four bits. The scale's four lowest mantissa bits are replaced by `z`: what is returned holds both.
    """
    x = x.astype(wide(x))
    low, high = x.min(-1), x.max(-1)
    scale = _scale(high - low, INT4_MAX)
    inverse = _inverse(scale)
    zero = jnp.clip(_half_away(_product(-low, inverse[..., 0])), 0, INT4_MAX)
    code = jnp.clip(_half_away(_product(x, inverse) + zero[..., None]), 0, INT4_MAX).astype(jnp.uint8)
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
    sign = jnp.asarray(signs(D), wide(x))
    y = x.astype(wide(x))
    y = hadamard(y) * sign if inverse else hadamard(y * sign)
    return y.astype(x.dtype)


@functools.cache
def rotation(D: int) -> np.ndarray:
    """What `rotate` multiplies with from the right, +-1 of shape [D, D]; its transpose is that of the inverse."""
    index = np.arange(D)
    parity = np.bitwise_count(index[:, None] & index) & 1
    return (signs(D)[:, None] * np.where(parity, -1, 1)).astype(np.float32)


def rotate_for_int4(x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """`rotate` with the roundings of vLLM's cache, in the dtype of `x`; float64 is not rounded.

    From 16 numbers on the signed head goes to bfloat16, through two products with H_16 / 4 and H_k / sqrt(k),
    k = D / 16, each rounded to bfloat16 (the last factor, too), and times sqrt(D) in float32.
    """
    D = x.shape[-1]
    if D < 16 or x.dtype == jnp.float64:
        return rotate(x)

    def product(y, factor):
        return _exact.rounded(hadamard(y) * factor, jnp.bfloat16)

    y = _exact.rounded(x.astype(jnp.float32) * jnp.asarray(signs(D), jnp.float32), jnp.bfloat16)
    k = D // 16
    y = product(y.reshape(*x.shape[:-1], k, 16), 0.25)
    root = float(ml_dtypes.bfloat16(k**-0.5))
    y = jnp.swapaxes(product(jnp.swapaxes(y, -1, -2), root), -1, -2).reshape(x.shape)
    # kept apart from what follows, or a GPU leaves this rounding out and joins the factor with the scale's
    return jax.lax.optimization_barrier((y * np.float32(D**0.5)).astype(x.dtype))


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


PER_HEAD = {
    "int8": per_head_int8,
    "float8_e4m3fn": per_head_fp8,
    "uint8": lambda x: per_head_int4(rotate_for_int4(x)),
}
"""Dtype of a cache -> codes and scales of heads."""


@functools.cache
def signs(D: int) -> np.ndarray:
    """+1 where a 24-bit uniform number of the Mersenne Twister, seeded as PyTorch does, lies below one half."""
    draws = np.random.RandomState(_SIGN_SEED).randint(0, 2**32, size=D, dtype=np.uint32)
    return np.where((draws & 0xFFFFFF) < 1 << 23, 1, -1).astype(np.int8)


def _scale(size, limit: float):
    """`max(size * (1 / limit), 1e-6)`, the reciprocal rounded: what Triton makes of a division by a constant."""
    share = size / limit if size.dtype == jnp.float64 else size * np.float32(1 / limit)
    return jnp.maximum(share, SCALE_FLOOR)


def _product(x, y):
    """`x * y`, rounded: not joined with a sum that follows."""
    return jax.lax.optimization_barrier(x * y)


def _inverse(scale):
    """`1 / scale`, with an axis for the head's numbers."""
    return _exact.divide(jnp.ones_like(scale), scale)[..., None]


def _half_away(x):
    """Nearest integer, halves away from zero, as adding half and cutting off does."""
    return jnp.trunc(jnp.where(x >= 0, x + 0.5, x - 0.5))
