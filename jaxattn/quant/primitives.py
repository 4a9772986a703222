"""Numeric primitives of quantization: exact division, powers of two, saturating casts, E2M1, roundings, packing.

XLA's CPU backend reads float32 denormals as zeros, and XLA everywhere may turn a division by a repeated number into a
product with its reciprocal; both change codes. What is here does neither, as far as each docstring says.
"""

from typing import Any, Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int8, Int32, UInt8

from pallas_kernels import _exact

E4M3_MAX, E5M2_MAX, E2M1_MAX, INT8_MAX = 448.0, 57344.0, 6.0, 127.0
TINY = 2.0**-126
"""The smallest normal float32."""

type Rounding = Literal["even", "away", "zero"]
type Ties = Literal["even", "zero"]

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_MANTISSA = 23


def wide(x: Array) -> Float[Array, "..."]:
    """`x` in the dtype to compute in: float64 for float64, else float32."""
    return x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)


def rounded(x: Float[Array, "..."], dtype: Any) -> Float[Array, "..."]:
    """`x` in `dtype`; XLA, which drops a rounding when the next step widens again, keeps this one."""
    return _exact.rounded(x, dtype).astype(dtype)


def divide(x: Float[Array, "..."], y: Array | float) -> Float[Array, "..."]:
    """`x / y` rounded to nearest even, also where XLA would multiply with a reciprocal; `y` broadcasts against `x`."""
    shape = jnp.broadcast_shapes(x.shape, jnp.shape(y))
    y = lax.optimization_barrier(jnp.broadcast_to(jnp.asarray(y, x.dtype), shape))
    return _exact.divide(jnp.broadcast_to(x, shape), y)


def inverse(scale: Float[Array, "..."]) -> Float[Array, "..."]:
    """`1 / scale`; 0 where the scale is 0 or denormal, so that a product of finite numbers with it is never NaN."""
    usable = scale >= TINY
    return jnp.where(usable | jnp.isnan(scale), divide(jnp.ones_like(scale), jnp.where(usable, scale, scale + 1)), 0)


def amax(x: Float[Array, "..."], axis: int | tuple[int, ...] | None) -> Float[Array, "..."]:
    """Largest magnitude along `axis` (kept), in the wide dtype; NaN counts as zero, so it spoils no neighbour."""
    x = jnp.abs(wide(x))
    return jnp.max(jnp.where(jnp.isnan(x), 0, x), axis=axis, keepdims=axis is not None, initial=0)


# ---------------------------------------------------------------- powers of two
def power_of_two(exponent: Int[Array, "..."]) -> Float[Array, "..."]:
    """`2^exponent` in float32 for exponents -126 to 127, put together from bits."""
    return lax.bitcast_convert_type((exponent.astype(jnp.int32) + 127) << _MANTISSA, jnp.float32)


def ue8m0_value(code: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """`2^(code - 127)` in float32; code 255 is NaN, and code 0 (a denormal) is zero on backends that flush."""
    code = code.astype(jnp.int32)
    bits = jnp.where(code == 0, 1 << (_MANTISSA - 1), code << _MANTISSA)
    return jnp.where(code == 255, jnp.nan, lax.bitcast_convert_type(bits, jnp.float32))


def ue8m0_ceil(x: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """Code of the smallest power of two that is not below positive `x`: exponent plus one if the mantissa is not 0.

    Codes stay in 1 to 254. Source: DeepGEMM, https://github.com/deepseek-ai/DeepGEMM (ceil_to_ue8m0).
    """
    exponent, mantissa = _fields(x)
    return jnp.clip(exponent + (mantissa != 0), 1, 254).astype(jnp.uint8)


def ue8m0_ceil_log2(x: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """The same by `ceil(log2(x))` in float32, which may be one off where `x` is within an ulp of a power of two."""
    return jnp.clip(jnp.ceil(jnp.log2(x.astype(jnp.float32))) + 127, 1, 254).astype(jnp.uint8)


def ue8m0_floor(x: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """Code of the largest power of two that is not above positive `x`, in 1 to 254."""
    return jnp.clip(_fields(x)[0], 1, 254).astype(jnp.uint8)


def divide_by_ue8m0(x: Float[Array, "..."], code: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """`x / 2^(code - 127)` for codes 1 to 254, exact; float32 denormals of `x` count with their value."""
    x = wide(x)
    exponent = code.astype(jnp.int32) - 127
    if x.dtype == jnp.float64:
        return x / power_of_two(exponent).astype(jnp.float64)
    biased, mantissa = _fields(x)
    small = mantissa.astype(jnp.float32) * power_of_two(jnp.maximum(-149 - exponent, -126))
    small = jnp.where(exponent > -23, 0, small)  # below 2^-126 again
    # in two products: the reciprocal of 2^127 is denormal, and a CPU would take it for 0
    half = exponent >> 1
    return jnp.where(
        biased == 0,
        jnp.where(jnp.signbit(x), -small, small),
        x * power_of_two(-half) * power_of_two(half - exponent),
    )


def _fields(x):
    """Biased exponent and mantissa of |x| as float32."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    return (bits >> _MANTISSA) & 255, bits & ((1 << _MANTISSA) - 1)


# ---------------------------------------------------------------- float8
def to_float8(x: Float[Array, "..."], dtype: str = "float8_e4m3fn") -> Float[Array, "..."]:
    """Codes of `x`: nearest even, saturating at the largest finite number, NaN of either sign becomes 0x7f.

    float64, the type of truths, is clamped only: a truth near the border of two codes must not choose.
    """
    limit = float8_max(dtype)
    x = jnp.where(jnp.isnan(x), jnp.nan, jnp.clip(x, -limit, limit))
    if x.dtype == jnp.float64:
        return x
    codes = x.astype(dtype)
    nan = lax.bitcast_convert_type(jnp.full(x.shape, 0x7F, jnp.uint8), jnp.dtype(dtype))
    return jnp.where(jnp.isnan(x), nan, codes)


def float8_max(dtype: str) -> float:
    """Largest finite number of a float8 type.

    Raises:
        ValueError: the type is not float8_e4m3fn or float8_e5m2.
    """
    limits = {"float8_e4m3fn": E4M3_MAX, "float8_e5m2": E5M2_MAX}
    if dtype not in limits:
        raise ValueError(f"the dtype of the codes must be {' or '.join(limits)}, got {dtype!r}")
    return limits[dtype]


# ---------------------------------------------------------------- E2M1
def to_e2m1(x: Float[Array, "..."], ties: Ties = "even") -> UInt8[Array, "..."]:
    """4-bit codes of `x`: sign in bit 3, then the magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6; beyond 6 saturates, NaN is +6.

    Args:
        x: any float.
        ties: "even" sends .25, .75, 1.25, ... to the even code and keeps the sign of zero (`cvt.rn.satfinite.e2m1x2`);
            "zero" sends ties to the smaller magnitude and never gives -0 (DeepGEMM's caster).

    Raises:
        ValueError: another rule.
    """
    if ties not in ("even", "zero"):
        raise ValueError(f"ties must be 'even' or 'zero', got {ties!r}")
    size = jnp.abs(wide(x))
    code = jnp.zeros(x.shape, jnp.uint8)
    for i, border in enumerate(_BETWEEN):
        code += (size >= border) if ties == "even" and i % 2 else (size > border)
    negative = jnp.signbit(x) & ((code > 0) | (ties == "even"))
    return jnp.where(jnp.isnan(x), 7, code | (negative.astype(jnp.uint8) << 3)).astype(jnp.uint8)


def from_e2m1(code: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """float32 values of 4-bit codes, -0 included."""
    size = jnp.asarray(_E2M1, jnp.float32)[(code & 7).astype(jnp.int32)]
    return jnp.where(code & 8, -size, size)


# ---------------------------------------------------------------- integers
def round_integer(x: Float[Array, "..."], rounding: Rounding) -> Float[Array, "..."]:
    """`x` as a whole number: "even" (halves to even), "away" (halves away from zero) or "zero" (cut off).

    Raises:
        ValueError: another rule.
    """
    if rounding == "even":
        return jnp.round(x)
    whole = jnp.trunc(x)
    if rounding == "zero":
        return whole
    if rounding != "away":
        raise ValueError(f"rounding must be 'even', 'away' or 'zero', got {rounding!r}")
    return whole + jnp.where(2 * jnp.abs(x - whole) >= 1, jnp.sign(x), 0)


def to_int8(x: Float[Array, "..."], rounding: Rounding = "even") -> Int8[Array, "..."]:
    """Rounded and saturated to -128..127; NaN becomes 0."""
    return jnp.clip(round_integer(jnp.nan_to_num(x, posinf=jnp.inf, neginf=-jnp.inf), rounding), -128, 127).astype(
        jnp.int8
    )


# ---------------------------------------------------------------- packing
def pack_nibbles(codes: UInt8[Array, "... M"]) -> UInt8[Array, "... M/2"]:
    """Two 4-bit codes a byte, the even index in the low four bits."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: UInt8[Array, "... M/2"]) -> UInt8[Array, "... M"]:
    """The codes of `pack_nibbles`."""
    return jnp.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def pack_words(codes: UInt8[Array, "... M"], bits: int) -> Int32[Array, "... M*bits/32"]:
    """A stream of `bits`-bit codes (2, 3, 4 or 8) in 32-bit words, low bits first; 3-bit codes cross words.

    Raises:
        ValueError: other widths, or codes that fill no whole number of words.
    """
    per, words = _stream(bits)
    if codes.shape[-1] % per:
        raise ValueError(f"{bits}-bit codes are packed {per} at a time, got {codes.shape[-1]} along the last axis")
    if bits == 8:
        parts = codes.reshape(*codes.shape[:-1], -1, 4, 1)
    else:
        stream = (codes[..., None] >> jnp.arange(bits, dtype=jnp.uint8)) & 1
        parts = stream.reshape(*codes.shape[:-1], codes.shape[-1] // per * words, 32, 1)
    width = 32 // parts.shape[-2]
    shifts = jnp.arange(parts.shape[-2], dtype=jnp.uint32) * width
    packed = jnp.sum(parts[..., 0].astype(jnp.uint32) << shifts, -1, dtype=jnp.uint32)
    return lax.bitcast_convert_type(packed, jnp.int32)


def unpack_words(packed: Int32[Array, "... W"], bits: int) -> UInt8[Array, "... W*32/bits"]:
    """The codes of `pack_words`.

    Raises:
        ValueError: other widths, or words that hold no whole number of codes.
    """
    per, words = _stream(bits)
    count = packed.shape[-1]
    if count % words:
        raise ValueError(f"{bits}-bit codes come in {words} words at a time, got {count} along the last axis")
    raw = lax.bitcast_convert_type(packed, jnp.uint32)[..., None] >> jnp.arange(32, dtype=jnp.uint32)
    stream = (raw & 1).astype(jnp.uint8).reshape(*packed.shape[:-1], count // words * per, bits)
    return jnp.sum(stream << jnp.arange(bits, dtype=jnp.uint8), -1, dtype=jnp.uint8)


def _stream(bits: int) -> tuple[int, int]:
    """How many codes fill how many words."""
    if bits not in (2, 3, 4, 8):
        raise ValueError(f"codes must have 2, 3, 4 or 8 bits, got {bits}")
    return (32, 3) if bits == 3 else (32 // bits, 1)


def grouped(x: Array, group: int) -> Array:
    """`[..., M]` as `[..., ceil(M / group), group]`, filled up with zeros."""
    M = x.shape[-1]
    count = -(-M // group)
    if M % group:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, count * group - M)])
    return x.reshape(*x.shape[:-1], count, group)


def ungrouped(x: Array, length: int) -> Array:
    """The inverse of `grouped`."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])[..., :length]
