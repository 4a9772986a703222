"""The warpgroup that finds work and fetches it: q of a tile, blocks of keys in two places, codes of a block decoded.

Block i of an item comes to place i mod 2. A place is free when both warpgroups that multiply with values are done with
it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic, _words
from pallas_kernels.mla import _work
from pallas_kernels.mla._plan import (
    BLOCK,
    KEPT,
    LATENT,
    PIECE,
    ROWS,
    SCALE_BYTES,
    SCALED,
    SCALES,
    TOLD,
    Plan,
)

f32, i32 = jnp.float32, jnp.int32
type Then = dict[int, Callable[[], None]]
"""What to do when so many pieces are decoded."""
HALF, HALVES = BLOCK // 2, (0, BLOCK // 2)
"""Rows of a block that are decoded at a time, and where they begin."""


def produce(x: Plan, r: Any) -> None:
    """All that the producer does."""
    find = _work.share if x.config.num_shares is not None else _work.splits
    counts = find(x, r, lambda item, counts: _produce(x, r, item, counts), (i32(0), i32(0), i32(0)))
    at = counts[0] & (TOLD - 1)
    r.told[at, 0] = i32(0)
    plgpu.barrier_arrive(r.told_bar.at[at])
    if x.interpreted or x.config.pair:
        _drain(x, r, counts)


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

    def fetch(i, used, ring, bar, order: tuple[int, ...] = tuple(range(pieces))):
        """Pieces in an order; `bar(piece)` is told of a piece."""
        start, size = (t.first + i) * BLOCK, BLOCK // x.copies
        offset = lax.rem(start, i32(x.page)) if x.page > BLOCK else 0

        def copy_columns(copy, columns, target, bar):
            number = r.told[TOLD + (sum(used) & (KEPT - 1)), copy]
            row = pl.multiple_of(jnp.asarray(copy * size), size) if x.copies > 1 else 0
            source = r.cache.at[number, pl.ds(offset, size), columns]
            plgpu.copy_gmem_to_smem(source, target.at[pl.ds(row, size)], bar, **share)

        for first, count in _runs(order):

            @pl.loop(0, x.copies * count)
            def _(n, first=first):
                piece, copy = (lax.div(n, i32(x.copies)), lax.rem(n, i32(x.copies))) if x.copies > 1 else (n, 0)
                piece += first
                copy_columns(copy, pl.ds(piece * PIECE, PIECE), ring.at[piece], bar(piece))

        if x.packed:

            @pl.loop(0, x.copies)
            def _(copy):
                copy_columns(copy, pl.ds(LATENT, SCALE_BYTES), r.k_marks.at[i & 1, 0], bar(0))
                copy_columns(
                    copy, pl.ds(LATENT + SCALE_BYTES, 2 * PIECE), r.k_rest.at[i & 1, len(order)], bar(len(order))
                )

    def wait_free(place, before, *parts):
        def wait():
            for part in parts:
                plgpu.barrier_wait(r.k_free.at[place * len(x.parts) + part])

        pl.when(before > 0)(wait)

    def fetch_codes(i, used):
        """Of block i, when its place is free."""
        place, coded = i & 1, LATENT // PIECE if x.packed else pieces
        wait_free(place, jnp.where(place == 0, *used), 0)
        target = r.k_raw.at[place, pl.ds(coded, coded)]
        fetch(i, used, target, lambda _: r.raw_bar.at[place], tuple(range(coded)))
        if x.looks_ahead:
            remember(i + 1, (used[0] + (1 - place), used[1] + place))
        if x.config.prefetch:
            _prefetch(x, r, t, i + 1)

    def block(i, used):
        place = i & 1
        before = jnp.where(place == 0, *used)
        valid = t.length - (t.first + i) * BLOCK

        def free(*parts):
            wait_free(place, before, *parts)

        def here(piece):
            return r.k_bar.at[place * x.groups + (lax.div(piece, i32(pieces // x.groups)) if x.groups > 1 else 0)]

        following = used[0] + (1 - place), used[1] + place
        if x.codes:
            then: Then = {}
            if x.config.ahead is None:
                fetch_codes(i, used)
            else:
                more = pl.when(i + 1 < t.blocks)
                then[x.config.ahead] = lambda: more(lambda: fetch_codes(i + 1, following))
            plgpu.barrier_wait(r.raw_bar.at[place])
            (_decode_packed if x.packed else _decode)(x, r, place, then)
            pl.when(valid < BLOCK)(lambda: _clean(x, r.k_tile.at[place], valid))
            plgpu.barrier_arrive(here(0))
        else:

            @pl.when(valid >= BLOCK)
            def _():
                for part, order in enumerate(x.parts):
                    free(part)
                    fetch(i, used, r.k_rows.at[place], here, order)

            @pl.when(valid < BLOCK)
            def _():
                free(*range(len(x.parts)))
                fetch(i, used, r.k_rows.at[place], lambda _: r.raw_bar.at[place])
                plgpu.barrier_wait(r.raw_bar.at[place])
                _clean(x, r.k_tile.at[place], valid)

                @pl.loop(0, x.copies * pieces)
                def _(n):
                    plgpu.barrier_arrive(here(lax.div(n, i32(x.copies))))

        used = following
        if not x.looks_ahead:
            remember(i + 1, used)
        if x.config.turns:
            _prefetch(x, r, t, i + 1)
        return used

    remember(i32(0), used)
    pl.when(items > 0)(lambda: plgpu.barrier_wait(r.q_free))
    _fetch_q(x, r, t)
    if x.codes and x.config.ahead is not None:
        fetch_codes(i32(0), tuple(used))
    used = lax.fori_loop(0, t.blocks, block, tuple(used))
    return items + 1, *used


def _prefetch(x: Plan, r: Any, t: Any, i) -> None:
    """Bring block i of an item, if there is one, into L2; each thread block of a pair brings half of it."""
    if x.interpreted:
        return
    rows, row_bytes = BLOCK // x.copies, r.cache.shape[2] * r.cache.dtype.itemsize
    size = rows * row_bytes // x.members

    def emit(context, cache, first, wanted, member):
        del context
        wanted = _words.both(_words.less(_words.Thread().index, 1), _words.less(0, _words.scalar(wanted)))
        memory = _words.Memory(cache).wide(_words.scalar(first), row_bytes).wide(_words.scalar(member), size)
        text = "{.reg .pred p; setp.ne.b32 p, $1, 0; " + f"@p cp.async.bulk.prefetch.L2.global [$0], {size};" + "}"
        flag = _mosaic.arith.extui(_mosaic.ir.IntegerType.get_signless(32), wanted)
        _mosaic.gpu_utils.inline_ptx(text, memory.pointer, flag, has_side_effects=True)

    splat = plgpu.Layout.WG_SPLAT
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), splat, splat, splat))
    start = (t.first + i) * BLOCK
    base, last = lax.div(start, i32(x.page)), lax.div(jnp.maximum(t.length - 1, 0), i32(x.page))
    member = lax.axis_index("member") if x.config.pair else i32(0)
    for n in range(x.copies):
        number = jnp.clip(r.page_table[t.request, jnp.clip(base + n, 0, last)], 0, x.pool - 1)
        offset = lax.rem(start, i32(x.page)) if x.page > BLOCK else 0
        inline(emit)(r.cache, number * x.page + offset, (i < t.blocks).astype(i32), member)


def _runs(order: tuple[int, ...]) -> list[tuple[int, int]]:
    """Ascending numbers as spans without gaps: first and count."""
    starts = [n for i, n in enumerate(order) if i == 0 or order[i - 1] != n - 1]
    ends = [n + 1 for i, n in enumerate(order) if i + 1 == len(order) or order[i + 1] != n + 1]
    return [(first, end - first) for first, end in zip(starts, ends, strict=True)]


def _drain(x: Plan, r: Any, counts) -> None:
    """See every barrier that is left complete: no block of a cluster may leave while another still signals to it.

    The interpreter always insists.
    """
    items, *used = counts
    pl.when(items > 0)(lambda: plgpu.barrier_wait(r.q_free))
    for n in range(len(used) * len(x.parts)):
        pl.when(used[n // len(x.parts)] > 0)(lambda n=n: plgpu.barrier_wait(r.k_free.at[n]))


def _decode(x: Plan, r: Any, place, then: Then) -> None:
    """Codes of a block, in the second half of its place, as numbers of q's dtype in all of it."""
    scale, pieces = r.cache_scale[0], x.D // PIECE
    _widen(x, r, place, pieces, lambda n: [scale, scale], then)


def _decode_packed(x: Plan, r: Any, place, then: Then) -> None:
    """The same of packed rows; scales are in registers before numbers cover them."""
    pieces = LATENT // PIECE
    if x.interpreted:
        marks, rest = r.k_marks[place, 0].reshape(BLOCK, SCALES, 4), r.k_rest[place, pieces].reshape(BLOCK, PIECE, 2)
        marks = lax.bitcast_convert_type(marks, f32)
        scales = [tuple(marks[first : first + HALF, i] for first in HALVES) for i in range(SCALES)]
        r.k_tile[place, pieces] = lax.bitcast_convert_type(rest, x.dtype)
    else:
        scales = _scales(r.k_marks.at[place, 0], _mosaic.strips(x.dtype, 128).reduce(1))

    plgpu.commit_smem()  # scales lie where the first numbers are written
    spread = [[lax.broadcast_in_dim(scale, (HALF, PIECE), [0]) for scale in own] for own in scales]
    _widen(x, r, place, pieces, lambda n: spread[n // (SCALED // PIECE)], then)


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


def _widen(x: Plan, r: Any, place, pieces: int, scales: Any, then: Then) -> None:
    """Codes of all pieces, which lie `pieces` pieces on, times `scales(n)` of the halves of the rows of piece n.

    Numbers of piece n cover codes of pieces 2 n - pieces and the one after. Where not everyone is sure to have read
    those, the codes of this and the next piece are read first, and the warps meet.
    """
    layout = _mosaic.strips(jnp.uint8, 128)
    # packed rows stay as TMA brings them: 656 bytes have no tiles
    how: Any = {"layout": layout, "optimized": not x.packed}
    rows = [pl.ds(first, HALF) for first in HALVES]

    def load(n):
        codes = [plgpu.load(r.k_raw.at[place, pieces + n, part], **how) for part in rows]
        return [lax.bitcast_convert_type(code, jnp.float8_e4m3fn) if x.packed else code for code in codes]

    def store(n, codes):
        for part, code, scale in zip(rows, codes, scales(n), strict=True):
            _mosaic.store_tile(r.k_tile.at[place, n, part], (code.astype(f32) * scale).astype(x.dtype), layout)

    n = met = 0
    while n < pieces:
        together = [n] if 2 * n + 1 - pieces < met else [m for m in (n, n + 1) if m < pieces]
        loaded = [load(m) for m in together]
        if 2 * n + 1 - pieces >= met:
            plgpu.commit_smem()
            met = together[-1] + 1
        for m, codes in zip(together, loaded, strict=True):
            store(m, codes)
            then.get(m + 1, lambda: None)()
        n = together[-1] + 1
    plgpu.commit_smem()


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
