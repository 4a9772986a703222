"""The kernel that adds up the partial results of tiles whose keys were split."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic, _partials, _rows
from pallas_kernels._online_softmax import FLOOR
from pallas_kernels.mla._plan import PIECE, ROWS, Plan

NOTES = ("parts", "first", "second", "row0", "count", "slot")
"""What the main kernel notes about a tile that may have been cut; `parts` is 0 if it was not."""
_TOGETHER = 8
"""Partial results whose loads are in flight at once."""
_HEIGHT = 16
"""Rows of a thread block."""

f32, i32 = jnp.float32, jnp.int32


def run(x: Plan, out: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """`o`, and `sums` if it exists, with the rows of all tiles that were cut filled in."""
    names = [name for name in ("o", "sums") if name in out]
    inputs = [out[name] for name in ("part_o", "part_sums", "notes")]

    def body(*refs, rows):
        given = dict(zip((*names, "part_o", "part_sums", "notes"), refs, strict=True))
        _entry(x, SimpleNamespace(**{"sums": None, "rows": rows} | given))

    spans = _mosaic.swizzled(128, bytes_per_value=2, rows=1)
    launch = plgpu.kernel(
        body,
        out_type=(),
        scratch_types={"rows": plgpu.SMEM((_HEIGHT, PIECE), x.dtype, transforms=spans)},
        grid=(x.members * x.entries, ROWS // _HEIGHT, x.Dv // PIECE),
        grid_names=("entry", "group", "piece"),
        kernel_name="mla_combine",
    )
    written = pl.run_state(lambda refs: launch(*refs, *inputs))([out[name] for name in names])
    # without it XLA would fuse the call with an update of a larger array, and lose the rows that it does not write
    return out | dict(zip(names, lax.optimization_barrier(written), strict=True))


def _entry(x: Plan, r: Any) -> None:
    """16 rows and 64 columns of one tile."""
    entry, group, piece = (lax.axis_index(name) for name in ("entry", "group", "piece"))
    t = SimpleNamespace(**{name: r.notes[entry, i] for i, name in enumerate(NOTES)})
    layout = _rows.layout(PIECE, _rows.vector(f32))
    row = layout.reduce(1)
    first = pl.multiple_of(group * _HEIGHT, _HEIGHT)
    here, columns = pl.ds(first, _HEIGHT), pl.ds(piece * PIECE, PIECE)

    def load(k):
        at = jnp.clip(jnp.where(k == 0, t.first, t.second + k - 1), 0, x.members * x.partials - 1)
        m, total = (plgpu.load(r.part_sums.at[at, i, here], layout=row, optimized=False) for i in range(2))
        return m, total, plgpu.load(r.part_o.at[at, here, columns], layout=layout, optimized=False)

    def several(n, state):
        ks = [n * _TOGETHER + i for i in range(_TOGETHER)]
        for k, part in zip(ks, [load(jnp.minimum(k, t.parts - 1)) for k in ks], strict=True):
            state = _partials.add(state, part, k < t.parts)
        return state

    @pl.when((t.parts > 0) & (first < t.count))
    def _():
        zeros = jnp.zeros((_HEIGHT,), f32)
        start = (
            plgpu.layout_cast(zeros + FLOOR, row),
            plgpu.layout_cast(zeros, row),
            plgpu.layout_cast(jnp.zeros((_HEIGHT, PIECE), f32), layout),
        )
        m, total, o = lax.fori_loop(0, lax.div(t.parts + (_TOGETHER - 1), i32(_TOGETHER)), several, start)
        if r.sums is not None:

            @pl.when(piece == 0)
            def _():
                for i, value in enumerate((m, total)):
                    _mosaic.store(r.sums.at[t.slot, i, here], value)

        inverse = _mosaic.divide(jnp.ones_like(total), jnp.where(total > 0, total, 1.0), row)
        r.rows[...] = (o * _partials.spread(inverse, o)).astype(x.dtype)
        plgpu.commit_smem()
        size = min(x.granule, _HEIGHT)
        for n in range(_HEIGHT // size):

            @pl.when(first + n * size < t.count)
            def _(n=n):
                target = r.o.at[pl.ds(t.row0 + first + n * size, size), columns]
                plgpu.copy_smem_to_gmem(r.rows.at[pl.ds(n * size, size)], target)

        plgpu.wait_smem_to_gmem(0)
