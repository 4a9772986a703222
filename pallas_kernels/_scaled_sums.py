"""Sums of products of codes over the inputs of a tile, the inner loops of `scaled_matmul`.

FP8 tensor cores keep about 14 bits of a running sum, so the sum of each block of 128 inputs (with block scales), or of
`PROMOTE` such blocks, is added to a float32 sum in registers. INT8 sums are int32, exact.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _inline, _inline_memory, _row_tiles

BLOCK = 128
"""Inputs of one step: a swizzle span of 8-bit codes."""
PROMOTE = 4
"""Steps whose FP8 products one accumulator adds up."""
TOGETHER = 8
"""Steps written out in a row; the tensor cores run dry after them only."""
SCALES = 4
"""Columns of block scales that are fetched together: TMA copies 16 bytes at least."""

f32, i32 = jnp.float32, jnp.int32


def _start(r: Any, slot, part, rows, sums=None, over=None):
    """Start the product of one block of inputs."""
    return _inline.start(r.a_ring.at[slot, part, rows], r.b_ring.at[slot, part], sums, over)


def _rows(x: Any, warpgroup, wave: int):
    """Rows of the tile that a warpgroup multiplies in one wave."""
    return pl.ds(0 if x.config.split else warpgroup * (x.config.rows // 2) + wave * 64, 64)


def _in_turn(x: Any, r: Any, turn, first, count: int, begin, end) -> None:
    """`begin(i, slot)` starts the products of step first + i, `end(i, pending)` uses them, one step later.

    So a warpgroup's tensor cores have work while it adds; `pending` groups of products may still be under way then.
    """
    slots = _slots(x, turn * x.steps + first, count)

    def finish(i, pending):
        end(i, pending)
        plgpu.barrier_arrive(r.empty.at[slots[i]])

    for i, slot in enumerate(slots):
        plgpu.barrier_wait(r.full.at[slot])
        begin(i, slot)
        if i > 0:
            finish(i - 1, x.waves)
    finish(count - 1, 0)


def _slots(x: Any, first, count: int) -> list:
    """Slots of `count` steps from step `first` on."""
    slots = [lax.rem(first, i32(x.config.stages))]
    for _ in range(count - 1):
        slots.append(jnp.where(slots[-1] == x.config.stages - 1, 0, slots[-1] + 1))
    return slots


def of_blocks(x: Any, r: Any, turn, warpgroup, at: _row_tiles.Place) -> tuple:
    """Sums of one tile with a scale per row and block of inputs: one float32 [64, features] per wave."""
    c = x.config
    part = warpgroup if c.split else 0
    scale_row, last = x.scale_row(at.feature), pl.cdiv(x.M, BLOCK) - 1
    if at.weight is not None:
        scale_row = scale_row + at.weight * pl.cdiv(x.F, BLOCK)

    def b_scales(j, count):
        return tuple(r.b_scale[scale_row, jnp.minimum((j + i) * x.parts + part, last)] for i in range(count))

    def multiply_ahead(j, sums, scales):
        sums, started, used = list(sums), {}, {}

        def begin(i, slot):
            for wave in range(x.waves):
                rows = _rows(x, warpgroup, wave)
                column = (j + i) * x.parts + part
                if c.resident:
                    scale = _inline_memory.load_column(r.scales, column) * scales[i]
                else:
                    ring = r.scale_ring.at[slot, rows]
                    scale = _inline_memory.load_column(ring, lax.rem(column, i32(SCALES))) * scales[i]
                started[i, wave] = scale, _start(r, slot, part, rows, over=used.pop((i - 2, wave), None))

        def end(i, pending):
            for wave in range(x.waves):
                scale, product = started.pop((i, wave))
                product = _inline.settle(product, pending + x.waves - 1 - wave)
                sums[wave] = _inline.add_scaled(sums[wave], scale, product)
                used[i, wave] = product

        _in_turn(x, r, turn, j, len(scales), begin, end)
        return tuple(sums)

    def multiply_waves(j, sums, scales):
        """One product at a time, all in the same registers: the other warpgroup's products fill the gaps."""
        sums, product = list(sums), None
        for i, slot in enumerate(_slots(x, turn * x.steps + j, len(scales))):
            plgpu.barrier_wait(r.full.at[slot])
            for wave in range(x.waves):
                rows = _rows(x, warpgroup, wave)
                product = _start(r, slot, 0, rows, over=product)
                scale = _inline_memory.load_column(r.scale_ring.at[slot, rows], lax.rem(j + i, i32(SCALES))) * scales[i]
                product = _inline.settle(product, 0)
                if wave == x.waves - 1:
                    plgpu.barrier_arrive(r.empty.at[slot])
                sums[wave] = _inline.add_scaled(sums[wave], scale, product)
        return tuple(sums)

    multiply = multiply_waves if x.waves > 1 else multiply_ahead

    def steps(n, carry):
        sums, scales = carry
        ahead = b_scales((n + 1) * x.written, x.written) if x.early else None
        return multiply(n * x.written, sums, scales), ahead or b_scales((n + 1) * x.written, x.written)

    zero = plgpu.layout_cast(jnp.zeros((64, c.features), f32), _inline.WGMMA)
    whole, rest = divmod(x.steps, x.written)
    turns = whole if at.weight is None else whole + jnp.minimum(at.weight, 0)  # one turn would be unrolled, and spill
    sums, scales = lax.fori_loop(0, turns, steps, ((zero,) * x.waves, b_scales(0, x.written)))
    return multiply(whole * x.written, sums, scales[:rest]) if rest else sums


def plain(x: Any, r: Any, turn, warpgroup, at: _row_tiles.Place) -> tuple:
    """Sums of one tile without scales: [64, features] per wave, int32 or float32."""
    c = x.config
    del at
    part, chain = warpgroup if c.split else 0, TOGETHER if x.running else PROMOTE

    def multiply(j, before, count):
        """`count` steps; sums of INT8 and bfloat16 go on, FP8 products of `chain` steps are added to float32 sums."""
        sums: list[Any] = [None] * x.waves if before is None else list(before)
        running: list[Any] = list(sums) if x.running else [None] * x.waves

        def begin(i, slot):
            for wave in range(x.waves):
                rows = _rows(x, warpgroup, wave)
                old = None if i % chain == 0 and not x.running else running[wave]
                if old is None and i > 0:
                    finished[i - 1, wave] = running[wave]
                over = used.pop((i - chain - 1, wave), None) if old is None else None
                running[wave] = _start(r, slot, part, rows, old, over)

        def end(i, pending):
            if i + 1 < count and (i + 1) % chain:
                plgpu.wgmma_wait(pending)
                return
            for wave in range(x.waves):
                products = finished.pop((i, wave), running[wave])
                products = _inline.settle(products, pending + x.waves - 1 - wave)
                sums[wave] = products if x.running else sums[wave] + products
                used[i, wave] = products

        finished, used = {}, {}
        _in_turn(x, r, turn, j, count, begin, end)
        return tuple(sums)

    whole, rest = divmod(x.steps, x.written)
    if x.running:
        first = rest or x.written
        sums = multiply(0, None, first)
        more = (x.steps - first) // x.written
        return lax.fori_loop(0, more, lambda n, sums: multiply(first + n * x.written, sums, x.written), sums)
    zero = plgpu.layout_cast(jnp.zeros((64, c.features), f32), _inline.WGMMA)
    sums = lax.fori_loop(0, whole, lambda n, sums: multiply(n * TOGETHER, sums, TOGETHER), (zero,) * x.waves)
    return multiply(whole * TOGETHER, sums, rest) if rest else sums
