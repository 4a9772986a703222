"""GPTQ checkpoints: 2, 3, 4 or 8 bits, packed along the input features, with optional act-order.

    qweight [M * bits / 32, F] int32: codes of column f, input feature by input feature, low bits first
    qzeros  [G, F * bits / 32] int32: zero points of a group along F; version 1 stores zero - 1, version 2 zero
    scales  [G, F]
    g_idx   [M] int32: group of each input feature (act-order: not sorted)

    word of qweight, 4 bits:   bit 31 | q7 | q6 | q5 | q4 | q3 | q2 | q1 | q0 | bit 0

3-bit codes form one stream: 32 codes in 3 words, codes 10 and 21 lie across two words. `w = (q - zero) * scales[g_idx]`
in the dtype of the scales. A version 1 zero point is the stored number plus 1 without wrapping: 15 means 16.
Source: vLLM 0.26.0 `auto_gptq.py`, csrc/quantization/gptq; https://arxiv.org/abs/2210.17323.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt8

from jaxattn.quant import integers
from jaxattn.quant import primitives as p


def quantize(
    w: Float[Array, "M F"], bits: int = 4, group: int = 128, *, symmetric: bool = True, version: int = 1
) -> tuple[Int32[Array, "W F"], Int32[Array, "G Z"], Float[Array, "G F"], Int32[Array, " M"]]:
    """`qweight, qzeros, scales, g_idx` of a weight, rounded to nearest; `calibrate.gptq` has smaller errors.

    Raises:
        ValueError: sizes that do not fit, or an asymmetric version 1, which cannot store a zero point of 0.
    """
    if version == 1 and not symmetric:
        raise ValueError("version 1 cannot store a zero point of 0; use version=2 for asymmetric codes")
    q, scale, zero = integers.quantize(w, bits, group, symmetric=symmetric)
    return *pack(q, zero, bits, version=version), scale, jnp.arange(w.shape[0], dtype=jnp.int32) // group


def dequantize(
    qweight: Int32[Array, "W F"],
    qzeros: Int32[Array, "G Z"],
    scales: Float[Array, "G F"],
    g_idx: Int32[Array, " M"] | None = None,
    *,
    bits: int = 4,
    version: int = 1,
) -> Float[Array, "M F"]:
    """The weight in the dtype of the scales; `g_idx` None = consecutive groups of equal size."""
    q, zero = unpack(qweight, qzeros, bits, version=version)
    return integers.dequantize(q, scales, zero, rows=g_idx)


def pack(
    q: UInt8[Array, "M F"], zero: Array, bits: int, *, version: int = 1
) -> tuple[Int32[Array, "W F"], Int32[Array, "G Z"]]:
    """`qweight` and `qzeros`; zero points of version 1 must lie in 1 to 2^bits.

    Raises:
        ValueError: another version, or sizes that fill no whole number of words.
    """
    _check_version(version)
    stored = (zero.astype(jnp.int32) - (version == 1)).astype(jnp.uint8) & (2**bits - 1)
    return p.pack_words(q.T, bits).T, p.pack_words(stored, bits)


def unpack(
    qweight: Int32[Array, "W F"], qzeros: Int32[Array, "G Z"], bits: int, *, version: int = 1
) -> tuple[UInt8[Array, "M F"], Int32[Array, "G F"]]:
    """Codes and zero points.

    Raises:
        ValueError: another version, or sizes that hold no whole number of codes.
    """
    _check_version(version)
    return p.unpack_words(qweight.T, bits).T, p.unpack_words(qzeros, bits).astype(jnp.int32) + (version == 1)


def _check_version(version: int) -> None:
    if version not in (1, 2):
        raise ValueError(f"the version of a GPTQ checkpoint must be 1 or 2, got {version}")
