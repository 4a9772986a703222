"""Where rows and weights of grouped products of experts lie, and how TMA fetches a step of them, see `experts`."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

FEW = 16
"""Rows that are fetched for a tile that has no more."""

i32 = jnp.int32


def share(total: Any, blocks: int, me: Any) -> Any:
    """How many of `total` tiles thread block `me` of some takes: its number and every so many further."""
    return lax.div(total - me + (blocks - 1), i32(blocks))


def first_row(x: Any, r: Any, tile):
    """Where a tile's results lie."""
    return (tile if x.config.shared else r.starts[tile]) * x.unit


def input_row(x: Any, r: Any, tile):
    """Where a tile's rows lie in the operand: all tokens in front, for the first product on shared rows."""
    return 0 if x.config.shared and x.act else first_row(x, r, tile)


def weight(x: Any, r: Any, expert, across, half: int, inputs):
    """Some inputs of one half of a tile's features, in global memory."""
    if x.act is None:
        return r.w.at[expert, pl.ds(across * x.width + half * x.config.half, x.config.half), inputs]
    features = pl.ds(across * x.config.half, x.config.half)
    return r.w.at[expert, features, half, inputs] if x.turns else r.w.at[expert, half, features, inputs]


def fetch(x: Any, r: Any, tile, k, slot) -> None:
    """Fetch the rows of step `k` of a tile, and their scales; what lies outside becomes zero."""
    c, full, row = x.config, r.full.at[slot], input_row(x, r, tile)
    scales = tile * x.loaded if x.tiled else row
    few = None if c.shared else r.filled[tile] <= FEW // x.unit

    def rows(count):
        given = r.rows.at[pl.ds(row, count), pl.ds(k * x.inputs, x.inputs)]
        plgpu.copy_gmem_to_smem(given, r.a_ring.at[slot, pl.ds(0, count)], full)

    if few is None:
        rows(x.loaded)
    else:
        pl.when(few)(lambda: rows(FEW))
        pl.when(jnp.logical_not(few))(lambda: rows(x.loaded))
    if x.blocks:
        to = r.scale_ring.at[slot, pl.ds(0, x.loaded)]
        plgpu.copy_gmem_to_smem(r.row_scale.at[k, pl.ds(scales, x.loaded)], to, full)


def load(x: Any, r: Any, tile, across, first) -> None:
    """Fetch one tile's rows and weights, step by step; what lies outside becomes zero."""
    c, expert = x.config, r.experts[tile]

    def step(k, _):
        at = first + k
        slot = lax.rem(at, i32(c.stages))
        pl.when(at >= c.stages)(lambda: plgpu.barrier_wait(r.empty.at[slot]))
        for half in range(2):
            given = weight(x, r, expert, across, half, pl.ds(k * x.inputs, x.inputs))
            plgpu.copy_gmem_to_smem(given, r.b_ring.at[slot, pl.ds(half * c.half, c.half)], r.full.at[slot])
        fetch(x, r, tile, k, slot)

    lax.fori_loop(0, x.steps, step, None)


def skip(x: Any, r: Any, first) -> None:
    """Let one tile's steps pass."""

    def step(k, _):
        slot = lax.rem(first + k, i32(x.config.stages))
        plgpu.barrier_wait(r.full.at[slot])
        plgpu.barrier_arrive(r.empty.at[slot])

    lax.fori_loop(0, x.steps, step, None)
