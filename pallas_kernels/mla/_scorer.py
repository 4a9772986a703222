"""Device code of latent attention with four roles: fetching, scores and weights, and two halves of the output.

The producer is that of `_attend`. One warpgroup, the scorer, multiplies q with each block of keys as its pieces arrive,
takes the softmax and leaves P and the factor of what came before in shared memory; two others, the mixers, hold half of
the output's columns each and multiply P with their half of the values. The scorer is a block ahead: its softmax runs
beside the products of the block before, and theirs wait for nothing but P.

P of a block lies in its own place, over the last 64 columns of the keys, which no value is part of: the scorer is the
only one to read them, and done with them by then. So a place that is free, both mixers being done with it, is free of
its P as well, and P of two blocks can wait at once.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic
from pallas_kernels import _online_softmax as softmax
from pallas_kernels._online_softmax import ACC, LOG2E, ROW
from pallas_kernels.mla import _attend, _work
from pallas_kernels.mla._plan import BLOCK, PIECE, READERS, ROWS, SCORER_REGISTERS, TOLD, Plan

f32, i32 = jnp.float32, jnp.int32
COLUMNS = 128
"""Columns of one of the mixers' products: ptxas assembles none whose sums exceed the registers at launch."""
TOTAL = READERS
"""Row of `stats` that holds the sums of an item; those before hold the factors that come with P of each place."""


def run(x: Plan, r: Any) -> None:
    """One thread block."""
    warpgroup = lax.axis_index("warpgroup")
    producing, scoring, mixing = SCORER_REGISTERS

    @pl.when(warpgroup == READERS + 1)
    def _():
        plgpu.set_max_registers(producing, action="decrease")
        _attend.produce(x, r)

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
        s = lax.cond(t.first + i < t.plain, lambda s: s, lambda s: jnp.where(_attend.visible(x, t, i), s, -jnp.inf), s)
        m_new = jnp.maximum(m, jnp.max(s, axis=1) * sharp)
        p = jnp.exp2(s * sharp - softmax.across(m_new, s))
        alpha = jnp.exp2(m - m_new)
        total = total * alpha + jnp.sum(p, axis=1)
        plgpu.commit_smem()  # all four warps are done with the keys that P takes the place of
        r.k_tile[place, x.held - 1] = p.astype(x.dtype)
        r.stats[place] = alpha
        plgpu.commit_smem()
        plgpu.barrier_arrive(r.p_bar.at[place])
        return m_new, total

    plgpu.barrier_wait(r.q_bar)
    m, total, _ = softmax.start(ROWS, ())
    m, total = lax.fori_loop(0, t.blocks, step, (m, total))
    r.stats[TOTAL] = total
    plgpu.commit_smem()
    plgpu.barrier_arrive(r.sum_bar)
    _attend.store_sums(r, t, m, total)


def _scores(x: Plan, r: Any, t: Any, place):
    """Unscaled scores, float32 [ROWS, BLOCK], of the block in a place, from its first pieces on as they arrive."""
    q, k, each = r.q_tile.at[t.zero], r.k_tile.at[place], x.D // PIECE // x.groups

    def product(acc):
        for n in range(x.D // PIECE):
            if n % each == 0:
                plgpu.barrier_wait(r.k_bar.at[place * x.groups + n // each])
            plgpu.wgmma(acc, q.at[n], k.at[n].T)
        return acc[...]

    return pl.run_scoped(product, _mosaic.ACC((ROWS, BLOCK), f32))


def _mix(x: Plan, r: Any, w, t: Any) -> None:
    """Own half of the output of an item."""
    half = x.Dv // PIECE // READERS

    def step(i, o):
        place = (i & 1) + t.zero
        plgpu.barrier_wait(r.p_bar.at[place])
        o = o * softmax.across(plgpu.load(r.stats.at[place], layout=ROW, optimized=False), o)
        v = r.k_tile.at[place, pl.ds((w + t.zero) * half, half)]
        p = plgpu.load(r.k_tile.at[place, x.held - 1], layout=ACC)
        if x.interpreted:
            o = _attend.add_product(x, r, w, o, p, v)
        else:
            o = _mosaic.add_product(v, o, p, min(x.Dv // READERS, COLUMNS))
            plgpu.wgmma_wait(0)
            o = lax.optimization_barrier(o)
        _attend.release(x, r, place, w)
        return o

    _, _, (o,) = softmax.start(ROWS, (x.Dv // READERS,))
    o = lax.fori_loop(0, t.blocks, step, o)
    plgpu.barrier_wait(r.sum_bar)
    total = plgpu.load(r.stats.at[TOTAL], layout=ROW, optimized=False)
    _attend.store_rows(x, r, t, w + t.zero, total, o)
    plgpu.barrier_arrive(r.q_free)
