"""Exact top-k of rows on Mosaic GPU (Hopper): by counts, or by bisection; see `jaxattn.ops.indexer_topk`.

A block counts keys (`_topk_counted`) unless a row is too long for its shared memory. Then bisection: a warpgroup holds
a part of a row as integer keys in the same order, each warp a quarter, and counts in each step how many are at least
the middle of an interval; most are done once exactly k are. Of equal keys, a second bisection finds how far in the part
they still belong. What is chosen is written in order: warps find their places by ballots. The winners of the parts
compete again. Parts that no range reaches are not loaded.

Chosen over XLA's `top_k`, which sorts, and over a Triton kernel, which nothing here can interpret.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic, _rows, _topk_counted, _words
from pallas_kernels._topk_counted import Counted, Launch
from pallas_kernels._words import Memory, Thread

_WARPS, _VEC = 4, 4
_STEP = _WARPS * 32 * _VEC
"""Entries that lanes load at once."""
_ENTRIES = (4096, 8192)
_LOWEST = -(2**31)
"""Key of what cannot be chosen; that of -inf is larger."""
_MAGNITUDE, _INFINITE = 2**31 - 1, 0x7F800000

i32 = jnp.int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Launch):
    """`entries`: most of a row that a warpgroup holds, 32 or 64 a lane."""

    entries: int = 8192

    def __post_init__(self):
        if self.entries not in _ENTRIES:
            raise ValueError(f"entries must be {_mosaic.either(_ENTRIES)}, got {self.entries}")


def why_not(*, logits, topk, **_) -> str | None:
    """None if the kernel can run these arguments, else one sentence."""
    if jnp.dtype(logits.dtype) != jnp.float32:
        return f"logits must be float32, got {jnp.dtype(logits.dtype).name}"
    if not logits.shape[1]:
        return "there are no entries"
    if _bisections(logits, topk):
        return None
    if logits.shape[1] > _topk_counted.MOST:
        return f"topk must be at most {_ENTRIES[-1] // 2} of more than {_topk_counted.MOST} entries, got {topk}"
    return _topk_counted.why_not(logits.shape[1], topk, _topk_counted.rule(*logits.shape))


def _bisections(logits, topk: int) -> list[Config]:
    S = logits.shape[1]
    return [Config(entries=n) for n in _ENTRIES if n >= S or n >= 2 * topk]


def default_config(*, logits, topk, **_) -> Launch:
    """Counts if a block can hold what they need, else bisection of the largest parts."""
    rule = _topk_counted.rule(*logits.shape)
    if _topk_counted.why_not(logits.shape[1], topk, rule) is None:
        return rule
    return _bisections(logits, topk)[-1]


def configs(*, logits, topk, **_) -> Iterable[Launch]:
    """All legal configurations but those of unlikely numbers of bins and loads."""
    N, S = logits.shape
    counted = [
        Counted(threads=t, bins=b, pieces=p)
        for p in _topk_counted.PIECES
        for t in _topk_counted.THREADS
        for b in (2048, 4096)
        if p == 1 or N * p <= 2 * _mosaic.num_sms()
    ]
    return [c for c in counted if _topk_counted.why_not(S, topk, c) is None] + _bisections(logits, topk)


def indexer_topk(*, config: Launch, logits, starts, ends, topk):
    """Launch; arguments as prepared by `jaxattn.ops.indexer_topk`."""
    if isinstance(config, Counted):
        if reason := _topk_counted.why_not(logits.shape[1], topk, config):
            raise ValueError(f"indexer_topk: {reason}")
        if not logits.shape[0]:
            return jnp.zeros((0, topk), i32)
        return _topk_counted.choose(config, logits, starts, ends, topk)
    assert isinstance(config, Config)
    if config not in _bisections(logits, topk):
        raise ValueError(f"indexer_topk: entries={config.entries} must be at least 2 topk = {2 * topk}")
    (N, S), most = logits.shape, config.entries
    if not N:
        return jnp.zeros((0, topk), i32)
    if most >= S:
        return _choose(logits, None, starts, ends, topk, starts)
    parts = -(-S // most)
    x = jnp.pad(logits, ((0, 0), (0, parts * most - S))).reshape(N * parts, most)
    first = jnp.arange(parts, dtype=i32) * most
    low, high = (jnp.clip(a[:, None] - first, 0, most).reshape(-1) for a in (starts, jnp.minimum(ends, S)))
    found = _choose(x, None, low, high, topk, jnp.zeros_like(low))
    best = jnp.take_along_axis(x, jnp.maximum(found, 0), 1).reshape(N, parts * topk)
    there = found.reshape(N, parts, topk)
    names = jnp.where(there >= 0, there + first[:, None] - starts[:, None, None], -1).reshape(N, parts * topk)
    while best.shape[1] > most:
        names, best = _fewer(names, best, topk, most)
    zero = jnp.zeros_like(starts)
    return _choose(best, names, zero, zero + best.shape[1], topk, zero)


def _fewer(names, best, topk: int, most: int):
    """The winners of every part of candidates."""
    N, S = best.shape
    parts = -(-S // most)
    best = jnp.pad(best, ((0, 0), (0, parts * most - S))).reshape(N * parts, most)
    names = jnp.pad(names, ((0, 0), (0, parts * most - S)), constant_values=-1).reshape(N * parts, most)
    places = jnp.where(names >= 0, jnp.arange(most, dtype=i32), -1)
    zero = jnp.zeros(N * parts, i32)
    found = _choose(best, places, zero, zero + most, topk, zero)
    at = jnp.maximum(found, 0)
    names = jnp.where(found >= 0, jnp.take_along_axis(names, at, 1), -1)
    return names.reshape(N, parts * topk), jnp.take_along_axis(best, at, 1).reshape(N, parts * topk)


def _choose(logits, names, starts, ends, topk: int, origins) -> jax.Array:
    """The best entries of rows that a warpgroup holds: their names, or their numbers less `origins`; -1 behind them.

    Args:
        logits: [N, S].
        names: int32 [N, S], rising, negative = cannot be chosen; None = numbers of entries.
        starts: int32 [N], first entry to choose from.
        ends: int32 [N], behind the last one.
        topk: how many.
        origins: int32 [N].
    """
    (N, S), width = logits.shape, -(-logits.shape[1] // _STEP) * _STEP
    shape = (_WARPS, width // _WARPS)
    layout = _rows.layout(shape[1], _VEC)
    arrays = [logits] if names is None else [logits, names]
    arrays = [jnp.pad(x, ((0, 0), (0, width - S)), constant_values=-1).reshape(N, *shape) for x in arrays]
    ends = jnp.minimum(ends, S)

    def read(refs, n):
        return [plgpu.load(ref.at[n], layout=layout, optimized=False) for ref in refs]

    def nothing(dtype):
        return plgpu.layout_cast(jnp.zeros(shape, dtype), layout)

    def body(starts_ref, ends_ref, origins_ref, *refs):
        *refs, o_ref, totals = refs
        n = lax.axis_index("row")
        start, end = starts_ref[n], ends_ref[n]
        x, *named = lax.cond(start < end, lambda: read(refs, n), lambda: [nothing(ref.dtype) for ref in refs])
        iota = [plgpu.broadcasted_iota(i32, shape, axis, layout=layout) for axis in (0, 1)]
        entry = iota[0] * shape[1] + iota[1]
        visible = (entry >= start) & (entry < end)
        for name in named:
            visible = visible & (name >= 0)
        keys = jnp.where(visible, _keys(x), _LOWEST)
        wanted = jnp.minimum(_count(keys > _LOWEST), topk)
        bound, limit = _threshold(keys, entry, wanted, width)
        chosen = (keys > bound) | ((keys == bound) & (entry < limit))
        value = named[0] if named else entry - origins_ref[n]
        _compact(o_ref, totals, n, chosen.astype(i32), value, wanted, layout)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((N, topk), i32),
        scratch_types=[plgpu.SMEM((_WARPS,), i32)],
        grid=(N,),
        grid_names=("row",),
        kernel_name="indexer_topk",
    )(starts, ends, origins, *arrays)


def _keys(x: jax.Array) -> jax.Array:
    """Integers in the order of floats, denormals included: NaN as -inf, both zeros alike."""
    bits = lax.bitcast_convert_type(x, i32)
    size = bits & _MAGNITUDE
    bits = jnp.where(size > _INFINITE, _INFINITE + _LOWEST, jnp.where(size == 0, 0, bits))
    return bits ^ ((bits >> 31) & _MAGNITUDE)


def _count(where: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sum(where.astype(i32), 1))


def _middle(low, high):
    """The mean, rounded down, without overflow."""
    return (low & high) + ((low ^ high) >> 1)


def _threshold(keys, entry, wanted, width: int):
    """(bound, limit): keys above the bound, and those equal to it in front of the limit, are `wanted` many."""

    def wider(state):
        low, high, found = state
        return (low + 1 < high) & (found != wanted)

    def halve(state):
        low, high, found = state
        middle = _middle(low, high)
        here = _count(keys >= middle)
        enough = here >= wanted
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle), jnp.where(enough, here, found)

    # at least `wanted` keys are at least `low`, fewer are at least `high`
    low, high = jnp.int32(_LOWEST + 1), jnp.max(jnp.max(keys, 1)) + 1
    bound, _, found = lax.while_loop(wider, halve, (low, high, _count(keys >= low)))
    equal = keys == bound
    missing = wanted - _count(keys > bound)

    def shorter(state):
        few, enough = state
        return (few + 1 < enough) & (found != wanted)

    def shift(state):
        few, enough = state
        middle = _middle(few, enough)
        here = _count(equal & (entry < middle)) >= missing
        return jnp.where(here, few, middle), jnp.where(here, middle, enough)

    _, limit = lax.while_loop(shorter, shift, (jnp.int32(0), jnp.int32(width)))
    return bound, limit


def _compact(out: Any, totals: Any, n: Any, chosen: jax.Array, value: jax.Array, wanted: Any, layout: Any) -> None:
    """Write the values of what is chosen to a row of `out`, in order, and -1 behind the last of `wanted`."""
    topk, count = out.shape[1], chosen.shape[1]
    if _mosaic.interpreting():
        [at] = jnp.nonzero(chosen.reshape(-1), size=topk, fill_value=-1)
        out[n] = jnp.where(at >= 0, value.reshape(-1)[at], -1)
        return
    splat, ref = plgpu.Layout.WG_SPLAT, plgpu.RefType()

    def emit(context, out, totals, chosen, value, n, wanted):
        del context
        thread, wanted = Thread(), _words.scalar(wanted)
        flags, values = _words.words_of(chosen), _words.words_of(value)
        row = Memory(out).wide(_words.scalar(n), 4 * topk)
        ballots = [_words.ballot(flag) for flag in flags]
        counts = [_words.population(b) for b in ballots]
        mine = sum(counts[1:], counts[0])
        Memory(totals).at(thread.warp << 2).store(0, mine, 4)
        _words.barrier()
        place = _words.Word.of(0)
        for warp in range(_WARPS - 1):
            before = Memory(totals).load(4 * warp, 4)
            place = place + _words.select(_words.less(warp, thread.warp), before, 0)
        lower = _words.lanes_below()
        for i in range(0, count // 32, _VEC):
            mine = place
            for b in ballots[i : i + _VEC]:
                mine = mine + _words.population(b & lower)
            for v in range(_VEC):
                row.at(mine << 2).store_if(_words.less(0, flags[i + v]), values[i + v])
                mine = mine + flags[i + v]
                place = place + counts[i + v]
        for first in range(0, topk, 128):
            at = thread.index + first
            behind = _words.both(_words.less(wanted, at + 1), _words.less(at, topk))
            row.at(at << 2).store_if(behind, -1)

    inline: Any = plgpu.inline_mgpu(arg_types=(ref, ref, layout, layout, splat, splat))
    inline(emit)(out, totals, chosen, value, n, wanted)
