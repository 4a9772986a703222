"""The kernel that adds up the partial sums of tiles whose keys were split, and what it shares with the other one."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic, _partials, _rows
from pallas_kernels._online_softmax import FLOOR, LOG2E

NOTES = ("parts", "first", "second", "token0", "count", "sum_slot")
"""What the decoding kernel notes about a tile that may have been cut; `parts` is 0 if it was not."""
_TOGETHER = 4
"""Partial sums whose loads are in flight at once."""

f32, i32 = jnp.float32, jnp.int32


def run(x, out: dict[str, jax.Array], sinks) -> dict[str, jax.Array]:
    """`o`, and `sums` if it exists, with the rows of all tiles that were cut filled in."""
    names = [name for name in ("o", "sums") if name in out]
    inputs = [out[name] for name in ("part_o", "part_sums", "notes")] + ([] if sinks is None else [sinks])

    def body(*refs, rows):
        o, *rest = refs
        sums = rest.pop(0) if "sums" in names else None
        part_o, part_sums, notes, *sink = rest
        r = SimpleNamespace(o=o, sums=sums, part_o=part_o, part_sums=part_sums, notes=notes, rows=rows)
        r.sinks = sink[0] if sink else None
        _entry(x, r)

    body.__name__ = "paged_decode_combine"
    spans = _mosaic.swizzled(128, bytes_per_value=x.out_dtype.itemsize, rows=1)
    launch = plgpu.kernel(
        body,
        out_type=(),
        scratch_types={"rows": plgpu.SMEM((1, x.rows, x.out_piece), x.out_dtype, transforms=spans)},
        grid=(x.entries, x.chunks, x.D // x.out_piece),
        grid_names=("entry", "chunk", "piece"),
        kernel_name="paged_decode_combine",
    )
    written = pl.run_state(lambda refs: launch(*refs, *inputs))([out[name] for name in names])
    # without it XLA would fuse the call with an update of a larger array, and lose the rows that it does not write
    written = lax.optimization_barrier(written)
    return dict(zip(names, written, strict=True))


def _entry(x, r: Any) -> None:
    """One tile, the columns of a swizzle span."""
    entry, chunk, piece = (lax.axis_index(name) for name in ("entry", "chunk", "piece"))
    t = SimpleNamespace(chunk=chunk, **{name: r.notes[chunk, entry, i] for i, name in enumerate(NOTES)})
    layout = _rows.layout(x.out_piece, x.out_piece // 16)
    row = layout.reduce(1)

    def load(k):
        at = jnp.clip(jnp.where(k == 0, t.first, t.second + k - 1), 0, x.partials - 1)
        sums = (r.part_sums.at[chunk, at, i, pl.ds(0, x.rows)] for i in range(2))
        m, total = (plgpu.load(ref, layout=row, optimized=False) for ref in sums)
        columns = pl.ds(piece * x.out_piece, x.out_piece)
        return m, total, plgpu.load(r.part_o.at[chunk, at, :, columns], layout=layout, optimized=False)

    def several(n, state):
        ks = [n * _TOGETHER + i for i in range(_TOGETHER)]
        for k, part in zip(ks, [load(jnp.minimum(k, t.parts - 1)) for k in ks], strict=True):
            state = _partials.add(state, part, k < t.parts)
        return state

    @pl.when(t.parts > 0)
    def _():
        zeros = jnp.zeros((x.rows,), f32)
        start = (
            plgpu.layout_cast(zeros + FLOOR, row),
            plgpu.layout_cast(zeros, row),
            plgpu.layout_cast(jnp.zeros((x.rows, x.out_piece), f32), layout),
        )
        m, total, o = lax.fori_loop(0, lax.div(t.parts + (_TOGETHER - 1), i32(_TOGETHER)), several, start)
        if r.sums is not None:

            @pl.when(piece == 0)
            def _():
                for i, value in enumerate((m, total)):
                    _mosaic.store(r.sums.at[t.sum_slot, chunk, i, pl.ds(0, x.rows)], value)

        if r.sinks is not None:
            sink = sink_rows(x, r.sinks, chunk, x.rows, row)
            m_new = jnp.maximum(m, sink)
            alpha = jnp.exp2(m - m_new)
            total = total * alpha + jnp.exp2(sink - m_new)
            o = o * _partials.spread(alpha, o)
        inverse = _mosaic.divide(jnp.ones_like(total), jnp.where(total > 0, total, 1.0), row)
        r.rows[0] = (o * _partials.spread(inverse, o)).astype(x.out_dtype)
        plgpu.commit_smem()
        copy_rows(x, r.rows, r.o, t, [piece * x.out_piece])
        plgpu.wait_smem_to_gmem(0)


# ---------------------------------------------------------------- shared with the decoding kernel
def sink_rows(x, sinks, chunk, rows: int, layout):
    """Sinks [H] in base 2 for the rows of a tile."""
    head0 = chunk * x.block_g
    at = lax.rem(plgpu.broadcasted_iota(i32, (rows,), 0, layout=layout), i32(x.slab)) - lax.rem(head0, i32(8))
    out = plgpu.layout_cast(jnp.full((rows,), FLOOR, f32), layout)
    for g in range(x.block_g):
        sink = jnp.clip(sinks[head0 + g].astype(f32) * LOG2E, FLOOR, -FLOOR)
        out = jnp.where(at == g, sink, out)
    return out


def copy_rows(x, rows: Any, o: Any, t: Any, columns: Iterable[Any]) -> None:
    """Rows of the tile's tokens to o; rows[n] holds `out_piece` columns from columns[n] on."""
    head0 = t.chunk * x.block_g
    for i in range(x.block_q):

        @pl.when(i < t.count)
        def _(i=i):
            for n, column in enumerate(columns):
                source = rows.at[n, pl.ds(i * x.slab + lax.rem(head0, i32(8)), x.block_g)]
                plgpu.copy_smem_to_gmem(source, o.at[t.token0 + i, pl.ds(head0, x.block_g), pl.ds(column, x.out_piece)])
