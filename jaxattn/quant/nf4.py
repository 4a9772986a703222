"""NF4 and FP4 of bitsandbytes: 4-bit codebooks with an absolute maximum per block, and its double quantization.

The weight is read row by row in blocks of 64. Code i stands for `codebook[i] * absmax[block]`; two codes lie in a byte,
the **even index in the high four bits**. Double quantization stores the absmax as 8-bit codes of a dynamic codebook
with one float32 absmax per 256 of them, after the mean was subtracted.

NF4's sixteen numbers are the expected quantiles of a normal distribution (https://arxiv.org/abs/2305.14314, appendix
E); FP4's magnitudes are 0, 1/192, 1/6, 1/4, 1/3, 1/2, 2/3, 1 in an order of its own. A number half way between two
codes goes to the smaller one (FP4: of smaller magnitude).
Source: https://github.com/bitsandbytes-foundation/bitsandbytes.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

from jaxattn.quant import primitives as p

type Format = Literal["nf4", "fp4"]
BLOCK, NESTED_BLOCK = 64, 256

_BELOW = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
)
_ABOVE = (
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_MAGNITUDES = (0.0, 0.0052083333, 0.6666666667, 1.0, 0.3333333333, 0.5, 0.1666666667, 0.25)


class Nested(NamedTuple):
    """Doubly quantized absolute maxima."""

    codes: UInt8[Array, " B"]
    absmax: Float[Array, " B/256"]
    offset: Float[Array, ""]
    book: Float[Array, "256"] | None = None
    """A checkpoint's own `nested_quant_map`, whose last bits are those of the torch that made it; None =
    `dynamic_codebook()`."""


def codebook(format: Format) -> np.ndarray:
    """float32 values of the sixteen codes.

    Raises:
        ValueError: another format.
    """
    if format == "nf4":
        return np.array(_BELOW + _ABOVE, np.float32)
    if format == "fp4":
        return np.array([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], np.float32)
    raise ValueError(f"format must be nf4 or fp4, got {format!r}")


def dynamic_codebook() -> np.ndarray:
    """256 signed numbers in ascending order: seven decades up to 1, each decade halved into twice as many steps."""
    numbers = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1, 2**decade + 1, dtype=np.float32)
        means = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - 6)
        numbers += [*means, *-means]
    return np.sort(np.array(numbers, np.float32))


def quantize(
    w: Float[Array, "..."], format: Format = "nf4", *, block: int = BLOCK
) -> tuple[UInt8[Array, " W"], Float[Array, " B"]]:
    """Packed codes and float32 absolute maxima of the flattened weight; a block of zeros has absmax 0 and codes of 0.

    Raises:
        ValueError: another format, or a weight that fills no whole number of blocks.
    """
    flat = p.wide(w).reshape(-1)
    if block < 2 or flat.size % block:
        raise ValueError(f"the weight must fill whole blocks of {block} numbers, got {flat.size}")
    parts = flat.reshape(-1, block)
    top = p.amax(parts, -1)
    return pack(_nearest(parts * p.inverse(top), codebook(format)).reshape(-1)), top[:, 0]


def dequantize(
    q: UInt8[Array, " W"],
    absmax: Float[Array, " B"] | Nested,
    shape: tuple[int, ...],
    format: Format = "nf4",
    *,
    dtype: str = "float32",
) -> Float[Array, "..."]:
    """`codebook[code] * absmax` in the given shape, rounded to `dtype` once."""
    top = dequantize_absmax(absmax) if isinstance(absmax, Nested) else absmax
    values = jnp.asarray(codebook(format), p.wide(top).dtype)[unpack(q).astype(jnp.int32)]
    return (values.reshape(top.size, -1) * p.wide(top)[:, None]).reshape(shape).astype(dtype)


def pack(codes: UInt8[Array, " M"]) -> UInt8[Array, " M/2"]:
    """Two codes a byte, the even index in the high four bits."""
    return p.pack_nibbles(codes.reshape(-1, 2)[:, ::-1].reshape(-1))


def unpack(packed: UInt8[Array, " W"]) -> UInt8[Array, " 2*W"]:
    """The codes of `pack`."""
    return p.unpack_nibbles(packed.reshape(-1)).reshape(-1, 2)[:, ::-1].reshape(-1)


def quantize_absmax(absmax: Float[Array, " B"]) -> Nested:
    """Absolute maxima in 8 bits: minus their mean, in blocks of 256 (the last may be short)."""
    offset = jnp.mean(absmax)
    parts = p.grouped(absmax - offset, NESTED_BLOCK)
    top = p.amax(parts, -1)
    codes = _nearest(parts * p.inverse(top), dynamic_codebook())
    return Nested(codes=p.ungrouped(codes, absmax.size), absmax=top[:, 0], offset=offset)


def dequantize_absmax(nested: Nested) -> Float[Array, " B"]:
    """float32 absolute maxima: code times absmax, rounded, plus the mean."""
    book = jnp.asarray(dynamic_codebook() if nested.book is None else nested.book)
    values = p.grouped(book[nested.codes.astype(jnp.int32)], NESTED_BLOCK)
    products = lax.optimization_barrier(values * nested.absmax[:, None])  # no fused multiply-add
    return p.ungrouped(products, nested.codes.size) + nested.offset


def _nearest(x, book: np.ndarray):
    """Code of the nearest number; half way the smaller one, or in FP4's book, which is symmetric, that nearer to 0."""
    if book.size == 16 and book[8] == 0:
        half = _nearest(jnp.abs(x), book[:8])
        return jnp.where(x < 0, half + 8, half).astype(jnp.uint8)
    order = np.argsort(book, kind="stable")
    ascending = book[order].astype(np.float64)
    between = jnp.asarray(((ascending[1:] + ascending[:-1]) / 2).astype(np.float32))
    place = jnp.searchsorted(between, x.astype(jnp.float32), side="left")
    return jnp.asarray(order.astype(np.uint8))[place]
