"""Device code of latent attention with four roles: fetching, scores and weights, and two halves of the output.

A tile is 64 consecutive (token, head) rows of one request, whose latents serve all heads. Its accumulator of 64 x 512
float32 numbers fills the registers of two warpgroups, the mixers, which hold half of the columns each: a split that is
FlashMLA's (https://github.com/deepseek-ai/FlashMLA, docs/20250422-new-kernel-deep-dive.md). `_fetch` is the producer.
One warpgroup, the scorer, multiplies q with each block of keys as its pieces arrive, takes the softmax and leaves P and
the factor of what came before in shared memory; the mixers multiply P with their half of the values, the first part of
the very rows that were keys. The scorer is a block ahead: its softmax runs beside the products of the block before.

P of a block lies in its own place, over the last 64 columns of the keys, which no value is part of: the scorer is the
only one to read them, and done with them by then. So a place that is free, both mixers being done with it, is free of
its P as well, and P of two blocks can wait at once.

With `Config.turns` the values of a block wait for the scores of the next one, and its place is free part by part: where
P lies when both mixers have loaded it, then what the first product of both has read, then the rest.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic, _products
from pallas_kernels import _online_softmax as softmax
from pallas_kernels._online_softmax import ACC, LOG2E, ROW
from pallas_kernels.mla import _fetch, _work
from pallas_kernels.mla._plan import BLOCK, PIECE, READERS, REGISTERS, ROWS, TOLD, Plan

f32, i32 = jnp.float32, jnp.int32
TOTAL = READERS
"""Row of `stats` that holds the sums of an item; those before hold the factors that come with P of each place."""


def run(x: Plan, r: Any) -> None:
    """One thread block."""
    warpgroup = lax.axis_index("warpgroup")
    producing, scoring, mixing = REGISTERS

    @pl.when(warpgroup == READERS + 1)
    def _():
        plgpu.set_max_registers(producing, action="decrease")
        _fetch.produce(x, r)

    @pl.when(warpgroup == READERS)
    def _():
        plgpu.set_max_registers(scoring, action="decrease")  # 128 at launch: fewer are an illegal "increase"
        _each(r, lambda t: _score(x, r, t))

    @pl.when(warpgroup < READERS)
    def _():
        plgpu.set_max_registers(mixing, action="increase")
        _each(r, functools.partial(_mix, x, r, warpgroup))
        plgpu.wait_smem_to_gmem(0)


def _each(r: Any, take: Any) -> None:
    """take(item) for all items that the producer tells of."""

    def hear(at):
        plgpu.barrier_wait(r.told_bar.at[at])
        t: Any = _work.Told(r.told, at)

        def item():
            take(t)
            return (at + 1) & (TOLD - 1)

        return lax.cond(t.blocks > 0, item, lambda: i32(-1))

    lax.while_loop(lambda at: at >= 0, hear, i32(0))


def _score(x: Plan, r: Any, t: Any) -> None:
    """Scores of all blocks of an item, and P of each; at the end the sums of the rows."""
    sharp = x.scale * LOG2E

    def step(i, state):
        m, total = state
        place = (i & 1) + t.zero
        s = _scores(x, r, t, place)
        if x.config.turns:
            pl.when(i > 0)(lambda: plgpu.barrier_arrive(r.turn_bar.at[1 - place]))
        s = lax.cond(t.first + i < t.plain, lambda s: s, lambda s: jnp.where(_visible(x, t, i), s, -jnp.inf), s)
        m_new = jnp.maximum(m, jnp.max(s, axis=1) * sharp)
        p = jnp.exp2(s * sharp - softmax.across(m_new, s))
        alpha = jnp.exp2(m - m_new)
        total = total * alpha + jnp.sum(p, axis=1)
        plgpu.commit_smem()  # all four warps are done with the keys that P takes the place of
        if x.codes or x.config.sparing:
            _mosaic.store_tile(r.k_tile.at[place, x.held - 1], p.astype(x.dtype), ACC)
            _mosaic.store_plain(r.stats.at[place], alpha, ROW)
        else:
            r.k_tile[place, x.held - 1] = p.astype(x.dtype)
            r.stats[place] = alpha
        plgpu.commit_smem()
        plgpu.barrier_arrive(r.p_bar.at[place])
        return m_new, total

    plgpu.barrier_wait(r.q_bar)
    m, total, _ = softmax.start(ROWS, ())
    m, total = lax.fori_loop(0, t.blocks, step, (m, total))
    if x.config.turns:
        plgpu.barrier_arrive(r.turn_bar.at[(t.blocks - 1) & 1])
    r.stats[TOTAL] = total
    plgpu.commit_smem()
    plgpu.barrier_arrive(r.sum_bar)
    _store_sums(r, t, m, total)


def _scores(x: Plan, r: Any, t: Any, place):
    """Unscaled scores, float32 [ROWS, BLOCK], of the block in a place, from its first pieces on as they arrive."""
    q, k, each = r.q_tile.at[t.zero], r.k_tile.at[place], x.D // PIECE // x.groups

    def product(acc):
        for i, n in enumerate(sum(x.parts, ())):
            if i % each == 0:
                plgpu.barrier_wait(r.k_bar.at[place * x.groups + n // each])
            plgpu.wgmma(acc, q.at[n], k.at[n].T)
        return acc[...]

    return pl.run_scoped(product, _mosaic.ACC((ROWS, BLOCK), f32))


def _visible(x: Plan, t: Any, i):
    """Pairs of the tile's rows and the keys of block i that attend."""
    key = (t.first + i) * BLOCK + plgpu.broadcasted_iota(i32, (ROWS, BLOCK), 1, layout=ACC)
    if not x.causal:
        return key < t.length
    token = lax.div(t.inside + plgpu.broadcasted_iota(i32, (ROWS, BLOCK), 0, layout=ACC), i32(x.H))
    return key <= jnp.minimum(t.skew + token, t.length - 1)


def _mix(x: Plan, r: Any, w, t: Any) -> None:
    """Own half of the output of an item."""
    half = x.Dv // PIECE // READERS

    def step(i, o):
        place = (i & 1) + t.zero
        plgpu.barrier_wait(r.p_bar.at[place])
        alpha = plgpu.load(r.stats.at[place], layout=ROW, optimized=False)
        p = plgpu.load(r.k_tile.at[place, x.held - 1], layout=ACC)
        if x.config.turns:
            _release(x, r, place, 0)
            o = lax.optimization_barrier(softmax.scaled(o, alpha))
            plgpu.barrier_wait(r.turn_bar.at[place])
        else:
            o = softmax.scaled(o, alpha)
        v = r.k_tile.at[place, pl.ds((w + t.zero) * half, half)]
        o = list(_add_products(x, r, w, o, p, v))
        if not x.config.turns:
            o = _finished(x, o, 0)
            _release(x, r, place, 0)
            return tuple(o)
        for n in range(x.chunks):
            o[n : n + 1] = _finished(x, o[n : n + 1], x.chunks - 1 - n)
            _release(x, r, place, 1 + n)
        return tuple(o)

    _, _, o = softmax.start(ROWS, (x.columns,) * x.chunks)
    o = lax.fori_loop(0, t.blocks, step, o)
    plgpu.barrier_wait(r.sum_bar)
    total = plgpu.load(r.stats.at[TOTAL], layout=ROW, optimized=False)
    _store_rows(x, r, t, w + t.zero, total, o)
    plgpu.barrier_arrive(r.q_free)


def _finished(x: Plan, chunks: list[Any], left: int) -> list[Any]:
    """Chunks whose products are done when at most `left` wgmma groups are still on their way."""
    if x.interpreted:
        return chunks
    plgpu.wgmma_wait(left)
    return lax.optimization_barrier(chunks)


def _add_products(x: Plan, r: Any, w, o: tuple[Any, ...], p, v) -> tuple[Any, ...]:
    """Chunks of O + P V, V in pieces of 64 columns; compiled, one wgmma group each, all of them in flight."""
    wide = x.columns // PIECE
    if not x.interpreted:
        return _products.add_products(v, o, p)
    r.p_own[w] = p
    plgpu.commit_smem()

    def fresh(n):
        def product(acc):
            for i in range(wide):
                plgpu.wgmma(acc.at[:, pl.ds(i * PIECE, PIECE)], r.p_own.at[w], v.at[n * wide + i])
            return acc[...]

        return pl.run_scoped(product, _mosaic.ACC((ROWS, x.columns), f32))

    return tuple(chunk + fresh(n) for n, chunk in enumerate(o))


def _release(x: Plan, r: Any, place, part: int) -> None:
    """Say that a part of a place is read; of a cluster's barrier only some threads tell, so that all must be done."""
    if x.config.pair or x.interpreted:
        plgpu.commit_smem()
    plgpu.barrier_arrive(r.k_free.at[place * len(x.parts) + part])


# ---------------------------------------------------------------- results
def _store_sums(r: Any, t: Any, m, total) -> None:
    """Maximum and sum of the rows of a tile or of a partial result."""
    if r.part_sums is not None:

        @pl.when(t.part >= 0)
        def _():
            for i, value in enumerate((m, total)):
                _mosaic.store(r.part_sums.at[t.part, i], value)

    if r.sums is not None:

        @pl.when(t.part < 0)
        def _():
            for i, value in enumerate((m, total)):
                _mosaic.store(r.sums.at[t.slot, i], value)


def _store_rows(x: Plan, r: Any, t: Any, w, total, o) -> None:
    """Own half of the rows of a tile, through q's memory, or of a partial result."""
    half = x.Dv // READERS
    if r.part_o is not None:

        @pl.when(t.part >= 0)
        def _():
            for n, chunk in enumerate(o):
                _mosaic.store(r.part_o.at[t.part, :, pl.ds(w * half + n * x.columns, x.columns)], chunk)

    @pl.when(t.part < 0)
    def _():
        rows = softmax.output((None, total, o))
        for n in range(half // PIECE):
            chunk, first = divmod(n * PIECE, x.columns)
            r.q_rows[0, w * (half // PIECE) + n] = rows[chunk][:, first : first + PIECE].astype(x.dtype)
        plgpu.commit_smem()

        @pl.loop(0, ROWS // x.granule)
        def _(part):
            row = pl.multiple_of(part * x.granule, x.granule)

            @pl.when(row < t.count)
            def _():
                for n in range(half // PIECE):
                    piece = w * (half // PIECE) + n
                    target = r.o.at[pl.ds(t.row0 + row, x.granule), pl.ds(piece * PIECE, PIECE)]
                    plgpu.copy_smem_to_gmem(r.q_rows.at[0, piece, pl.ds(row, x.granule)], target)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
