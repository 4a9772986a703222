"""Groups of 32 or 128 features as FP8 codes with UE8M0 scales, inside the epilogue of a transposed product.

A value [64, n] in the layout of wgmma has two groups of 32 for each of n rows; a warp holds 16 of the 32 features, so
two warps meet in shared memory; of 128 the eight of two warpgroups. The scale is the smallest power of two that is not
below `max(amax, 1e-4) / 448`: see `_row_copies.encode`, which reads the same exponent off the bits.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _expert_codes, _inline, _mosaic, _nibbles

ir, arith, llvm, vector, memref = _inline.ir, _inline.arith, _inline.llvm, _inline.vector, _inline.memref
utils = _inline.utils
GROUP = 32
LOWEST = -22
"""Exponent of the scale where amax is 1e-4 or less."""
E4M3 = jnp.float8_e4m3fn


def scales(value: jax.Array, spare: Any) -> tuple[jax.Array, jax.Array]:
    """The scale of every number's group and its inverse, float32 like `value` [64, n].

    Args:
        value: float32 in the layout of wgmma.
        spare: float32 [4, n] in plain shared memory; between two uses warps must meet.
    """
    return _powers(_group_max(jnp.abs(value), spare))


def _powers(top: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scales for the largest magnitudes of groups, and their inverses."""
    bits = lax.bitcast_convert_type(top, jnp.int32)
    exponent = jnp.maximum(((bits + 0x1FFFFF) >> 23) - (127 + 8), LOWEST)
    scale, inverse = (lax.bitcast_convert_type((127 + e) << 23, jnp.float32) for e in (exponent, -exponent))
    return scale, inverse


def _group_max(value: jax.Array, spare: Any) -> jax.Array:
    """The largest of each 32 rows, in all of them."""
    n = value.shape[1]
    if _mosaic.interpreting():
        top = jnp.max(value.reshape(2, GROUP, n), 1, keepdims=True)
        return jnp.broadcast_to(top, (2, GROUP, n)).reshape(value.shape)
    out = plgpu.ShapeDtypeStruct(value.shape, jnp.float32, layout=_inline.WGMMA)

    def emit(context, value, spare):
        del context
        index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        warp, pair = _warp_and_pair()
        other = arith.index_cast(index, arith.xori(warp, utils.c(1, i32)))
        warp, tops = arith.index_cast(index, warp), []
        columns = value.registers.reshape(n // 8, 2)
        for j, (first, second) in enumerate(columns):
            for e in range(2):
                top = _warp_max(arith.maximumf(vector.extract(first, [], [e]), vector.extract(second, [], [e])))
                at = arith.index_cast(index, arith.addi(pair, utils.c(8 * j + e, i32)))
                memref.store(top, spare, [warp, at])
                tops.append((at, top))
        utils.warpgroup_barrier()
        registers = columns.copy()
        for j in range(n // 8):
            both = llvm.mlir_undef(columns[j, 0].type)
            for e in range(2):
                at, top = tops[2 * j + e]
                both = vector.insert(arith.maximumf(top, memref.load(spare, [other, at])), both, [], [e])
            registers[j, :] = both
        registers = registers.reshape(value.registers.shape)
        return _inline.mgpu.FragmentedArray(_registers=registers, _layout=value.layout, _is_signed=None)

    inline: Any = plgpu.inline_mgpu(arg_types=(_inline.WGMMA, plgpu.RefType()), return_type=out)
    return inline(emit)(value, spare)


def leave_tops(value: jax.Array, ref: Any) -> None:
    """The largest magnitudes of each warp's 16 features, for `joint_scales`: float32 [4, n] in plain shared memory."""
    n = value.shape[1]
    if _mosaic.interpreting():
        ref[...] = jnp.max(jnp.abs(value).reshape(4, 16, n), 1)
        return

    def emit(context, value, ref):
        del context
        index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        warp, pair = _warp_and_pair()
        for j, (first, second) in enumerate(value.registers.reshape(n // 8, 2)):
            for e in range(2):
                mine = [_inline.fragments.mlir_math.absf(vector.extract(x, [], [e])) for x in (first, second)]
                top = _warp_max(arith.maximumf(*mine))
                at = arith.index_cast(index, arith.addi(pair, utils.c(8 * j + e, i32)))
                memref.store(top, ref, [arith.index_cast(index, warp), at])

    inline: Any = plgpu.inline_mgpu(arg_types=(_inline.WGMMA, plgpu.RefType()))
    inline(emit)(value, ref)


def joint_scales(ref: Any) -> tuple[jax.Array, jax.Array]:
    """`scales` of groups of 128 features, [64, n], once both warpgroups have left float32 [8, n]."""
    n = ref.shape[1]
    shape = (_nibbles.FEATURES, n)
    if _mosaic.interpreting():
        return _powers(jnp.broadcast_to(jnp.max(ref[...], 0), shape))

    def emit(context, ref):
        del context
        f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        pointer, two = utils.memref_ptr(ref), ir.VectorType.get((2,), f32)
        _, pair = _warp_and_pair()
        layout = _inline.fragments.WGMMA_LAYOUT
        registers = np.empty((n // 8, 2), object)
        for j in range(n // 8):
            tops = []
            for row in range(8):
                at = utils.getelementptr(pointer, [arith.addi(pair, utils.c(row * n + 8 * j, i32))], f32)
                tops.append(llvm.load(two, at, alignment=8))
            registers[j, :] = functools.reduce(arith.maximumf, tops)
        registers = registers.reshape(layout.registers_shape(shape))
        return _inline.mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    out = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=_inline.WGMMA)
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=out)
    return _powers(inline(emit)(ref))


def _warp_and_pair() -> tuple[Any, Any]:
    """The thread's warp, and the first of its columns."""
    thread = utils.thread_idx()
    return _inline.bits(thread, 5, 3, 0), _inline.bits(thread, 0, 3, 1)


def _warp_max(top: Any) -> Any:
    """The largest of the lanes that hold the same columns."""
    for hop in (4, 8, 16):
        top = arith.maximumf(top, utils.shfl_bfly(top, hop))
    return top


def rounded(value: jax.Array, scale: jax.Array, inverse: jax.Array) -> jax.Array:
    """What the codes of `value` mean, float32."""
    return (value * inverse).astype(E4M3).astype(jnp.float32) * scale


def store_codes(ref: Any, value: jax.Array, folded: bool = False) -> None:
    """`ref[...] = _nibbles.permute(e4m3(value.T))`, uint8 [n, 64] in plain shared memory, of numbers up to 448.

    With `folded` they are in the order of `_expert_codes.permute`.
    """
    if _mosaic.interpreting():
        permute = _expert_codes.permute if folded else _nibbles.permute
        ref[...] = lax.bitcast_convert_type(permute(value.T.astype(E4M3)), jnp.uint8)
        return

    def emit(context, ref, value):
        del context
        index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        i8, i16 = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(16)
        thread = utils.thread_idx()
        pair = _inline.bits(thread, 0, 3, 1)
        # feature 16 w + 8 h + r has the place 32 (w / 2) + 16 (r % 2) + 8 (w % 2) + 4 h + r / 2
        parts, step = ((6, 1, 5), (2, 1, 4), (5, 1, 3), (3, 3, 0)), 4
        if folded:  # 32 h + 16 (r / 4) + 4 w + r % 4
            parts, step = ((4, 1, 4), (5, 3, 2), (2, 3, 0)), 32
        column = utils.c(0, i32)
        for part in parts:
            column = arith.addi(column, _inline.bits(thread, *part))
        for i, register in enumerate(value.registers.reshape(value.shape[1] // 8, 2).flat):
            where = arith.index_cast(index, arith.addi(column, utils.c(step * (i % 2), i32)))
            low, high = (vector.extract(register, [], [e]) for e in range(2))
            asm = "cvt.rn.satfinite.e4m3x2.f32 $0, $1, $2;"
            both = llvm.inline_asm(i16, [high, low], asm, "=h,f,f", asm_dialect=0, has_side_effects=False)
            for e in range(2):
                code = arith.trunci(i8, arith.shrui(both, utils.c(8 * e, i16)))
                line = arith.index_cast(index, arith.addi(pair, utils.c(8 * (i // 2) + e, i32)))
                memref.store(code, ref, [line, where])

    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _inline.WGMMA))
    inline(emit)(ref, value)


def store_scales(ref: Any, scale: jax.Array) -> None:
    """`ref[...] = scale[::32]`, float32 [2, n] in plain shared memory; or `scale[:1]` where all are equal, [1, n]."""
    count = ref.shape[0]
    if _mosaic.interpreting():
        ref[...] = scale[:: _nibbles.FEATURES // count]
        return

    def emit(context, ref, scale):
        del context
        index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        thread = utils.thread_idx()
        group, pair = arith.index_cast(index, _inline.bits(thread, 6, count - 1, 0)), _inline.bits(thread, 0, 3, 1)
        for j, register in enumerate(scale.registers.reshape(scale.shape[1] // 8, 2)[:, 0]):
            for e in range(2):  # all lanes of a column write the same number
                at = arith.index_cast(index, arith.addi(pair, utils.c(8 * j + e, i32)))
                memref.store(vector.extract(register, [], [e]), ref, [group, at])

    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _inline.WGMMA))
    inline(emit)(ref, scale)
