"""Prefill attention with a short causal window: a tile sees all its keys at once.

A warpgroup has `part_q` consecutive tokens times `block_g` heads, row = token * block_g + head, and takes `span` keys,
the last of which is that of its last token. So masks are the same in every tile, and touch but the first and last
columns; products, softmax and output follow each other without a loop. Warpgroups do not wait for each other, so that
some may use the tensor core while others take their softmax.

Keys and values of a tile lie in one block of `span_rows`, of which a warpgroup reads `span` rows from its first token
on. TMA brings q, and takes o, as boxes of tokens by heads: one copy a tile and 64 columns.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic, _products
from pallas_kernels import _online_softmax as softmax
from pallas_kernels._online_softmax import ACC, FLOOR, LOG2E, ROW
from pallas_kernels.attention import _lanes as lanes
from pallas_kernels.attention._parts import clean, closed, split, stage_of
from pallas_kernels.attention._plan import CHUNK, PIECE, ROWS, WARPS, Plan

f32, i32 = jnp.float32, jnp.int32


def padded(x: Plan, inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs whose keys may be read from before the first on: TMA gives zeros there, the interpreter does not."""
    if not x.interpreted or x.page is not None:
        return inputs
    front = ((x.span_rows, 0), (0, 0), (0, 0))
    return inputs | {name: jnp.pad(inputs[name], front) for name in ("k", "v")}


def first_key(x: Plan, t: Any):
    """Key that a tile's block begins with; negative near the beginning of a sequence."""
    return t.position + (x.part_q - x.span)


# ---------------------------------------------------------------- producer
def fetch(x: Plan, r: Any, t: Any, tiles) -> None:
    """Bring keys, q and values of a tile."""
    first = first_key(x, t)
    kv_head = split(t.chunk, x.chunks // x.K)[0]
    places = _places(x, r, t, first)
    at = split(t.steps, x.config.num_stages)[1]

    def free(barrier, count, stage, stages):
        pl.when(count >= stages)(lambda: plgpu.barrier_wait(barrier.at[stage]))

    def bring(source, ring, full):
        if x.page is None:
            rows = pl.ds(t.origin + first + (x.span_rows if x.interpreted else 0), x.span_rows)
            for piece in range(ring.shape[0]):
                plgpu.copy_gmem_to_smem(source.at[rows, kv_head, pl.ds(piece * PIECE, PIECE)], ring.at[piece], full)
        else:
            _bring_chunks(x, source, ring, full, places, kv_head, lax.rem(first + x.span_rows * CHUNK, i32(CHUNK)))

    free(r.k_free, t.steps, at, x.config.num_stages)
    bring(r.k, r.k_rows.at[at], r.k_bar.at[at])
    stage = stage_of(x, tiles)
    free(r.q_free, tiles, stage, x.config.q_stages)
    _fetch_q(x, r, t, stage)
    free(r.v_free, t.steps, at, x.config.num_stages)
    dirty = (first < t.low) | (first + x.span_rows > t.high)

    @pl.when(jnp.logical_not(dirty))
    def _():
        bring(r.v, r.v_rows.at[at], r.v_bar.at[at])

    @pl.when(dirty)
    def _():
        bring(r.v, r.v_rows.at[at], r.raw_bar)
        plgpu.barrier_wait(r.raw_bar)
        front = x.lead - first
        clean(x, r.v_tile.at[at], t.low + front, t.high + front)

        @pl.loop(0, x.copies * (x.Dv // PIECE))
        def _(_):
            plgpu.barrier_arrive(r.v_bar.at[at])


def _places(x: Plan, r: Any, t: Any, first):
    """Page and row of each chunk of a tile; of those outside the visible range the nearest one inside is read again."""
    if x.page is None:
        return ()
    parts = x.page // CHUNK
    base = lax.shift_right_arithmetic(first, i32(CHUNK.bit_length() - 1))
    inside = split(t.low, CHUNK)[0], split(jnp.maximum(t.high - 1, 0), CHUNK)[0]

    def place(n):
        page, part = split(jnp.clip(base + n, *inside), parts)
        return jnp.clip(r.page_table[t.request, page], 0, x.pool - 1), part * CHUNK

    return tuple(place(n) for n in range(x.copies))


def _bring_chunks(x: Plan, source, ring, full, places, kv_head, ahead) -> None:
    """Copy chunks of pages so that the first key, `ahead` rows behind the first chunk's, comes to row `lead`."""

    def copy(n, number, offset):
        rows = pl.ds(x.lead - ahead + n * CHUNK, CHUNK)
        for piece in range(ring.shape[0]):
            part = source.at[number, pl.ds(offset, CHUNK), kv_head, pl.ds(piece * PIECE, PIECE)]
            plgpu.copy_gmem_to_smem(part, ring.at[piece, rows], full)

    if not x.by_warps:
        for n, place in enumerate(places):
            copy(n, *place)
        return

    @plgpu.warp_map
    def _(warp):
        for first in range(0, x.copies, WARPS):
            number, offset = places[first]
            for n, place in enumerate(places[first + 1 : first + WARPS]):
                number, offset = (lax.select(warp == n + 1, a, b) for a, b in zip(place, (number, offset), strict=True))
            chunk = functools.partial(copy, first + warp, number, offset)
            if first + WARPS <= x.copies:
                chunk()
            else:
                pl.when(first + warp < x.copies)(chunk)


def _fetch_q(x: Plan, r: Any, t: Any, stage) -> None:
    block_g = x.config.block_g
    token0 = lax.rem(t.token0, i32(x.q_rows)) if x.q_rows < x.N else t.token0

    def copy(token, count, place):
        for piece in range(x.D // PIECE):
            part = r.q.at[pl.ds(token0 + token, count), pl.ds(t.chunk * block_g, block_g), pl.ds(piece * PIECE, PIECE)]
            plgpu.copy_gmem_to_smem(part, place(piece), r.q_bar.at[stage])

    if not x.interpreted:
        copy(0, x.block_q, lambda piece: r.q_rows.at[stage, piece])
        return

    @pl.loop(0, x.block_q)  # a box of three dimensions fits no tile of two
    def _(token):
        part = r.q.at[token0 + token, pl.ds(t.chunk * block_g, block_g)]
        for piece in range(x.D // PIECE):
            rows = r.q_tile.at[stage, piece, pl.ds(token * block_g, block_g)]
            plgpu.copy_gmem_to_smem(part.at[:, pl.ds(piece * PIECE, PIECE)], rows, r.q_bar.at[stage])


def drain(x: Plan, r: Any, tiles, steps) -> None:
    """See every barrier that is left complete: the interpreter insists."""
    for n in range(x.config.q_stages):
        pl.when(n < tiles)(lambda n=n: plgpu.barrier_wait(r.q_free.at[n]))
    for n in range(x.config.num_stages):

        @pl.when(n < steps)
        def _(n=n):
            plgpu.barrier_wait(r.k_free.at[n])
            plgpu.barrier_wait(r.v_free.at[n])


# ---------------------------------------------------------------- consumers
def attend(x: Plan, r: Any, t: Any, warpgroup, first_q) -> None:
    """Compute and store a warpgroup's rows of a tile."""
    stage = first_q // x.config.consumers
    at = split(t.steps, x.config.num_stages)[1]
    mine = pl.multiple_of(warpgroup * ROWS, ROWS)
    keys = pl.ds(pl.multiple_of(x.lead + warpgroup * x.part_q, 8), x.span)

    plgpu.barrier_wait(r.q_bar.at[stage])
    plgpu.barrier_wait(r.k_bar.at[at])

    def product(acc):
        for n in range(x.D // PIECE):
            plgpu.wgmma(acc, r.q_tile.at[stage, n, pl.ds(mine, ROWS)], r.k_tile.at[at, n, keys].T)
        return acc[...]

    s = pl.run_scoped(product, _mosaic.ACC((ROWS, x.span), f32))
    plgpu.barrier_arrive(r.k_free.at[at])
    plgpu.barrier_arrive(r.q_free.at[stage])
    s = _masked(x, t, warpgroup, s)
    sharp = x.scale * LOG2E
    m = jnp.maximum(jnp.max(lanes.folded(s, jnp.max, x.interpreted), axis=1) * sharp, FLOOR)
    p = jnp.exp2(s * sharp - softmax.across(m, s))
    total = jnp.sum(lanes.folded(p, jnp.sum, x.interpreted), axis=1)
    p = p.astype(x.dtype)
    plgpu.barrier_wait(r.v_bar.at[at])
    o = _product(x, r, warpgroup, p, r.v_tile.at[at, :, keys])
    plgpu.barrier_arrive(r.v_free.at[at])
    _finish(x, r, t, warpgroup, closed(r, t, warpgroup, (m, total, (o,))))


def _masked(x: Plan, t: Any, warpgroup, s):
    """Scores, -inf where a row's token does not see the key; keys before the first hide in the first tiles only."""
    token = lax.div(plgpu.broadcasted_iota(i32, (ROWS,), 0, layout=ROW), i32(x.config.block_g))
    newest = x.span - x.part_q  # column of the key of a row's own token, less that token
    oldest = newest - (x.window or 0) + 1
    s = lanes.masked(s, token + newest, x.interpreted, above=True, within=range(newest + 1, x.span))
    s = lanes.masked(s, token + oldest, x.interpreted, above=False, within=range(oldest + x.part_q - 1))
    first = first_key(x, t) + warpgroup * x.part_q

    def begun(s):
        bound = plgpu.layout_cast(jnp.broadcast_to(-first, (ROWS,)), ROW)
        return lanes.masked(s, bound, x.interpreted, above=False)

    return lax.cond(first >= 0, lambda s: s, begun, s)


def _product(x: Plan, r: Any, warpgroup, p, v):
    """P V."""
    if not x.interpreted:
        zero = plgpu.layout_cast(jnp.zeros((ROWS, x.Dv), f32), ACC)
        o = _products.add_product(v, zero, p)
        plgpu.wgmma_wait(0)
        return lax.optimization_barrier(o)
    r.p_tile[warpgroup] = p
    plgpu.commit_smem()

    def product(acc):
        for n in range(x.Dv // PIECE):
            plgpu.wgmma(acc.at[:, pl.ds(n * PIECE, PIECE)], r.p_tile.at[warpgroup], v.at[n])
        return acc[...]

    return pl.run_scoped(product, _mosaic.ACC((ROWS, x.Dv), f32))


def _finish(x: Plan, r: Any, t: Any, warpgroup, state: softmax.State) -> None:
    """Store the rows of the tile's tokens; what follows them belongs to the next request."""
    block_g, part_q = x.config.block_g, x.part_q
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    (o,) = softmax.output(state)
    for n in range(x.Dv // PIECE):
        r.o_tile[warpgroup, n] = o[:, n * PIECE : (n + 1) * PIECE].astype(x.dtype)
    plgpu.commit_smem()
    heads = pl.ds(t.chunk * block_g, block_g)
    first = t.token0 + warpgroup * part_q

    def store(token, size):
        for n in range(x.Dv // PIECE):
            columns = pl.ds(n * PIECE, PIECE)
            if not x.interpreted:
                rows = r.o_rows.at[warpgroup, n, pl.ds(token, size)]
                plgpu.copy_smem_to_gmem(rows, r.o.at[pl.ds(first + token, size), heads, columns])
                continue
            for i in range(size):
                rows = r.o_tile.at[warpgroup, n, pl.ds((token + i) * block_g, block_g)]
                plgpu.copy_smem_to_gmem(rows, r.o.at[first + token + i, heads, columns])

    count = jnp.clip(t.count - warpgroup * part_q, 0, part_q)
    pl.when(count == part_q)(functools.partial(store, 0, part_q))
    size = part_q // 2
    while size:
        done = count & -(2 * size)
        pl.when((count & size) != 0)(functools.partial(store, done, size))
        size //= 2
