"""Device code of latent attention: a producer finds work and fetches, two warpgroups attend to 64 rows together.

A tile is 64 consecutive (token, head) rows of one request, whose latents serve all heads. Its accumulator of 64 x 512
float32 numbers fills the registers of two warpgroups, which hold half of the columns each. They take turns with the
scores: one computes S = Q K^T of a block of 64 keys, its maximum and P, hands P and the maximum over in shared memory,
and both multiply P with their half of V, which is the first part of the very rows that were K. While one takes the
softmax the other one's products run. The split of the accumulator and the exchange of P are those of FlashMLA
(https://github.com/deepseek-ai/FlashMLA, docs/20250422-new-kernel-deep-dive.md); here both accumulators follow one
running maximum block by block, so that P is rounded once, to the dtype of q.

Block i of an item belongs to warpgroup i mod 2, and so does one of the two places that blocks are fetched to. A place
is free when both have multiplied with its values. The turns also guard P: a warpgroup writes its own only after it has
read the other one's, and the next item begins only when both are done with this one.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic, _words
from pallas_kernels import _online_softmax as softmax
from pallas_kernels._online_softmax import ACC, LOG2E, ROW
from pallas_kernels.mla import _ahead, _work
from pallas_kernels.mla._plan import (
    BLOCK,
    KEPT,
    LATENT,
    PIECE,
    READERS,
    REGISTERS,
    ROWS,
    SCALE_BYTES,
    SCALED,
    SCALES,
    TOLD,
    Plan,
)

f32, i32 = jnp.float32, jnp.int32
HALF, HALVES = BLOCK // 2, (0, BLOCK // 2)
"""Rows of a block that are decoded at a time, and where they begin."""


def run(x: Plan, r: Any) -> None:
    """One thread block."""
    warpgroup = lax.axis_index("warpgroup")
    producing, reading = REGISTERS

    @pl.when(warpgroup == READERS)
    def _():
        plgpu.set_max_registers(producing, action="decrease")
        produce(x, r)

    @pl.when(warpgroup < READERS)
    def _():
        plgpu.set_max_registers(reading, action="increase")
        lax.while_loop(lambda at: at >= 0, functools.partial(_consume, x, r, warpgroup), i32(0))
        plgpu.wait_smem_to_gmem(0)


# ---------------------------------------------------------------- producer
def produce(x: Plan, r: Any) -> None:
    """All that the producer does."""
    find = _work.share if x.config.num_shares is not None else _work.splits
    counts = find(x, r, functools.partial(_produce, x, r), (i32(0), i32(0), i32(0)))
    at = counts[0] & (TOLD - 1)
    r.told[at, 0] = i32(0)
    plgpu.barrier_arrive(r.told_bar.at[at])
    if x.interpreted or x.config.pair:
        _drain(r, counts, x.halves)


def _produce(x: Plan, r: Any, item: _work.Item, counts):
    """Tell the readers of an item and fetch its data; `counts` of items so far, and of blocks of each place."""
    items, *used = counts
    at = items & (TOLD - 1)
    for i, name in enumerate(_work.FIELDS):
        r.told[at, i] = getattr(item, name)
    plgpu.barrier_arrive(r.told_bar.at[at])
    t: Any = _work.Told(r.told, at)
    pieces = x.D // PIECE
    share: Any = {"collective_axes": "member"} if x.config.pair else {}

    def remember(i, used):
        """Pages of block i; of pages that hold no key of the request the last one that does is read again.

        Warps drift apart by up to two blocks, and each writes them: `KEPT` lists leave those of slow ones alone.
        """
        last = lax.div(jnp.maximum(t.length - 1, 0), i32(x.page))
        base = lax.div((t.first + i) * BLOCK, i32(x.page))
        for n in range(x.copies):
            number = r.page_table[t.request, jnp.clip(base + n, 0, last)]
            r.told[TOLD + (sum(used) & (KEPT - 1)), n] = jnp.clip(number, 0, x.pool - 1)

    def fetch(i, used, ring, bar, first: Any = 0, last: Any = pieces, turned: Any = False):
        """Pieces `first` to `last`, counted from the end if `turned`; `bar(piece)` is told of a piece."""
        start, size = (t.first + i) * BLOCK, BLOCK // x.copies
        offset = lax.rem(start, i32(x.page)) if x.page > BLOCK else 0

        def copy_columns(copy, columns, target, bar):
            number = r.told[TOLD + (sum(used) & (KEPT - 1)), copy]
            row = pl.multiple_of(jnp.asarray(copy * size), size) if x.copies > 1 else 0
            source = r.cache.at[number, pl.ds(offset, size), columns]
            plgpu.copy_gmem_to_smem(source, target.at[pl.ds(row, size)], bar, **share)

        @pl.loop(x.copies * first, x.copies * last)
        def _(n):
            piece, copy = (lax.div(n, i32(x.copies)), lax.rem(n, i32(x.copies))) if x.copies > 1 else (n, 0)
            if turned is not False:
                piece = jnp.where(turned, pieces - 1 - piece, piece)
            copy_columns(copy, pl.ds(piece * PIECE, PIECE), ring.at[piece], bar(piece))

        if x.packed:

            @pl.loop(0, x.copies)
            def _(copy):
                copy_columns(copy, pl.ds(LATENT, SCALE_BYTES), r.k_marks.at[i & 1, 0], bar(0))
                copy_columns(copy, pl.ds(LATENT + SCALE_BYTES, 2 * PIECE), r.k_rest.at[i & 1, last], bar(last))

    def block(i, used):
        place = i & 1
        before = jnp.where(place == 0, *used)
        valid = t.length - (t.first + i) * BLOCK

        def free(half):
            pl.when(before > 0)(lambda: plgpu.barrier_wait(r.k_free.at[place * x.halves + half]))

        def by_half():
            """First what the block's own reader multiplies with: from the front, or that of the second from the end."""
            half = x.Dv // PIECE // READERS
            cut = jnp.where(place == 0, half, pieces - half)
            fetch(i, used, r.k_rows.at[place], here, 0, cut, place > 0)
            free(1 - place)
            fetch(i, used, r.k_rows.at[place], here, cut, pieces, place > 0)

        free(place if x.halves > 1 else 0)

        def here(piece):
            return r.k_bar.at[place * x.groups + (lax.div(piece, i32(pieces // x.groups)) if x.groups > 1 else 0)]

        if x.codes:
            coded = LATENT // PIECE if x.packed else pieces
            fetch(i, used, r.k_raw.at[place, pl.ds(coded, coded)], lambda _: r.raw_bar, last=coded)
            plgpu.barrier_wait(r.raw_bar)
            (_decode_packed if x.packed else _decode)(x, r, place)
            pl.when(valid < BLOCK)(lambda: _clean(x, r.k_tile.at[place], valid))
            plgpu.barrier_arrive(here(0))
        else:
            whole = by_half if x.halves > 1 else lambda: fetch(i, used, r.k_rows.at[place], here)
            pl.when(valid >= BLOCK)(whole)

            @pl.when(valid < BLOCK)
            def _():
                if x.halves > 1:
                    free(1 - place)
                fetch(i, used, r.k_rows.at[place], lambda _: r.raw_bar)
                plgpu.barrier_wait(r.raw_bar)
                _clean(x, r.k_tile.at[place], valid)

                @pl.loop(0, x.copies * pieces)
                def _(n):
                    plgpu.barrier_arrive(here(lax.div(n, i32(x.copies))))

        used = used[0] + (1 - place), used[1] + place
        remember(i + 1, used)
        return used

    remember(i32(0), used)
    pl.when(items > 0)(lambda: plgpu.barrier_wait(r.q_free))
    _fetch_q(x, r, t)
    used = lax.fori_loop(0, t.blocks, block, tuple(used))
    return items + 1, *used


def _drain(r: Any, counts, halves: int) -> None:
    """See every barrier that is left complete: no block of a cluster may leave while another still signals to it.

    The interpreter always insists.
    """
    items, *used = counts
    pl.when(items > 0)(lambda: plgpu.barrier_wait(r.q_free))
    for n in range(READERS * halves):
        pl.when(used[n // halves] > 0)(lambda n=n: plgpu.barrier_wait(r.k_free.at[n]))


def _decode(x: Plan, r: Any, place) -> None:
    """Codes of a block, in the second half of its place, as numbers of q's dtype in all of it."""
    scale, pieces = r.cache_scale[0], x.D // PIECE
    pl.loop(0, pieces)(lambda n: _widen(x, r, place, n, pieces, [scale, scale]))
    plgpu.commit_smem()


def _decode_packed(x: Plan, r: Any, place) -> None:
    """The same of packed rows; scales are in registers before numbers cover them."""
    pieces = LATENT // PIECE
    if x.interpreted:
        marks, rest = r.k_marks[place, 0].reshape(BLOCK, SCALES, 4), r.k_rest[place, pieces].reshape(BLOCK, PIECE, 2)
        marks = lax.bitcast_convert_type(marks, f32)
        scales = [tuple(marks[first : first + HALF, i] for first in HALVES) for i in range(SCALES)]
        r.k_tile[place, pieces] = lax.bitcast_convert_type(rest, x.dtype)
    else:
        scales = _scales(r.k_marks.at[place, 0], _mosaic.strips(x.dtype, 128).reduce(1))

    def group(n, scales):
        own, *others = scales
        spread = [lax.broadcast_in_dim(scale, (HALF, PIECE), [0]) for scale in own]
        for piece in range(SCALED // PIECE):
            _widen(x, r, place, n * (SCALED // PIECE) + piece, pieces, spread)
        return [*others, own]

    lax.fori_loop(0, SCALES, group, scales)
    plgpu.commit_smem()


def _scales(marks: Any, layout: Any) -> list[tuple[jax.Array, ...]]:
    """Scales [HALF] of each group and half of the rows, from bytes [BLOCK, SCALE_BYTES] in shared memory; compiled.

    `layout` is that of a number for each row of `_mosaic.strips`: eight lanes have a row, a warp four, in turns of 16.
    """
    out = [plgpu.ShapeDtypeStruct((HALF,), f32, layout=layout)] * (SCALES * len(HALVES))

    def emit(context, marks):
        del context
        thread = _words.Thread()
        own = _words.Memory(marks).at(((thread.warp << 2) + (thread.lane >> 3)) << 4)
        return [
            _words.fragment(
                [own.load((first + turn) * SCALE_BYTES + 4 * i, 4) for turn in range(0, HALF, 16)],
                (HALF,),
                layout,
                "f32",
            )
            for i in range(SCALES)
            for first in HALVES
        ]

    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=out)
    found = inline(emit)(marks)
    return [tuple(found[i : i + len(HALVES)]) for i in range(0, len(found), len(HALVES))]


def _widen(x: Plan, r: Any, place, piece, distance: int, scales) -> None:
    """Codes that lie `distance` pieces on, times the scales of both halves of the rows, as numbers in their piece.

    It covers the codes of pieces up to its own, which everyone must have read by then.
    """
    layout, parts = _mosaic.strips(jnp.uint8, 128), [pl.ds(first, HALF) for first in HALVES]
    # packed rows stay as TMA brings them: 656 bytes have no tiles
    how: Any = {"layout": layout, "optimized": not x.packed}
    codes = [plgpu.load(r.k_raw.at[place, distance + piece, part], **how) for part in parts]
    plgpu.commit_smem()
    for part, code, scale in zip(parts, codes, scales, strict=True):
        code = lax.bitcast_convert_type(code, jnp.float8_e4m3fn) if x.packed else code
        r.k_tile[place, piece, part] = (code.astype(f32) * scale).astype(x.dtype)


def _clean(x: Plan, k, valid) -> None:
    """Make values from row `valid` on zero, a few at a time: they may be NaN, and NaN times 0 is NaN."""
    layout, rows = _mosaic.strips(x.dtype, 128), 32

    @pl.loop(0, BLOCK // rows)
    def _(n):
        first = pl.multiple_of(n * rows, rows)

        @pl.when(first + rows > valid)
        def _():
            row = first + plgpu.broadcasted_iota(i32, (rows, PIECE), 0, layout=layout)

            @pl.loop(0, x.Dv // PIECE)
            def _(piece):
                part = k.at[piece, pl.ds(first, rows)]
                value = plgpu.load(part, layout=layout)
                part[...] = jnp.where(row < valid, value, jnp.zeros_like(value))

    plgpu.commit_smem()


def _fetch_q(x: Plan, r: Any, t: Any) -> None:
    """All rows of the tile; in place of rows that it lacks, some that it has."""
    pieces, size = x.D // PIECE, x.granule

    @pl.loop(0, ROWS // size * pieces)
    def _(n):
        part, piece = lax.div(n, i32(pieces)), lax.rem(n, i32(pieces))
        row = pl.multiple_of(part * size, size)
        source = r.q.at[pl.ds(t.row0 + jnp.minimum(row, t.count - size), size), pl.ds(piece * PIECE, PIECE)]
        plgpu.copy_gmem_to_smem(source, r.q_rows.at[0, piece, pl.ds(row, size)], r.q_bar)


# ---------------------------------------------------------------- readers
def _consume(x: Plan, r: Any, w, at):
    """Hear of an item, compute and store; returns where to hear of the next, -1 if this was the end."""
    plgpu.barrier_wait(r.told_bar.at[at])
    t: Any = _work.Told(r.told, at)

    def item():
        _finish(x, r, t, w, _attend(x, r, t, w))
        plgpu.barrier_arrive(r.q_free)
        return (at + 1) & (TOLD - 1)

    return lax.cond(t.blocks > 0, item, lambda: i32(-1))


def _attend(x: Plan, r: Any, t: Any, w):
    """Maximum, own sum, and own half of the output after all blocks of an item."""
    half, sharp = x.Dv // PIECE // READERS, x.scale * LOG2E

    def mine():
        return w + t.zero

    def other():
        return 1 - w + t.zero

    def values(place):
        return r.k_tile.at[place, pl.ds((w + t.zero) * half, half)]

    def weights(s, m, total, i):
        """Maximum, sum and P after the scores of block i, given out."""
        s = lax.cond(t.first + i < t.plain, lambda s: s, lambda s: jnp.where(visible(x, t, i), s, -jnp.inf), s)
        m_new = jnp.maximum(m, jnp.max(s, axis=1) * sharp)
        p = jnp.exp2(s * sharp - softmax.across(m_new, s))
        total = total * jnp.exp2(m - m_new) + jnp.sum(p, axis=1)
        p = p.astype(x.dtype)
        r.p_tile[...] = p
        r.stats[0] = m_new
        plgpu.commit_smem()
        plgpu.barrier_arrive(r.p_bar.at[w])
        return m_new, total, p

    def received():
        """P and maximum that the other warpgroup gives out."""
        plgpu.barrier_wait(r.p_bar.at[1 - w])
        return plgpu.load(r.p_tile, layout=ACC), plgpu.load(r.stats.at[0], layout=ROW, optimized=False)

    def rescaled(total, o, alpha):
        return total * alpha, o * softmax.across(alpha, o)

    def begin(place):
        """Scores of the block in a place; compiled they are in flight."""
        if not x.interpreted:
            return _ahead.scores(x, r, t, w)
        for n in range(x.groups):
            plgpu.barrier_wait(r.k_bar.at[place * x.groups + _ahead.group(x, w, n)])
        return _scores(x, r, t, r.k_tile.at[place])

    def step(n, state):
        """The other warpgroup's last block, and an own one; there is none before the very first block of all.

        In its stead that block itself is multiplied with P = 0, which saves a copy of the code.
        """
        i = 2 * n + w
        m, total, o = state
        real, nothing = i > 0, plgpu.layout_cast(jnp.zeros((ROWS, BLOCK), x.dtype), ACC)

        def free():
            pl.when(real)(lambda: release(x, r, 1 - w, w))

        ahead = x.config.ahead
        s: Any = begin(mine()) if ahead else None
        p, top = lax.cond(real, received, lambda: (nothing, m))
        total, o = rescaled(total, o, jnp.exp2(m - top))
        if not ahead:
            plgpu.barrier_wait(r.k_bar.at[w])
        v = values(jnp.where(real, other(), mine()))
        if x.interpreted:
            o = add_product(x, r, w, o, p, v)
            free()
            m, total, p = weights(s if ahead else _scores(x, r, t, r.k_tile.at[mine()]), top, total, i)
        else:
            first = x.config.values_first and not ahead
            if ahead:
                o = _mosaic.add_product(v, o, p)
            else:
                s, o = _mosaic.products(r.q_tile.at[t.zero], r.k_tile.at[mine()], v, o, p, values_first=first)
            plgpu.wgmma_wait(1)
            if first:
                free()
                plgpu.wgmma_wait(0)
                s, o = lax.optimization_barrier((s, o))
                m, total, p = weights(s, top, total, i)
            else:  # the product with the values runs beside the softmax
                m, total, p = weights(lax.optimization_barrier(s), top, total, i)
                plgpu.wgmma_wait(0)
                o = lax.optimization_barrier(o)
                free()
        o = add_product(x, r, w, o * softmax.across(jnp.exp2(top - m), o), p, values(mine()))
        release(x, r, w, w)
        return m, total, o

    def end(state):
        """The last block of all, if it is the other warpgroup's."""
        m, total, o = state
        p, top = received()
        total, o = rescaled(total, o, jnp.exp2(m - top))
        o = add_product(x, r, w, o, p, values(other()))
        release(x, r, 1 - w, w)
        return top, total, o

    plgpu.barrier_wait(r.q_bar)
    m, total, (o,) = softmax.start(ROWS, (x.Dv // READERS,))
    state = lax.fori_loop(0, lax.div(t.blocks + 1 - w, i32(2)), step, (m, total, o))
    return lax.cond((t.blocks - 1) & 1 == w, lambda state: state, end, state)


def release(x: Plan, r: Any, place, w) -> None:
    """Say that the warpgroup is done with a place; of a cluster's barrier only some threads tell, so all must be."""
    if x.config.pair:
        plgpu.commit_smem()
    plgpu.barrier_arrive(r.k_free.at[place * x.halves + (w if x.halves > 1 else 0)])


def visible(x: Plan, t: Any, i):
    """Pairs of the tile's rows and the keys of block i that attend."""
    key = (t.first + i) * BLOCK + plgpu.broadcasted_iota(i32, (ROWS, BLOCK), 1, layout=ACC)
    if not x.causal:
        return key < t.length
    token = lax.div(t.inside + plgpu.broadcasted_iota(i32, (ROWS, BLOCK), 0, layout=ACC), i32(x.H))
    return key <= jnp.minimum(t.skew + token, t.length - 1)


def _scores(x: Plan, r: Any, t: Any, k):
    """Unscaled scores, float32 [ROWS, BLOCK], interpreted."""
    q = r.q_tile.at[t.zero]

    def product(acc):
        for n in range(x.D // PIECE):
            plgpu.wgmma(acc, q.at[n], k.at[n].T)
        return acc[...]

    return pl.run_scoped(product, _mosaic.ACC((ROWS, BLOCK), f32))


def add_product(x: Plan, r: Any, w, o, p, v):
    """O + P V, V in pieces of 64 columns."""
    if not x.interpreted:
        o = _mosaic.add_product(v, o, p)
        plgpu.wgmma_wait(0)
        return lax.optimization_barrier(o)
    r.p_own[w] = p
    plgpu.commit_smem()

    def fresh(acc):
        for n in range(v.shape[0]):
            plgpu.wgmma(acc.at[:, pl.ds(n * PIECE, PIECE)], r.p_own.at[w], v.at[n])
        return acc[...]

    return o + pl.run_scoped(fresh, _mosaic.ACC(o.shape, f32))


# ---------------------------------------------------------------- results
def _finish(x: Plan, r: Any, t: Any, w, state) -> None:
    """Add up the sums of both warpgroups; store the rows of the tile and its sums, or a partial result."""
    m, total, o = state
    w = w + t.zero
    r.stats[1 + w] = total
    plgpu.commit_smem()
    plgpu.barrier_arrive(r.sum_bar.at[w])
    plgpu.barrier_wait(r.sum_bar.at[1 - w])
    total = total + plgpu.load(r.stats.at[2 - w], layout=ROW, optimized=False)
    pl.when(w == 0)(lambda: store_sums(r, t, m, total))
    store_rows(x, r, t, w, total, o)


def store_sums(r: Any, t: Any, m, total) -> None:
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


def store_rows(x: Plan, r: Any, t: Any, w, total, o) -> None:
    """Own half of the rows of a tile, through q's memory, or of a partial result."""
    half = x.Dv // READERS
    if r.part_o is not None:

        @pl.when(t.part >= 0)
        def _():
            _mosaic.store(r.part_o.at[t.part, :, pl.ds(w * half, half)], o)

    @pl.when(t.part < 0)
    def _():
        (rows,) = softmax.output((None, total, (o,)))
        for n in range(half // PIECE):
            r.q_rows[0, w * (half // PIECE) + n] = rows[:, n * PIECE : (n + 1) * PIECE].astype(x.dtype)
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
