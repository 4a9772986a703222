"""The compressor of DeepSeek-V4 on Mosaic GPU, in place: two launches, see `jaxattn.ops.compressor`.

The first leaves every token's numbers in the state; it loads them before it knows their place, all before it stores
any. The second has a thread block for each token, which goes on where a window ends: eight rows of the window at a
time, values and scores at once if there are no more, each channel in one lane, then norm, rotation by angles that it
looks up itself, and the cache's format.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _codes, _frames, _mosaic, _packed_rows, _rotary
from pallas_kernels import _plans as plans
from pallas_kernels._frames import Frame

_FRAMES = {512: _packed_rows.V4, 128: _packed_rows.INDEXER}
"""How an entry lies in a warpgroup."""
_ROTARY = 64
_TOGETHER = 8
"""Rows of a window in registers."""
_MOST = 256

f32, i32 = jnp.float32, jnp.int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(_packed_rows.Config):
    """As that of `_packed_rows`, of the first launch."""


def why_not(*, kv, ape, weight, cos_sin, state_table, cache, format, **_) -> str | None:
    """None if the kernel can run these arguments, else one sentence."""
    D, count = weight.shape[0], kv.shape[1] // weight.shape[0] * ape.shape[0]
    if jnp.dtype(kv.dtype) != f32:
        return f"kv must be float32, got {jnp.dtype(kv.dtype).name}"
    for name, x in (("weight", weight), ("cache", cache)):
        if jnp.dtype(x.dtype).name not in (*plans.DTYPES, "uint8"):
            return f"{name} must be {_mosaic.either(plans.DTYPES)}, got {jnp.dtype(x.dtype).name}"
    if D not in _FRAMES or cos_sin.shape[1] != _ROTARY:
        dims = _mosaic.either(_FRAMES)
        return f"entries must have {dims} numbers, {_ROTARY} of them rotated, got {D} and {cos_sin.shape[1]}"
    if count & (count - 1) or not _TOGETHER <= count <= _MOST:
        return f"a window must have a power of two of {_TOGETHER} to {_MOST} rows, got {count}"
    if format != "plain" and cache.shape[1] % 32:
        return f"a page must be a multiple of 32 bytes, got {cache.shape[1]}"
    return None if state_table.shape[1] else "there are no pages of states"


def default_config(**_) -> Config:
    """One token a block."""
    return Config()


def configs(**_) -> Iterable[Config]:
    """All legal configurations."""
    return Config.choices()


def compressor(
    *,
    config: Config,
    kv,
    score,
    ape,
    weight,
    positions,
    request,
    cos_sin,
    state,
    state_table,
    cache,
    cache_slots,
    format,
    page,
    eps,
):
    """Launch; arguments as prepared by `jaxattn.ops.compressor`."""
    if not len(kv):
        return cache, state
    state = _save(kv, score, ape, positions, request, state, state_table, config)
    entries = positions, request, cache_slots, state_table
    return _compress(state, entries, ape.shape[0], weight, cos_sin, cache, format, page, eps), state


def _slot(table: Any, owner: Any, position: Any, spage: int, pages: int) -> tuple[Any, Any, Any]:
    """(there, page, place) of a position's state; page and place are those of some state where there is none."""
    column = lax.div(position, i32(spage))
    there = (position >= 0) & (column < table.shape[1])
    number = table[owner, jnp.where(there, column, 0)]
    there = there & (number >= 0) & (number < pages)
    return there, jnp.where(there, number, 0), jnp.where(there, lax.rem(position, i32(spage)), 0)


def _save(kv, score, ape, positions, request, state, table, config: Config):
    """The state with every token's row."""
    (N, W), (SP, spage, _), ratio = kv.shape, state.shape, ape.shape[0]
    line, tokens = _frames.line(W, f32), config.tokens
    assert not isinstance(line, str), line

    def body(positions_ref, request_ref, table_ref, kv_ref, score_ref, ape_ref, state_ref):
        def one(n):
            def load(ref, row):
                return [line.frame.load(line.at(ref, row, start)) for start in line.starts]

            early = [load(ref, n) for ref in (kv_ref, score_ref)]
            position = positions_ref[n]
            there, number, place = _slot(table_ref, request_ref[n], position, spage, SP)
            early = [[_packed_rows.held(x, line.frame.numbers) for x in pieces] for pieces in early]

            @pl.when(there)
            def _():
                late = lax.rem(position, i32(ratio))
                for start, value, more, bias in zip(line.starts, *early, load(ape_ref, late), strict=True):
                    put(state_ref.at[number, place], start, value, more + bias)

        def put(row, start, value, score):
            _mosaic.store(row.at[pl.ds(start, line.width)], value)
            _mosaic.store(row.at[pl.ds(W + start, line.width)], score)

        _packed_rows.each_token(tokens, N, one)

    grid = (pl.cdiv(N, tokens),)
    launch = plgpu.kernel(
        body,
        out_type=(),
        grid=grid,
        grid_names=("block",),
        kernel_name="compressor_state",
        # no thread reads what it writes
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    read = positions, request, table, kv, score, ape
    return _packed_rows.in_place(lambda ref: launch(*read, ref), [state])[0]


def _compress(state, entries, ratio: int, weight, cos_sin, cache, format: str, page: int | None, eps: float):
    """The cache with the entries of the windows that end."""
    positions, request, slots, table = entries
    (N,), (SP, spage, width), D = positions.shape, state.shape, weight.shape[0]
    frame, size = _FRAMES[D], cache.shape[1] if page is None else page
    (blocks, unit), W, S = frame.shape, width // 2, cache.shape[0] * size
    count = W // D * ratio
    chunks = count // _TOGETHER
    view, put = _writer(cache, format, size, frame)

    def body(positions_ref, request_ref, slots_ref, table_ref, state_ref, weight_ref, angles_ref, cache_ref, *scratch):
        n = lax.axis_index("token")
        last, slot, owner = positions_ref[n], slots_ref[n], request_ref[n]
        ends = (last >= 0) & (lax.rem(last + 1, i32(ratio)) == 0)

        @pl.when(ends & (slot >= 0) & (slot < S))
        def _():
            def place_of(i):
                """(there, page, place, first block) of row i of the window; the older half has the first columns."""
                half = jnp.where(i < ratio, 0, blocks) if W > D else 0
                return *_slot(table_ref, owner, last - (count - 1) + i, spage, SP), half

            def load(place, which):
                _, number, at, half = place
                return frame.load(state_ref.at[number, at, pl.ds(which * (W // unit) + half, blocks)])

            def row(i, which):
                """Values (0) or scores (1) of row i of the window."""
                missing = 0.0 if which == 0 else -jnp.inf
                if early:
                    there, both = early[i]
                    return _where(there, both[which], missing)
                place = place_of(i)
                x = load(place, which)
                return jnp.where(lax.broadcast(place[0], frame.shape), x, missing)

            def chunk(j):
                return list(range(count)) if early else [j + m * chunks for m in range(_TOGETHER)]

            early = {}
            if chunks == 1:
                # conditions become masks: there are fewer predicates than rows, so that the first row would be waited
                # for, and its predicate be free again, before the others are loaded
                found = [(jnp.where(there, -1, 0), *place) for there, *place in map(place_of, range(count))]
                found = lax.optimization_barrier(found)
                early = {i: (place[0], [load(place, which) for which in (0, 1)]) for i, place in enumerate(found)}

            def largest(j, top):
                for i in chunk(j):
                    top = jnp.maximum(top, row(i, 1))
                return top

            lowest = plgpu.layout_cast(jnp.full(frame.shape, -jnp.inf, f32), frame.numbers)
            top = lax.fori_loop(0, chunks, largest, lowest) if chunks > 1 else largest(i32(0), lowest)
            top = jnp.where(jnp.abs(top) < jnp.inf, top, 0.0)

            def sums(j):
                weights = [jnp.exp(row(i, 1) - top) for i in chunk(j)]
                products = [
                    frame.each("mul.rn.f32", jnp.multiply, w, row(i, 0)) for w, i in zip(weights, chunk(j), strict=True)
                ]
                return _pairwise(products), _pairwise(weights)

            if chunks == 1:
                above, below = sums(i32(0))
            else:

                def keep(j, _):
                    for which, x in enumerate(sums(j)):
                        _mosaic.store(scratch[0].at[j, which], x)

                lax.fori_loop(0, chunks, keep, None)
                above, below = (
                    _pairwise([frame.load(scratch[0].at[j, which]) for j in range(chunks)]) for which in (0, 1)
                )
            below = jnp.maximum(below, _codes.TINY)
            mixed = _mosaic.divide(above, below, frame.numbers)
            scale = _frames.wide(frame.load(weight_ref))
            x = mixed * frame.spread(_inverse_root(frame, mixed, eps)) * scale
            block = plgpu.broadcasted_iota(i32, frame.shape, 0, layout=frame.numbers)
            cos, sin = _factors(frame, angles_ref, last - (ratio - 1))
            turned = _rotary.turned(x, cos, sin, frame.numbers)
            x = jnp.where(block >= blocks - _ROTARY // unit, turned, x)
            put(cache_ref, slot, x)

    launch = plgpu.kernel(
        body,
        out_type=(),
        grid=(N,),
        grid_names=("token",),
        scratch_types=[plgpu.SMEM((chunks, 2, *frame.shape), f32)] if chunks > 1 else [],
        kernel_name="compressor",
    )
    states = state.reshape(SP, spage, width // unit, unit)
    read = positions, request, slots, table, states, weight.reshape(frame.shape), cos_sin.astype(f32)
    return _packed_rows.in_place(lambda ref: launch(*read, ref), [view])[0].reshape(cache.shape)


def _where(mask: jax.Array, x: jax.Array, other: float) -> jax.Array:
    """float32 `x` where a scalar mask is -1, `other` where it is 0, without a predicate."""
    if other:
        mask, constant = lax.broadcast(mask, x.shape), np.float32(other).view(np.int32)
        bits = (lax.bitcast_convert_type(x, i32) & mask) | (~mask & constant)
    else:
        bits = lax.bitcast_convert_type(x, i32) & lax.broadcast(mask, x.shape)
    return lax.bitcast_convert_type(bits, f32)


def _pairwise(parts: Sequence[jax.Array]) -> jax.Array:
    """The sum in the reference's order: halves are added until one is left."""
    parts = list(parts)
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [a + b for a, b in zip(parts[:half], parts[half:], strict=True)]
    return parts[0]


def _inverse_root(frame: Frame, x: jax.Array, eps: float) -> jax.Array:
    """`1 / sqrt(mean(x^2) + eps)` of all numbers, for each row of the frame."""
    squares = frame.each("mul.rn.f32", jnp.multiply, x, x)
    if _mosaic.interpreting():  # in the reference's order and form
        total = _pairwise(list(squares.reshape(-1)))
        return jnp.broadcast_to(lax.rsqrt(total / x.size + eps), frame.shape[:1])
    mean = frame.divide_rows(frame.full(jnp.sum(frame.reduce(jnp.sum, squares))), float(x.size)) + frame.full(eps)
    return frame.divide_rows(frame.full(1.0), frame.row("sqrt.rn.f32", jnp.sqrt, mean))


def _factors(frame: Frame, table: Any, position: Any) -> tuple[jax.Array, ...]:
    """Angles of a position from the table, for every row of V4's frame, or as the frame has them."""
    if frame.shape[1] < _ROTARY:
        return _rotary.from_table(table, position, frame.shape, frame.numbers)
    found = _rotary.from_table(table, position, (_ROTARY,), frame.numbers.reduce(0))
    return tuple(lax.broadcast_in_dim(x, frame.shape, [1]) for x in found)


def _writer(cache, format: str, page: int, frame: Frame) -> tuple[jax.Array, Callable[..., None]]:
    """The cache as the kernel has it, and what writes an entry."""
    if format == "v4":
        return cache, lambda ref, slot, x: _packed_rows.put_v4(ref, _packed_rows.place_of(slot, page), x)
    if format == "indexer_mxfp4":
        return cache, lambda ref, slot, x: _packed_rows.put_indexer_mxfp4(ref, _packed_rows.place_of(slot, page), x)
    if format == "indexer_fp8":
        view = cache.reshape(cache.shape[0], -1, 32)
        return view, lambda ref, slot, x: _packed_rows.put_indexer_fp8(ref, _packed_rows.place_of(slot, page), x)
    view = cache.reshape(-1, *frame.shape)
    return view, lambda ref, slot, x: _mosaic.store(ref.at[slot.astype(i32)], x.astype(cache.dtype))
