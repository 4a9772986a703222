"""Decoding with keys as the rows of wgmma: `S^T [keys, rows] = K q^T`, `O^T [D, rows] += V^T P^T`.

The rows of a tile, few in decode, are the small dimension N of wgmma, so that nothing is computed for rows that do not
exist, and the output takes `D rows / 128` registers of a thread instead of D / 2: more thread blocks fit. In return
maxima and sums run over the warps, and P^T goes through shared memory. The same functions as in `_decode_blocks`.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic, _words
from pallas_kernels._online_softmax import ACC, FLOOR, ROW
from pallas_kernels._words import Memory, Thread
from pallas_kernels.paged_attention import _per_head
from pallas_kernels.paged_attention._common import ROWS
from pallas_kernels.turboquant_attention.unpack import column_maxima, column_sum, store_transposed

OPTIONAL = ("p_rows", "room", "row_room")
"""References of this form only."""
KEYS = 64
"""Keys of a block: the M of one wgmma."""
COLUMN = ACC.reduce(0)

f32, i32 = jnp.float32, jnp.int32


def scratch(x, *lead: int) -> dict[str, Any]:
    """P^T as wgmma reads it, room for maxima of warps, and for numbers of rows."""
    blocks = x.num_stages if x.at_once else 1
    p_rows = (blocks, x.rows, KEYS) if x.at_once else (x.rows, KEYS)
    return {
        "p_rows": plgpu.SMEM((*lead, *p_rows), x.operand, transforms=p_transforms()),
        "room": plgpu.SMEM((*lead, blocks, 4, x.rows), f32),
        "row_room": plgpu.SMEM((*lead, ROWS), f32),
    }


def p_transforms():
    """Of P^T."""
    return _mosaic.swizzled(128, bytes_per_value=2)


def across(row, like):
    """A number per row of the tile, for all keys."""
    return plgpu.layout_cast(lax.broadcast_in_dim(row, like.shape, [1]), ACC)


def start(x):
    """State before the first key: maxima, sums of P^T over blocks alone, which meet in `finished`, and O^T."""
    return (
        plgpu.layout_cast(jnp.full((x.rows,), FLOOR, f32), COLUMN),
        plgpu.layout_cast(jnp.zeros((KEYS, x.rows), f32), ACC),
        (plgpu.layout_cast(jnp.zeros((x.D, x.rows), f32), ACC),),
    )


def of_rows(x, r: Any, value):
    """A number per row of q, or None, as scores have them."""
    if value is None:
        return None
    r.row_room[...] = value
    plgpu.commit_smem()
    return plgpu.load(r.row_room.at[pl.ds(0, x.rows)], layout=COLUMN, optimized=False)


def scores(x, r: Any, k, meanwhile):
    """Unscaled scores, float32 [KEYS, rows]."""

    def product(acc):
        for q in (r.q_tile.at[1], r.q_tile.at[0]) if x.code_keys else (r.q_tile,):
            plgpu.wgmma(acc, k, q.at[pl.ds(0, x.rows)].T)
        if meanwhile is not None:
            meanwhile()
        return acc[...]

    return pl.run_scoped(product, _mosaic.ACC((KEYS, x.rows), f32))


def update(x, r: Any, state, s, lift):
    """State before P V is added, and P^T; `s` are scores in base 2, P is raised by two to the power `lift`."""
    m, total, (o,) = state
    [top] = column_maxima([s], r.room)
    m_new = jnp.maximum(m, top - lift)
    alpha = jnp.exp2(m - m_new)
    p = jnp.exp2(s - across(m_new, s))
    return (m_new, total * across(alpha, total) + p, (o * across(alpha, o),)), p


def finished(r: Any, state):
    """State after the last key, with one sum for each row."""
    m, total, o = state
    return m, column_sum(total, r.room), o


def add_product(x, r: Any, o: tuple, p, v):
    """O^T plus V^T P^T."""
    (before,) = o
    store_transposed(r.p_rows, p.astype(x.operand), p_transforms())
    plgpu.commit_smem()
    if not x.interpreted:
        return pl.run_state(lambda acc: plgpu.wgmma(acc, v.T, r.p_rows.T))(_mosaic.ACC.init(before))

    def fresh(acc):
        plgpu.wgmma(acc, v.T, r.p_rows.T)
        return acc[...]

    return before + pl.run_scoped(fresh, _mosaic.ACC(before.shape, f32))


# ---------------------------------------------------------------- results
def output(x, state, sink):
    """The normalised O^T; zeros in rows that saw no key."""
    m, total, (o,) = state
    if sink is not None:
        m_new = jnp.maximum(m, sink)
        alpha = jnp.exp2(m - m_new)
        total, o = total * alpha + jnp.exp2(sink - m_new), o * across(alpha, o)
    inverse = _mosaic.divide(jnp.ones_like(total), jnp.where(total > 0, total, 1.0), COLUMN)
    return o * across(inverse, o)


def stage(x, ref: Any, o, dtype) -> None:
    """Write O^T [D, rows] as rows of o to `ref` [D / width, ROWS, width], whose rows of 128 bytes are swizzled."""
    plgpu.commit_smem()  # everyone has read what lay there
    o, width = o.astype(dtype), ref.shape[2]
    if _mosaic.interpreting():
        for n in range(x.D // width):
            ref[n, pl.ds(0, x.rows)] = o[n * width : (n + 1) * width].T
        return
    size = jnp.dtype(dtype).itemsize

    def build(context, ref, o):
        del context
        thread, words = Thread(), _words.words_of(o)
        each = 2 if size == 2 else 4  # words of 64 columns and 8 rows of O^T's transpose
        for n in range(x.D // KEYS):
            for half in range(2):
                if size == 2:
                    chunk, within, piece = (thread.warp << 1) + half, thread.group << 1, n * ROWS * 128
                else:
                    chunk = ((thread.warp & 1) << 2) + (thread.group >> 2) + 2 * half
                    within, piece = (thread.group & 3) << 2, ((thread.warp >> 1) + 2 * n) * (ROWS * 128)
                for e in range(2):
                    row = (thread.column << 1) + e
                    place = Memory(ref).at(piece).at((row << 7) + ((chunk ^ row) << 4) + within)
                    for j in range(x.rows // 8):
                        first = each * (n * (x.rows // 8) + j)
                        word = words[first + half] >> 16 * e if size == 2 else words[first + 2 * half + e]
                        place.store(1024 * j, word, size)

    spans = _mosaic.swizzled(128, bytes_per_value=size, rows=1)
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(spans), ACC))
    inline(build)(ref, o)


# ---------------------------------------------------------------- scales of keys
def keys_scales(x, scales: Any, head: Any, hole=None):
    """Scales of one KV head as numbers of keys, float32 [KEYS]; as `_per_head.columns`."""
    if _mosaic.interpreting():
        value = lax.dynamic_index_in_dim(_per_head.tokens(x, scales[...]), head, 1, keepdims=False)
    else:

        def build(context, scales, head):
            del context
            thread = Thread()
            row = (thread.warp * _per_head.place(x, 16)) + thread.group * (4 * x.K)
            mine = Memory(scales).at(row + (_words.scalar(head) << 2))
            return _words.fragment(
                [mine.load(_per_head.place(x, 8 * half), 4) for half in range(2)], (KEYS,), ROW, "f32"
            )

        out = plgpu.ShapeDtypeStruct((KEYS,), f32, layout=ROW)
        inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT), return_type=out)
        value = inline(build)(scales, head)
    return _per_head.finished(x, value, ROW, hole)


def of_keys(value, like):
    """A number per key, for all rows of the tile."""
    return plgpu.layout_cast(lax.broadcast_in_dim(value, like.shape, [0]), ACC)
