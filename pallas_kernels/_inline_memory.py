"""Loads and stores that Pallas has no words for, inside kernels on Mosaic GPU.

Each has a plain form for the interpreter.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _inline, _mosaic
from pallas_kernels._inline import ROW, WGMMA, arith, bits, fragments, ir, llvm, memref, mgpu, utils, vector

_ROWS = 64
"""Rows of wgmma's layout."""


def load_span(ref: Any, layout: Any) -> jax.Array:
    """16-bit numbers [rows, 64] in memory as `_inline.span` says, in a tiled layout.

    Mosaic loads them from its tiles only.
    """
    if _mosaic.interpreting():
        return plgpu.load(ref, layout=layout, optimized=False)

    def emit(context, ref):
        del context
        how: Any = {"swizzle": 128, "layout": layout.to_mgpu(), "optimized": False}
        return mgpu.FragmentedArray.load_tiled(_inline.tiled(ref), **how)

    out = plgpu.ShapeDtypeStruct(ref.shape, ref.dtype, layout=layout)
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(_inline.span()),), return_type=out)
    return inline(emit)(ref)


def store_span(ref: Any, value: jax.Array, layout: Any) -> None:
    """The reverse of `load_span`."""
    if _mosaic.interpreting():
        ref[...] = value
        return

    def emit(context, ref, value):
        del context
        value.store_tiled(_inline.tiled(ref), swizzle=128, optimized=False)

    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(_inline.span()), layout))
    inline(emit)(ref, value)


def load_column(ref: Any, column: jax.Array) -> jax.Array:
    """`ref[:, column]` of a plain float32 [64, n] in shared memory, a number per row in the layout of wgmma's rows.

    Layout inference of jax 0.11.2 fails on such strided references.
    """
    if _mosaic.interpreting():
        value = plgpu.load(ref.at[:, column], layout=ROW, optimized=False)
        _inline.release_reads()
        return value
    out = plgpu.ShapeDtypeStruct((_ROWS,), jnp.float32, layout=ROW)

    def emit(context, ref, column):
        del context
        index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        row = _row()
        at = arith.index_cast(index, column.registers.item())
        layout = fragments.WGMMA_ROW_LAYOUT
        registers = np.empty(layout.registers_shape((_ROWS,)), object)
        for half, i in enumerate(np.ndindex(registers.shape)):
            mine = arith.index_cast(index, arith.addi(row, utils.c(8 * half, i32)))
            registers[i] = vector.broadcast(ir.VectorType.get((1,), ir.F32Type.get()), memref.load(ref, [mine, at]))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA), return_type=out)
    return inline(emit)(ref, column)


def load_bytes(ref: Any) -> jax.Array:
    """The 64 float32 numbers of uint8 [2, 128] in plain shared memory, one per row in the layout of wgmma's rows."""
    if _mosaic.interpreting():
        raw = ref[...].reshape(_ROWS, 4)
        return lax.bitcast_convert_type(raw, jnp.float32)
    out = plgpu.ShapeDtypeStruct((_ROWS,), jnp.float32, layout=ROW)

    def emit(context, ref):
        del context
        f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        pointer, row = utils.memref_ptr(ref), _row()
        layout = fragments.WGMMA_ROW_LAYOUT
        registers = np.empty(layout.registers_shape((_ROWS,)), object)
        for half, i in enumerate(np.ndindex(registers.shape)):
            mine = arith.addi(row, utils.c(8 * half, i32))
            value = llvm.load(f32, utils.getelementptr(pointer, [mine], f32))
            registers[i] = vector.broadcast(ir.VectorType.get((1,), f32), value)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=out)
    return inline(emit)(ref)


def store_row(ref: Any, value: jax.Array) -> None:
    """`ref[...] = value` for float32 [64] in the layout of wgmma's rows and global memory, without waiting for anyone.

    Mosaic puts a barrier of the warpgroup before and after every store.
    """
    if _mosaic.interpreting():
        _mosaic.store(ref, value)
        return

    def emit(context, ref, value):
        del context
        index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        row = _row()
        zero = llvm.ConstantOp(i32, ir.IntegerAttr.get(i32, 0)).result
        for half, register in enumerate(value.registers.flat):
            at = arith.index_cast(index, arith.addi(row, utils.c(8 * half, i32)))
            memref.store(llvm.extractelement(register, zero), ref, [at])

    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ROW))
    inline(emit)(ref, value)


def _row():
    """The first of the two rows of wgmma's layout that the thread has, the other one is 8 behind it."""
    thread = utils.thread_idx()
    return arith.addi(bits(thread, 5, 3, 4), bits(thread, 2, 7, 0))
