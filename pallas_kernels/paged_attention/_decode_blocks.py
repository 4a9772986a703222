"""Device code of the decoding kernel: find the tiles, attend, store results or partial sums."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic
from pallas_kernels import _online_softmax as softmax
from pallas_kernels._online_softmax import ACC, ROW
from pallas_kernels.paged_attention import _common as common
from pallas_kernels.paged_attention import _decode_codes as codes
from pallas_kernels.paged_attention import _decode_combine as combine
from pallas_kernels.paged_attention import _decode_joined as joined
from pallas_kernels.paged_attention import _decode_once as once
from pallas_kernels.paged_attention import _decode_swapped as swapped
from pallas_kernels.paged_attention import _per_head as per_head
from pallas_kernels.paged_attention._common import ROWS

OPTIONAL = (
    "k_scale",
    "v_scale",
    "sinks",
    "sums",
    "tile",
    "p_tile",
    "part_o",
    "part_sums",
    "notes",
    "q_raw",
    "staged",
)
OPTIONAL += (*per_head.OPTIONAL, *swapped.OPTIONAL, *joined.OPTIONAL)
"""References that a kernel may do without."""
LIFT = 15
"""Exponent that P in float16 is raised by: up to 2**15, normal down to 2**-29."""
_UNROLL = 8
_SNAP = 16
"""Shares of whole tiles may be longer than equal ones by one part in so many."""

f32, i32 = jnp.float32, jnp.int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """What a thread block computes, as scalars on the device.

    `count` tokens (at most block_q) from row `token0` of q on, the first at `position` among the request's `length`
    keys, with the heads of `chunk`. Its sums belong into `sum_slot`.
    """

    request: Any
    length: Any
    token0: Any
    count: Any
    position: Any
    chunk: Any
    sum_slot: Any


def run(x, r: Any, shared: dict[str, Any]) -> None:
    """One thread block; `shared` are its unions in shared memory."""
    r.shared = _named(x, shared)
    if x.num_shares is not None:
        _share(x, r)
    else:
        _split(x, r)


def _own(x, r: Any, t: "Tile") -> Any:
    """The references with shared memory as it is for one tile.

    A zero made of the tile's token hides from the compiler that this memory is always the same, or the addresses of
    everything before and after the main loop would be kept in registers through it.
    """
    zero = lax.shift_right_logical(t.token0, i32(31))
    own = {name: ref.at[zero] for name, ref in r.shared.items()}
    return SimpleNamespace(**vars(r) | own)


def _named(x, shared: dict[str, Any]) -> dict[str, Any]:
    """Members of the unions in shared memory by name."""
    q_tile, (ring, *staging) = shared["q_tile"], shared["ring"]
    out = {name: shared[name] for name in OPTIONAL if name in shared}
    out |= dict(zip(("rows", "staged"), staging, strict=False))
    out |= {"k_ring": ring[0], "v_ring": ring[1]}
    return out | ({"q_tile": q_tile[0], "q_raw": q_tile[1]} if x.fitted else {"q_tile": q_tile, "q_raw": q_tile})


# ---------------------------------------------------------------- which tile
def _start_of(x, r, b):
    return jnp.clip(r.query_start[b], 0, x.N)


def _request(x, r, b):
    """First row and end of request b, and its length; request B is the padding behind the last one: no keys."""
    request, real = jnp.minimum(b, x.B - 1), b < x.B
    end = jnp.where(real, _start_of(x, r, request + 1), x.N)
    return _start_of(x, r, b), end, jnp.where(real, joined.length(x, r, request), 0)


def _tile(x, b, i, chunk, start, end, length) -> Tile:
    """Tile i of request b."""
    skipped = i * x.block_q
    return Tile(
        request=jnp.minimum(b, x.B - 1),
        length=length,
        token0=start + skipped,
        count=jnp.minimum(end - start - skipped, x.block_q),
        position=length - (end - start) + skipped,
        chunk=chunk,
        sum_slot=jnp.clip(lax.div(start, i32(x.block_q)) + b + i, 0, x.sum_slots - 1),
    )


def _last_request(x, inside):
    """The largest b of 0 to B with inside(b), which holds up to some b, 0 included."""

    def halve(_, bounds):
        low, high = bounds
        middle = lax.div(low + high + 1, i32(2))
        found = inside(middle)
        return jnp.where(found, middle, low), jnp.where(found, high, middle - 1)

    return lax.fori_loop(0, x.B.bit_length(), halve, (i32(0), i32(x.B)))[0]


def _split(x, r: Any) -> None:
    """One split of one tile."""
    chunk, slot, split = (lax.axis_index(name) for name in ("chunk", "slot", "split"))
    if x.at_once and x.block_q == 1:
        once.fetch_q(x, r, slot, chunk)

    def begin(b):
        return lax.div(_start_of(x, r, b), i32(x.block_q))

    if x.block_q == 1:
        guess = jnp.minimum(slot, x.B - 1)  # all requests have one token
        start, end, length = _request(x, r, guess)

        def search():
            b = _last_request(x, lambda b: _start_of(x, r, b) <= slot)
            return b, *_request(x, r, b)

        right = (start <= slot) & (slot < end)
        b, start, end, length = lax.cond(right, lambda: (guess, start, end, length), search)
        i = slot - start
    else:
        extra = slot - (x.B + 1)
        first = extra < 0
        b = lax.cond(first, lambda: slot, lambda: _last_request(x, lambda b: begin(b) <= extra))
        start, end, length = _request(x, r, b)
        i = jnp.where(first, 0, extra + 1 - begin(b))
    t = _tile(x, b, i, chunk, start, end, length)
    if x.at_once:
        _once(x, _own(x, r, t), t)
        return
    r, bounds = _own(x, r, t), _bounds(x, t)
    first, last = bounds[:2]
    if x.num_splits == 1:

        @pl.when(t.count > 0)
        def _():
            _write(x, r, t, _attend(x, r, t, first, last, bounds))

        return
    size = x.split_blocks
    start = lax.div(first, i32(size))
    parts = jnp.maximum(lax.div(last + (size - 1), i32(size)) - start, 1)
    low = (start + split) * size
    entry = slot * x.num_splits

    @pl.when((t.count > 0) & (split < parts))
    def _():
        state = _attend(x, r, t, jnp.maximum(first, low), jnp.minimum(last, low + size), bounds)
        pl.when(parts == 1)(lambda: _write(x, r, t, state))
        pl.when(parts > 1)(lambda: _write_partial(x, r, t, entry + split, state))

    @pl.when((split == 0) & (slot < x.slots))
    def _():
        cut = (t.count > 0) & (parts > 1)
        _note(r, slot, jnp.where(cut, parts, 0), entry, entry + 1, t)


def _once(x, r: Any, t: "Tile") -> None:
    """A tile whose keys are all fetched at once; with one token a tile its q is on its way."""

    @pl.when(t.count > 0)
    def _():
        if x.block_q > 1:
            once.fetch_q(x, r, t.token0, t.chunk)
        sinks = _sinks(x, r, t)
        _write(x, r, t, once.attend(x, r, t), sinks)

    if x.block_q == 1:
        pl.when(t.count <= 0)(lambda: plgpu.barrier_wait(r.q_bar))


def _share(x, r: Any) -> None:
    """An equal share of all blocks of keys, request by request, tile by tile, for one chunk of heads."""
    share, chunk = lax.axis_index("share"), lax.axis_index("chunk")

    def work(b, least: Any = 1):
        """Tiles of request b, and blocks of each, at least `least`."""
        start, end, length = _request(x, r, b)
        tiles = lax.div(jnp.maximum(end - start, 0) + (x.block_q - 1), i32(x.block_q))
        return tiles, jnp.maximum(lax.div(length + (x.block_kv - 1), i32(x.block_kv)), least)

    def scan(step, state, least: Any = 1):
        """step(b, work of request b, state) over all requests, the loads of several at once."""

        def several(n, state):
            each = []
            for k in range(_UNROLL):
                b = jnp.minimum(n * _UNROLL + k, x.B)
                tiles, per_tile = work(b, least)
                each.append((b, (jnp.where(n * _UNROLL + k <= x.B, tiles, 0), per_tile)))
            for b, some in each:
                state = step(b, some, state)
            return state

        return lax.fori_loop(0, -(-(x.B + 1) // _UNROLL), several, state)

    def measure(b, some, state):
        (tiles, per_tile), (total, count, longest) = some, state
        longest = jnp.where(tiles > 0, jnp.maximum(longest, per_tile), longest)
        return total + tiles * per_tile, count + tiles, longest

    def a_share(total):
        return lax.div(total + (x.num_shares - 1), i32(x.num_shares))

    total, count, longest = scan(measure, (i32(0), i32(0), i32(0)))
    size, least = a_share(total), 1
    if x.snap:  # all tiles count as the longest one, and shares hold whole tiles
        whole = a_share(count) * longest
        snapped = whole - size <= lax.div(size, i32(_SNAP))
        size, least = jnp.where(snapped, whole, size), jnp.where(snapped, longest, 1)
        total = jnp.where(snapped, count * longest, total)
    begin = jnp.minimum(share * size, total)
    stop = jnp.minimum(begin + size, total)

    def locate(b, some, state):
        (tiles, per_tile), (prefix, found, base) = some, state
        units = tiles * per_tile
        here = (units > 0) & (prefix <= begin)
        return prefix + units, jnp.where(here, b, found), jnp.where(here, prefix, base)

    b, base = scan(locate, (i32(0), i32(0), i32(0)), least)[1:]

    def part(unit, b, base):
        """Tile, blocks [low, high) of it, blocks of the tile and of the request, of the share from `unit` on."""
        tiles, per_tile = work(b, least)
        within = unit - base
        low = lax.rem(within, per_tile)
        high = jnp.minimum(per_tile, low + stop - unit)
        t = _tile(x, b, lax.div(within, per_tile), chunk, *_request(x, r, b))
        return t, low, high, per_tile, tiles * per_tile

    def item(state):
        unit, b, base, noted = state
        t, low, high, per_tile, units = part(unit, b, base)
        real = (units > 0) & (t.count > 0)

        @pl.when(real)
        def _():
            bounds = _bounds(x, t)
            first, last = jnp.maximum(bounds[0], low), jnp.minimum(bounds[1], high)
            own = _own(x, r, t)
            state = _attend(x, own, t, first, last, bounds)
            again, *blocks = part(unit, b, base)  # cheaper than registers in the main loop
            starts, ends = blocks[0] == 0, blocks[1] == blocks[2]
            own = _own(x, r, again)
            pl.when(starts & ends)(lambda: _write(x, own, again, state))
            at = jnp.where(starts, x.num_shares + share, share)
            pl.when(~(starts & ends))(lambda: _write_partial(x, own, again, at, state))

        t, low, high, per_tile, units = part(unit, b, base)
        cut = real & (low == 0) & (high < per_tile)
        parts = lax.div(unit + per_tile - 1, size) - share + 1
        pl.when(cut)(lambda: _note(r, share, parts, x.num_shares + share, share + 1, t))
        following = unit + jnp.where(units > 0, high - low, 0)
        over = following >= base + units
        return following, jnp.where(over, b + 1, b), jnp.where(over, base + units, base), noted | cut.astype(i32)

    start = begin, b, base, i32(0)
    noted = lax.while_loop(lambda s: (s[0] < stop) & (s[1] <= x.B), item, start)[3]

    @pl.when((noted == 0) & (share < x.num_shares))
    def _():
        r.notes[chunk, share, 0] = i32(0)


def _note(r, entry, parts, first, second, t: Tile) -> None:
    """Tell the combining kernel about a tile of `parts` partial sums: `first`, then `second`, second + 1, ..."""
    values = {"parts": parts, "first": first, "second": second}
    values |= {"token0": t.token0, "count": t.count, "sum_slot": t.sum_slot}
    for i, name in enumerate(combine.NOTES):
        r.notes[t.chunk, entry, i] = jnp.asarray(values[name], i32)


# ---------------------------------------------------------------- attention
def _bounds(x, t: Tile):
    """Blocks [first, last) that hold keys of the tile, the blocks among them without a mask, and the keys."""
    low, high, full_low, full_high = common.key_range(
        causal=x.causal, window=x.window, position=t.position, count=t.count, length=t.length
    )
    size = i32(x.block_kv)
    first = lax.div(low, size)
    last = jnp.where(high > low, lax.div(high + (x.block_kv - 1), size), first)
    return first, last, lax.div(full_low + (x.block_kv - 1), size), lax.div(full_high, size), low, high


def _attend(x, r: Any, t: Tile, first, last, bounds):
    """State of the online softmax over the blocks [first, last) of the tile."""
    block_kv, num_stages = x.block_kv, x.num_stages
    whole = first == bounds[0]  # the tile's first keys are among them
    _, _, full_first, full_last, low, high = bounds
    last = jnp.maximum(first, last)
    full_first = jnp.clip(full_first, first, last)
    full_last = jnp.clip(full_last, full_first, last)
    kv_head = lax.div(t.chunk * x.block_g, i32(x.H // x.K))
    first_page, last_page = lax.div(low, i32(x.page)), lax.div(jnp.maximum(high - 1, 0), i32(x.page))
    skipped = joined.pages(x, r, t.request)
    if x.joined is not None:
        first_page, last_page = skipped + first_page, jnp.minimum(skipped + last_page, x.pages - 1)

    def page_numbers(j):
        """Pages of block j; of the pages outside the visible range the nearest one inside is read again."""
        base = lax.div(j * block_kv, i32(x.page)) + skipped
        return [
            jnp.clip(r.page_table[t.request, jnp.clip(base + i, first_page, last_page)], 0, x.pool - 1)
            for i in range(max(1, block_kv // x.page))
        ]

    def fetch(pool, ring, bars, j, pages):
        to = lax.rem(j - first, i32(num_stages))
        bar = bars.at[to]
        rows = min(x.page, block_kv)
        offset = lax.rem(j * block_kv, i32(x.page)) if block_kv < x.page else 0
        for i, number in enumerate(pages):
            source = pool.at[number, pl.ds(offset, rows), kv_head]
            place = pl.ds(i * rows, rows)
            plgpu.copy_gmem_to_smem(source, ring.at[to, place], bar)
            if x.per_head:
                per_head.fetch(x, r, ring, (number, offset), (to, i * rows), rows, bar)

    fetch_k = functools.partial(fetch, r.k_pages, r.k_ring, r.k_bar)
    fetch_v = functools.partial(fetch, r.v_pages, r.v_ring, r.v_bar)

    def prefetch(j, pages):
        fetch_k(j, pages)
        fetch_v(j, pages)

    for i in range(num_stages):
        pl.when(first + i < last)(lambda j=first + i: prefetch(j, page_numbers(j)))
    if x.joined is not None:
        joined.fetch(x, r, t)
    factor = _load_q(x, r, t)
    factor = swapped.of_rows(x, r, factor) if x.swapped else factor
    if r.k_scale is not None:
        factor = r.k_scale[0] if factor is None else factor * r.k_scale[0]
    before = x.scale if x.softcap is None else x.scale / x.softcap
    factor = before if factor is None else factor * before
    sharp = (factor if x.softcap is None else x.softcap) * softmax.LOG2E

    shape, axes = ((block_kv, x.rows), (1, 0)) if x.swapped else ((ROWS, block_kv), (0, 1))
    row, column = (plgpu.broadcasted_iota(i32, shape, axis, layout=ACC) for axis in axes)
    token = lax.div(row, i32(x.slab)) if x.block_q > 1 else 0
    scales_of = swapped.keys_scales if x.swapped else per_head.columns
    per_key = swapped.of_keys if x.swapped else per_head.down

    def step(j, state, masked):
        at = lax.rem(j - first, i32(num_stages))
        more = j + num_stages < last
        ahead = page_numbers(jnp.minimum(j + num_stages, last - 1))
        hole = (j * block_kv, low, high) if masked else None
        k, v = r.k_ring.at[at], r.v_ring.at[at]

        def refill():
            pl.when(more)(lambda: fetch_v(j + num_stages, ahead))

        def convert_v():
            """V's block, when it is there, as numbers; returns its scales per key, or None."""
            plgpu.barrier_wait(r.v_bar.at[at])
            given = r.v_scales.at[at] if x.per_head else None
            weight = scales_of(x, given, kv_head, hole) if x.per_head else None  # before the barriers of `convert`
            codes.convert(x, v, given, kv_head, hole, r.tile)
            if not x.swapped:  # else with P
                plgpu.commit_smem()
            refill()
            return weight

        plgpu.barrier_wait(r.k_bar.at[at])
        scales = scales_of(x, r.k_scales.at[at], kv_head) if x.per_head else None
        if x.restage and not x.code_keys:
            codes.convert(x, k, r.k_scales.at[at] if x.per_head else None, kv_head, None, r.tile)
            plgpu.commit_smem()
            k = r.tile
        s = _scores(x, r, k, convert_v if x.code_keys else None)
        if scales is not None:
            s = s * per_key(scales, s)
        pl.when(more)(lambda: fetch_k(j + num_stages, ahead))
        if x.softcap is not None:
            s = jnp.tanh(_times(x, s, factor))
        if masked:
            seen = common.visible(
                causal=x.causal,
                window=x.window,
                position=t.position + token,
                key=j * block_kv + column,
                length=t.length,
            )
            s = jnp.where(seen, s, -jnp.inf)
        (m, total, o), p = _update(x, r, state, s, sharp)
        if not x.restage:
            plgpu.barrier_wait(r.v_bar.at[at])
            v = codes.clear(x, v, hole) if masked else v
        elif not x.code_keys:
            weight = convert_v()
            p = p if weight is None else p * per_key(weight, p)
        o = _add_product(x, r, o, p, r.tile if x.restage else v)
        if not x.restage:
            refill()
        return m, total, (o,)

    masked, plain = (functools.partial(step, masked=masked) for masked in (True, False))
    state = swapped.start(x) if x.swapped else softmax.start(ROWS, (x.D,))
    if x.joined is not None:
        state = _join(x, r, state, joined.scores(x, r, t, whole))
    if x.window is not None:
        state = lax.fori_loop(first, full_first, masked, state)
    state = lax.fori_loop(full_first, full_last, plain, state)
    state = lax.fori_loop(full_last, last, masked, state)
    m, total, (o,) = swapped.finished(r, state) if x.swapped else state
    return m, total, (o if r.v_scale is None else o * r.v_scale[0],)


def _join(x, r: Any, state, s):
    """State with partial results of prefixes, whose scores are `s`, see `_decode_joined`."""
    (m, total, o), p = swapped.update(x, r, state, s, 0) if x.swapped else softmax.update(state, s, 1.0)
    plgpu.barrier_wait(r.prefix_bar)
    o = _add_product(x, r, o, p, r.prefix_rows)
    if x.swapped:
        plgpu.commit_smem()  # everyone has multiplied
    return m, total, (_add_product(x, r, (o,), p - p.astype(x.operand).astype(f32), r.prefix_rows),)


def _load_q(x, r: Any, t: Tile):
    """Bring the tile's rows of q into shared memory; returns what scores of a row must be multiplied with, or None."""
    base, bar = lax.div(t.chunk * x.block_g, i32(8)) * 8, r.q_bar
    for i in range(x.block_q):
        source = r.q.at[jnp.minimum(t.token0 + i, x.N - 1), pl.ds(base, x.slab)]
        plgpu.copy_gmem_to_smem(source, r.q_raw.at[pl.ds(i * x.slab, x.slab)], bar)
    plgpu.barrier_wait(bar)
    if not x.fitted:
        return None
    value = plgpu.load(r.q_raw, layout=ACC).astype(f32)
    exponent = lax.shift_right_logical(lax.bitcast_convert_type(jnp.max(jnp.abs(value), axis=1), i32), i32(23))
    top = 7 if x.code_keys else 14  # the largest value of a row comes to lie in [2**top, 2**(top + 1))
    up = jnp.clip(127 + top - (exponent - 127), 1, 253)
    value = value * softmax.across(lax.bitcast_convert_type(up << 23, f32), value)
    plgpu.commit_smem()  # everyone has read
    if x.code_keys:
        for i, term in enumerate(softmax.split(value, 2, x.cache_dtype)):
            r.q_tile[i] = term
    else:
        r.q_tile[...] = value.astype(x.operand)
    plgpu.commit_smem()
    return lax.bitcast_convert_type((254 - up) << 23, f32)


def _times(x, s, factor):
    """Scores times a number, or a number per row."""
    across = swapped.across if x.swapped else softmax.across
    return s * (across(factor, s) if getattr(factor, "ndim", 0) else factor)


def _update(x, r: Any, state, s, sharp):
    """As `_online_softmax.update`, where `sharp` may be one number per row, and P is lifted if it is for float16."""
    if x.swapped:
        return swapped.update(x, r, state, _times(x, s, sharp), LIFT if x.lifted else 0)
    m, total, o = state
    top = jnp.max(s, axis=1) * sharp
    m_new = jnp.maximum(m, top - LIFT if x.lifted else top)
    alpha = jnp.exp2(m - m_new)
    p = jnp.exp2(_times(x, s, sharp) - softmax.across(m_new, s))
    return (m_new, total * alpha + jnp.sum(p, axis=1), softmax.scaled(o, alpha)), p


def _scores(x, r: Any, k, meanwhile):
    """Unscaled scores, float32 [ROWS, block_kv]; `meanwhile` is called while they are computed."""
    if x.swapped:
        return swapped.scores(x, r, k, meanwhile)

    def product(acc):
        for q in (r.q_tile.at[1], r.q_tile.at[0]) if x.code_keys else (r.q_tile,):
            plgpu.wgmma(acc, q, k.T)
        if meanwhile is not None:
            meanwhile()
        return acc[...]

    return pl.run_scoped(product, _mosaic.ACC((ROWS, x.block_kv), f32))


def _add_product(x, r: Any, o: tuple, p, v):
    """O plus P V."""
    if x.swapped:
        return swapped.add_product(x, r, o, p, v)
    (chunk,) = o
    p = p.astype(x.operand)
    if not x.interpreted:
        return pl.run_state(lambda acc: plgpu.wgmma(acc, p, v))(_mosaic.ACC.init(chunk))
    r.p_tile[...] = p  # the interpreter multiplies what is in shared memory only
    plgpu.commit_smem()

    def fresh(acc):
        plgpu.wgmma(acc, r.p_tile, v)
        return acc[...]

    return chunk + pl.run_scoped(fresh, _mosaic.ACC(chunk.shape, f32))


# ---------------------------------------------------------------- results
def _sinks(x, r: Any, t: Tile):
    """Sinks of the tile's rows in base 2, None without."""
    rows, layout = (x.rows, swapped.COLUMN) if x.swapped else (ROWS, ROW)
    return None if r.sinks is None else combine.sink_rows(x, r.sinks, t.chunk, rows, layout)


def _keep_sums(x, target: Any, state) -> None:
    """Maximum and sum of each row to `target` [2, ROWS]."""
    for i, value in enumerate(state[:2]):
        if x.swapped:
            _mosaic.store(target.at[i, pl.ds(0, x.rows)], value)
        else:
            target[i] = value


def _write(x, r: Any, t: Tile, state, sinks=None) -> None:
    """Output, and sums, of a tile whose keys were all seen; `sinks` if they were read before."""
    sinks = _sinks(x, r, t) if sinks is None else sinks
    if r.sums is not None:
        _keep_sums(x, r.sums.at[t.sum_slot, t.chunk], state)
    if x.swapped:
        swapped.stage(x, r.rows, swapped.output(x, state, sinks), x.out_dtype)
    else:
        state = state if sinks is None else softmax.with_sink(state, sinks)
        (o,) = softmax.output(state)
        for n in range(0, x.D, x.out_piece):
            r.rows[n // x.out_piece] = o[:, n : n + x.out_piece].astype(x.out_dtype)
    plgpu.commit_smem()
    combine.copy_rows(x, r.rows, r.o, t, range(0, x.D, x.out_piece))
    plgpu.wait_smem_to_gmem(0)


def _write_partial(x, r: Any, t: Tile, at, state) -> None:
    """Unnormalised output and sums of some of a tile's keys."""
    (o,), width = state[2], r.staged.shape[2]
    _keep_sums(x, r.part_sums.at[t.chunk, at], state)
    if x.swapped:
        swapped.stage(x, r.staged, o, f32)
    else:
        for n in range(0, x.D, width):
            r.staged[n // width] = o[:, n : n + width]
    plgpu.commit_smem()
    for n in range(0, x.D, width):
        source = r.staged.at[n // width, pl.ds(0, x.rows)]
        plgpu.copy_smem_to_gmem(source, r.part_o.at[t.chunk, at, :, pl.ds(n, width)])
    plgpu.wait_smem_to_gmem(0)
