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


def load_rows(ref: Any, first: jax.Array) -> jax.Array:
    """`ref[first : first + 64]` of 32-bit numbers [n] in global memory, a number per row in the layout of wgmma's rows.

    Behind the last number it repeats, so that nobody needs to fill it up.
    """
    if _mosaic.interpreting():
        return _repeated(ref, first, _ROWS)

    def emit(context, ref, first):
        del context
        i32, kind = ir.IntegerType.get_signless(32), ir.MemRefType(ref.type).element_type
        pointer, row = utils.memref_ptr(ref), arith.addi(first.registers.item(), _row())
        layout = fragments.WGMMA_ROW_LAYOUT
        registers = np.empty(layout.registers_shape((_ROWS,)), object)
        for half, i in enumerate(np.ndindex(registers.shape)):
            mine = arith.minsi(arith.addi(row, utils.c(8 * half, i32)), utils.c(last, i32))
            value = llvm.load(kind, utils.getelementptr(pointer, [mine], kind))
            registers[i] = vector.broadcast(ir.VectorType.get((1,), kind), value)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)

    last, signed = ref.shape[0] - 1, True if ref.dtype == jnp.int32 else None
    out = plgpu.ShapeDtypeStruct((_ROWS,), ref.dtype, layout=ROW)
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA), return_type=out)
    return inline(emit)(ref, jnp.asarray(first, jnp.int32))


def load_line(ref: Any, first: jax.Array, count: int) -> jax.Array:
    """`ref[first : first + count]`, likewise a number per column of wgmma's layout; `first` and the length are even."""
    if _mosaic.interpreting():
        return _repeated(ref, first, count)

    def emit(context, ref, first):
        del context
        i32, kind = ir.IntegerType.get_signless(32), ir.MemRefType(ref.type).element_type
        pointer, pair = utils.memref_ptr(ref), ir.VectorType.get((2,), kind)
        column = arith.addi(first.registers.item(), bits(utils.thread_idx(), 0, 3, 1))
        layout = fragments.WGMMA_COL_LAYOUT
        registers = np.empty(layout.registers_shape((count,)), object)
        for n, i in enumerate(np.ndindex(registers.shape)):
            mine = arith.minsi(arith.addi(column, utils.c(8 * n, i32)), utils.c(last, i32))
            registers[i] = llvm.load(pair, utils.getelementptr(pointer, [mine], kind), alignment=8)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)

    last, signed = ref.shape[0] - 2, True if ref.dtype == jnp.int32 else None
    out = plgpu.ShapeDtypeStruct((count,), ref.dtype, layout=WGMMA.reduce(0))
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA), return_type=out)
    return inline(emit)(ref, jnp.asarray(first, jnp.int32))


def _repeated(ref: Any, first: jax.Array, count: int) -> jax.Array:
    return ref[...][jnp.minimum(first + jnp.arange(count), ref.shape[0] - 1)]


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
