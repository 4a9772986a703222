"""AWQ checkpoints: 4 bits, eight output features in a word, interleaved.

    qweight [M, F / 8] int32, qzeros [G, F / 8] int32, scales [G, F]

    word:   bit 31 | f7 | f5 | f3 | f1 | f6 | f4 | f2 | f0 | bit 0        f0..f7: eight neighbouring output features

`w = (q - zero) * scale` in the dtype of the scales.
Source: vLLM 0.26.0 `auto_awq.py`, csrc/quantization/awq; https://arxiv.org/abs/2306.00978.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt8

from jaxattn.quant import integers
from jaxattn.quant import primitives as p

BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output feature in each nibble of a word, lowest first."""


def quantize(
    w: Float[Array, "M F"], group: int = 128
) -> tuple[Int32[Array, "M W"], Int32[Array, "G W"], Float[Array, "G F"]]:
    """`qweight, qzeros, scales` of a weight, asymmetric, rounded to nearest; `calibrate.awq` has smaller errors.

    Raises:
        ValueError: the group does not divide M, or F is no multiple of 8.
    """
    q, scale, zero = integers.quantize(w, BITS, group, symmetric=False)
    return pack(q), pack(zero), scale


def dequantize(
    qweight: Int32[Array, "M W"], qzeros: Int32[Array, "G W"], scales: Float[Array, "G F"]
) -> Float[Array, "M F"]:
    """The weight in the dtype of the scales."""
    return integers.dequantize(unpack(qweight), scales, unpack(qzeros))


def pack(q: UInt8[Array, "N F"]) -> Int32[Array, "N F/8"]:
    """Words of eight interleaved codes.

    Raises:
        ValueError: F is no multiple of 8.
    """
    N, F = q.shape
    if F % 8:
        raise ValueError(f"AWQ packs 8 output features in a word, got {F}")
    return p.pack_words(q.reshape(N, F // 8, 8)[..., jnp.array(ORDER)].reshape(N, F), BITS)


def unpack(packed: Int32[Array, "N W"]) -> UInt8[Array, "N 8*W"]:
    """The codes of `pack`."""
    q = p.unpack_words(packed, BITS)
    back = [ORDER.index(f) for f in range(8)]
    return q.reshape(*packed.shape, 8)[..., jnp.array(back)].reshape(q.shape)
