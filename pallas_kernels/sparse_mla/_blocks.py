"""Device code of sparse latent attention: which tile, and what the three warpgroups of a thread block do."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _gather_rows, _mosaic, _products
from pallas_kernels import _online_softmax as softmax
from pallas_kernels._gather_rows import PIECE, Source
from pallas_kernels._online_softmax import ACC, FLOOR, LOG2E, ROW
from pallas_kernels.sparse_mla._plan import HEADS, Plan

OPTIONAL = ("extra_cache", "extra_indices", "counts", "extra_counts", "sinks", "lse", "top", "weight", "stage")
"""References that a kernel may do without."""
REGISTERS = {"plain": (72, 240, 192), "v4": (88, 224, 192)}
"""Registers of a thread that gathers, that scores, and that multiplies values only; together no more than the 3 x 168
that a thread block starts with, or the one that asks last would wait for ever."""
COLUMN = ACC.reduce(0)

f32, i32 = jnp.float32, jnp.int32


# ---------------------------------------------------------------- tiles
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tile:
    """One token, 64 heads from `head` on, one split: `own` blocks of the first list, `blocks` of both, at least one."""

    token: Any
    head: Any
    split: Any
    ends: tuple[Any, ...]
    """Entries of the token's lists."""
    starts: tuple[Any, ...]
    """First block of each list that belongs to the split."""
    own: Any
    blocks: Any


def _tile(x: Plan, r: Any, number) -> _Tile:
    """Tile `number`: the heads of a token side by side, because they read the same rows."""
    c = x.config
    together = x.chunks * c.splits
    token, rest = lax.div(number, i32(together)), lax.rem(number, i32(together))
    chunk, split = lax.div(rest, i32(c.splits)), lax.rem(rest, i32(c.splits))
    ends, starts, counts = [], [], []
    low, before = split * x.per_split, 0
    for (*_, width), blocks, lengths in zip(x.lists, x.blocks, (r.counts, r.extra_counts), strict=False):
        end = i32(width) if lengths is None else jnp.clip(lengths[token], 0, width)
        used = lax.div(end + (c.block_kv - 1), i32(c.block_kv))
        start = jnp.clip(low - before, 0, blocks)
        stop = jnp.clip(low + x.per_split - before, 0, used)
        ends.append(end)
        starts.append(start)
        counts.append(jnp.maximum(stop - start, 0))
        before += blocks
    return _Tile(
        token=token,
        head=chunk * HEADS,
        split=split,
        ends=tuple(ends),
        starts=tuple(starts),
        own=counts[0],
        blocks=jnp.maximum(sum(counts[1:], counts[0]), 1),
    )


def run(x: Plan, r: Any) -> None:
    """One thread block: warpgroup 0 leads, 1 follows, 2 gathers."""
    warpgroup, cta = lax.axis_index("warpgroup"), lax.axis_index("cta")
    count = lax.div(x.tiles - cta + (x.grid - 1), i32(x.grid))

    def walk(role):
        """role(tile, is it the first, blocks of earlier tiles) for every tile; returns all blocks."""

        def tile(turn, steps):
            t = _tile(x, r, turn * x.grid + cta)
            role(t, turn == 0, steps)
            return steps + t.blocks

        return lax.fori_loop(0, count, tile, i32(0))

    gathering, scoring, adding = REGISTERS[x.format]

    @pl.when(warpgroup == 2)
    def _():
        plgpu.set_max_registers(gathering, action="decrease")
        steps = walk(functools.partial(_gather, x, r))
        if x.interpreted:  # the interpreter wants to see every barrier complete
            plgpu.barrier_wait(r.q_free)
            for n in range(x.config.stages):
                pl.when(n < steps)(functools.partial(_wait_free, x, r, n))

    @pl.when(warpgroup == 0)
    def _():
        plgpu.set_max_registers(scoring, action="increase")
        steps = walk(functools.partial(_lead, x, r))
        plgpu.wait_smem_to_gmem(0)
        if x.interpreted:
            plgpu.barrier_wait(r.end_free)
            for n in range(x.slots_p):
                pl.when(n < steps)(lambda n=n: plgpu.barrier_wait(r.p_free.at[n]))

    @pl.when(warpgroup == 1)
    def _():
        plgpu.set_max_registers(adding, action="increase")
        walk(functools.partial(_follow, x, r))
        plgpu.wait_smem_to_gmem(0)


# ---------------------------------------------------------------- gathering
def _wait_free(x: Plan, r: Any, slot) -> None:
    for half in range(2):
        plgpu.barrier_wait(r.free.at[half * x.config.stages + slot])


def _gather(x: Plan, r: Any, t: _Tile, first, steps) -> None:
    """Bring q and all blocks of rows."""
    stages, rows = x.config.stages, x.config.block_kv

    def fetch_q():
        pl.when(jnp.logical_not(first))(lambda: plgpu.barrier_wait(r.q_free))
        for n in range(x.pieces):
            source = r.q.at[t.token, pl.ds(t.head, HEADS), pl.ds(n * PIECE, PIECE)]
            plgpu.copy_gmem_to_smem(source, r.q_tile.at[n], r.q_full)

    def place(b):
        """Which list block b belongs to, and the first entry in each list."""
        b = jnp.minimum(b, t.blocks - 1)
        second = (b >= t.own).astype(i32) if len(x.lists) > 1 else i32(0)
        starts = (t.starts[0] + b, *(start + b - t.own for start in t.starts[1:]))
        return second, tuple(start * rows for start in starts)

    def slot_of(b):
        step = steps + b
        return lax.rem(step, i32(stages)), step >= stages

    if x.interpreted:
        fetch_q()

        @pl.loop(0, t.blocks)
        def _(b):
            slot, used = slot_of(b)
            pl.when(used)(lambda: _wait_free(x, r, slot))
            _gather_plainly(x, r, t, slot, *place(b))
            plgpu.commit_smem()
            plgpu.barrier_arrive(r.full.at[slot])

        return
    caches = (r.cache, r.indices), (r.extra_cache, r.extra_indices)
    sources = [
        Source(cache, indices, x.format, *facts) for (cache, indices), facts in zip(caches, x.lists, strict=False)
    ]

    def locate(b):
        second, starts = place(b)
        return _gather_rows.locate(sources, t.token, starts, t.ends, second, rows)

    def mask(slot):
        return r.notes.at[x.slots_p + 1 + slot, pl.ds(0, rows)]

    def copied(b, found):
        slot, used = slot_of(b)
        following = locate(b + 1)
        for half, pieces in enumerate((range(x.half), range(x.half, x.pieces))):
            pl.when(used)(lambda half=half: plgpu.barrier_wait(r.free.at[half * stages + slot]))
            _gather_rows.copy(found, r.kv.at[slot], None if half == 0 else mask(slot), pieces, rows)
        _mosaic.arrive_when_copied(r.full.at[slot])
        plgpu.barrier_arrive(r.full.at[slot])
        return following

    def unpacked(b, state):
        found, raw = state
        slot, used = slot_of(b)
        following = locate(b + 1)
        pl.when(used)(lambda: _wait_free(x, r, slot))
        passes = _gather_rows.passes(x.format, rows)
        for n in range(passes):
            ahead = (found, n + 1) if n + 1 < passes else (following, 0)
            raw = _gather_rows.unpack(raw, found, n, r.kv.at[slot], mask(slot), rows, ahead)
        plgpu.commit_smem()
        plgpu.barrier_arrive(r.full.at[slot])
        return following, raw

    found = locate(i32(0))
    if x.format == "plain":
        fetch_q()
        lax.fori_loop(0, t.blocks, copied, found)
    else:
        raw = _gather_rows.load(found, 0, rows)
        fetch_q()
        lax.fori_loop(0, t.blocks, unpacked, (found, raw))


def _gather_plainly(x: Plan, r: Any, t: _Tile, slot, second, starts) -> None:
    """One block of rows, for the interpreter: any way of reading memory will do."""
    rows = x.config.block_kv

    def one(cache, indices, facts, start, end):
        count, _, page, width = facts
        entry = start + jnp.arange(rows, dtype=i32)
        index = jnp.take(indices[t.token], jnp.minimum(entry, width - 1))
        valid = (entry < end) & (index >= 0) & (index < count)
        index = jnp.where(valid, index, 0)
        if x.format == "plain":
            value = jnp.take(cache[...], index, axis=0)
        else:
            value = _dequantized(cache[...], index, page, x.dtype)
        return jnp.where(valid[:, None], value, jnp.zeros_like(value)), valid

    found = one(r.cache, r.indices, x.lists[0], starts[0], t.ends[0])
    if len(x.lists) > 1:
        other = one(r.extra_cache, r.extra_indices, x.lists[1], starts[1], t.ends[1])
        found = tuple(jnp.where(second == 1, b, a) for a, b in zip(found, other, strict=True))
    value, valid = found
    for n in range(x.pieces):
        r.kv[slot, n] = value[:, n * PIECE : (n + 1) * PIECE]
    r.notes[x.slots_p + 1 + slot, pl.ds(0, rows)] = jnp.where(valid, 0.0, -jnp.inf)


def _dequantized(pages, index, page: int, dtype):
    """Rows [rows, 512] of packed pages."""
    rows, scales = page * _gather_rows.ROW_BYTES, page * _gather_rows.SCALE_BYTES
    P, codes = pages.shape[0], _gather_rows.CODES
    row = jnp.take(pages[:, :rows].reshape(P * page, -1), index, axis=0)
    scale = jnp.take(pages[:, rows : rows + scales].reshape(P * page, -1), index, axis=0)[:, : codes // PIECE]
    power = jnp.exp2(scale.astype(f32) - 127)
    numbers = lax.bitcast_convert_type(row[:, :codes], jnp.float8_e4m3fn).astype(f32) * jnp.repeat(power, PIECE, 1)
    rotary = lax.bitcast_convert_type(row[:, codes:].reshape(-1, _gather_rows.ROTARY, 2), jnp.bfloat16)
    return jnp.concatenate([numbers.astype(dtype), rotary], 1)


# ---------------------------------------------------------------- the leading warpgroup
def _lead(x: Plan, r: Any, t: _Tile, first, steps) -> None:
    """Scores and P of all blocks, the first half of the output's columns, and the sums of the tile's rows."""
    rows, stages = x.config.block_kv, x.config.stages
    sharp = x.scale * LOG2E

    def product(slot, zero):
        def pieces(acc):
            for n in range(x.pieces):
                plgpu.wgmma(acc, r.q_tile.at[zero + n], r.kv.at[slot, zero + n].T)
            return acc[...]

        return pl.run_scoped(pieces, _mosaic.ACC((HEADS, rows), f32))

    def block(b, state):
        m, total, o = state
        step = steps + b
        slot, at = lax.rem(step, i32(stages)), lax.rem(step, i32(x.slots_p))
        plgpu.barrier_wait(r.full.at[slot])
        plgpu.commit_smem()  # copies of rows are ordinary stores, which wgmma sees behind a fence only
        # a zero that keeps addresses from being moved out of the loop, where they would be held in registers
        s = product(slot, lax.shift_right_logical(step, i32(31)))
        pl.when(b == t.blocks - 1)(lambda: plgpu.barrier_arrive(r.q_free))
        mask = r.notes.at[x.slots_p + 1 + slot, pl.ds(0, rows)]
        mask = plgpu.load(mask, layout=COLUMN, optimized=False)
        s = s * sharp + plgpu.layout_cast(lax.broadcast_in_dim(mask, s.shape, [1]), ACC)
        m_new = jnp.maximum(m, jnp.max(s, axis=1))
        alpha = jnp.exp2(m - m_new)
        p = jnp.exp2(s - softmax.across(m_new, s))
        total = total * alpha + jnp.sum(p, axis=1)
        p = p.astype(x.dtype)
        pl.when(step >= x.slots_p)(lambda: plgpu.barrier_wait(r.p_free.at[at]))
        r.p[at] = p
        _mosaic.store(r.notes.at[at], alpha)
        plgpu.commit_smem()
        plgpu.barrier_arrive(r.p_full.at[at])
        o = _add_product(x, r, 0, slot, at, o * softmax.across(alpha, o), p)
        _release(x, r, t, 0, slot, b)
        return m_new, total, o

    plgpu.barrier_wait(r.q_full)
    m, total, (o,) = softmax.start(HEADS, (x.half * PIECE,))
    m, total, o = lax.fori_loop(0, t.blocks, block, (m, total, o))
    factor = _sums(x, r, t, m, total)
    pl.when(jnp.logical_not(first))(lambda: plgpu.barrier_wait(r.end_free))
    _mosaic.store(r.notes.at[x.slots_p], factor)
    plgpu.barrier_arrive(r.end_full)
    _write(x, r, t, 0, steps, o * softmax.across(factor, o))


def _sums(x: Plan, r: Any, t: _Tile, m, total):
    """Store what is asked for; returns what the output must be multiplied with."""
    where = (t.token, pl.ds(t.head, HEADS))
    where = where if x.config.splits == 1 else (t.split, *where)
    if r.lse is not None:
        some = total > 0
        _mosaic.store(r.lse.at[where], jnp.where(some, m * (1 / LOG2E) + jnp.log(total), -jnp.inf))
        _mosaic.store(r.top.at[where], jnp.where(some, m * (1 / LOG2E), -jnp.inf))
    factor = None
    if r.sinks is not None:
        sink = plgpu.load(r.sinks.at[pl.ds(t.head, HEADS)], layout=ROW, optimized=False)
        if x.config.splits > 1:
            sink = sink + jnp.where(t.split == 0, 0.0, 2 * FLOOR)
        m_new = jnp.maximum(m, sink)
        factor = jnp.exp2(m - m_new)
        m, total = m_new, total * factor + jnp.exp2(sink - m_new)
    if r.weight is not None:
        _mosaic.store(r.weight.at[where], jnp.where(total > 0, m * (1 / LOG2E) + jnp.log(total), -jnp.inf))
    inverse = _mosaic.divide(jnp.ones_like(total), jnp.where(total > 0, total, 1.0), ROW)
    return inverse if factor is None else inverse * factor


# ---------------------------------------------------------------- the following warpgroup
def _follow(x: Plan, r: Any, t: _Tile, first, steps) -> None:
    """The second half of the output's columns."""
    del first

    def block(b, o):
        step = steps + b
        slot, at = lax.rem(step, i32(x.config.stages)), lax.rem(step, i32(x.slots_p))
        plgpu.barrier_wait(r.p_full.at[at])
        alpha = plgpu.load(r.notes.at[at], layout=ROW, optimized=False)
        p = None
        if not x.interpreted:
            p = plgpu.load(r.p.at[at], layout=ACC)
            plgpu.barrier_arrive(r.p_free.at[at])
            plgpu.commit_smem()
        o = _add_product(x, r, 1, slot, at, o * softmax.across(alpha, o), p)
        if x.interpreted:
            plgpu.barrier_arrive(r.p_free.at[at])
        _release(x, r, t, 1, slot, b)
        return o

    o = plgpu.layout_cast(jnp.zeros((HEADS, x.half * PIECE), f32), ACC)
    o = lax.fori_loop(0, t.blocks, block, o)
    plgpu.barrier_wait(r.end_full)
    factor = plgpu.load(r.notes.at[x.slots_p], layout=ROW, optimized=False)
    plgpu.barrier_arrive(r.end_free)
    _write(x, r, t, 1, steps, o * softmax.across(factor, o))


# ---------------------------------------------------------------- values
def _add_product(x: Plan, r: Any, half: int, slot, at, o, p):
    """O + P V for half of the columns; P is in registers, for the interpreter in shared memory."""
    if not x.interpreted:
        o = _products.add_product(r.kv.at[slot, pl.ds(half * x.half, x.half)], o, p)
        plgpu.wgmma_wait(0)
        return lax.optimization_barrier(o)

    def fresh(acc):
        for n in range(x.half):
            plgpu.wgmma(acc.at[:, pl.ds(n * PIECE, PIECE)], r.p.at[at], r.kv.at[slot, half * x.half + n])
        return acc[...]

    return o + pl.run_scoped(fresh, _mosaic.ACC(o.shape, f32))


def _release(x: Plan, r: Any, t: _Tile, half: int, slot, b) -> None:
    """Give back half of a slot; that of the tile's last block carries the output first."""
    done = functools.partial(plgpu.barrier_arrive, r.free.at[half * x.config.stages + slot])
    if x.staged:
        done()
    else:
        pl.when(b < t.blocks - 1)(done)


def _write(x: Plan, r: Any, t: _Tile, half: int, steps, o) -> None:
    """Half of the columns of the output."""
    heads, column = pl.ds(t.head, HEADS), half * x.half * PIECE
    if x.config.splits > 1:
        _mosaic.store(r.o.at[t.split, t.token, heads, pl.ds(column, x.half * PIECE)], o)
        return
    slot = lax.rem(steps + t.blocks - 1, i32(x.config.stages))
    pieces = [o[:, n * PIECE : (n + 1) * PIECE].astype(x.dtype) for n in range(x.half)]
    targets = [r.o.at[t.token, heads, pl.ds(column + n * PIECE, PIECE)] for n in range(x.half)]
    if x.staged:
        for piece, target in zip(pieces, targets, strict=True):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            r.stage[half] = piece
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(r.stage.at[half], target)
        return
    for n, piece in enumerate(pieces):
        r.kv[slot, half * x.half + n] = piece
    plgpu.commit_smem()
    for n, target in enumerate(targets):
        plgpu.copy_smem_to_gmem(r.kv.at[slot, half * x.half + n], target)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(r.free.at[half * x.config.stages + slot])
