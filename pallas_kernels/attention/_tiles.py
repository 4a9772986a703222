"""The tiles of prefill attention: their order, and what the producer finds out about each."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic
from pallas_kernels._mosaic import ir, llvm
from pallas_kernels.attention._plan import Plan

i32 = jnp.int32


def first_tiles(x: Plan, query_start):
    """Tiles before each request, the padding counted as request B, and of all: int32 [B+2]."""
    start = jnp.concatenate([jnp.clip(query_start, 0, x.N), jnp.full(1, x.N, i32)])
    count = -(-jnp.maximum(jnp.diff(start), 0) // x.block_q)
    if x.B > 256:
        return jnp.pad(jnp.cumsum(count, dtype=i32), (1, 0))
    before = jnp.arange(x.B + 1) < jnp.arange(x.B + 2)[:, None]  # one small kernel
    return jnp.where(before, count, 0).sum(1, dtype=i32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """What the producer finds out about a tile, as scalars on the device.

    `count` tokens (at most block_q) from row `token0` of q on, the first at `position` among the request's `length`
    keys. Step i takes the block of keys from `start - i * block_kv` on; blocks that start between `plain_low` and
    `plain_high` need no mask. Keys in [low, high) are those that the request's queries see. `origin` is the row of k
    that holds the first key (0 if paged).
    """

    blocks: Any
    start: Any
    end: Any
    plain_low: Any
    plain_high: Any
    position: Any
    length: Any
    token0: Any
    count: Any
    slot: Any
    chunk: Any
    low: Any
    high: Any
    origin: Any
    request: Any
    zero: Any
    """Zero; what is added to it cannot be moved out of a loop, where it would hold a register."""


SEGMENTS = ("table_row", "first_page", "lengths", "query_start", "first_tile")
"""Columns of a table that replaces those of these names: `table_row` and `first_page` say where a request's pages stand
in the page table. The row behind the last request's ends its rows and tiles, one more the padding's."""
FIELDS = [*(field.name for field in dataclasses.fields(Tile)), "steps"]


class Told:
    """A tile in shared memory, each field read when it is needed: registers are scarce."""

    def __init__(self, tile, at):
        self._tile, self._at = tile, at

    def __getattr__(self, field):
        return self._tile[self._at, FIELDS.index(field)]


class _Column:
    """A column of a table as a reference of one dimension."""

    def __init__(self, table, at: int):
        self._table, self._at = table, at

    def __getitem__(self, row):
        return self._table[row, self._at]


def columns(segments) -> dict[str, Any]:
    """References to the columns of `segments`, if it is there."""
    return {} if segments is None else {name: _Column(segments, i) for i, name in enumerate(SEGMENTS)}


def number_of(x: Plan, turn, cta):
    """The tile of a thread block's turn: there and back again, so that long tiles first means equal shares."""
    there = turn & 1 == 0
    return turn * x.grid + jnp.where(there, cta, x.grid - 1 - cta)


def counted(launch, x: Plan, inputs: dict[str, Any]):
    """`launch(x, inputs)`, if tiles are taken one by one with their counter `taken` among the inputs.

    Launches under vmap would count together: there every thread block has its own tiles, which changes no bit.
    """
    if not x.dynamic:
        return launch(x, inputs)

    @jax.custom_batching.custom_vmap
    def run(inputs):
        return _mosaic.discharged(lambda given: launch(x, given | {"taken": jax.new_ref(jnp.zeros(1, i32))}), inputs)

    @run.def_vmap
    def _(axis_size, batched, inputs):
        del axis_size
        shared = dataclasses.replace(x, config=dataclasses.replace(x.config, dynamic=False))
        axes = tuple(jax.tree.map(lambda mapped: 0 if mapped else None, batched))
        out = jax.vmap(functools.partial(launch, shared), in_axes=axes)(inputs)
        return out, jax.tree.map(lambda _: True, out)

    return run(inputs)


def take(x: Plan, r: Any):
    """The next tile that no thread block has taken; the first ones, one a thread block, are not counted."""

    def count(context, taken, box):
        del context
        utils: Any = _mosaic.gpu_utils
        utils.warpgroup_barrier()  # all have read the last one
        with utils.single_thread(scope=utils.ThreadSubset.WARPGROUP):
            one = _mosaic.gpu.c(1, ir.IntegerType.get_signless(32))
            old = llvm.atomicrmw(llvm.AtomicBinOp.add, utils.memref_ptr(taken), one, llvm.AtomicOrdering.monotonic)
            utils.memref.store(old, box, [_mosaic.gpu.c(0, ir.IndexType.get())])
        utils.warpgroup_barrier()

    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    inline(count)(r.taken, r.next_tile)
    return x.grid + r.next_tile[0]


def locate(x: Plan, r: Any, number) -> Tile:
    """Tile `number`; zero blocks if there is none."""
    block_q, block_kv = x.block_q, x.config.block_kv
    slots = jnp.maximum(r.first_tile[x.B + 1], 1) if x.dense else x.slots
    side_by_side = x.together * slots
    group, inside = lax.div(number, jnp.asarray(side_by_side, i32)), lax.rem(number, jnp.asarray(side_by_side, i32))
    slot, groups = lax.div(inside, i32(x.together)), x.chunks // x.together
    # groups, and below requests, are walked to and fro: long tiles stand next to long ones, so that shares stay equal
    slot = jnp.where((groups - group) & 1 == 1, slots - 1 - slot, slot)
    chunk = group * x.together + lax.rem(inside, i32(x.together))

    def start_of(b):
        return jnp.clip(r.query_start[b], 0, x.N)

    def first_of(b):
        """The first of a request's slots."""
        return r.first_tile[b] if x.dense else lax.div(start_of(b), i32(block_q)) + b

    def halve(_, bounds):
        low, high = bounds
        middle = lax.div(low + high + 1, i32(2))
        below = first_of(middle) <= slot
        return jnp.where(below, middle, low), jnp.where(below, high, middle - 1)

    b, _ = lax.fori_loop(0, x.B.bit_length(), halve, (i32(0), i32(x.B)))
    request = jnp.minimum(b, x.B - 1)
    real = b < x.B  # b == B: the padding behind the last request, rows without keys
    start = start_of(b)
    end = jnp.where(real, start_of(request + 1), x.N)
    first = first_of(b)
    last = r.first_tile[b + 1] - 1 if x.dense else lax.div(end, i32(block_q)) + b
    slot = jnp.where(b & 1 == 1, first + last - slot, slot)
    if x.page is None:
        origin = jnp.clip(r.key_start[request], 0, x.S)
        keys = jnp.clip(r.key_start[request + 1], 0, x.S) - origin
    else:
        origin, keys = i32(0), jnp.clip(r.lengths[request], 0, x.S)
    length = jnp.where(real, jnp.maximum(keys, 0), 0)
    skipped = (slot - first) * block_q
    count = jnp.minimum(end - start - skipped, block_q)
    exists = (count > 0) & (number < slots * x.chunks)
    position = length - (end - start) + skipped
    # keys that some row of the tile sees, that every row sees, and that some row of the request sees
    final, low, full_low, high, full_high = position + count - 1, i32(0), i32(0), length, length
    lowest, highest = i32(0), length
    if x.window is not None:
        low = jnp.clip(position - (x.window - 1), 0, length)
        full_low = jnp.maximum(final - (x.window - 1), 0)
        lowest = jnp.maximum(length - (end - start) - (x.window - 1), 0)
    if x.causal:
        high, full_high = jnp.minimum(final + 1, length), jnp.minimum(position + 1, length)
    elif x.window is not None:
        high, full_high = jnp.minimum(final + x.window, length), jnp.minimum(position + x.window, length)
        highest = jnp.minimum(length - 1 + x.window, length)
    align = i32(1 if x.page is None else min(x.page, block_kv))
    key0 = lax.div(low, align) * align
    blocks = jnp.maximum(lax.div(high - key0 + (block_kv - 1), i32(block_kv)), 1)
    return Tile(
        blocks=jnp.where(exists, blocks, 0),
        start=key0 + (blocks - 1) * block_kv,
        end=key0,
        plain_low=full_low,
        plain_high=full_high - block_kv,
        position=position,
        length=length,
        token0=start + skipped,
        count=count,
        slot=slot - first + lax.div(start, i32(block_q)) + b if x.dense else slot,
        chunk=chunk,
        low=lowest,
        high=highest,
        origin=origin,
        request=request,
        zero=i32(0),
    )
