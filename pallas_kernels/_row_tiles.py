"""Tiles of rows that lie in groups, each with a weight of its own: the tables, and how a partial tile is stored."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _inline

ROWS = 64
"""Rows that are stored together."""

i32 = jnp.int32


def most(N: int, E: int, rows: int) -> int:
    """Tiles of `rows` rows that N rows in E groups need, however they are shared out."""
    return (N + min(E, N) * (rows - 1)) // rows


def tables(offsets: jax.Array, N: int, rows: int) -> dict[str, jax.Array]:
    """Which rows and which weight each tile has; without a host and with static sizes.

    Args:
        offsets: int32 [E + 1]: group e has rows offsets[e] to offsets[e + 1] - 1 of N.
        N: rows, in groups or behind the last one.
        rows: of a tile; a group's last one may be partial.

    Returns:
        int32 `first` row, `weight` and `end` (behind the weight's last row) of `most` tiles; `count`: tiles that there
        are, and the end of the last group.
    """
    E = offsets.shape[0] - 1
    tile, group = (np.arange(n, dtype=np.int32) for n in (most(N, E, rows), E))
    offsets = jnp.clip(offsets, 0, N)
    tiles = -(-jnp.diff(offsets) // rows)
    ends = jnp.sum(jnp.where(group <= group[:, None], tiles, 0), 1, dtype=jnp.int32)
    of = jnp.sum(tile[:, None] >= ends[:-1], 1, dtype=jnp.int32)
    first = offsets[of] + (tile - (ends - tiles)[of]) * rows
    count = jnp.stack([jnp.minimum(ends[-1], len(tile)), offsets[E]])
    return {"count": count, "first": first, "weight": of, "end": offsets[of + 1]}


# ---------------------------------------------------------------- device code
class Place(NamedTuple):
    """Where a tile lies; where there are several weights, also which one it has and where that one's rows end."""

    row: Any
    feature: Any
    weight: Any = None
    end: Any = None


def send(tile: Any, o: Callable[[Any, int], Any], count) -> None:
    """Start to write the first `count` of 64 rows of shared memory; `o(start, size)` is where they go.

    A swizzle repeats after 8 rows, so each copy starts at a multiple of them.
    """

    def rows(start, size: int):
        plgpu.copy_smem_to_gmem(tile.at[pl.ds(start, size)], o(start, size), commit_group=False)

    def some():
        for size in (32, 16, 8):
            pl.when(count & size != 0)(lambda size=size: rows(count & (ROWS - 2 * size), size))
        for size in range(1, 8):
            pl.when(count & 7 == size)(lambda size=size: rows(count & (ROWS - 8), size))

    pl.when(count >= ROWS)(lambda: rows(0, ROWS))
    pl.when((count > 0) & (count < ROWS))(some)
    plgpu.commit_smem_to_gmem_group()


def clear(tiles: Any, o: Any, first, warpgroup, block, blocks: int) -> None:
    """Write zeros to rows `first` and on of `o`.

    Args:
        tiles: shared memory, [64, columns] for each warpgroup that takes part, the first ones.
        o: global memory.
        first: row.
        warpgroup: the caller.
        block: its thread block, of `blocks`.
        blocks: that share the work.
    """
    (N, F), (warpgroups, _, columns) = o.shape, tiles.shape
    across, writers = pl.cdiv(F, columns), blocks * warpgroups
    pieces = lax.div(N - first + (ROWS - 1), i32(ROWS)) * across
    me = block * warpgroups + warpgroup

    @pl.when((warpgroup < warpgroups) & (me < pieces))
    def _():
        tile = tiles.at[warpgroup]
        tile[...] = plgpu.layout_cast(jnp.zeros(tile.shape, tile.dtype), _inline.WGMMA)
        plgpu.commit_smem()

        def piece(i, _):
            at = me + i * writers
            row, column = first + lax.div(at, i32(across)) * ROWS, lax.rem(at, i32(across)) * columns
            plgpu.copy_smem_to_gmem(tile, o.at[pl.ds(row, ROWS), pl.ds(column, columns)])

        lax.fori_loop(0, lax.div(pieces - me + (writers - 1), i32(writers)), piece, None)
        plgpu.wait_smem_to_gmem(0)
