"""Blocks of a cache as the decoding kernel's wgmma reads them: codes as numbers, and keys that no row sees as zeros."""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic
from pallas_kernels.paged_attention import _common as common
from pallas_kernels.paged_attention import _per_head as per_head

_TOGETHER = 64
"""Keys whose codes are converted at a time. Two barriers of the thread block lie around each piece."""

i32 = jnp.int32


def _layout(x, dtype):
    """Register layout of a block of the cache."""
    if x.restage:
        return _mosaic.strips(dtype, 2 * _span(x))
    return _mosaic.strips(dtype, x.swizzle)


def _span(x) -> int:
    """Columns of a register tile of converted codes."""
    return 128 if x.D >= 128 else 64


def _keep(value, layout, start, low, high):
    """Keys outside [low, high) become zero, because a product with P = 0 would let their NaN through."""
    row = plgpu.broadcasted_iota(i32, value.shape, 0, layout=layout)
    return jnp.where((row >= low - start) & (row < high - start), value, jnp.zeros_like(value))


def convert(x, codes: Any, scales, head, hole, tile: Any) -> None:
    """Codes of a block as 16-bit numbers in `tile`, for wgmma after the next `commit_smem`."""
    layout = _layout(x, codes.dtype)
    for n in range(0, x.block_kv, _TOGETHER):
        some = pl.ds(n, _TOGETHER)
        if x.per_head:
            value = per_head.numbers(x, codes.at[some], scales, head, layout, _span(x), n)
        else:
            value = plgpu.load(codes.at[some], layout=layout).astype(x.operand)
        if hole is not None:
            start, low, high = hole
            value = _keep(value, layout, start + n, low, high)
        tile[some, :] = value


def clear(x, block, hole):
    """The block, what no row sees zeroed."""
    start, low, high = hole

    @pl.when((start < low) | (start + x.block_kv > high))
    def _():
        layout = _layout(x, block.dtype)
        for n in range(0, x.D, common.PIECE):
            piece = pl.ds(n, common.PIECE)
            block[:, piece] = _keep(plgpu.load(block.at[:, piece], layout=layout), layout, start, low, high)
        plgpu.commit_smem()

    return block
