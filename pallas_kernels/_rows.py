"""Row kernels: matrices [N, D] cut into tiles of whole rows, one warpgroup a tile, straight through registers.

Memory-bound work needs wide loads in flight and nothing else: a row lies in neighbouring lanes, 16 bytes each, and no
shared memory is used. What is left over when N is no multiple of the smallest tile goes through shared memory by TMA,
which clips at the array's end in both directions; no row is read or written twice.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic

_WARPS, _LANES = 4, 32
_TMA_BOX = 256
"""Largest extent of one TMA copy in each dimension."""
_ELEMENTS = 8192
"""Elements of one array in a tile: 64 a thread, eight or more 16-byte loads in flight."""


def vector(dtype: Any) -> int:
    """Elements in 16 bytes."""
    return 16 // jnp.dtype(dtype).itemsize


def lanes(D: int, vec: int) -> int:
    """Neighbouring lanes that hold a row's contiguous piece of `lanes * vec` values."""
    pieces = D // vec
    return min(_LANES, pieces & -pieces)


def smallest(D: int, vec: int) -> int:
    """Rows of the smallest tile."""
    return _WARPS * _LANES // lanes(D, vec)


def layout(D: int, vec: int) -> Any:
    """Register layout of [rows, D]; `.reduce(1)` is that of one number a row."""
    across = lanes(D, vec)
    per_warp = _LANES // across
    tile, part, lane_dims = (_WARPS * per_warp, across * vec), (per_warp, vec), (-2, -3)
    if across == 1:
        lane_dims = (-2,)
    if per_warp == 1:
        return plgpu.Layout.TILED(plgpu.Tiling((tile, (vec,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    return plgpu.Layout.TILED(plgpu.Tiling((tile, part)), warp_dims=(-4,), lane_dims=lane_dims, vector_dim=-1)


def why_not(N: int, D: int, vec: int) -> str | None:
    """None if rows of D values in 16-byte pieces can be laid out, else one sentence."""
    if D % vec:
        return f"the row length D must be a multiple of {vec} (16 bytes), got {D}; pad it"
    if N % smallest(D, vec) and D > _TMA_BOX:
        return (
            f"with rows longer than {_TMA_BOX} values the number of rows must be a multiple of {smallest(D, vec)}, got "
            f"{N} rows of {D}; pad them"
        )
    return None


def why_not_rows(rows: int, D: int, vec: int) -> str | None:
    """None if a tile of `rows` rows is legal, else one sentence."""
    least = smallest(D, vec)
    if rows % least:
        return f"{rows=} must be a multiple of {least}, the smallest tile for D={D}"
    return None


def check_rows(rows: int) -> None:
    """Raise `ValueError` for a tile height that is legal for no row length."""
    if rows <= 0 or rows % _WARPS:
        raise ValueError(f"{rows=} must be a positive multiple of {_WARPS}, one row for each warp")


def padded(x: jax.Array, D: int, vec: int) -> jax.Array:
    """One number a row `[..., N]`, lengthened with zeros to whole smallest tiles.

    A kernel reads and writes such numbers straight, also in the tile that N cuts short: a one-dimensional TMA copy does
    not clip on the card (jax 0.11.2; interpreted it does).
    """
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % smallest(D, vec))])


def choices(D: int, vec: int, most: int = _ELEMENTS) -> tuple[int, ...]:
    """Legal tile heights from the smallest on, in powers of two, with at most `most` elements a tile (at least one)."""
    least = smallest(D, vec)
    found = [least]
    while found[-1] * 2 * D <= most:
        found.append(found[-1] * 2)
    return tuple(found)


def default_rows(N: int, D: int, vec: int, sms: int, most: int = _ELEMENTS) -> int:
    """The largest tile that leaves each of `sms` multiprocessors four tiles, else the smallest."""
    legal = [r for r in choices(D, vec, most) if 4 * sms * r <= N]
    return legal[-1] if legal else smallest(D, vec)


@dataclasses.dataclass(frozen=True)
class Tile:
    """Rows `start` to `start + rows` of every array of one kernel; those beyond `N` do not exist."""

    start: Any
    rows: int
    D: int
    vec: int
    clipped: bool

    def load(self, ref: Any) -> jax.Array:
        """`ref` [N, 1, D], or [N] if `padded`, -> [rows, D] or [rows] in registers; clipped rows hold anything."""
        where = ref.at[pl.ds(self.start, self.rows)]
        flat = len(ref.shape) == 1
        tiled = layout(self.D, self.vec)
        kind = tiled.reduce(1) if flat else tiled
        if flat or not self.clipped:
            return plgpu.load(where if flat else where.at[:, 0], layout=kind, optimized=False)

        def fetch(smem, barrier):
            plgpu.copy_gmem_to_smem(where, smem, barrier)
            plgpu.barrier_wait(barrier)
            return plgpu.load(smem.at[:, 0], layout=kind, optimized=False)

        return pl.run_scoped(fetch, plgpu.SMEM((self.rows, *ref.shape[1:]), ref.dtype), plgpu.Barrier())

    def store(self, ref: Any, value: jax.Array) -> None:
        """Write [rows, D] or [rows] to `ref` as `load` reads it, cast to its dtype; clipped rows are not written."""
        where = ref.at[pl.ds(self.start, self.rows)]
        value = value.astype(ref.dtype)
        flat = len(ref.shape) == 1
        if flat or not self.clipped:
            _mosaic.store(where if flat else where.at[:, 0], value)
            return

        def put(smem):
            smem[:, 0] = value
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem, where)
            plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(put, plgpu.SMEM((self.rows, *ref.shape[1:]), ref.dtype))

    def divide(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """`x / y` of float32 [rows], correctly rounded."""
        return _mosaic.divide(x, y, layout(self.D, self.vec).reduce(1))

    def spread(self, x: jax.Array) -> jax.Array:
        """[rows] -> [rows, D]."""
        return lax.broadcast_in_dim(x, (self.rows, self.D), [0])


def launch(
    process: Callable[..., None],
    arrays: Sequence[jax.Array],
    out_type: Sequence[jax.ShapeDtypeStruct],
    *,
    N: int,
    D: int,
    vec: int,
    rows: int,
    name: str,
) -> Sequence[jax.Array]:
    """Run `process(tile, *input_refs, *output_refs)` once for every tile of N rows.

    Args:
        process: device code; uses `tile.load` and `tile.store`.
        arrays: inputs in global memory.
        out_type: outputs.
        N: rows.
        D: row length.
        vec: elements in 16 bytes of the widest input.
        rows: rows of a tile, a multiple of `smallest(D, vec)`.
        name: of the kernel in profiles.
    """
    least = smallest(D, vec)
    full, rest = divmod(N, rows)
    whole, sliver = rest - rest % least, rest % least
    tiles = full + bool(whole) + bool(sliver)
    if not tiles:
        return [jnp.zeros(t.shape, t.dtype) for t in out_type]

    def body(*refs):
        i = lax.axis_index("tile")

        def tile(rows, clipped, first):
            return lambda: process(Tile(first, rows, D, vec, clipped), *refs)

        if full:
            pl.when(i < full)(tile(rows, False, i * rows))
        if whole:
            pl.when(i == full)(tile(whole, False, full * rows))
        if sliver:
            pl.when(i == tiles - 1)(tile(least, True, i * 0 + (N - sliver)))

    body.__name__ = name
    return plgpu.kernel(body, out_type=list(out_type), grid=(tiles,), grid_names=("tile",))(*arrays)
