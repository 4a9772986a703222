"""Rotary embedding inside row kernels: factors of numbers and of their partners, by token or by row."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic, _words
from pallas_kernels._frames import Frame
from pallas_kernels._mosaic import arith, ir, llvm, vector


def angles(
    cos_sin: jax.Array, positions: jax.Array, *, interleaved: bool = True, inverse: bool = False
) -> tuple[jax.Array, jax.Array]:
    """What numbers and their partners are multiplied with, float32 [N, Dr] each; partners are added.

    The partner of a number is its neighbour in the pair (2i, 2i + 1), or with halves the one Dr / 2 further on.

    Args:
        cos_sin: [P, Dr] `cos || sin`.
        positions: [N] rows of the table, those outside take the nearest row.
        interleaved: pairs are neighbours, else halves.
        inverse: turn back.
    """
    rows = cos_sin[jnp.clip(positions, 0, cos_sin.shape[0] - 1)].astype(jnp.float32)
    cos, sin = jnp.split(rows, 2, axis=1)
    sin = -sin if inverse else sin
    if not interleaved:
        return jnp.concatenate([cos, cos], 1), jnp.concatenate([-sin, sin], 1)
    return jnp.repeat(cos, 2, axis=1), jnp.stack([-sin, sin], -1).reshape(rows.shape)


def turned(x: jax.Array, cos: jax.Array, sin: jax.Array, layout: Any, distance: int = 1) -> jax.Array:
    """float32 pairs, so far apart, rotated, every product rounded; for `distance` see `_mosaic.partners`."""
    return _mosaic.product_sum(x, cos, _mosaic.partners(x, distance, layout), sin, layout)


def from_table(ref: Any, row: Any, shape: tuple[int, ...], layout: Any) -> tuple[jax.Array, jax.Array]:
    """What `angles` gives for interleaved pairs, read by the kernel itself: no launch before it, no array between.

    Args:
        ref: float32 [P, Dr] `cos || sin` in global memory.
        row: int32 scalar, which row; those outside count as the nearest row.
        shape: [Dr], or more numbers in any shape, of which the last Dr are turned; the angles of the others are
            anything finite that the table holds.
        layout: of the result.

    Returns:
        Factors of numbers and of their partners, float32 `shape`.
    """
    P, Dr = ref.shape
    row = jnp.clip(row, 0, P - 1)
    before = math.prod(shape) - Dr
    if _mosaic.interpreting():
        cos, sin = jnp.split(ref[row], 2)
        cos, sin = jnp.repeat(cos, 2), jnp.stack([-sin, sin], -1).reshape(Dr)
        cos, sin = (jnp.concatenate([jnp.broadcast_to(x[:1], before), x]).reshape(shape) for x in (cos, sin))
        return cos, sin

    def emit(context, ref, row):
        del context
        kind = layout.to_mgpu()
        memory = _words.Memory(ref).wide(_words.scalar(row), 4 * Dr)
        vec, found = kind.vector_length, ([], [])
        for index in kind.thread_idxs(shape):
            at = _words.Word(arith.index_cast(ir.IntegerType.get_signless(32), _flat(index, shape))) + -before
            at = _words.select(_words.less(at, 0), 0, at)
            # vec numbers are vec / 2 pairs; a single one is half a pair
            pair = memory.at((at >> 1) << 2)
            cos, sin = (_loaded(pair.at(offset), max(vec // 2, 1)) for offset in (0, 2 * Dr))
            minus = arith.negf(sin)
            if vec == 1:
                odd = arith.trunci(ir.IntegerType.get_signless(1), at.value)
                sin = arith.select(odd, sin, minus)
            else:
                cos = vector.shuffle(cos, cos, [i // 2 for i in range(vec)])
                sin = vector.shuffle(minus, sin, [i // 2 + i % 2 * (vec // 2) for i in range(vec)])
            for registers, x in zip(found, (cos, sin), strict=True):
                registers.append(x)
        return [_array(registers, shape, kind) for registers in found]

    out = [plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout)] * 2
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT), return_type=out)
    cos, sin = inline(emit)(ref, row)
    return cos, sin


def _flat(index: Sequence[Any], shape: Sequence[int]) -> Any:
    """The place of an index in row-major order."""
    place = index[0]
    for x, size in zip(index[1:], shape[1:], strict=True):
        place = arith.addi(arith.muli(place, arith.constant(place.type, size)), x)
    return place


def _loaded(memory: _words.Memory, count: int) -> Any:
    """So many float32 numbers, aligned together."""
    return llvm.load(ir.VectorType.get((count,), ir.F32Type.get()), memory.pointer, alignment=4 * count)


def _array(registers: Sequence[Any], shape: tuple[int, ...], layout: Any) -> Any:
    """The array whose registers these are, in the order of `thread_idxs`."""
    out = np.empty(len(registers), object)
    out[:] = registers
    out = out.reshape(layout.registers_shape(shape))
    return _mosaic.mosaic_gpu.FragmentedArray(_registers=out, _layout=layout, _is_signed=None)


@dataclasses.dataclass(frozen=True)
class Heads:
    """Heads as rows of a tile: angles belong to the token if tiles lie within one, else each row has its own."""

    H: int
    rows: int
    """Of a whole tile."""

    @property
    def by_token(self) -> bool:
        """A vector of angles serves a tile."""
        return self.H % self.rows == 0

    def spread(self, x: jax.Array) -> jax.Array:
        """Angles [N, Dr] as the kernel reads them, repeated where each row needs its own."""
        return x if self.by_token else jnp.repeat(x, self.H, axis=0)

    def load(self, ref: Any, start: Any, frame: Frame) -> jax.Array:
        """Angles of the rows from `start` on, [rows, Dr]."""
        if not self.by_token:
            return frame.load(ref.at[pl.ds(start, frame.shape[0])])
        token = lax.div(start, jnp.int32(self.H))
        values = plgpu.load(ref.at[token], layout=frame.numbers.reduce(0), optimized=False)
        return lax.broadcast_in_dim(values, frame.shape, [1])
