"""Which blocks of keys of which tiles a cluster of thread blocks attends to: scalar code on the device."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mla import _scan
from pallas_kernels.mla._combine import NOTES
from pallas_kernels.mla._plan import BLOCK, ROWS, Plan

i32 = jnp.int32

type Produce = Callable[["Item", Any], Any]
"""`produce(item, counts)` hands an item on and returns the producer's new counts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """Some blocks of keys of a tile, as scalars on the device.

    `count` rows (at most 64) of q from row `row0` on, the first at row `inside` of its request: token `inside // H`,
    position `skew + inside // H` among the `length` keys. `blocks` blocks of keys, the first `first`; those before
    `plain` need no mask. Results go to partial sum `part`, or, if that is negative, to o and to the sums of `slot`.
    """

    blocks: Any
    first: Any
    plain: Any
    request: Any
    length: Any
    skew: Any
    inside: Any
    row0: Any
    count: Any
    slot: Any
    part: Any
    zero: Any
    """Zero; what is added to it cannot be moved out of a loop, where it would hold registers."""


FIELDS = [field.name for field in dataclasses.fields(Item)]


class Told:
    """An item in shared memory, each field read when it is needed: registers are scarce."""

    def __init__(self, told, at):
        self._told, self._at = told, at

    def __getattr__(self, field):
        return self._told[self._at, FIELDS.index(field)]


def _first_slot(x: Plan, start, b):
    return lax.div(start * x.H, i32(x.rows)) + x.gap * b


def _tile(x: Plan, b, i, start, end, length) -> SimpleNamespace:
    """Tile i of request b, and the end of its blocks and of those without a mask."""
    inside = i * x.rows
    count = jnp.minimum((end - start) * x.H - inside, x.rows)
    skew = length - (end - start)
    high = full = length
    if x.causal:
        high = jnp.minimum(length, skew + lax.div(inside + count - 1, i32(x.H)) + 1)
        full = jnp.clip(skew + lax.div(inside, i32(x.H)) + 1, 0, length)
    return SimpleNamespace(
        last=lax.div(jnp.maximum(high, 0) + (BLOCK - 1), i32(BLOCK)),
        plain=lax.div(full, i32(BLOCK)),
        request=jnp.minimum(b, x.B - 1),
        length=length,
        skew=skew,
        inside=inside,
        row0=start * x.H + inside,
        count=count,
        slot=jnp.clip(_first_slot(x, start, b) + i, 0, x.slots - 1),
    )


def _own(x: Plan, t: SimpleNamespace) -> SimpleNamespace:
    """The part of a tile that belongs to this block of the cluster: all heads of a token see the same keys."""
    if not x.config.pair:
        return t
    member = lax.axis_index("member")
    own = {"inside": t.inside + member * ROWS, "row0": t.row0 + member * ROWS, "slot": t.slot + member * x.slots}
    return SimpleNamespace(**vars(t) | own | {"count": lax.div(t.count, i32(2))})


def _base(x: Plan, count: int):
    """Where what belongs to this block of the cluster begins in an array of `count` for each."""
    return lax.axis_index("member") * count if x.config.pair else 0


def _item(x: Plan, t: SimpleNamespace, first, last, part) -> Item:
    """Blocks [first, last) of a tile, at least one; a block that nothing is seen of is masked in full."""
    part = jnp.where(part < 0, -1, part + _base(x, x.partials))
    blocks = jnp.maximum(jnp.minimum(last, t.last) - first, 1)
    fields = {name: getattr(t, name) for name in FIELDS if hasattr(t, name)}
    return Item(blocks=blocks, first=first, part=part, zero=i32(0), **fields)


def splits(x: Plan, r: Any, produce: Produce, counts):
    """Every so many splits of all tiles."""
    cluster, total = lax.axis_index("cluster"), x.slots * x.num_splits

    def right(b, slot):
        return (_first_slot(x, _scan.start_of(x, r, b), b) <= slot) & (
            (b == x.B) | (slot < _first_slot(x, _scan.start_of(x, r, jnp.minimum(b + 1, x.B)), b + 1))
        )

    def search(slot):
        def halve(_, bounds):
            low, high = bounds
            middle = lax.div(low + high + 1, i32(2))
            below = _first_slot(x, _scan.start_of(x, r, middle), middle) <= slot
            return jnp.where(below, middle, low), jnp.where(below, high, middle - 1)

        return lax.fori_loop(0, x.B.bit_length(), halve, (i32(0), i32(x.B)))[0]

    def turn(n, counts):
        number = n * x.grid + cluster
        slot, split = lax.div(number, i32(x.num_splits)), lax.rem(number, i32(x.num_splits))
        used = x.slots - x.gap  # if all requests have as many tokens
        guess = jnp.clip(lax.div(slot * x.B + x.gap * (used - 1), i32(max(1, used))), 0, x.B - 1)
        b = lax.cond(right(guess, slot), lambda: guess, lambda: search(slot))
        start, end, length = _scan.request(x, r, b)
        t = _own(x, _tile(x, b, slot - _first_slot(x, start, b), start, end, length))
        exists = (number < total) & (t.count > 0)
        parts = jnp.maximum(lax.div(t.last + (x.split_blocks - 1), i32(x.split_blocks)), 1)
        entry, first = slot * x.num_splits, split * x.split_blocks
        if x.num_splits > 1:

            @pl.when((split == 0) & (number < total))
            def _():
                _note(x, r, slot, jnp.where(exists & (parts > 1), parts, 0), entry, entry + 1, t)

        item = _item(x, t, first, first + x.split_blocks, jnp.where(parts > 1, entry + split, -1))
        return lax.cond(exists & (split < parts), lambda c: produce(item, c), lambda c: c, counts)

    return lax.fori_loop(0, -(-total // x.grid), turn, counts)


def share(x: Plan, r: Any, produce: Produce, counts):
    """An equal share of all blocks of keys, request by request, tile by tile; tiles that stay whole count as one."""
    number, num_shares = lax.axis_index("cluster"), x.grid

    whole, size, total, b, base = _scan.find(x, r, number)
    begin = jnp.minimum(number * size, total)
    stop = jnp.minimum(begin + size, total)

    def item(state):
        unit, b, base, noted, counts = state
        tiles, per_tile = _scan.work(x, r, b)
        per_tile = jnp.where(whole, 1, per_tile)
        units, within = tiles * per_tile, unit - base
        low = lax.rem(within, per_tile)
        high = jnp.minimum(per_tile, low + stop - unit)
        t = _own(x, _tile(x, b, lax.div(within, per_tile), *_scan.request(x, r, b)))
        starts, ends = low == 0, high == per_tile
        at = jnp.where(starts & ends, -1, jnp.where(starts, num_shares + number, number))
        real = (units > 0) & (t.count > 0)
        cut = real & starts & ~ends
        parts = lax.div(unit + per_tile - 1, size) - number + 1
        pl.when(cut)(lambda: _note(x, r, number, parts, num_shares + number, number + 1, t))
        found = _item(x, t, low, jnp.where(whole, t.last, high), at)
        counts = lax.cond(real, lambda c: produce(found, c), lambda c: c, counts)
        following = unit + jnp.where(units > 0, high - low, 0)
        over = following >= base + units
        return (
            following,
            jnp.where(over, b + 1, b),
            jnp.where(over, base + units, base),
            noted | cut.astype(i32),
            counts,
        )

    start = begin, b, base, i32(0), counts
    state = lax.while_loop(lambda s: (s[0] < stop) & (s[1] <= x.B), item, start)

    @pl.when(state[3] == 0)
    def _():
        r.notes[number + _base(x, x.entries), 0] = i32(0)

    return state[4]


def _note(x: Plan, r: Any, entry, parts, first, second, t) -> None:
    """Tell the combining kernel about a tile of `parts` partial sums: `first`, then `second`, second + 1, ..."""
    values = {"parts": parts, "first": first + _base(x, x.partials), "second": second + _base(x, x.partials)}
    values |= {"row0": t.row0, "count": t.count, "slot": t.slot}
    for i, name in enumerate(NOTES):
        r.notes[entry + _base(x, x.entries), i] = jnp.asarray(values[name], i32)
