"""Sums over all inputs in grouped products of experts: one warpgroup's 64 rows of a tile, see `experts`."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _inline, _mosaic

ROWS = 64
BLOCK = 128
"""Inputs that share a scale, and the features that do."""
TOGETHER = 2
"""Blocks whose products are started at once."""
ALONE = 2
"""Blocks that are written out in a row where products are started one by one."""

f32, i32 = jnp.float32, jnp.int32
WGMMA, ROW = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)


def sums(x: Any, r: Any, warpgroup, expert, across, first) -> tuple[jax.Array, jax.Array]:
    """Both halves of a tile, [64, half] each: float32, or int32 for INT8.

    Args:
        x: plan of the product.
        r: its references.
        warpgroup: whose rows.
        expert: of the tile.
        across: which of the tiles side by side.
        first: number of the tile's first step.
    """
    if not x.blocks and x.format != "fp8_tensor":
        return _plain_sums(x, r, warpgroup, expert, across, first)
    return (_block_sums if x.config.half == ROWS else _wide_sums)(x, r, warpgroup, expert, across, first)


def _operands(r: Any, warpgroup, slot):
    return r.a_ring.at[slot, pl.ds(warpgroup * ROWS, ROWS)], r.b_ring.at[slot].T


def _plain_sums(x: Any, r: Any, warpgroup, expert, across, first) -> tuple[jax.Array, jax.Array]:
    """Sums over all inputs, both halves [64, half]; int32 for INT8."""
    del expert, across
    c = x.config

    def products(sums):
        def step(k, _):
            at = first + k
            slot = lax.rem(at, i32(c.stages))
            plgpu.barrier_wait(r.full.at[slot])
            plgpu.wgmma(sums, *_operands(r, warpgroup, slot))
            plgpu.wgmma_wait(1)
            before = lax.rem(at + (c.stages - 1), i32(c.stages))
            pl.when(k > 0)(lambda: plgpu.barrier_arrive(r.empty.at[before]))

        lax.fori_loop(0, x.steps, step, None)
        values = sums[...]
        plgpu.barrier_arrive(r.empty.at[lax.rem(first + (x.steps - 1), i32(c.stages))])
        return values

    kind = i32 if x.format == "int8" else f32
    sums = pl.run_scoped(products, _mosaic.ACC((ROWS, 2 * c.half), kind))
    return sums[:, : c.half], sums[:, c.half :]


def _block_sums(x: Any, r: Any, warpgroup, expert, across, first) -> tuple[jax.Array, jax.Array]:
    """Sums of sums over 128 inputs, each with the scales of its rows and of its features, if there are any.

    FP8 tensor cores keep about 14 bits of a running sum, so 128 inputs are as far as they go.
    """
    c = x.config
    scales = _weight_scales(x, r, expert, across)

    def add(k, sums, weight_scales):
        """Blocks k, k + 1, ..."""

        def products(*parts):
            total = list(sums)
            at = [lax.rem(first + k + i, i32(c.stages)) for i in where]
            for slot, part in zip(at, parts, strict=True):
                plgpu.barrier_wait(r.full.at[slot])
                plgpu.wgmma(part, *_operands(r, warpgroup, slot))
            for i, (slot, part) in enumerate(zip(at, parts, strict=True)):
                scale = None
                if x.blocks:
                    rows = r.scale_ring.at[slot, pl.ds(warpgroup * ROWS, ROWS)]
                    scale = plgpu.load(rows, layout=ROW, optimized=False)
                value = plgpu.wgmma_accumulator_load(part, wait_n=len(parts) - 1 - i)
                if x.blocks and _mosaic.interpreting():
                    plgpu.commit_smem()  # the race detector wants a fence behind loads; the card does not
                plgpu.barrier_arrive(r.empty.at[slot])
                for half in range(2):
                    mine = value[:, half * c.half : (half + 1) * c.half]
                    if scale is not None:
                        mine = mine * lax.broadcast_in_dim(scale * weight_scales[where[i]][half], mine.shape, [0])
                    total[half] = total[half] + mine
            return tuple(total)

        for start in range(0, len(weight_scales), TOGETHER):
            where = range(start, min(start + TOGETHER, len(weight_scales)))
            sums = pl.run_scoped(products, *[_mosaic.ACC((ROWS, 2 * c.half), f32) for _ in where])
        return sums

    def step(n, carry):
        sums, now = carry
        ahead = scales((n + 1) * TOGETHER, TOGETHER)
        return add(n * TOGETHER, sums, now), ahead

    zero = plgpu.layout_cast(jnp.zeros((ROWS, c.half), f32), WGMMA)
    whole, rest = divmod(x.steps, TOGETHER)
    sums, now = lax.fori_loop(0, whole, step, ((zero, zero), scales(0, TOGETHER)))
    return add(whole * TOGETHER, sums, now[:rest]) if rest else sums


def _weight_scales(x: Any, r: Any, expert, across):
    """`scales(k, count)`: those of blocks k, k + 1, ... for both halves, or None."""
    distance = x.N if x.act else x.config.half  # from the features of one half to those of the other
    lines = [lax.div(across * x.width + half * distance, i32(BLOCK)) for half in range(2)]
    last = x.steps - 1

    def scales(k, count):
        if not x.blocks:
            return (None,) * count
        at = [jnp.minimum(k + i, last) for i in range(count)]
        return tuple(tuple(r.weight_scale[expert, line, i] for line in lines) for i in at)

    return scales


def _wide_sums(x: Any, r: Any, warpgroup, expert, across, first) -> tuple[jax.Array, jax.Array]:
    """`_block_sums` of 2 x 128 features: one product at a time, another warpgroup's fill the gaps."""
    c, scales = x.config, _weight_scales(x, r, expert, across)

    def add(k, sums, weight_scales):
        sums, product = list(sums), None
        for i, now in enumerate(weight_scales):
            slot = lax.rem(first + k + i, i32(c.stages))
            plgpu.barrier_wait(r.full.at[slot])
            scale = None
            for half in range(2):
                rows, features = pl.ds(warpgroup * ROWS, ROWS), pl.ds(half * c.half, c.half)
                a, b = r.a_ring.at[slot, rows], r.b_ring.at[slot, features]
                product = _inline.start(a, b, over=product)
                if x.blocks and half == 0:
                    scale = plgpu.load(r.scale_ring.at[slot, rows], layout=ROW, optimized=False)
                product = _inline.settle(product, 0)
                if half == 1:
                    _inline.release_reads()
                    plgpu.barrier_arrive(r.empty.at[slot])
                if scale is None:
                    sums[half] = sums[half] + product
                else:
                    sums[half] = _inline.add_scaled(sums[half], scale * now[half], product)
        return tuple(sums)

    def steps(n, carry):
        sums, now = carry
        return add(n * ALONE, sums, now), scales((n + 1) * ALONE, ALONE)

    zero = plgpu.layout_cast(jnp.zeros((ROWS, c.half), f32), WGMMA)
    whole, rest = divmod(x.steps, ALONE)
    sums, now = lax.fori_loop(0, whole, steps, ((zero, zero), scales(0, ALONE)))
    return add(whole * ALONE, sums, now[:rest]) if rest else sums


def encoded(value, lowest: int):
    """Numbers [64, 128] over the scales of their rows, and those, [64]: see `_row_copies.encode`."""
    bits = lax.bitcast_convert_type(jnp.max(jnp.abs(value), 1), i32)
    exponent = jnp.maximum(((bits + 0x1FFFFF) >> 23) - (127 + 8), lowest)
    scale, inverse = (lax.bitcast_convert_type((127 + e) << 23, f32) for e in (exponent, -exponent))
    return value * lax.broadcast_in_dim(inverse, value.shape, [0]), scale
