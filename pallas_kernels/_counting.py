"""Counting sort of (token, slot) pairs by expert on Mosaic GPU: where every pair goes, in one launch or two.

A stable sort by a small key needs no comparison of pairs with pairs, but for those that stand close together:

    place of pair i = pairs of lower experts + pairs of its expert in earlier chunks + those before it in its own chunk

`counted` counts the pairs of every expert chunk by chunk, all chunks side by side. Then any kernel finds the places of
a few pairs, a *part* of a chunk, by itself (`find_places`): its warpgroup adds up the counts and compares its pairs
with their chunk. Nothing is scanned over thread blocks, nobody waits for another, and there are no atomics, so that the
order is that of the flat indices. Where one chunk holds all pairs its ids are counted in place and the first launch
falls away.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic, _rows

COLUMNS = 128
"""Pairs, or experts, that are compared at once; a warp holds a row of them."""
ROWS = 4
"""Rows of the smallest tile, one for each warp."""
SLAB = 32
"""Experts that one thread block counts, and experts or blocks of rows that are found together."""
_PAIRS = 24
"""Most pairs of a part whose places are found together."""
_LINES = 64
"""Most lines of counts that are read together."""
_UNROLLED = 8
"""Places that are read before the first of them is written to."""
_BLOCKS = 256
"""Blocks whose experts one thread block finds."""
_THREADS = 128

i32 = jnp.int32
LAYOUT = _rows.layout(COLUMNS, 4)
DOWN, ACROSS = LAYOUT.reduce(1), LAYOUT.reduce(0)
"""Of a number for each row, for each column."""


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
    def slabs(self) -> int:
        """Of experts."""
        return -(-self.num_experts // SLAB)

    @property
    def width(self) -> int:
        """Columns of a line of counts: every expert, and some that hold anything."""
        return -(-self.num_experts // COLUMNS) * COLUMNS

    @property
    def together(self) -> int:
        """Lines that are read at once."""
        return min(_LINES, -(-self.chunks // ROWS) * ROWS)

    @property
    def lines(self) -> int:
        """Chunks, filled up to what is read at once."""
        return -(-self.chunks // self.together) * self.together

    @property
    def scratch(self) -> dict[str, Any]:
        """Shared memory of `Memory`, by name."""
        return {"sums": plgpu.SMEM((2, self.width), i32), "chunk": plgpu.SMEM((self.chunk,), i32)}

    @property
    def starts(self) -> Any:
        """Shared memory of what `find_starts` finds."""
        return plgpu.SMEM((max(self.width, (self.num_experts // SLAB + 1) * SLAB),), i32)


@dataclasses.dataclass(frozen=True)
class Memory:
    """What a warpgroup reads and works in."""

    ids: Any
    """What `flat` gave."""
    counts: Any
    """What `counted` gave; None counts in place, where there is one chunk."""
    sums: Any
    """For every expert all its pairs, filled up to blocks, and those in earlier chunks."""
    chunk: Any
    """Experts of a chunk's pairs."""


def chunk(part: int, most: int) -> int:
    """The largest chunk that fits a part and does not exceed `most`, or else the smallest."""
    least = math.lcm(part, COLUMNS)
    return max(most // least, 1) * least


def default_chunk(pairs: int) -> int:
    """Many pairs have longer chunks, whose counts every thread block reads."""
    return 512 if pairs <= 1 << 15 else 1024 if pairs <= 1 << 17 else 2048


def flat(sort: Sort, ids: jax.Array) -> jax.Array:
    """Experts of all chunks' pairs, out of range where there is none; costs nothing where chunks are whole."""
    return jnp.pad(ids.reshape(-1), (0, sort.chunks * sort.chunk - sort.pairs), constant_values=-1)


def counted(sort: Sort, ids: jax.Array, filled: int = 0, more: Sequence[Any] = ()) -> list[jax.Array]:
    """Pairs of every expert in every chunk, [lines, width].

    Args:
        sort: sizes.
        ids: what `flat` gave.
        filled: with it, also an array of so many numbers that all say `pairs`.
        more: shapes of further arrays, which hold anything, for a later launch to write to.
    """
    out = [jax.ShapeDtypeStruct(shape, i32) for shape in ((sort.lines, sort.width), *([(filled,)] if filled else []))]

    def body(ids_ref, counts_ref, *others):
        i, slab = lax.axis_index("chunk"), lax.axis_index("slab")
        if filled:
            _fill(others[0], sort.pairs, i * sort.slabs + slab, sort.chunks * sort.slabs)
        starts = range(0, sort.chunk, COLUMNS)
        pieces = [_load(ids_ref.at[pl.ds(i * sort.chunk + start, COLUMNS)], ACROSS) for start in starts]
        expert, total = _down(_number(SLAB, DOWN, slab * SLAB)), _zeros(SLAB)
        for piece in pieces:
            total = total + jnp.where(_across(piece, SLAB) == expert, i32(1), i32(0))
        _mosaic.store(counts_ref.at[i, pl.ds(slab * SLAB, SLAB)], jnp.sum(total, 1))

    return plgpu.kernel(
        body,
        out_type=[*out, *more],
        grid=(sort.chunks, sort.slabs),
        grid_names=("chunk", "slab"),
        kernel_name="count_experts",
    )(ids)


def _fill(ref: Any, value: int, block: Any, blocks: int) -> None:
    """A thread block's share of `ref[...] = value`."""
    whole, rest = divmod(ref.shape[0], _THREADS)
    layout = plgpu.Layout.WG_STRIDED((_THREADS,), vec_size=1)
    full = plgpu.layout_cast(jnp.full((_THREADS,), value, i32), layout)

    def step(n, _):
        _mosaic.store_plain(ref.at[pl.ds((block + n * blocks) * _THREADS, _THREADS)], full, layout)

    lax.fori_loop(0, lax.div(whole - 1 - block + blocks, i32(blocks)), step, None)
    last = whole * _THREADS
    pl.when(block == 0)(lambda: lax.fori_loop(0, rest, lambda n, _: put(ref, last + n, i32(value)), None))


def sort_pairs(sort: Sort, ids: jax.Array, rows: int) -> Sequence[jax.Array]:
    """All that there is to know of a sort, in two launches.

    The first counts and fills rows with what stands for padding. In the second one every thread block writes a few
    pairs to their places, and some write where experts start and whose blocks are.

    Args:
        sort: sizes.
        ids: expert of every pair, anything out of range where it takes no part.
        rows: to sort into, a multiple of the block.

    Returns:
        int32: the pair of every row, `pairs` = none; the expert of every block, -1 = none; [1] rows in use; the row of
        every pair, [pairs], -1 = none; the row that every expert starts at, [E + 1].
    """
    E, blocks = sort.num_experts, rows // sort.block
    ids = flat(sort, ids)
    sizes = (blocks, 1, sort.parts * sort.part, E + 1)
    counts, *outputs = counted(sort, ids, rows, [jax.ShapeDtypeStruct((n,), i32) for n in sizes])
    finders = -(-blocks // _BLOCKS)

    def body(
        sorted_ref, experts_ref, padded_ref, places_ref, starts_ref, ids_ref, counts_ref, *, found, own, **scratch
    ):
        block, r = lax.axis_index("block"), Memory(ids_ref, counts_ref, **scratch)

        @pl.when(block < finders)
        def _():
            find_starts(sort, r, found)

            @pl.when(block == 0)
            def _():
                put(padded_ref, 0, found[E])
                write_out(starts_ref, found, E + 1)

            first = block * _BLOCKS
            some = lax.div(jnp.minimum(blocks - first, _BLOCKS) + (SLAB - 1), i32(SLAB))
            find = functools.partial(_find_experts, sort, found, experts_ref, own)
            lax.fori_loop(0, some, lambda n, _: find(first + n * SLAB), None)

        pl.when(block >= finders)(lambda: _write_pairs(sort, r, sorted_ref, places_ref, own, block - finders))

    launch = plgpu.kernel(
        body,
        out_type=(),
        scratch_types=sort.scratch | {"found": sort.starts, "own": plgpu.SMEM((max(sort.part, SLAB),), i32)},
        grid=(finders + sort.parts,),
        grid_names=("block",),
        kernel_name="sort_pairs",
    )
    pairs, experts, padded, places, starts = pl.run_state(lambda refs: launch(*refs, ids, counts))(outputs)
    return pairs, experts, padded, places[: sort.pairs], starts


def _find_experts(sort: Sort, starts_ref: Any, experts_ref: Any, own: Any, first: Any) -> None:
    """The experts of 32 blocks, or of as many as there are."""
    blocks, experts = experts_ref.shape[0], experts_of_blocks(sort, starts_ref, first)
    pl.when(first + SLAB <= blocks)(lambda: _mosaic.store(experts_ref.at[pl.ds(first, SLAB)], experts))

    @pl.when(first + SLAB > blocks)
    def _():
        own[pl.ds(0, SLAB)] = experts
        lax.fori_loop(0, blocks - first, lambda i, _: put(experts_ref, first + i, own[i]), None)


def _write_pairs(sort: Sort, r: Memory, sorted_ref: Any, places_ref: Any, own: Any, part: Any) -> None:
    """A part's pairs to their places."""
    begin = part * sort.part

    def take(start, count, experts, place):
        place = jnp.where(experts < sort.num_experts, place, -1)
        own[pl.ds(start, count)] = place
        _mosaic.store(places_ref.at[pl.ds(begin + start, count)], place)

    def write(n, _):
        places = [own[n * _UNROLLED + i] for i in range(_UNROLLED)]
        for i, at in enumerate(places):
            pair = begin + n * _UNROLLED + i
            pl.when(at >= 0)(lambda at=at, pair=pair: put(sorted_ref, at, pair))

    find_places(sort, r, part, take)
    lax.fori_loop(0, sort.part // _UNROLLED, write, None)


# ---------------------------------------------------------------- inside kernels
def find_places(sort: Sort, r: Memory, part: Any, take: Callable[..., None]) -> None:
    """Call `take(first, count, experts, places)` for a few pairs of a part at a time, numbers in layout `DOWN`.

    A place is a row. Pairs that take no part have expert E and the rows behind those of the last one, in their order.

    Args:
        sort: sizes.
        r: memory.
        part: number of the part, which holds `sort.part` pairs.
        take: device code; `first` counts from the part's start, `count` is known when it is traced.
    """
    E, start = sort.num_experts, part * sort.part
    number = lax.div(start, i32(sort.chunk))
    begin = number * sort.chunk
    r.chunk[...] = _clean(_load(r.ids.at[pl.ds(begin, sort.chunk)], _whole(sort.chunk)), E)
    _add_up(sort, r, number)
    count = max(n for n in range(ROWS, _PAIRS + 1, ROWS) if sort.part % n == 0)

    def some(i, _):
        first = i * count
        at = start - begin + first
        experts = _load(r.chunk.at[pl.ds(at, count)], DOWN)
        own, pair = _down(experts), _down(_number(count, DOWN, at))

        def add_experts(n, place):
            expert = _across(_number(COLUMNS, ACROSS, n * COLUMNS), count)
            every, before = (_across(x, count) for x in _columns(r.sums, n))
            # pairs that take no part are not counted: they are what is left of the earlier chunks, `begin` pairs
            lower = jnp.where(own == E, every - before, every)
            equal = (expert == own) & (expert < E)
            return place + jnp.where(expert < own, lower, jnp.where(equal, before, i32(0)))

        def add_pairs(n, place):
            other = _across(_load(r.chunk.at[pl.ds(n * COLUMNS, COLUMNS)], ACROSS), count)
            earlier = _across(_number(COLUMNS, ACROSS, n * COLUMNS), count) < pair
            return place + jnp.where(earlier & (other == own), i32(1), i32(0))

        place = lax.fori_loop(0, sort.width // COLUMNS, add_experts, _zeros(count))
        place = lax.fori_loop(0, lax.div(at + (count + COLUMNS - 1), i32(COLUMNS)), add_pairs, place)
        place = jnp.sum(place, 1)
        take(first, count, experts, jnp.where(experts == E, place + begin, place))

    lax.fori_loop(0, sort.part // count, some, None)


def find_starts(sort: Sort, r: Memory, starts_ref: Any) -> None:
    """The row that each expert starts at, and as number E the end of the last one's, in `sort.starts`."""
    _add_up(sort, r, i32(0))

    def some(i, _):
        row = _down(_number(SLAB, DOWN, i * SLAB))

        def add(n, start):
            expert, (every, _) = _across(_number(COLUMNS, ACROSS, n * COLUMNS), SLAB), _columns(r.sums, n)
            return start + jnp.where((expert < row) & (expert < sort.num_experts), _across(every, SLAB), i32(0))

        start = lax.fori_loop(0, sort.width // COLUMNS, add, _zeros(SLAB))
        starts_ref[pl.ds(i * SLAB, SLAB)] = jnp.sum(start, 1)

    lax.fori_loop(0, sort.num_experts // SLAB + 1, some, None)


def experts_of_blocks(sort: Sort, starts_ref: Any, first: Any) -> jax.Array:
    """The experts of `SLAB` blocks from `first` on, -1 behind the last, from what `find_starts` found."""
    rows = _number(SLAB, DOWN, first) * sort.block

    def add(n, passed):
        expert = _across(_number(COLUMNS, ACROSS, n * COLUMNS), SLAB)
        start = _across(_load(starts_ref.at[pl.ds(n * COLUMNS, COLUMNS)], ACROSS), SLAB)
        inside = (expert > 0) & (expert < sort.num_experts)
        return passed + jnp.where(inside & (_down(rows) >= start), i32(1), i32(0))

    experts = jnp.sum(lax.fori_loop(0, sort.width // COLUMNS, add, _zeros(SLAB)), 1)
    return jnp.where(rows < starts_ref[sort.num_experts], experts, i32(-1))


def write_out(ref: Any, memory: Any, count: int) -> None:
    """The first numbers of shared memory to global memory."""
    whole, rest = divmod(count, SLAB)

    def some(n, _):
        at = pl.ds(n * SLAB, SLAB)
        _mosaic.store(ref.at[at], _load(memory.at[at], DOWN))

    lax.fori_loop(0, whole, some, None)
    last = whole * SLAB
    lax.fori_loop(0, rest, lambda n, _: put(ref, last + n, memory[last + n]), None)


def put(ref: Any, at: Any, value: Any) -> None:
    """Write one number."""
    ref[at] = value


def _add_up(sort: Sort, r: Memory, chunk: Any) -> None:
    """Fill `r.sums`; `chunk` is the first that is not earlier."""

    def columns(n, _):
        column = n * COLUMNS
        every, before = _count(sort, r, column) if r.counts is None else _add_lines(sort, r, column, chunk)
        if sort.block > 1:
            every = lax.div(every + (sort.block - 1), jnp.full_like(every, sort.block)) * sort.block
        r.sums[0, pl.ds(column, COLUMNS)] = every
        r.sums[1, pl.ds(column, COLUMNS)] = before

    lax.fori_loop(0, sort.width // COLUMNS, columns, None)


def _count(sort: Sort, r: Memory, column: Any) -> tuple[jax.Array, jax.Array]:
    """Pairs of 128 experts in the only chunk, none before it."""
    expert = _across(_number(COLUMNS, ACROSS, column), SLAB)

    def add(n, total):
        ids = _load(r.ids.at[pl.ds(n * SLAB, SLAB)], DOWN)
        return total + jnp.where(_down(ids) == expert, i32(1), i32(0))

    total = jnp.sum(lax.fori_loop(0, sort.chunk // SLAB, add, _zeros(SLAB)), 0)
    return total, total - total


def _add_lines(sort: Sort, r: Memory, column: Any, chunk: Any) -> tuple[jax.Array, jax.Array]:
    """Pairs of 128 experts in all chunks, and in those before `chunk`."""

    def step(n, sums):
        firsts = [n * sort.together + k for k in range(0, sort.together, ROWS)]
        loads = [_load(r.counts.at[pl.ds(first, ROWS), pl.ds(column, COLUMNS)], LAYOUT) for first in firsts]
        for first, counts in zip(firsts, loads, strict=True):
            line = _down(_number(ROWS, DOWN, first))
            every = sums[0] + jnp.where(line < sort.chunks, counts, i32(0))
            sums = every, sums[1] + jnp.where(line < chunk, counts, i32(0))
        return sums

    every, before = lax.fori_loop(0, sort.lines // sort.together, step, (_zeros(ROWS),) * 2)
    return jnp.sum(every, 0), jnp.sum(before, 0)


def _columns(ref: Any, n: Any) -> tuple[jax.Array, jax.Array]:
    first, second = (_load(ref.at[k, pl.ds(n * COLUMNS, COLUMNS)], ACROSS) for k in range(2))
    return first, second


def _whole(count: int) -> Any:
    """Layout of a multiple of 128 numbers."""
    return plgpu.Layout.WG_STRIDED((count,), vec_size=next(v for v in (4, 2, 1) if count % (_THREADS * v) == 0))


def _number(count: int, layout: Any, first: Any) -> jax.Array:
    """first, first + 1, ..."""
    return plgpu.broadcasted_iota(i32, (count,), 0, layout=layout) + first


def _load(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def _clean(ids: jax.Array, num_experts: int) -> jax.Array:
    """E for whatever takes no part."""
    return jnp.where((ids >= 0) & (ids < num_experts), ids, i32(num_experts))


def _zeros(rows: int) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((rows, COLUMNS), i32), LAYOUT)


def _down(x: jax.Array) -> jax.Array:
    """A number for each row, repeated in all columns."""
    return lax.broadcast_in_dim(x, (x.shape[0], COLUMNS), [0])


def _across(x: jax.Array, rows: int) -> jax.Array:
    """A number for each column, repeated in all rows."""
    return lax.broadcast_in_dim(x, (rows, COLUMNS), [1])
