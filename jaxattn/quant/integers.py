"""Integer weights in groups of input features: what GPTQ, AWQ, Marlin and wna16 pack.

A weight is [M, F] here, input features first, as these formats store it. `w ~ (q - zero) * scale[group of the row]`.
Rounding is to nearest, halves to even.

    symmetric:   scale = max(max / (2^(b-1) - 1), -min / 2^(b-1)),   zero = 2^(b-1)
    asymmetric:  scale = max((max - min) / (2^b - 1), 1e-5),          zero = clip(round(-min / scale), 0, 2^b - 1)

Scales and quotients are rounded to the dtype of the weight, as vLLM's `quantize_weights` does in torch; an all-zero
group, whose symmetric scale vLLM makes 0 (and its codes NaN), has scale 1 here.
Source: vLLM 0.26.0 `quant_utils.py` (quantize_weights).
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt8

from jaxattn.quant import primitives as p

ASYMMETRIC_FLOOR = 1e-5


def grid(
    w: Float[Array, "M F"], bits: int, group: int, symmetric: bool
) -> tuple[Float[Array, "G F"], UInt8[Array, "G F"]]:
    """Scales and zero points of every group of rows.

    Raises:
        ValueError: the group does not divide M, or codes of `bits` do not fit a byte.
    """
    M, F = w.shape
    if not 2 <= bits <= 8:
        raise ValueError(f"codes must have 2 to 8 bits, got {bits}")
    if group < 1 or M % group:
        raise ValueError(f"the group must divide the {M} input features, got {group}")
    parts = p.wide(w).reshape(M // group, group, F)
    high, low = parts.max(1), parts.min(1)
    if symmetric:
        half = 2.0 ** (bits - 1)
        up, down = (jnp.abs(p.rounded(p.divide(x, y), w.dtype)) for x, y in ((high, half - 1), (low, -half)))
        scale = jnp.maximum(up, down)
        return jnp.where(scale > 0, scale, 1).astype(w.dtype), jnp.full((M // group, F), int(half), jnp.uint8)
    top = 2.0**bits - 1
    span = p.rounded(high - low, w.dtype)
    scale = jnp.maximum(p.rounded(p.divide(p.wide(span), top), w.dtype), jnp.asarray(ASYMMETRIC_FLOOR, w.dtype))
    zero = jnp.clip(jnp.round(p.rounded(p.divide(-low, p.wide(scale)), w.dtype)), 0, top)
    return scale, zero.astype(jnp.uint8)


def round_to(
    w: Float[Array, "M F"], scale: Float[Array, "M F"], zero: UInt8[Array, "M F"], bits: int
) -> UInt8[Array, "M F"]:
    """The nearest codes for given scales and zero points of every element."""
    whole = jnp.round(p.rounded(p.divide(p.wide(w), p.wide(scale)), w.dtype)).astype(jnp.float32)
    return jnp.clip(whole + zero.astype(jnp.float32), 0, 2**bits - 1).astype(jnp.uint8)


def quantize(
    w: Float[Array, "M F"], bits: int = 4, group: int = 128, *, symmetric: bool = True
) -> tuple[UInt8[Array, "M F"], Float[Array, "G F"], UInt8[Array, "G F"]]:
    """Codes, scales (in the dtype of `w`) and zero points, rounded to nearest.

    Raises:
        ValueError: the group does not divide M.
    """
    scale, zero = grid(w, bits, group, symmetric)
    return round_to(w, jnp.repeat(scale, group, 0), jnp.repeat(zero, group, 0), bits), scale, zero


def dequantize(
    q: UInt8[Array, "M F"],
    scale: Float[Array, "G F"],
    zero: Array,
    *,
    rows: Int32[Array, " M"] | None = None,
) -> Float[Array, "M F"]:
    """`(q - zero) * scale`, one rounding to the dtype of the scales.

    Args:
        q: codes.
        scale: of each group.
        zero: zero points, any integer type, or one number.
        rows: group of each row; None = consecutive groups of equal size.
    """
    if rows is None:
        rows = jnp.arange(q.shape[0]) // (q.shape[0] // scale.shape[0])
    zero = jnp.broadcast_to(jnp.asarray(zero, jnp.int32), scale.shape)
    whole = (q.astype(jnp.int32) - zero[rows]).astype(p.wide(scale).dtype)
    return (whole * p.wide(scale)[rows]).astype(scale.dtype)
