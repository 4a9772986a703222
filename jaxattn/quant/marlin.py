"""Marlin's layout of 4- and 8-bit weights: the order in which tensor core fragments are loaded, as a permutation.

A weight of codes [M, F] is cut into tiles of 16 input and 64 output features. Lane t of a warp (t = 0..31) holds, for
each of four 16-wide blocks j of the tile, the eight codes of an m16n8k16 fragment:

    rows 2 (t mod 4) + {0, 1, 8, 9},  columns 16 j + t div 4 + {0, 8}

(rows vary fastest). A tile is stored lane by lane, block by block; in every word the codes are interleaved, so that
two 16-bit halves can be taken out with one mask:

    4 bits:  bit 31 | c7 | c5 | c3 | c1 | c6 | c4 | c2 | c0 | bit 0           8 bits:  | c3 | c1 | c2 | c0 |

`qweight` is [M / 16, F * 16 * bits / 32] int32. Scales are permuted along F, so that a lane finds its own in one load.
Codes are unsigned, the zero point is 2^(bits-1). Source: vLLM 0.26.0 `marlin_utils.py`, csrc/quantization/marlin;
https://arxiv.org/abs/2408.11743.
"""

import numpy as np
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int32, UInt8

from jaxattn.quant import integers
from jaxattn.quant import primitives as p

TILE_ROWS, TILE_COLUMNS = 16, 64
_INTERLEAVE = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}


def quantize(
    w: Float[Array, "M F"], group: int | None = 128, *, bits: int = 4
) -> tuple[Int32[Array, "M/16 W"], Float[Array, "G F"]]:
    """`qweight` and permuted scales of a weight, symmetric, rounded to nearest; group None = all of M.

    Raises:
        ValueError: sizes that do not fit.
    """
    M = w.shape[0]
    group = M if group is None else group
    q, scale, _ = integers.quantize(w, bits, group)
    return pack(q, bits), permute_scales(scale, grouped=group < M)


def dequantize(qweight: Int32[Array, "M/16 W"], scales: Float[Array, "G F"], *, bits: int = 4) -> Float[Array, "M F"]:
    """The weight in the dtype of the scales; one row of scales means one group."""
    scale = unpermute_scales(scales, grouped=scales.shape[0] > 1)
    return integers.dequantize(unpack(qweight, bits), scale, 2 ** (bits - 1))


def pack(q: UInt8[Array, "M F"], bits: int = 4) -> Int32[Array, "M/16 W"]:
    """Codes in Marlin's order.

    Raises:
        ValueError: M is no multiple of 16, F none of 64, or bits is not 4 or 8.
    """
    M, F = q.shape
    order = _order(bits)
    if M % TILE_ROWS or F % TILE_COLUMNS:
        raise ValueError(f"Marlin's tiles need multiples of 16 input and 64 output features, got {M} and {F}")
    tiles = q.reshape(M // TILE_ROWS, TILE_ROWS, F // TILE_COLUMNS, TILE_COLUMNS).transpose(0, 2, 1, 3)
    tiles = tiles.reshape(M // TILE_ROWS, F // TILE_COLUMNS, TILE_ROWS * TILE_COLUMNS)[..., order]
    return p.pack_words(tiles.reshape(M // TILE_ROWS, F * TILE_ROWS), bits)


def unpack(qweight: Int32[Array, "M/16 W"], bits: int = 4) -> UInt8[Array, "M F"]:
    """The codes of `pack`."""
    q = p.unpack_words(qweight, bits)
    rows, F = q.shape[0], q.shape[1] // TILE_ROWS
    tiles = q.reshape(rows, F // TILE_COLUMNS, TILE_ROWS * TILE_COLUMNS)[..., np.argsort(_order(bits))]
    tiles = tiles.reshape(rows, F // TILE_COLUMNS, TILE_ROWS, TILE_COLUMNS).transpose(0, 2, 1, 3)
    return tiles.reshape(rows * TILE_ROWS, F)


def permute_scales(scales: Float[Array, "G F"], *, grouped: bool) -> Float[Array, "G F"]:
    """Scales in the order of the lanes: [8, 8] blocks transposed, or, for one scale per column, pairs of 8 shuffled."""
    order = _scale_order(grouped)
    return scales.reshape(-1, order.size)[:, order].reshape(scales.shape)


def unpermute_scales(scales: Float[Array, "G F"], *, grouped: bool) -> Float[Array, "G F"]:
    """The inverse of `permute_scales`."""
    order = np.argsort(_scale_order(grouped))
    return scales.reshape(-1, order.size)[:, order].reshape(scales.shape)


def shuffle_fp4_scales(scales: Array) -> Array:
    """Permuted MXFP4 or NVFP4 scales with each four in the order 0, 2, 1, 3."""
    return scales.reshape(-1, 4)[:, jnp.array([0, 2, 1, 3])].reshape(scales.shape)


def to_s0e5m3(scales: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """NVFP4's positive e4m3 scales as five exponent and three mantissa bits: those of `fp16(128 s)` below its sign."""
    bits = lax.bitcast_convert_type((p.wide(scales) * 128).astype(jnp.float16), jnp.uint16)
    return ((bits << 1) >> 8).astype(jnp.uint8)


def from_s0e5m3(codes: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """float32 values of the bytes of `to_s0e5m3`."""
    half = lax.bitcast_convert_type((codes.astype(jnp.uint16) << 8) >> 1, jnp.float16)
    return half.astype(jnp.float32) / 128


def _order(bits: int) -> np.ndarray:
    """Place in a row-major tile of each of its 1024 codes, in the order of storage."""
    if bits not in _INTERLEAVE:
        raise ValueError(f"Marlin packs codes of 4 or 8 bits, got {bits}")
    lane, block, half, row = np.ix_(range(32), range(4), (0, 8), (0, 1, 8, 9))
    place = (2 * (lane % 4) + row) * TILE_COLUMNS + 16 * block + lane // 4 + half
    words = _INTERLEAVE[bits]
    return place.reshape(-1, len(words))[:, words].ravel()


def _scale_order(grouped: bool) -> np.ndarray:
    if grouped:
        return np.arange(64).reshape(8, 8).T.ravel()
    return (2 * np.arange(4)[:, None] + np.array([0, 1, 8, 9, 16, 17, 24, 25])).ravel()
