"""Counting sort of (token, slot) pairs by expert on Mosaic GPU: where every pair goes, in one launch or two.

A stable sort by a small key needs no comparison of pairs with pairs, but for those that stand close together:

    place of pair i = pairs of lower experts + pairs of its expert in earlier chunks + those before it in its own chunk

`counted` counts the pairs of every expert chunk by chunk, all chunks side by side. Then any kernel can have the places
of a few pairs, a *part* of a chunk, by itself (`Places`): its warpgroup adds up the counts and compares its pairs with
their chunk, all in one sum per pair, in less than two microseconds. Nothing is scanned over thread blocks, nobody waits
for another, and there are no atomics, so that the order is that of the flat indices. Where one chunk holds all pairs
its own ids are counted in place and the first launch falls away.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic, _routing, _rows

COLUMNS = 128
"""Pairs, or experts, that are compared at once; a warp holds a row of them."""
ROWS = 4
"""Rows of the smallest tile, one for each warp."""
SLAB = 32
"""Experts that one thread block counts, and offsets that are written together."""
_THREADS = 128
_GROUP = 32
"""Chunks whose counts are read at once."""

i32 = jnp.int32
LAYOUT = _rows.layout(COLUMNS, 4)
DOWN, ACROSS = LAYOUT.reduce(1), LAYOUT.reduce(0)
"""Of a number for each row, for each column."""


def _number(count: int, layout: Any) -> jax.Array:
    """0, 1, 2, ..."""
    return plgpu.broadcasted_iota(i32, (count,), 0, layout=layout)


def _load(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def _zeros(rows: int) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((rows, COLUMNS), i32), LAYOUT)


def _down(x: jax.Array) -> jax.Array:
    """A number for each row, repeated in all columns."""
    return lax.broadcast_in_dim(x, (x.shape[0], COLUMNS), [0])


def _across(x: jax.Array, rows: int) -> jax.Array:
    """A number for each column, repeated in all rows."""
    return lax.broadcast_in_dim(x, (rows, COLUMNS), [1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sort:
    """Sizes of one sort."""

    pairs: int
    num_experts: int
    part: int
    """Pairs whose places one warpgroup finds; a multiple of `ROWS`."""
    chunk: int
    """Pairs that are counted together; a multiple of the part and of `COLUMNS`."""
    block: int = 1
    """Rows to a multiple of which every expert is filled up."""

    @property
    def chunks(self) -> int:
        """How many, the last one filled up."""
        return -(-self.pairs // self.chunk)

    @property
    def parts(self) -> int:
        """Those that hold a pair."""
        return -(-self.pairs // self.part)

    @property
    def width(self) -> int:
        """Columns of a line of counts: every expert, one for pairs that take no part, and some that hold anything."""
        return -(-(self.num_experts + 1) // COLUMNS) * COLUMNS

    @property
    def together(self) -> int:
        """Lines that are read at once."""
        return min(_GROUP, -(-self.chunks // ROWS) * ROWS)

    @property
    def lines(self) -> int:
        """Chunks, filled up to what is read at once."""
        return -(-self.chunks // self.together) * self.together


def chunk(part: int, most: int) -> int:
    """The largest chunk that fits a part and does not exceed `most`, or else the smallest."""
    least = math.lcm(part, COLUMNS)
    return max(most // least, 1) * least


def default_chunk(pairs: int) -> int:
    """Many pairs have longer chunks, whose counts every thread block reads."""
    return 512 if pairs <= 1 << 15 else 1024 if pairs <= 1 << 17 else 2048


def _clean(ids: jax.Array, num_experts: int) -> jax.Array:
    """E for whatever takes no part."""
    return jnp.where((ids >= 0) & (ids < num_experts), ids, i32(num_experts))


def flat(sort: Sort, ids: jax.Array, expert_map: jax.Array | None) -> jax.Array:
    """Experts of all chunks' pairs, out of range where there is none; costs nothing for whole chunks without a map."""
    if expert_map is not None:
        ids = _routing.local_experts(ids, sort.num_experts, expert_map)
    ids = ids.reshape(-1)
    return jnp.pad(ids, (0, sort.chunks * sort.chunk - sort.pairs), constant_values=-1)


def counted(sort: Sort, ids: jax.Array, filled: int = 0, more: Sequence[Any] = ()) -> list[jax.Array]:
    """Pairs of every expert in every chunk, [lines, width].

    Args:
        sort: sizes.
        ids: what `flat` gave.
        filled: with it, also an array of so many numbers that all say `pairs`.
        more: shapes of further arrays, which hold anything, for a later launch to write to.
    """
    slabs = -(-(sort.num_experts + 1) // SLAB)
    out = [jax.ShapeDtypeStruct(shape, i32) for shape in ((sort.lines, sort.width), *([(filled,)] if filled else []))]

    def body(ids_ref, counts_ref, *others):
        i, slab = lax.axis_index("chunk"), lax.axis_index("slab")
        if filled:
            _fill(others[0], sort.pairs, i * slabs + slab, sort.chunks * slabs)
        starts = range(0, sort.chunk, COLUMNS)
        pieces = [_load(ids_ref.at[pl.ds(i * sort.chunk + start, COLUMNS)], ACROSS) for start in starts]
        expert = _down(slab * SLAB + _number(SLAB, DOWN))
        total = _zeros(SLAB)
        for piece in pieces:
            total = total + jnp.where(_across(_clean(piece, sort.num_experts), SLAB) == expert, i32(1), i32(0))
        _mosaic.store(counts_ref.at[i, pl.ds(slab * SLAB, SLAB)], jnp.sum(total, 1))

    return plgpu.kernel(
        body,
        out_type=[*out, *more],
        grid=(sort.chunks, slabs),
        grid_names=("chunk", "slab"),
        kernel_name="count_experts",
    )(ids)


def _fill(ref: Any, value: int, block: Any, blocks: int) -> None:
    """A thread block's share of `ref[...] = value`."""
    whole, rest = divmod(ref.shape[0], _THREADS)
    full = plgpu.layout_cast(jnp.full((_THREADS,), value, i32), plgpu.Layout.WG_STRIDED((_THREADS,), vec_size=1))

    def step(n, _):
        _mosaic.store(ref.at[pl.ds((block + n * blocks) * _THREADS, _THREADS)], full)

    lax.fori_loop(0, lax.div(whole - 1 - block + blocks, i32(blocks)), step, None)

    @pl.when(block == 0)
    def _():
        for n in range(rest):
            ref[whole * _THREADS + n] = i32(value)


# ---------------------------------------------------------------- inside kernels
def totals(sort: Sort, ids_ref: Any, counts_ref: Any, chunk: Any) -> list[tuple[jax.Array, jax.Array]]:
    """For every 128 experts how many pairs they have, filled up to blocks, and how many in chunks before `chunk`."""
    return [_totals(sort, ids_ref, counts_ref, chunk, column) for column in range(0, sort.width, COLUMNS)]


def _totals(sort: Sort, ids_ref: Any, counts_ref: Any, chunk: Any, column: int):
    if counts_ref is None:
        expert = _across(column + _number(COLUMNS, ACROSS), SLAB)

        def add(n, total):
            ids = _clean(_load(ids_ref.at[pl.ds(n * SLAB, SLAB)], DOWN), sort.num_experts)
            return total + jnp.where(_down(ids) == expert, i32(1), i32(0))

        total = jnp.sum(lax.fori_loop(0, sort.chunk // SLAB, add, _zeros(SLAB)), 0)
        return _filled_up(sort, total), total - total

    def step(n, sums):
        firsts = [n * sort.together + k for k in range(0, sort.together, ROWS)]
        loads = [_load(counts_ref.at[pl.ds(first, ROWS), pl.ds(column, COLUMNS)], LAYOUT) for first in firsts]
        for first, counts in zip(firsts, loads, strict=True):
            line = _down(first + _number(ROWS, DOWN))
            every = sums[0] + jnp.where(line < sort.chunks, counts, i32(0))
            sums = every, sums[1] + jnp.where(line < chunk, counts, i32(0))
        return sums

    sums = lax.fori_loop(0, sort.lines // sort.together, step, (_zeros(ROWS),) * 2)
    return _filled_up(sort, jnp.sum(sums[0], 0)), jnp.sum(sums[1], 0)


def _filled_up(sort: Sort, count: jax.Array) -> jax.Array:
    if sort.block == 1:
        return count
    return lax.div(count + (sort.block - 1), jnp.full_like(count, sort.block)) * sort.block


def find_places(sort: Sort, ids_ref: Any, counts_ref: Any, part: Any, take: Callable[..., None]) -> None:
    """Call `take(first, count, experts, places)` for a few pairs of a part at a time, numbers in layout `DOWN`.

    A place is a row. Pairs that take no part have the rows behind those of the last expert, in their order.

    Args:
        sort: sizes.
        ids_ref: what `flat` gave, in global memory.
        counts_ref: what `counted` gave; None counts in place, where there is one chunk.
        part: number of the part, which holds `sort.part` pairs.
        take: device code; `first` counts from the part's start, `count` is known when it is traced.
    """
    start = part * sort.part
    chunk = lax.div(start, i32(sort.chunk))
    columns = range(0, sort.chunk, COLUMNS)
    others = [_load(ids_ref.at[pl.ds(chunk * sort.chunk + column, COLUMNS)], ACROSS) for column in columns]
    others = [_clean(ids, sort.num_experts) for ids in others]
    sums = totals(sort, ids_ref, counts_ref, chunk)
    count = max(n for n in range(ROWS, SLAB + 1, ROWS) if sort.part % n == 0)

    def some(i, _):
        first = i * count
        experts = _clean(_load(ids_ref.at[pl.ds(start + first, count)], DOWN), sort.num_experts)
        own, number = _down(experts), _down(start - chunk * sort.chunk + first + _number(count, DOWN))
        place = _zeros(count)
        for n, (every, before) in enumerate(sums):
            expert = _across(n * COLUMNS + _number(COLUMNS, ACROSS), count)
            place = place + jnp.where(expert < own, _across(every, count), i32(0))
            place = place + jnp.where(expert == own, _across(before, count), i32(0))
        for column, ids in zip(columns, others, strict=True):
            earlier = _across(column + _number(COLUMNS, ACROSS), count) < number
            place = place + jnp.where(earlier & (_across(ids, count) == own), i32(1), i32(0))
        take(first, count, experts, jnp.sum(place, 1))

    lax.fori_loop(0, sort.part // count, some, None)


def find_starts(sort: Sort, ids_ref: Any, counts_ref: Any, starts_ref: Any) -> None:
    """The row that each expert starts at, and E the end of the last one's, in shared memory [width]."""
    sums = totals(sort, ids_ref, counts_ref, 0)

    def some(i, _):
        row, start = _down(i * SLAB + _number(SLAB, DOWN)), _zeros(SLAB)
        for n, (every, _) in enumerate(sums):
            expert = _across(n * COLUMNS + _number(COLUMNS, ACROSS), SLAB)
            start = start + jnp.where(expert < row, _across(every, SLAB), i32(0))
        starts_ref[pl.ds(i * SLAB, SLAB)] = jnp.sum(start, 1)

    lax.fori_loop(0, sort.num_experts // SLAB + 1, some, None)


def experts_of_blocks(sort: Sort, starts_ref: Any, first: Any) -> jax.Array:
    """The experts of 32 blocks from `first` on, -1 behind the last, from what `find_starts` found."""
    row, passed = _down((first + _number(SLAB, DOWN)) * sort.block), _zeros(SLAB)
    for column in range(0, sort.width, COLUMNS):
        ends = _across(_load(starts_ref.at[pl.ds(column, COLUMNS)], ACROSS), SLAB)
        number = _across(column + _number(COLUMNS, ACROSS), SLAB)
        inside = (number > 0) & (number <= sort.num_experts)
        passed = passed + jnp.where(inside & (row >= ends), i32(1), i32(0))
    expert = jnp.sum(passed, 1)
    return jnp.where(expert < sort.num_experts, expert, i32(-1))


def put(ref: Any, at: Any, value: Any) -> None:
    """Write one number."""
    ref[at] = value
