"""Device code of prefill attention that tiles share, whether they walk over blocks of keys or take all in one pass."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic
from pallas_kernels import _online_softmax as softmax
from pallas_kernels._online_softmax import LOG2E, ROW
from pallas_kernels.attention._plan import PIECE, Plan

i32 = jnp.int32


def split(n, parts: int):
    """Quotient and remainder of a number that is not negative."""
    if parts & (parts - 1):
        return lax.div(n, i32(parts)), lax.rem(n, i32(parts))
    return lax.shift_right_logical(n, i32(parts.bit_length() - 1)), n & (parts - 1)


def stage_of(x: Plan, tiles):
    """Where q of a tile lies, counted or as it was told of."""
    return tiles & (x.config.q_stages - 1)


def clean(x: Plan, v, low, high) -> None:
    """Make rows outside [low, high), which no query of the request sees, zero: they may be NaN, and NaN times 0 is NaN.

    A few rows at a time: this warpgroup has few registers.
    """
    layout, rows = _mosaic.strips(x.dtype, 128), 32 if v.shape[1] % 32 == 0 else 16

    @pl.loop(0, v.shape[1] // rows)
    def _(n):
        first = pl.multiple_of(n * rows, rows)

        @pl.when((first < low) | (first + rows > high))
        def _():
            row = first + plgpu.broadcasted_iota(i32, (rows, PIECE), 0, layout=layout)
            for piece in range(x.Dv // PIECE):
                part = v.at[piece, pl.ds(first, rows)]
                value = plgpu.load(part, layout=layout)
                part[...] = jnp.where((row >= low) & (row < high), value, jnp.zeros_like(value))

    plgpu.commit_smem()


def closed(r: Any, t: Any, warpgroup, state: softmax.State) -> softmax.State:
    """A warpgroup's sums with its sinks among them; the log-sum-exp, which knows no sinks, is stored."""
    m, total, _ = state
    if r.lse is not None:
        lse = jnp.where(total == 0, -jnp.inf, m * (1 / LOG2E) + jnp.log(total))
        _mosaic.store(r.lse.at[t.slot, t.chunk, warpgroup], lse)
    if r.sinks is not None:
        sink = plgpu.load(r.sinks.at[t.chunk, warpgroup], layout=ROW, optimized=False)
        state = softmax.with_sink(state, sink)
    return state
