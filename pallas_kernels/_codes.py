"""Codes of small formats inside kernels, to the bit those of `jaxattn.quant.primitives`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import _mosaic
from pallas_kernels._frames import Frame

E4M3 = "float8_e4m3fn"
type Encode = Callable[[jax.Array], jax.Array]
LIMITS = {E4M3: 448.0, "float8_e5m2": 57344.0}
TINY = 2.0**-126
E2M1_MAX = 6.0
_MANTISSA = 0x7FFFFF
_LARGEST_POWER = 254 << 23
_ROUNDER = 1.5 * 2.0**23
"""Added to |x| < 2^22 it leaves the nearest integer, halves to even, in the low bits of the sum."""
ROUNDER_BITS = 0x4B400000
"""The bits of that number."""


def float8(x: jax.Array, dtype: str = E4M3) -> jax.Array:
    """Codes to nearest even that saturate; NaN of either sign becomes 0x7f, as `cvt.rn.satfinite` has it."""
    if _mosaic.interpreting():
        limit = LIMITS[dtype]
        x = jnp.where(jnp.isnan(x), jnp.nan, jnp.clip(x, -limit, limit))
    return x.astype(dtype)


def token_scale(frame: Frame, top: jax.Array, limit: float) -> jax.Array:
    """`max(top / limit, 1 / (512 limit))`."""
    least = np.float32(1 / 512) / np.float32(limit)
    return jnp.maximum(frame.over_constant(top, limit), frame.full(least))


def fp8_static(frame: Frame, pieces, scale, dtype: str = E4M3) -> tuple[list[jax.Array], Encode]:
    """Codes of `x * (1 / scale)`; 0 for scales below 2^-126."""
    del pieces
    s = frame.full(scale)
    r = frame.spread(jnp.where(s < TINY, 0.0, frame.divide_rows(frame.full(1.0), s)))
    return [], lambda x: float8(x * r, dtype)


def fp8_token(frame: Frame, pieces, bound=None, dtype: str = E4M3) -> tuple[list[jax.Array], Encode]:
    """Scales of rows and codes of `x / s`; what is larger than `bound` saturates."""
    top = frame.largest(pieces)
    s = token_scale(frame, top if bound is None else jnp.minimum(top, frame.full(bound)), LIMITS[dtype])
    # a bound makes room for quotients that overflow
    how = frame.quotient if bound is None else frame.divide
    return [s], lambda x: float8(how(x, s), dtype)


def rounded(x: jax.Array, dtype) -> jax.Array:
    """float32 numbers rounded to `dtype`."""
    return x.astype(dtype).astype(jnp.float32)


def power_above(x: jax.Array) -> jax.Array:
    """The smallest power of two that is not below normal x > 0, at most 2^127."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type(jnp.minimum((bits + _MANTISSA) & ~_MANTISSA, _LARGEST_POWER), jnp.float32)


def over_power(frame: Frame, x: jax.Array, scale: jax.Array) -> jax.Array:
    """`x / scale` of numbers by their row's power of two, 2^-126 to 2^127."""
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    if _mosaic.interpreting():  # on a CPU, where the denormal 2^-127 counts as 0
        double = lax.bitcast_convert_type(_LARGEST_POWER + (1 << 23) - bits, jnp.float32)
        return lax.optimization_barrier(x * 0.5) * frame.spread(double)
    return x * frame.spread(lax.bitcast_convert_type(jnp.maximum(_LARGEST_POWER - bits, 1 << 22), jnp.float32))


def nearest_integer(frame: Frame, x: jax.Array) -> jax.Array:
    """|x| < 2^22 as an int32 whose low 8 (16, ...) bits are those of the nearest integer, halves to even."""
    moved = frame.each("add.rn.f32", jnp.add, x, jnp.full_like(x, _ROUNDER))
    return lax.bitcast_convert_type(moved, jnp.int32)


def or_zero(x: jax.Array) -> jax.Array:
    """`x`, 0 for NaN."""
    return jnp.where(x == x, x, 0.0)


# ---------------------------------------------------------------- rotations, four bits
def rotate(frame: Frame, x: jax.Array, group: int) -> jax.Array:
    """`x H / sqrt(group)` in groups of a tile's rows, not yet rounded to a narrower type."""
    y = _mosaic.butterflies(x, group, frame.numbers)
    return frame.each("mul.rn.f32", jnp.multiply, y, jnp.full_like(y, np.float32(group**-0.5)))


def exponent(x: jax.Array, *, up: bool) -> jax.Array:
    """Code of the power of two at or above (else below) normal x > 0, int32 in 1 to 254."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.clip((bits + (_MANTISSA if up else 0)) >> 23, 1, 254)


def mxfp4_exponent(frame: Frame, top: jax.Array, floor: float = 6 * TINY) -> jax.Array:
    """Code of the scale of rows whose largest magnitude is `top`: `ceil(log2(max(top, floor) / 6))`."""
    return exponent(frame.divide_rows(jnp.maximum(top, frame.full(floor)), E2M1_MAX), up=True)


def power(code: jax.Array) -> jax.Array:
    """`2^(code - 127)` of codes 1 to 254."""
    return lax.bitcast_convert_type(code << 23, jnp.float32)


def e2m1(frame: Frame, x: jax.Array, ties: str = "even") -> jax.Array:
    """4-bit codes as int32: nearest with ties to the even code, or ("zero") to the smaller magnitude without -0.

    From 1 on codes are the exponent's last bits and the first bit of the mantissa of |x|, rounded; below, |x| is
    rounded to halves by adding 1.5 * 2^22, and the larger of both codes is right. What is larger than 6 saturates, NaN
    becomes 7.
    """
    size = jnp.abs(x)
    bits = lax.bitcast_convert_type(size, jnp.uint32)
    if ties == "even":
        code = ((bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22).astype(jnp.int32)
        moved = frame.each("add.rn.f32", jnp.add, size, jnp.full_like(size, 1.5 * 2.0**22))
        small = jnp.minimum(lax.bitcast_convert_type(moved, jnp.int32) - (0x4AC00000 - _ONE), _ONE + 2)
    else:
        code = ((bits + 0x1FFFFF) >> 22).astype(jnp.int32)
        small = _ONE + jnp.where(size > 0.25, 1, 0) + jnp.where(size > 0.75, 1, 0)
    code = jnp.minimum(jnp.maximum(code, small), _ONE + 7) - _ONE
    sign = (lax.bitcast_convert_type(x, jnp.int32) >> 28) & 8
    if ties == "zero":
        sign = jnp.where(code > 0, sign, 0)
    # products are NaN without a sign on the card, but not where this is interpreted
    return jnp.where(x == x, code | sign, 7) if _mosaic.interpreting() else code | sign


_ONE = 252
"""What the exponent's last bits and a bit of the mantissa of 1.0 are, less its code 2."""
