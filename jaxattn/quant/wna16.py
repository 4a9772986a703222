"""The `moe_wna16` layout of 4- and 8-bit expert weights: output features first, packed along the input features.

    w      [..., F, M / 2] uint8 (4 bits: the even input feature in the low four bits), or [..., F, M] (8 bits)
    scales [..., F, G]
    zeros  [..., F / 2, G] uint8 (4 bits: the even output feature in the low four bits), [..., F, G] or None: 2^(bits-1)

Source: vLLM 0.26.0 `moe_wna16.py`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from jaxattn.quant import integers
from jaxattn.quant import primitives as p


def quantize(
    w: Float[Array, "F M"], bits: int = 4, group: int = 128, *, symmetric: bool = True
) -> tuple[UInt8[Array, "F W"], Float[Array, "F G"], UInt8[Array, "Z G"] | None]:
    """Packed codes, scales and zero points (None if symmetric) of one expert's weight, rounded to nearest.

    Raises:
        ValueError: sizes that do not fit.
    """
    q, scale, zero = integers.quantize(w.T, bits, group, symmetric=symmetric)
    packed, zeros = pack(q.T, zero.T, bits)
    return packed, scale.T, None if symmetric else zeros


def dequantize(
    w: UInt8[Array, "*E F W"],
    scales: Float[Array, "*E F G"],
    zeros: UInt8[Array, "*E Z G"] | None = None,
    *,
    bits: int = 4,
) -> Float[Array, "*E F M"]:
    """The weights in the dtype of the scales."""
    q, zero = unpack(w, zeros, bits)
    group = q.shape[-1] // scales.shape[-1]
    whole = q.astype(jnp.int32) - (2 ** (bits - 1) if zero is None else jnp.repeat(zero.astype(jnp.int32), group, -1))
    return (whole.astype(p.wide(scales).dtype) * jnp.repeat(p.wide(scales), group, -1)).astype(scales.dtype)


def pack(q: UInt8[Array, "*E F M"], zero: UInt8[Array, "*E F G"], bits: int = 4) -> tuple[Array, Array]:
    """Packed codes and zero points.

    Raises:
        ValueError: bits is not 4 or 8.
    """
    _check_bits(bits)
    if bits == 8:
        return q, zero
    return p.pack_nibbles(q), p.pack_nibbles(zero.swapaxes(-1, -2)).swapaxes(-1, -2)


def unpack(
    w: UInt8[Array, "*E F W"], zeros: UInt8[Array, "*E Z G"] | None, bits: int = 4
) -> tuple[Array, Array | None]:
    """The codes and zero points of `pack`.

    Raises:
        ValueError: bits is not 4 or 8.
    """
    _check_bits(bits)
    if bits == 8:
        return w, zeros
    return p.unpack_nibbles(w), None if zeros is None else p.unpack_nibbles(zeros.swapaxes(-1, -2)).swapaxes(-1, -2)


def _check_bits(bits: int) -> None:
    if bits not in (4, 8):
        raise ValueError(f"moe_wna16 packs codes of 4 or 8 bits, got {bits}")
