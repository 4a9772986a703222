"""Rows on Mosaic GPU: copies in another order, sums of a few, FP8 codes; straight through a warpgroup's registers."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _frames, _mosaic, _rows

_THREADS = 128
_TOGETHER = 4
"""Rows that one thread block copies."""


def fits(width: int) -> bool:
    """True if rows of so many numbers can be spread over a warpgroup."""
    return width >= _THREADS


def why_not(width: int, dtype: Any) -> str | None:
    """None if rows of so many numbers can be copied, else one sentence."""
    if not fits(width):
        return f"rows must have at least {_THREADS} numbers, got {width}; pad them"
    if width % _THREADS and isinstance(line := _frames.line(width, dtype), str):
        return line
    return None


class Row:
    """How a row of M numbers lies in registers: whole, in pieces, or in overlapping pieces that are written twice.

    Args:
        M: numbers of a row.
        dtype: their dtype.
        pieces: to cut a row into, fewer where they would not keep loads of the same width.
    """

    def __init__(self, M: int, dtype: Any, pieces: int = 1):
        self.dtype = jnp.dtype(dtype)
        self.shape: tuple[int, ...] = (M,)
        self.apart = M % _THREADS == 0
        """Pieces do not overlap."""
        if not self.apart:
            line = _frames.line(M, dtype)
            assert not isinstance(line, str), line
            self.piece: tuple[int, ...] = (line.width,)
            self.places: list[tuple[Any, ...]] = [(pl.ds(start, line.width),) for start in line.starts]
            self.layout = line.frame.numbers
            return
        vec = 16 // self.dtype.itemsize  # as much of 16 bytes a thread as divides it
        while M % (_THREADS * vec):
            vec //= 2
        lines = M // _THREADS
        pieces = max(n for n in range(1, pieces + 1) if lines % (n * vec) == 0)
        self.shape, self.piece = (lines, _THREADS), (lines // pieces, _THREADS)
        self.places = [(pl.ds(n * self.piece[0], self.piece[0]),) for n in range(pieces)] if pieces > 1 else [()]
        self.layout = plgpu.Layout.WG_STRIDED(self.piece, vec_size=vec)

    def place(self, piece: Any) -> tuple[Any, ...]:
        """Where a piece lies whose number is not known before; of pieces that do not overlap."""
        return (pl.ds(piece * self.piece[0], self.piece[0]),) if len(self.places) > 1 else ()

    def zeros(self) -> jax.Array:
        """A piece of zeros."""
        return plgpu.layout_cast(jnp.zeros(self.piece, self.dtype), self.layout)

    def load(self, ref: Any, row: Any, place: tuple[Any, ...]) -> jax.Array:
        """A piece of a row."""
        return plgpu.load(ref.at[(row, *place)], layout=self.layout, optimized=False)

    def store(self, ref: Any, row: Any, place: tuple[Any, ...], value: jax.Array) -> None:
        """Write a piece of a row that no other thread reads; warps do not wait for each other."""
        _mosaic.store_plain(ref.at[(row, *place)], value, self.layout)


def registers(width: int, dtype: Any) -> int:
    """Registers of a thread that hold a row."""
    return -(-width * jnp.dtype(dtype).itemsize // (4 * _THREADS))


def take(x: jax.Array, source: jax.Array) -> jax.Array:
    """`x[source]` for [T, M] and int32 [R]; R a multiple of 4."""
    (_, M), R = x.shape, source.shape[0]
    row = Row(M, x.dtype)

    def body(x_ref, source_ref, o_ref):
        first = lax.axis_index("block") * _TOGETHER
        for place in row.places:
            rows = [row.load(x_ref, source_ref[first + i], place) for i in range(_TOGETHER)]
            for i, value in enumerate(rows):
                _mosaic.store(o_ref.at[(first + i, *place)], value)

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((R, *row.shape), x.dtype),
        grid=(R // _TOGETHER,),
        grid_names=("block",),
        kernel_name="take_rows",
    )(x.reshape(-1, *row.shape), source)
    return out.reshape(R, M)


def add(y: jax.Array, positions: jax.Array, weights: jax.Array | None = None, pieces: int = 1) -> jax.Array:
    """`sum over a of weights[t, a] * y[positions[t, a]]` in float32, in order, each product and the sum rounded.

    Args:
        y: [R, M].
        positions: int32 [T, A]; a negative one adds nothing, whatever its weight.
        weights: float32 [T, A], None = 1.
        pieces: thread blocks of a token, at most.

    Returns:
        [T, M].
    """
    (_, M), (T, A) = y.shape, positions.shape
    row = Row(M, y.dtype, pieces)
    across = len(row.places) if row.apart else 1

    def body(y_ref, at_ref, *refs):
        *weight_refs, o_ref = refs
        t = lax.axis_index("token")
        at = [at_ref[t, a] for a in range(A)]
        factors = [ref[t, a] for ref in weight_refs for a in range(A)]
        for place in [row.place(lax.axis_index("piece"))] if row.apart else row.places:
            values = [row.load(y_ref, jnp.maximum(i, 0), place) for i in at]
            total = plgpu.layout_cast(jnp.zeros(row.piece, jnp.float32), row.layout)
            for a, (i, value) in enumerate(zip(at, values, strict=True)):
                value = value.astype(jnp.float32)
                if factors:  # an instruction of its own, which no sum is fused with
                    factor = lax.broadcast(factors[a], row.piece)
                    value = _mosaic.pointwise("mul.rn.f32", jnp.multiply, row.layout, value, factor)
                total = total + jnp.where(lax.broadcast(i, row.piece) >= 0, value, 0.0)
            _mosaic.store(o_ref.at[(t, *place)], total.astype(y.dtype))

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((T, *row.shape), y.dtype),
        grid=(T, across),
        grid_names=("token", "piece"),
        kernel_name="add_rows",
    )(y.reshape(-1, *row.shape), positions, *([] if weights is None else [weights]))
    return out.reshape(T, M)


GROUP = 128
"""Numbers that share a scale."""
_TILE = 64
"""Rows of a tile."""


def encode(x: jax.Array, lowest: int, group: int = GROUP) -> tuple[jax.Array, jax.Array]:
    """float8_e4m3fn codes per 128 or 32 numbers and their scales, powers of two, one row of scales for each group.

    The scale is the smallest power of two that is not below `amax / 448`, at least `2^lowest`: 448 is 1.75 * 2^8, so
    the exponent is that of amax less 8, and one more where the mantissa is above 1.75.

    Args:
        x: [R, K], K a multiple of the group.
        lowest: -33 for a floor of 1e-10 under amax / 448, -22 for 1e-4 under amax.
        group: 128 or 32, numbers that share a scale.

    Returns:
        [R, K] and float32 [K / group, R].
    """
    if group < GROUP and x.shape[1] > group:  # short rows are taken as they follow each other
        q, s = encode(x.reshape(-1, group), lowest, group)
        return q.reshape(x.shape), s.reshape(x.shape[0], -1).T
    (R, K), vec = x.shape, _rows.vector(jnp.bfloat16)
    rows = _TILE if R % _TILE == 0 else _rows.smallest(group, vec)
    x = jnp.pad(x, ((0, -R % rows), (0, 0)))
    layout = _rows.layout(group, vec)

    def body(x_ref, q_ref, s_ref):
        at, number = pl.ds(lax.axis_index("rows") * rows, rows), lax.axis_index("group")
        columns = pl.ds(number * group, group)
        value = plgpu.load(x_ref.at[at, columns], layout=layout, optimized=False).astype(jnp.float32)
        bits = lax.bitcast_convert_type(jnp.max(jnp.abs(value), 1), jnp.int32)
        exponent = jnp.maximum(((bits + 0x1FFFFF) >> 23) - (127 + 8), lowest)
        scale, inverse = (lax.bitcast_convert_type((127 + e) << 23, jnp.float32) for e in (exponent, -exponent))
        value = value * lax.broadcast_in_dim(inverse, value.shape, [0])
        _mosaic.store(q_ref.at[at, columns], value.astype(jnp.float8_e4m3fn))
        _mosaic.store(s_ref.at[number, at], scale)

    q, s = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct(x.shape, jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((K // group, x.shape[0]), jnp.float32),
        ],
        grid=(x.shape[0] // rows, K // group),
        grid_names=("rows", "group"),
        kernel_name="encode_rows",
    )(x)
    return q[:R], s[:, :R]
