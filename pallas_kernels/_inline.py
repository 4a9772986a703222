"""Device code that Pallas has no words for: wgmma into fresh registers, inside kernels on Mosaic GPU.

Pallas sets an accumulator to zero before wgmma adds to it. A product that is scaled and added to a running sum block by
block pays for those zeros each time, so `start` tells the first instruction of each block to overwrite (scale-d = 0).
Every function has a plain form for the interpreter. Loads, and stores but for transposed ones, are in
`_inline_memory`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as _mgpu
from jax.experimental.mosaic.gpu import fragmented_array as _fragments
from jax.experimental.mosaic.gpu import mma_utils as _mma_utils
from jax.experimental.mosaic.gpu import utils as _utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic

mgpu: Any = _mgpu
fragments: Any = _fragments
mma_utils: Any = _mma_utils
utils: Any = _utils
ir: Any = fragments.ir
llvm: Any = fragments.llvm
vector: Any = fragments.vector
arith: Any = fragments.arith
memref: Any = fragments.memref
WGMMA = plgpu.Layout.WGMMA
ROW = WGMMA.reduce(1)
_NAMES = {"float8_e4m3fn": "e4m3", "uint8": "e4m3", "float8_e5m2": "e5m2", "int8": "s8"}
_NAMES |= {"bfloat16": "bf16", "float16": "f16"}
_M = 64


def span(swizzle: int = 128) -> tuple[Any, ...]:
    """Transforms of [rows, one swizzle span] operands in shared memory.

    Without tiles of 8 rows, which lie in memory the same way, TMA clips at any row and column.
    """
    return (plgpu.SwizzleTransform(swizzle),)  # pyright: ignore[reportAbstractUsage]


def spans(rows: int) -> tuple[Any, ...]:
    """Transforms of 16-bit numbers [rows, some swizzle spans] that lie span by span, each as `span` has it."""
    return (plgpu.TilingTransform((rows, 64)), *span())  # pyright: ignore[reportAbstractUsage]


def release_reads() -> None:
    """Tell the race detector that values read from a slot are in registers before TMA may write to the slot.

    It wants a fence between the two proxies there; on the card the barrier that frees the slot is enough, as in CUTLASS
    (`PipelineTmaAsync::consumer_release`), because a load whose value was used is complete.
    """
    if _mosaic.interpreting():
        plgpu.commit_smem()


def start(a: Any, b: Any, sums: jax.Array | None = None, over: jax.Array | None = None) -> jax.Array:
    """Start `sums + a @ b.T` of operands in shared memory; only `start` may use the result before `settle`.

    Args:
        a: [64, 128] codes, memory as `span` says; bytes are codes of float8_e4m3fn. Or [64, 64] of bfloat16 or float16.
        b: [n, 128] or [n, 64], likewise.
        sums: float32 or int32 (INT8) [64, n], settled or not; None = 0 without setting registers to zero.
        over: with `sums` None, a settled array that is used up by now: the new one takes its registers. Else ptxas
            starts products early, in more registers than there are.
    """
    n, kind = b.shape[0], jnp.int32 if a.dtype == jnp.int8 else jnp.float32
    if _mosaic.interpreting() and a.dtype == jnp.uint8:
        codes = lax.bitcast_convert_type(a[...], b.dtype).astype(kind)
        part = jnp.dot(codes, b[...].astype(kind).T, precision="highest")
        return part if sums is None else sums + part
    if _mosaic.interpreting():

        def multiply(part):
            plgpu.wgmma(part, a, b.T)
            return part[...]

        part = pl.run_scoped(multiply, _mosaic.ACC((_M, n), kind))
        return part if sums is None else sums + part
    given = tuple(x for x in (sums, over) if x is not None)
    fresh, names = sums is None, (_NAMES[jnp.dtype(a.dtype).name], _NAMES[jnp.dtype(b.dtype).name])

    def emit(context, a, b, *given):
        del context
        return array(_issue(a, b, n, *names, registers(given[0]) if given else [], fresh), n, kind)

    tile, out = plgpu.RefType(span()), plgpu.ShapeDtypeStruct((_M, n), kind, layout=WGMMA)
    inline: Any = plgpu.inline_mgpu(arg_types=(tile, tile, *(WGMMA for _ in given)), return_type=out)
    return inline(emit)(a, b, *given)


def settle(sums: jax.Array, pending: int) -> jax.Array:
    """The sums of `start` once no more than `pending` later starts are under way."""
    if _mosaic.interpreting():
        return sums
    n, kind = sums.shape[1], sums.dtype

    def emit(context, sums):
        del context
        return array(wait(registers(sums), pending, kind), n, kind)

    out = plgpu.ShapeDtypeStruct(sums.shape, kind, layout=WGMMA)
    inline: Any = plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=out)
    return inline(emit)(sums)


def add_scaled(sums: jax.Array, scale: jax.Array, part: jax.Array) -> jax.Array:
    """`sums + scale[:, None] * part` in float32, one instruction per number.

    Args:
        sums: float32 [64, n] in the layout of wgmma.
        scale: float32 [64], one per row.
        part: float32 or int32 [64, n].
    """
    part = part.astype(jnp.float32)
    if _mosaic.interpreting():
        return sums + part * lax.broadcast_in_dim(scale, sums.shape, [0])

    def emit(context, sums, scale, part):
        del context
        return multiply_add(part, scale.broadcast_in_dim(sums.shape, (0,), fragments.WGMMA_LAYOUT), sums)

    out = plgpu.ShapeDtypeStruct(sums.shape, jnp.float32, layout=WGMMA)
    inline: Any = plgpu.inline_mgpu(arg_types=(WGMMA, ROW, WGMMA), return_type=out)
    return inline(emit)(sums, scale, part)


class Order(NamedTuple):
    """An order of the 64 columns of a value that leaves registers transposed."""

    permute: Callable[[jax.Array], jax.Array]
    """What `store_transposed` does to the last axis of the transposed value."""
    column: Callable[[Any], Any]
    """Where a thread's first row goes."""
    step: int
    """How far behind it the second goes."""


def _rows(thread):
    return arith.addi(bits(thread, 5, 3, 4), bits(thread, 2, 7, 0))


AS_IT_IS = Order(lambda x: x, _rows, 8)


def store_transposed(ref: Any, value: jax.Array, swizzled: bool = False, order: Order = AS_IT_IS) -> None:
    """`ref[...] = order.permute(value.T)` for a 16-bit value [64, n] in the layout of wgmma.

    Memory is plain, or as `span` says.
    """
    if _mosaic.interpreting():
        ref[...] = order.permute(value.T)
        return

    def emit(context, ref, value):
        del context
        scatter(ref, value, order.column(utils.thread_idx()), order.step, swizzled)

    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(span() if swizzled else ()), WGMMA))
    inline(emit)(ref, value)


def scatter(ref, value, column, step: int, swizzled: bool = False) -> None:
    """Instructions that write a value [64, n] transposed: the thread's first row to `column`, its second behind it.

    With `swizzled` lines of 64 16-bit numbers lie as `span` says.
    """
    index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
    pair, count = bits(utils.thread_idx(), 0, 3, 1), value.shape[1] // 8
    for i, register in enumerate(value.registers.reshape(count, 2).flat):
        plain = arith.addi(column, utils.c(step * (i % 2), i32))
        for half in range(2):
            chunk = arith.shli(arith.addi(pair, utils.c(half, i32)), utils.c(3, i32))  # pair + half: line modulo 8
            where = arith.index_cast(index, arith.xori(plain, chunk) if swizzled else plain)
            line = arith.index_cast(index, arith.addi(pair, utils.c(8 * (i // 2) + half, i32)))
            at = llvm.ConstantOp(i32, ir.IntegerAttr.get(i32, half)).result
            memref.store(llvm.extractelement(register, at), ref, [line, where])


def bits(value, right: int, mask: int, left: int):
    """`(value >> right & mask) << left`."""
    i32 = ir.IntegerType.get_signless(32)
    value = arith.andi(arith.shrui(value, utils.c(right, i32)), utils.c(mask, i32))
    return arith.shli(value, utils.c(left, i32))


# ---------------------------------------------------------------- instructions
def multiply_add(part, rows, acc):
    """`part * rows + acc`, one instruction each."""
    fma = fragments.mlir_math.fma
    registers = np.empty_like(acc.registers)
    for i in np.ndindex(registers.shape):
        registers[i] = fma(part.registers[i], rows.registers[i], acc.registers[i])
    return mgpu.FragmentedArray(_registers=registers, _layout=acc.layout, _is_signed=None)


def _kind(dtype: Any) -> tuple[Any, str]:
    """Type and constraint of one register."""
    return (ir.IntegerType.get_signless(32), "r") if dtype == jnp.int32 else (ir.F32Type.get(), "f")


def registers(acc) -> list:
    """The registers of an array in the layout of wgmma, in wgmma's order."""
    i32 = ir.IntegerType.get_signless(32)
    zero = llvm.ConstantOp(i32, ir.IntegerAttr.get(i32, 0)).result
    return [llvm.extractelement(x, zero) for x in acc.to_layout(fragments.WGMMA_LAYOUT_ACC_32BIT).registers.flat]


def array(registers: Sequence[Any], n: int, dtype: Any):
    """The inverse of `registers`."""
    kind, _ = _kind(dtype)
    layout = fragments.WGMMA_LAYOUT_ACC_32BIT
    one = ir.VectorType.get((1,), kind)
    values = np.empty(len(registers), object)
    for i, x in enumerate(registers):
        values[i] = vector.broadcast(one, x)
    return mgpu.FragmentedArray(
        _registers=values.reshape(layout.registers_shape((_M, n))),
        _layout=layout,
        _is_signed=True if dtype == jnp.int32 else None,
    ).to_layout(fragments.WGMMA_LAYOUT)


def words(values: Sequence[Any], layout: Any, shape: tuple[int, ...]):
    """A thread's 32-bit integers as an array of a layout that holds one in each register."""
    given = np.empty(len(values), object)
    for i, x in enumerate(values):
        given[i] = vector.broadcast(ir.VectorType.get((1,), x.type), x)
    layout = layout.to_mgpu()
    given = given.reshape(layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=given, _layout=layout, _is_signed=True)


def assembly(lines: Sequence[str], sums: Sequence[Any], count: int, inputs: Sequence[tuple[Any, str]], dtype) -> list:
    """Inline assembly on `count` registers $0.. (started from `sums`, if any), `inputs` behind them."""
    kind, letter = _kind(dtype)
    struct = llvm.inline_asm(
        llvm.StructType.get_literal([kind] * count),
        [*sums, *(value for value, _ in inputs)],
        "{ " + " ".join(lines) + " }",
        ",".join([f"={letter}"] * count + [str(i) for i in range(len(sums))] + [name for _, name in inputs]),
        asm_dialect=0,
        has_side_effects=True,
    )
    return [llvm.extractvalue(kind, struct, [i]) for i in range(count)]


def tiled(ref):
    """[rows, one swizzle span] of shared memory as tiles of 8 rows."""
    ref = utils.memref_unfold(utils.memref_unfold(ref, 0, (None, 8)), 2, (1, None))
    return utils.memref_transpose(ref, (0, 2, 1, 3))


def descriptor(x: Any, n: int | None, span_values: int = 128) -> tuple[Any, int]:
    """The descriptor that wgmma takes of [rows, one swizzle span] in shared memory and its step per instruction.

    `n` is the width of the product for the second operand, None for the first.
    """
    x = tiled(x)
    x = x if n is None else utils.memref_transpose(x, (1, 0, 3, 2))
    (base, step), _, _ = mma_utils.create_descriptor(
        x,
        swizzle=128,
        large_tile=(_M if n is None else span_values, span_values),
        group_size=(_M, span_values) if n is None else (span_values, n),
        logical_k_major=n is not None,
    )
    return base, step[1][0] >> 4


def _issue(a, b, n: int, a_name: str, b_name: str, sums: list, fresh: bool) -> list:
    """Start `sums + a @ b.T`, or with `fresh` `a @ b.T`: then the first instruction overwrites (scale-d = 0)."""
    integer, depth = a_name == "s8", 16 if a_name in ("bf16", "f16") else 32
    total, ending = ("s32", "") if integer else ("f32", ", 1, 1, 0, 0" if depth == 16 else ", 1, 1")
    (a_base, a_step), (b_base, b_step) = descriptor(a, None, 4 * depth), descriptor(b, n, 4 * depth)
    count = n // 2
    acc = "{" + ", ".join(f"${i}" for i in range(count)) + "}"
    first = count + len(sums)
    lines = [".reg .pred p;", ".reg .b64 da, db;", "wgmma.fence.sync.aligned;"]
    lines += [f"setp.{'ne' if fresh else 'eq'}.b32 p, 0, 0;"]
    for k in range(4):
        lines += [f"add.s64 da, ${first}, {a_step * k};", f"add.s64 db, ${first + 1}, {b_step * k};"]
        lines += [f"wgmma.mma_async.sync.aligned.m64n{n}k{depth}.{total}.{a_name}.{b_name} {acc}, da, db, p{ending};"]
        lines += ["setp.eq.b32 p, 0, 0;"] if fresh and k == 0 else []
    lines += ["wgmma.commit_group.sync.aligned;"]
    return assembly(lines, sums, count, [(a_base, "l"), (b_base, "l")], jnp.int32 if integer else jnp.float32)


def wait(sums: list, pending: int, dtype: Any) -> list:
    """The same registers once no more than `pending` later groups are under way."""
    return assembly([f"wgmma.wait_group.sync.aligned {pending};"], sums, len(sums), [], dtype)


def relu_dot(values: jax.Array, weights: jax.Array, keep_nan: bool = False) -> jax.Array:
    """`sum_c weights[c] * max(values[:, c], 0)` in float32, one product-and-sum a number.

    Args:
        values: float32 [64, n] in the layout of wgmma, n a multiple of 8.
        weights: float32 [n] in `WGMMA.reduce(0)`.
        keep_nan: NaN stays NaN, else it counts as 0.

    Returns:
        float32 [64], a number per row in the layout of wgmma's rows.
    """
    if _mosaic.interpreting():
        kept = jnp.maximum(values, 0.0) if keep_nan else jnp.where(values > 0, values, 0.0)
        return jnp.sum(kept * lax.broadcast_in_dim(weights, values.shape, [1]), axis=1)

    def emit(context, values, weights):
        del context
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        fma, zero = fragments.mlir_math.fma, arith.constant(f32, 0.0)
        larger = arith.maximumf if keep_nan else arith.maxnumf

        def element(x, i):
            return llvm.extractelement(x, llvm.ConstantOp(i32, ir.IntegerAttr.get(i32, i)).result)

        given = registers(values)
        factors = [element(x, i) for x in weights.registers.flat for i in range(x.type.shape[0])]
        sums = []
        for half in range(2):
            chains = [zero, zero]
            for j in range(len(given) // 4):
                for i in range(2):
                    kept = larger(given[4 * j + 2 * half + i], zero)
                    chains[i] = fma(kept, factors[2 * j + i], chains[i])
            total = arith.addf(*chains)
            for hop in (1, 2):
                total = arith.addf(total, utils.shfl_bfly(total, hop))
            sums.append(total)
        layout = fragments.WGMMA_ROW_LAYOUT
        out = np.empty(layout.registers_shape((_M,)), object)
        for at, total in zip(np.ndindex(out.shape), sums, strict=True):
            out[at] = vector.broadcast(ir.VectorType.get((1,), f32), total)
        return mgpu.FragmentedArray(_registers=out, _layout=layout, _is_signed=None)

    out = plgpu.ShapeDtypeStruct((_M,), jnp.float32, layout=ROW)
    inline: Any = plgpu.inline_mgpu(arg_types=(WGMMA, WGMMA.reduce(0)), return_type=out)
    return inline(emit)(values, weights)
