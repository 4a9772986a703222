"""Scores that are begun before the weights of the block before them arrive: instructions of `_attend`."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic
from pallas_kernels._online_softmax import ACC
from pallas_kernels.mla._plan import BLOCK, PIECE, ROWS, Plan

gpu, wgmma = _mosaic.gpu, _mosaic._wgmma


def group(x: Plan, w, n: int):
    """Where the group of pieces lies that comes n-th: to the second reader they come from the end, see `by_half`."""
    return jnp.where(w > 0, x.groups - 1 - n, n) if x.halves > 1 else n


def scores(x: Plan, r: Any, t: Any, w) -> jax.Array:
    """Start `q k^T` [ROWS, BLOCK] of reader w's block, pieces as they arrive: wgmma groups in flight. Compiled only."""
    each, place = x.D // PIECE // x.groups, w + t.zero
    s: Any = None
    for n in range(x.groups):
        at = group(x, w, n)
        plgpu.barrier_wait(r.k_bar.at[place * x.groups + at])
        pieces = pl.ds(at * each, each)
        s = _start(r.q_tile.at[t.zero, pieces], r.k_tile.at[place, pieces], s)
    return s


def _start(q, k, s: jax.Array | None) -> jax.Array:
    """Start `s + q k^T` of pieces of 64 columns, all of them swizzled tiles; one wgmma group. No s: zeros."""
    tile = plgpu.RefType(_mosaic.swizzled(128, bytes_per_value=2))
    out = plgpu.ShapeDtypeStruct((ROWS, BLOCK), jnp.float32, layout=ACC)

    def issue(context, q, k, *s):
        del context
        f32 = _mosaic.ir.F32Type.get()
        s = s[0] if s else gpu.FragmentedArray.splat(gpu.c(0.0, f32), (ROWS, BLOCK), ACC.to_mgpu())
        acc = wgmma.WGMMAAccumulator.from_registers(s)
        q, k = (gpu.memref_slice(ref, (slice(None), slice(None), 0)) for ref in (q, k))
        acc = wgmma.wgmma(acc, gpu.memref_transpose(q, (1, 0, 2, 3)), gpu.memref_transpose(k, (0, 1, 3, 2)))
        _mosaic.nvvm.wgmma_commit_group_sync_aligned()
        return acc.value

    before = () if s is None else (s,)
    inline: Any = plgpu.inline_mgpu(arg_types=(tile, tile, *(ACC,) * len(before)), return_type=out)
    return inline(issue)(q, k, *before)
