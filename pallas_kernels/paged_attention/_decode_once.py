"""Decoding of few keys: everything is fetched before the first product, and the softmax is taken once.

For short windows, where a loop over blocks costs more than the blocks: its steps wait for each other, and every step
looks up pages of its own. Here q is fetched before the request is known, all pages are looked up together, only those
that are visible are fetched, and maxima and sums meet once. Keys are the rows of wgmma as in `_decode_swapped`; the
n-th block of 64 keys that a tile sees lies in stage n of the ring. Blocks begin at multiples of 64 keys, so that a
row's sums do not depend on the other rows of its tile.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic
from pallas_kernels import _online_softmax as softmax
from pallas_kernels._online_softmax import ACC, FLOOR
from pallas_kernels.paged_attention import _common as common
from pallas_kernels.paged_attention import _decode_swapped as swapped
from pallas_kernels.paged_attention._decode_swapped import KEYS
from pallas_kernels.turboquant_attention.unpack import column_maxima, column_sum, store_transposed

MOST = 128
"""Rows of a tile times stages: their scores take half as many registers of a thread."""

f32, i32 = jnp.float32, jnp.int32


# ---------------------------------------------------------------- how much
def blocks(x) -> int:
    """Blocks of keys that a tile may see, whole blocks from the start of a request."""
    keys = x.pages * x.page
    if x.window is not None:
        seen = x.window * (1 if x.causal else 2) - (0 if x.causal else 1) + x.block_q - 1
        keys = min(keys, seen + KEYS - 1)
    return -(-keys // KEYS)


def illegal(x) -> str | None:
    """Why a legal configuration does not fit these shapes."""
    if not x.swapped:
        return "at_once needs swapped=True"
    if x.split_pages is not None or x.num_shares is not None:
        return "at_once is for tiles that are not split; leave split_pages and num_shares out"
    if x.restage:
        return f"at_once is for caches in q's dtype, got {x.cache_dtype.name}"
    if x.num_stages < blocks(x):
        return f"at_once needs a stage for every {KEYS} keys of a tile, {blocks(x)} here, got {x.num_stages}"
    if x.num_stages * x.rows > MOST:
        return f"at_once is for at most {MOST} rows of all stages, got {x.num_stages} of {x.rows}; leave it out"
    return None


# ---------------------------------------------------------------- device code
def fetch_q(x, r: Any, token0: Any, chunk: Any) -> None:
    """Start the copies of a tile's rows of q; with one token a tile, its slot, before the request is found."""
    base, tile = lax.div(chunk * x.block_g, i32(8)) * 8, r.shared["q_tile"].at[0]
    for i in range(x.block_q):
        source = r.q.at[jnp.minimum(token0 + i, x.N - 1), pl.ds(base, x.slab)]
        plgpu.copy_gmem_to_smem(source, tile.at[pl.ds(i * x.slab, x.slab)], r.q_bar)


def attend(x, r: Any, t: Any):
    """State of the softmax over all keys of the tile; its q is on its way."""
    low, high, _, _ = common.key_range(
        causal=x.causal, window=x.window, position=t.position, count=t.count, length=t.length
    )
    size = min(x.page, KEYS)  # keys of a copy
    copies = KEYS // size
    start = lax.div(low, i32(KEYS)) * KEYS
    kv_head = lax.div(t.chunk * x.block_g, i32(x.H // x.K))

    def page_number(i):
        key = jnp.clip(start + i * size, low, jnp.maximum(high - 1, 0))
        return jnp.clip(r.page_table[t.request, jnp.minimum(lax.div(key, i32(x.page)), x.pages - 1)], 0, x.pool - 1)

    numbers = [page_number(i) for i in range(x.num_stages * copies)]

    def bar_of(bars, n):
        return bars.at[n]

    def fetch(pool, ring, bars):
        for i, number in enumerate(numbers):
            first, bar = start + i * size, bar_of(bars, i // copies)
            needed = (first < high) & (first + size > low)

            @pl.when(needed)
            def _(i=i, number=number, first=first, bar=bar):
                offset = lax.rem(first, i32(x.page)) if size < x.page else 0
                source = pool.at[number, pl.ds(offset, size), kv_head]
                plgpu.copy_gmem_to_smem(source, ring.at[i // copies, pl.ds(i % copies * size, size)], bar)

            pl.when(jnp.logical_not(needed))(lambda bar=bar: plgpu.barrier_arrive(bar))

    fetch(r.k_pages, r.k_ring, r.k_bar)
    fetch(r.v_pages, r.v_ring, r.v_bar)

    def within(n):
        """Visible keys as rows of block n."""
        return low - (start + n * KEYS), high - (start + n * KEYS)

    def empty(n):
        first, last = within(n)
        return (first >= KEYS) | (last <= jnp.maximum(first, 0))

    for n in range(x.num_stages):
        pl.when(empty(n))(lambda n=n: _zero(x, r.v_ring.at[n]))
    plgpu.barrier_wait(r.q_bar)
    scores = _scores(x, r, bar_of)
    key, column = (plgpu.broadcasted_iota(i32, (KEYS, x.rows), axis, layout=ACC) for axis in (0, 1))
    token = lax.div(column, i32(x.slab)) if x.block_q > 1 else 0
    for n, s in enumerate(scores):
        if x.softcap is not None:
            s = jnp.tanh(s * (x.scale / x.softcap))
        seen = common.visible(
            causal=x.causal,
            window=x.window,
            position=t.position + token,
            key=start + n * KEYS + key,
            length=t.length,
        )
        scores[n] = jnp.where(seen, s, -jnp.inf)
    sharp = (x.scale if x.softcap is None else x.softcap) * softmax.LOG2E
    m = plgpu.layout_cast(jnp.full((x.rows,), FLOOR, f32), swapped.COLUMN)
    for top in column_maxima(scores, r.room):
        m = jnp.maximum(m, top * sharp)
    weights = [jnp.exp2(s * sharp - swapped.across(m, s)) for s in scores]
    for n, p in enumerate(weights):
        store_transposed(r.p_rows.at[n], p.astype(x.operand), swapped.p_transforms())
    whole = weights[0]
    for p in weights[1:]:
        whole = whole + p
    total = column_sum(whole, r.room)
    for n in range(x.num_stages):
        plgpu.barrier_wait(bar_of(r.v_bar, n))
        first, last = within(n)
        partly = jnp.logical_not(empty(n)) & ((first > 0) | (last < KEYS))
        pl.when(partly)(functools.partial(_keep, x, r.v_ring.at[n], first, last))
    plgpu.commit_smem()

    def product(acc):
        for n in range(x.num_stages):
            plgpu.wgmma(acc, r.v_ring.at[n].T, r.p_rows.at[n].T)
        return acc[...]

    return m, total, (pl.run_scoped(product, _mosaic.ACC((x.D, x.rows), f32)),)


def _scores(x, r: Any, bar_of: Any) -> list[Any]:
    """Unscaled scores of every block, float32 [KEYS, rows], in flight together."""

    def products(*accs):
        for n, acc in enumerate(accs):
            plgpu.barrier_wait(bar_of(r.k_bar, n))
            plgpu.wgmma(acc, r.k_ring.at[n], r.q_tile.at[pl.ds(0, x.rows)].T)
        return [acc[...] for acc in accs]

    return list(pl.run_scoped(products, *[_mosaic.ACC((KEYS, x.rows), f32) for _ in range(x.num_stages)]))


def _pieces_of(x, block: Any):
    """Columns of a swizzle span at a time, and their layout in registers."""
    layout = _mosaic.strips(block.dtype, 128)
    return layout, [block.at[:, pl.ds(n, common.PIECE)] for n in range(0, x.D, common.PIECE)]


def _zero(x, block: Any) -> None:
    """A block that no copy writes: a product with P = 0 would let NaN through."""
    layout, parts = _pieces_of(x, block)
    for part in parts:
        part[...] = plgpu.layout_cast(jnp.zeros((KEYS, common.PIECE), block.dtype), layout)


def _keep(x, block: Any, low: Any, high: Any) -> None:
    """Make rows outside [low, high) zero."""
    layout, parts = _pieces_of(x, block)
    row = plgpu.broadcasted_iota(i32, (KEYS, common.PIECE), 0, layout=layout)
    for part in parts:
        value = plgpu.load(part, layout=layout)
        part[...] = jnp.where((row >= low) & (row < high), value, jnp.zeros_like(value))
