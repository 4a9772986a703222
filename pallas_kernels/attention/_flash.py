"""Prefill attention on Hopper: what packed and paged keys share, from the choice of tiles to the online softmax.

Thread blocks stay on their multiprocessor and take tile after tile, long ones first. A tile is 64 rows for each of
`consumers` warpgroups: `block_q` consecutive tokens of one request times `block_g` query heads that share a KV head.
One more warpgroup finds the tiles, and brings q, keys and values by TMA into a ring of `num_stages` blocks, so that the
next tile's data arrive while this one is computed.

A consumer issues Q K^T of the next block and P V of the last one together, and takes the softmax of the former while
the latter still runs (the overlap within a warpgroup of FlashAttention-3, https://arxiv.org/abs/2407.08608). Consumers
do not wait for each other. Blocks are walked from the newest keys to the oldest; only those that some row does not see
in full are masked.

Products accumulate in float32, P is rounded to the dtype of q, the softmax runs in base 2.
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic, _products
from pallas_kernels import _online_softmax as softmax
from pallas_kernels._online_softmax import FLOOR, LOG2E, ROW
from pallas_kernels.attention import _lanes as lanes
from pallas_kernels.attention import _span
from pallas_kernels.attention import _tiles as tiles_of
from pallas_kernels.attention._parts import clean, closed, split, stage_of
from pallas_kernels.attention._plan import PIECE, ROWS, TOLD, WARPS, Plan, scratch

OPTIONAL = ("sinks", "lse", "key_start", "page_table", "lengths", "first_tile", "segments")
OPTIONAL += ("p_tile", "taken")
"""References that a kernel may do without."""
f32, i32 = jnp.float32, jnp.int32


# ---------------------------------------------------------------- launch
def launch(x: Plan, inputs: dict[str, Any], return_lse: bool, name: str, *, as_rows: bool = False) -> tuple[Any, Any]:
    """O [N, H, Dv] and, if asked for, lse [N, H], from references named as in `_tiles.locate`.

    With `as_rows` lse [slots, chunks, warpgroups, ROWS] as the tiles' rows have it, see `_lse`. `segments`, int32
    [B + 2, 5], may stand for the other tables: its columns are `_tiles.SEGMENTS`.
    """
    if x.dense and "segments" not in inputs:
        inputs = inputs | {"first_tile": tiles_of.first_tiles(x, inputs["query_start"])}
    if x.config.one_pass:
        inputs = _span.padded(x, inputs)
    o, *lse = tiles_of.counted(functools.partial(_launch, return_lse=return_lse, name=name), x, inputs)
    if not return_lse:
        return o, None
    return o, lse[0] if as_rows else _lse(x, lse[0], inputs["query_start"])


def _launch(x: Plan, inputs: dict[str, Any], *, return_lse: bool, name: str) -> list[Any]:
    outputs = {"o": jax.ShapeDtypeStruct((x.N, x.H, x.Dv), x.dtype)}
    if return_lse:
        outputs["lse"] = jax.ShapeDtypeStruct((x.slots, x.chunks, x.config.consumers, ROWS), f32)

    def body(*refs, **memory):
        given = dict(zip((*inputs, *outputs), refs, strict=True))
        for name in [name for name in ("q", "k", "v", "o") if name in memory]:
            ref = memory.pop(name)
            memory[f"{name}_rows"], memory[f"{name}_tile"] = (ref, ref) if x.interpreted else ref
        memory.setdefault("o_rows", memory["q_rows"])
        given |= tiles_of.columns(given.get("segments"))
        _block(x, SimpleNamespace(**dict.fromkeys(OPTIONAL) | given | memory))

    return plgpu.kernel(
        body,
        out_type=list(outputs.values()),
        scratch_types=scratch(x),
        grid=(x.grid,),
        grid_names=("cta",),
        num_threads=x.config.consumers + 1,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            approx_math=x.softcap is None,  # the approximate tanh has 11 bits
            reduction_scratch_bytes=0,  # row reductions stay within four lanes
        ),
    )(*inputs.values())


def sink_rows(x: Plan, sinks):
    """Sinks [H] in base 2 as each tile's rows need them: float32 [chunks, warpgroups, ROWS]."""
    row = jnp.arange(ROWS * x.config.consumers)
    head = row % x.config.block_g if x.config.one_pass else row // x.block_q
    sinks = jnp.clip(sinks.astype(f32) * LOG2E, FLOOR, -FLOOR)
    return sinks.reshape(-1, x.config.block_g)[:, head].reshape(x.chunks, x.config.consumers, ROWS)


@functools.partial(jax.jit, static_argnums=0)
def _lse(x: Plan, rows, query_start):
    """Log-sum-exp [N, H] from those of the rows of all tiles [slots, chunks, warpgroups, ROWS]."""
    token, head = jnp.arange(x.N)[:, None], jnp.arange(x.H)[None]
    start = jnp.clip(query_start, 0, x.N)
    b = jnp.searchsorted(start[1:], token, side="right", method="compare_all")
    first = start[b]
    slot = first // x.block_q + b + (token - first) // x.block_q
    inside, row = head % x.config.block_g, (token - first) % x.block_q
    row = row * x.config.block_g + inside if x.config.one_pass else inside * x.block_q + row
    lse = rows.reshape(x.slots, x.chunks, -1)[slot, head // x.config.block_g, row]
    return jnp.where(b < x.B, lse, -jnp.inf)


# ---------------------------------------------------------------- device code
def _block(x: Plan, r: Any) -> None:
    """One thread block: a producer and its consumers, each over the same tiles."""
    warpgroup, cta = lax.axis_index("warpgroup"), lax.axis_index("cta")
    consumers = x.config.consumers
    turns = -(-x.slots * x.chunks // x.grid)
    producing, computing = x.registers

    @pl.when(warpgroup == consumers)
    def _():
        plgpu.set_max_registers(producing, action="decrease")
        produce = functools.partial(_produce, x, r)
        if x.dynamic:
            tiles, steps, _ = lax.while_loop(
                lambda state: state[2] < x.slots * x.chunks,
                lambda state: (*produce(state[2], state[:2]), tiles_of.take(x, r)),
                (i32(0), i32(0), jnp.asarray(cta, i32)),
            )
        else:
            tiles, steps = lax.fori_loop(
                0, turns, lambda n, counts: produce(tiles_of.number_of(x, n, cta), counts), (i32(0), i32(0))
            )
        at = tiles & (TOLD - 1)
        r.tile[at, tiles_of.FIELDS.index("blocks")] = i32(0)
        plgpu.barrier_arrive(r.told.at[at])
        if x.interpreted:
            (_span.drain if x.config.one_pass else _drain)(x, r, tiles, steps)

    @pl.when(warpgroup < consumers)
    def _():
        plgpu.set_max_registers(computing, action="increase")
        consume = functools.partial(_consume, x, r, warpgroup)
        lax.while_loop(lambda at: at >= 0, consume, i32(0))
        plgpu.wait_smem_to_gmem(0)


# ---------------------------------------------------------------- producer
def _produce(x: Plan, r: Any, number, counts):
    """Find tile `number`, tell the consumers if there is one, fetch its data; `counts`: earlier tiles and blocks.

    What is told stays valid while `TOLD - 1` more tiles are found: q's memory is free for the next tile only when all
    consumers are done with the one `q_stages` before.
    """
    found = tiles_of.locate(x, r, number)

    def tell(counts):
        tiles, steps = counts
        at = tiles & (TOLD - 1)
        for i, field in enumerate(tiles_of.FIELDS[:-1]):
            r.tile[at, i] = getattr(found, field)
        r.tile[at, len(tiles_of.FIELDS) - 1] = steps
        plgpu.barrier_arrive(r.told.at[at])
        t: Any = tiles_of.Told(r.tile, at)
        if x.config.one_pass:
            _span.fetch(x, r, t, tiles)
            return tiles + 1, t.steps + 1
        _fetch(x, r, t, tiles)
        return tiles + 1, t.steps + t.blocks

    return lax.cond(found.blocks > 0, tell, lambda counts: counts, counts)


def _drain(x: Plan, r: Any, tiles, steps) -> None:
    """See every barrier that is left complete: the interpreter insists."""
    for n in range(x.config.q_stages):
        pl.when(n < tiles)(lambda n=n: plgpu.barrier_wait(r.q_free.at[n]))
    for n in range(x.config.num_stages):

        @pl.when(n < steps)
        def _(n=n):
            plgpu.barrier_wait(r.k_free.at[n])
            plgpu.barrier_wait(r.v_free.at[n])


def _fetch(x: Plan, r: Any, t: Any, tiles) -> None:
    """Bring q and all blocks; keys run one block ahead of values, as the consumers need them."""
    block_kv, num_stages = x.config.block_kv, x.config.num_stages

    row, skipped = (None, None) if r.segments is None else (r.table_row[t.request], r.first_page[t.request])

    def pages(i):
        """Pages of step i; of the pages outside the visible range the nearest one inside is read again."""
        if x.page is None:
            return ()
        inside = lax.div(t.low, i32(x.page)), lax.div(jnp.maximum(t.high - 1, 0), i32(x.page))
        base = lax.div(t.start - jnp.minimum(i, t.blocks - 1) * block_kv, i32(x.page))
        return tuple(
            jnp.clip(r.page_table[t.request if row is None else row, column(base + n, *inside)], 0, x.pool - 1)
            for n in range(x.copies)
        )

    def column(page, first, last):
        page = jnp.clip(page, first, last)
        return page if skipped is None else jnp.minimum(page + skipped, r.page_table.shape[1] - 1)

    def fetch(source, ring, full, i):
        start = t.start - i * block_kv
        size = block_kv // x.copies
        if x.by_warps:
            fetch_by_warps(source, ring, full, i, start, size)
            return
        if x.config.pages_at_once > 1:
            fetch_pages(source, ring, full, i, start, size)
            return

        @pl.loop(0, x.copies * ring.shape[0])
        def _(n):
            copy, piece = split(n, ring.shape[0])
            if x.page is None:
                place = (pl.ds(t.origin + start, block_kv),)
            else:
                offset = lax.rem(start, i32(x.page)) if block_kv < x.page else 0
                place = r.numbers[i & 1, copy], pl.ds(offset, size)
            kv_head, _ = split(t.chunk, x.chunks // x.K)
            part = source.at[*place, kv_head, pl.ds(piece * PIECE, PIECE)]
            rows = pl.ds(pl.multiple_of(copy * size, size), size)
            plgpu.copy_gmem_to_smem(part, ring.at[piece, rows], full)

    def fetch_pages(source, ring, full, i, start, size):
        assert x.page is not None
        offset = lax.rem(start, i32(x.page)) if block_kv < x.page else 0
        kv_head = split(t.chunk, x.chunks // x.K)[0]
        count = x.config.pages_at_once

        @pl.loop(0, x.copies // count)
        def _(n):
            numbers = [r.numbers[i & 1, n * count + k] for k in range(count)]
            for k, number in enumerate(numbers):
                rows = pl.ds(pl.multiple_of((n * count + k) * size, size), size)
                for piece in range(ring.shape[0]):
                    part = source.at[number, pl.ds(offset, size), kv_head, pl.ds(piece * PIECE, PIECE)]
                    plgpu.copy_gmem_to_smem(part, ring.at[piece, rows], full)

    def fetch_by_warps(source, ring, full, i, start, size):
        assert x.page is not None
        offset = lax.rem(start, i32(x.page)) if block_kv < x.page else 0
        kv_head = split(t.chunk, x.chunks // x.K)[0]

        numbers = [r.numbers[i & 1, n] for n in range(x.copies)]  # warps read no memory

        @plgpu.warp_map
        def _(warp):
            for first in range(0, x.copies, WARPS):
                place, number = first + warp, numbers[first]
                for n in range(1, WARPS):
                    number = lax.select(warp == n, numbers[first + n], number)
                rows = pl.ds(place * size, size)
                for piece in range(ring.shape[0]):
                    part = source.at[number, pl.ds(offset, size), kv_head, pl.ds(piece * PIECE, PIECE)]
                    plgpu.copy_gmem_to_smem(part, ring.at[piece, rows], full)

    def free(barrier, i):
        """The ring's place for step i, when it may be overwritten."""
        step = t.steps + i
        _, at = split(step, num_stages)
        pl.when(step >= num_stages)(lambda: plgpu.barrier_wait(barrier.at[at]))
        return at

    def keys(i):
        at = free(r.k_free, i)
        fetch(r.k, r.k_rows.at[at], r.k_bar.at[at], i)

    def values(i):
        at = free(r.v_free, i)
        start = t.start - i * block_kv
        dirty = (start < t.low) | (start + block_kv > t.high)

        @pl.when(jnp.logical_not(dirty))
        def _():
            fetch(r.v, r.v_rows.at[at], r.v_bar.at[at], i)

        @pl.when(dirty)
        def _():
            fetch(r.v, r.v_rows.at[at], r.raw_bar.at[at], i)
            plgpu.barrier_wait(r.raw_bar.at[at])
            clean(x, r.v_tile.at[at], t.low - start, t.high - start)

            @pl.loop(0, x.copies * (x.Dv // PIECE))
            def _(_):
                plgpu.barrier_arrive(r.v_bar.at[at])

    def remember(i, numbers):
        for n, number in enumerate(numbers):
            r.numbers[i & 1, n] = number

    def step(i, numbers):
        remember(i, numbers)
        numbers = pages(i + 1)
        keys(i)
        values(i - 1)
        return numbers

    remember(i32(0), pages(i32(0)))
    second = pages(i32(1))
    keys(i32(0))
    stage = stage_of(x, tiles)
    pl.when(tiles >= x.config.q_stages)(lambda: plgpu.barrier_wait(r.q_free.at[stage]))
    _fetch_q(x, r, t, stage * x.config.consumers)
    lax.fori_loop(1, t.blocks, step, second)
    values(t.blocks - 1)


def _fetch_q(x: Plan, r: Any, t: Any, first) -> None:
    parts, pieces = ROWS // x.piece_q, x.D // PIECE

    @pl.loop(0, x.config.consumers * parts * pieces)
    def _(n):
        place, piece = split(n, pieces)
        consumer, part = split(place, parts)
        row = pl.multiple_of(part * x.piece_q, x.piece_q)
        token = consumer * ROWS + row
        head = t.chunk * x.config.block_g + lax.div(token, i32(x.block_q))
        first_row = lax.rem(t.token0, i32(x.q_rows)) if x.q_rows < x.N else t.token0
        tokens = pl.ds(first_row + lax.rem(token, i32(x.block_q)), x.piece_q)
        plgpu.copy_gmem_to_smem(
            r.q.at[tokens, head, pl.ds(piece * PIECE, PIECE)],
            r.q_rows.at[first + consumer, piece, pl.ds(row, x.piece_q)],
            r.q_bar.at[first + consumer],
        )


# ---------------------------------------------------------------- consumers
def _consume(x: Plan, r: Any, warpgroup, at):
    """Hear of a tile, compute and store its rows; returns where to hear of the next, -1 if this was the end."""
    plgpu.barrier_wait(r.told.at[at])
    t: Any = tiles_of.Told(r.tile, at)

    def tile():
        (_span.attend if x.config.one_pass else _attend)(x, r, t, warpgroup, stage_of(x, at) * x.config.consumers)
        return (at + 1) & (TOLD - 1)

    return lax.cond(t.blocks > 0, tile, lambda: i32(-1))


def _attend(x: Plan, r: Any, t: Any, warpgroup, first_q) -> None:
    c = x.config
    mine = first_q + warpgroup if c.q_stages > 1 else warpgroup  # where this warpgroup's q lies
    _, first = split(t.steps, c.num_stages)
    sharp = (x.scale if x.softcap is None else x.softcap) * LOG2E
    # ptxas moves the wait for P V up to the scores; it stays behind the softmax if a loop stands before it, that of a
    # wait for the values which the next step needs (with one stage they come only when P V is done)
    ahead = c.num_stages > 1 and x.overlap

    def after(at):
        return jnp.where(at == c.num_stages - 1, 0, at + 1) if c.num_stages > 1 else at

    def plain(start):
        """Whether no row's range ends within the block from key `start` on: below, above."""
        return start >= t.plain_low, start <= t.plain_high

    def maxima(s, m, start, plain):
        """Scores of the block from key `start` on as the softmax takes them, and what it subtracts: the rows' maxima,
        or what was subtracted before if that is not exceeded by more than `slack`; each row decides for itself.
        """
        if x.softcap is not None:
            s = jnp.tanh(s * (x.scale / x.softcap))
        s = _masked(x, t, warpgroup, start, plain, s)
        peak = jnp.max(lanes.folded(s, jnp.max, x.interpreted), axis=1) * sharp
        return s, jnp.where(peak - m > c.slack, peak, m)

    def weights(s, m, m_new, total):
        """Sums, and P."""
        p = jnp.exp2(s * sharp - softmax.across(m_new, s))
        alpha = softmax.across(jnp.exp2(m - m_new), total)
        return total * alpha + lanes.folded(p, jnp.sum, x.interpreted), p.astype(x.dtype)

    def scores(at):
        """Q K^T alone."""

        def product(acc):
            plgpu.barrier_wait(r.k_bar.at[at])
            for n in range(x.D // PIECE):
                plgpu.wgmma(acc, r.q_tile.at[mine + t.zero, n], r.k_tile.at[at, n].T)
            return acc[...]

        s = pl.run_scoped(product, _mosaic.ACC((ROWS, c.block_kv), f32))
        plgpu.barrier_arrive(r.k_free.at[at])
        return s

    def values_there(at, *, early):
        if early == ahead:
            plgpu.barrier_wait(r.v_bar.at[at])

    def step(state):
        m, total, o, p, before, start = state
        at, start = after(before), start - c.block_kv
        if x.interpreted or not x.overlap:
            values_there(before, early=False)
            o = _add_product(x, r, warpgroup, o, p, r.v_tile.at[before])
            s, m_new = maxima(scores(at), m, start, plain(start))
            total, p = weights(s, m, m_new, total)
            values_there(at, early=True)
            plgpu.barrier_arrive(r.v_free.at[before])
            return m_new, total, lanes.rescaled(o, jnp.exp2(m - m_new), x.interpreted), p, at, start

        plgpu.barrier_wait(r.k_bar.at[at])
        values_there(before, early=False)
        s, o = _products.products(r.q_tile.at[mine + t.zero], r.k_tile.at[at], r.v_tile.at[before], o, p)
        whole = plain(start)  # read while the products run
        plgpu.wgmma_wait(1)
        s = lax.optimization_barrier(s)
        plgpu.barrier_arrive(r.k_free.at[at])
        s, m_new = maxima(s, m, start, whole)
        values_there(at, early=True)
        plgpu.wgmma_wait(0)  # before the exponentials: P is then packed, and o rescaled, beside them
        o = lax.optimization_barrier(o)
        plgpu.barrier_arrive(r.v_free.at[before])
        o = lanes.rescaled(o, jnp.exp2(m - m_new), x.interpreted)
        total, p = weights(s, m, m_new, total)
        return m_new, total, o, p, at, start

    plgpu.barrier_wait(r.q_bar.at[mine])
    m, _, (total, o) = softmax.start(ROWS, (lanes.LANE, x.Dv))
    start = t.start
    s = scores(first)
    s, m_new = maxima(s, m, start, plain(start))
    total, p = weights(s, m, m_new, total)
    m = m_new
    values_there(first, early=True)
    # a loop over `start`, whose end is read from shared memory: every register counts
    m, total, o, p, last, _ = lax.while_loop(lambda state: state[5] > t.end, step, (m, total, o, p, first, start))
    if not c.share_o:
        plgpu.barrier_arrive(r.q_free.at[stage_of(x, t._at)])
    values_there(last, early=False)
    o = _add_product(x, r, warpgroup, o, p, r.v_tile.at[last])
    plgpu.barrier_arrive(r.v_free.at[last])
    _finish(x, r, t, warpgroup, (m, jnp.sum(total, axis=1), (o,)), mine)


def _masked(x: Plan, t: Any, warpgroup, start, plain, s):
    """Scores of the block from key `start` on, -inf where a row does not see the key.

    Each end of the visible range by itself: most blocks have one at most.
    """

    def query(ahead):
        row = plgpu.broadcasted_iota(i32, (ROWS,), 0, layout=ROW)
        token = lax.rem(row, i32(x.block_q)) if x.block_q < ROWS else row
        return token + (t.position + lax.rem(warpgroup * ROWS, i32(x.block_q)) - start + ahead)

    def last():
        if x.causal:
            return query(0)
        end = plgpu.layout_cast(jnp.broadcast_to(t.length - 1 - start, (ROWS,)), ROW)
        return end if x.window is None else jnp.minimum(query(x.window - 1), end)

    def edge(plain, bound, *, above):
        return lax.cond(plain, lambda s: s, lambda s: lanes.masked(s, bound(), x.interpreted, above=above), s)

    if x.window is not None:
        window = x.window
        s = edge(plain[0], lambda: query(1 - window), above=False)
    return edge(plain[1], last, above=True)


def _add_product(x: Plan, r: Any, warpgroup, o, p, v):
    """O + P V, V in pieces of 64 columns."""
    if not x.interpreted:
        o = _products.add_product(v, o, p)
        plgpu.wgmma_wait(0)
        return lax.optimization_barrier(o)
    r.p_tile[warpgroup] = p
    plgpu.commit_smem()

    def fresh(acc):
        for n in range(x.Dv // PIECE):
            plgpu.wgmma(acc.at[:, pl.ds(n * PIECE, PIECE)], r.p_tile.at[warpgroup], v.at[n])
        return acc[...]

    return o + pl.run_scoped(fresh, _mosaic.ACC(o.shape, f32))


def _finish(x: Plan, r: Any, t: Any, warpgroup, state, mine) -> None:
    """Log-sum-exp, sink, division, and the rows of the tile's tokens; what follows them belongs to the next request.

    With `share_o` the output leaves through q's memory, at `mine`.
    """
    warpgroup = warpgroup + t.zero
    place = mine + t.zero if x.config.share_o else warpgroup
    state = closed(r, t, warpgroup, state)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    (o,) = softmax.output(state)
    for n in range(x.Dv // PIECE):
        r.o_rows[place, n] = o[:, n * PIECE : (n + 1) * PIECE].astype(x.dtype)
    plgpu.commit_smem()

    def store(row, head, token, size):
        @pl.loop(0, x.Dv // PIECE)
        def _(n):
            target = r.o.at[pl.ds(t.token0 + token, size), head, pl.ds(n * PIECE, PIECE)]
            plgpu.copy_smem_to_gmem(r.o_rows.at[place, n, pl.ds(row, size)], target)

    @pl.loop(0, ROWS // x.piece_q)
    def _(n):
        row = n * x.piece_q
        head, token = t.chunk, warpgroup * ROWS + row
        if x.config.block_g > 1:
            head = head * x.config.block_g + lax.div(token, i32(x.block_q))
            token = lax.rem(token, i32(x.block_q))
        count = jnp.clip(t.count - token, 0, x.piece_q)
        pl.when(count == x.piece_q)(functools.partial(store, row, head, token, x.piece_q))
        size = x.piece_q // 2
        while size:
            done = count & -(2 * size)
            pl.when((count & size) != 0)(functools.partial(store, row + done, head, token + done, size))
            size //= 2

    if x.config.share_o:  # the next q may come where this output has left
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(r.q_free.at[0])
