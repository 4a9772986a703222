"""Device code that Pallas has no words for: mma.sync with weights that stay in registers, inside kernels on Mosaic GPU.

wgmma takes its second operand from shared memory and gives all four warps the same; here each warp has columns, and
weights, of its own, which leaves all shared memory to the other operand. Each function has a plain form for the
interpreter.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _inline, _mosaic
from pallas_kernels._inline import ROW, WGMMA, arith, bits, fragments, ir, llvm, mgpu, utils

TOKENS = 16
"""Rows of a product."""
SPAN = 64
"""Columns whose products stay in one accumulator: tensor cores cut off where registers round."""
SPANS = 8
"""Spans of a warpgroup, two of each warp."""
_DEPTH = 16
_TERMS = 3
_OWN = 2


def _tiles(outputs: int) -> int:
    return -(-outputs // 8)


def weights(ref: Any) -> jax.Array:
    """A warpgroup's weights, exact as three bfloat16 numbers each, in registers (an opaque array).

    Args:
        ref: float32 [O, 2, 256] in global memory: columns of outputs, in the order of `multiply`'s spans.
    """
    outputs = ref.shape[0]
    if _mosaic.interpreting():
        rows = jnp.pad(ref[...].reshape(outputs, SPANS, SPAN), ((0, 8 * _tiles(outputs) - outputs), (0, 0), (0, 0)))
        return jnp.swapaxes(rows, 0, 1)
    count = _registers(outputs)
    layout = plgpu.Layout.WG_STRIDED((128 * count,), 1)

    def emit(context, ref):
        del context
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        pair = ir.VectorType.get((2,), f32)
        strides, _ = ir.MemRefType(ref.type).get_strides_and_offset()
        pointer, thread = utils.memref_ptr(ref), utils.thread_idx()
        row, column = bits(thread, 2, 7, 0), bits(thread, 0, 3, 1)
        # warps 0 and 1 have the first 256 columns, 2 and 3 the others
        warp = arith.addi(arith.muli(bits(thread, 6, 1, 0), utils.c(strides[1], i32)), bits(thread, 5, 1, 7))
        column = arith.addi(column, warp)
        found = []
        for span, k, j, half in np.ndindex(_OWN, SPAN // _DEPTH, _tiles(outputs), 2):
            mine = arith.addi(row, utils.c(8 * j, i32))
            inside = arith.cmpi(arith.CmpIPredicate.ult, mine, utils.c(outputs, i32))
            mine = arith.select(inside, mine, utils.c(0, i32))
            at = arith.addi(arith.muli(mine, utils.c(strides[0], i32)), column)
            at = arith.addi(at, utils.c(span * SPAN + k * _DEPTH + 8 * half, i32))
            value = llvm.load(pair, utils.getelementptr(pointer, [at], f32))
            numbers = [llvm.extractelement(value, utils.c(i, i32)) for i in range(2)]
            zero = arith.constant(f32, 0.0)
            numbers = [arith.select(inside, x, zero) for x in numbers]
            found += _split(*numbers)
        return _integers(found, layout)

    out = plgpu.ShapeDtypeStruct((128 * count,), jnp.int32, layout=layout)
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=out)
    return inline(emit)(ref)


def _registers(outputs: int) -> int:
    return _OWN * (SPAN // _DEPTH) * _tiles(outputs) * 2 * _TERMS


def _split(first, second) -> list:
    """Three registers with the three parts of two numbers, the largest first."""
    lines = [".reg .f32 a, b, x, y;", ".reg .b32 t;"]
    for i in range(_TERMS):
        a, b = ("$3", "$4") if i == 0 else ("a", "b")
        lines += [f"cvt.rn.bf16x2.f32 ${i}, {b}, {a};"]
        if i + 1 < _TERMS:
            lines += [f"shl.b32 t, ${i}, 16;", "mov.b32 x, t;", f"and.b32 t, ${i}, 0xffff0000;", "mov.b32 y, t;"]
            lines += [f"sub.rn.f32 a, {a}, x;", f"sub.rn.f32 b, {b}, y;"]
    return assembly(lines, ["=&r"] * _TERMS, [(first, "f"), (second, "f")], effects=True)


def multiply(ref: Any, weights: jax.Array, outputs: int) -> tuple[jax.Array, jax.Array]:
    """Products of 16 tokens with each warp's columns, and the sums of their squares.

    Args:
        ref: bfloat16 [2, 4, 16, 64] in shared memory, spans of 16 tokens as `_inline.span` says; warp w has two of
            these eight, from 2 w on.
        weights: as `weights` returns them.
        outputs: their number of outputs.

    Returns:
        float32 [64, O], O rounded up to a multiple of 8, and [64]: row 16 w + t belongs to warp w and token t.
    """
    tiles = _tiles(outputs)
    if _mosaic.interpreting():
        x = ref[...].reshape(SPANS, TOKENS, SPAN).astype(jnp.float32)
        _inline.release_reads()
        both = jnp.einsum("stc,soc->sto", x, weights, precision=lax.Precision.HIGHEST)
        both = both.reshape(SPANS // 2, 2, TOKENS, -1).sum(1)
        return both.reshape(4 * TOKENS, -1), jnp.sum(x * x, 2).reshape(-1, 2, TOKENS).sum(1).reshape(-1)

    def emit(context, ref, weights):
        del context
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        zero = arith.constant(f32, 0.0)
        place = _matrices(ref)
        found = iter([llvm.extractelement(x, utils.c(0, i32)) for x in weights.registers.flat])
        sums, squares = [zero] * (4 * tiles), [zero] * 2
        for span in range(_OWN):
            depth = range(SPAN // _DEPTH)
            a = [_load_matrices(*place, span, k) for k in depth]
            b = {index: next(found) for index in np.ndindex(SPAN // _DEPTH, tiles, 2, _TERMS)}
            for registers in a:
                for i, register in enumerate(registers):
                    squares[i % 2] = _add_squares(squares[i % 2], register)
            for j in range(tiles):
                parts = [[zero] * 4] * _TERMS
                for k in depth:
                    parts = [_mma(parts[p], a[k], [b[k, j, half, p] for half in range(2)]) for p in range(_TERMS)]
                for part in reversed(parts):
                    for i, x in enumerate(part):
                        sums[4 * j + i] = arith.addf(sums[4 * j + i], x)
        for distance in (1, 2):
            squares = [arith.addf(x, utils.shfl_bfly(x, distance)) for x in squares]
        rows = np.empty(fragments.WGMMA_ROW_LAYOUT.registers_shape((4 * TOKENS,)), object)
        for i, x in zip(np.ndindex(rows.shape), squares, strict=True):
            rows[i] = one(x)
        of_rows = mgpu.FragmentedArray(_registers=rows, _layout=fragments.WGMMA_ROW_LAYOUT, _is_signed=None)
        return _inline.array(sums, 8 * tiles, jnp.float32), of_rows

    layout = plgpu.Layout.WG_STRIDED(weights.shape, 1)
    out = (
        plgpu.ShapeDtypeStruct((4 * TOKENS, 8 * tiles), jnp.float32, layout=WGMMA),
        plgpu.ShapeDtypeStruct((4 * TOKENS,), jnp.float32, layout=ROW),
    )
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(_inline.span()), layout), return_type=out)
    return inline(emit)(ref, weights)


def store(ref: Any, sums: jax.Array, squares: jax.Array) -> None:
    """What `multiply` returns to plain float32 [64, O + 4] in shared memory, squares behind sums: one address."""
    outputs, width = sums.shape[1], 4 * ref.shape[1]
    if _mosaic.interpreting():
        ref[:, :outputs] = sums
        ref[:, outputs] = squares
        return

    def emit(context, ref, sums, squares):
        del context
        thread = utils.thread_idx()
        row, pair = arith.addi(bits(thread, 5, 3, 4), bits(thread, 2, 7, 0)), bits(thread, 0, 3, 3)
        at = arith.addi(address(ref), arith.addi(arith.muli(row, utils.c(width, row.type)), pair))
        numbers = _inline.registers(sums)
        for i in range(0, len(numbers), 2):
            line = f"st.shared.v2.f32 [$0+{8 * width * (i // 2 % 2) + 32 * (i // 4)}], {{$1, $2}};"
            assembly([line], [], [(at, "r"), *((x, "f") for x in numbers[i : i + 2])], effects=True)
        for i, x in enumerate(squares.registers.flat):
            x = llvm.extractelement(x, utils.c(0, row.type))
            lines = [
                ".reg .pred p;",
                "setp.eq.b32 p, $1, 0;",
                f"@p st.shared.f32 [$0+{8 * width * i + 4 * outputs}], $2;",
            ]
            assembly(lines, [], [(at, "r"), (pair, "r"), (x, "f")], effects=True)

    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA, ROW))
    inline(emit)(ref, sums, squares)


# ---------------------------------------------------------------- instructions
def assembly(lines, outputs, inputs, *, effects: bool) -> list:
    """Inline PTX; returns its outputs $0.., of constraints `outputs`; `inputs` behind them.

    Without `effects` the compiler may move or drop it.
    """
    kinds = {"r": ir.IntegerType.get_signless(32), "f": ir.F32Type.get(), "l": ir.IntegerType.get_signless(64)}
    types = [kinds[name[-1]] for name in outputs]
    constraints = [*outputs, *(name for _, name in inputs)]
    kind = llvm.StructType.get_literal(types) if len(types) > 1 else types[0] if types else ir.Type.parse("!llvm.void")
    result = llvm.inline_asm(
        kind,
        [value for value, _ in inputs],
        "{ " + " ".join(lines) + " }",
        ",".join(constraints),
        asm_dialect=0,
        has_side_effects=effects,
    )
    if len(types) < 2:
        return [result] if types else []
    return [llvm.extractvalue(x, result, [i]) for i, x in enumerate(types)]


def address(ref):
    """The 32-bit address of shared memory."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(ref))


def _matrices(ref):
    """Address of the lane's row in the warp's first span, that row modulo 8, and the half of the columns it loads."""
    i32 = ir.IntegerType.get_signless(32)
    thread = utils.thread_idx()
    row = bits(thread, 0, 15, 0)
    size = TOKENS * SPAN * 2
    warp = arith.muli(bits(thread, 5, 3, 0), utils.c(_OWN * size, i32))
    return (
        arith.addi(arith.addi(address(ref), warp), arith.shli(row, utils.c(7, i32))),
        bits(thread, 0, 7, 0),
        bits(thread, 4, 1, 0),
    )


def _load_matrices(at, row, half, span: int, k: int) -> list:
    """The first operand of 16 tokens and 16 columns."""
    i32 = ir.IntegerType.get_signless(32)
    chunk = arith.addi(half, utils.c(2 * k, i32))
    chunk = arith.shli(arith.xori(chunk, row), utils.c(4, i32))
    at = arith.addi(arith.addi(at, chunk), utils.c(span * TOKENS * SPAN * 2, i32))
    line = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
    return assembly([line], ["=r"] * 4, [(at, "r")], effects=True)


def _mma(sums, a, b) -> list:
    """`sums + a b` of 16 tokens, 8 outputs and 16 columns."""
    line = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, "
    inputs = [*((x, "r") for x in (*a, *b)), *((x, "f") for x in sums)]
    return assembly([line + "{$10, $11, $12, $13};"], ["=f"] * 4, inputs, effects=False)


def _add_squares(total, register):
    """A sum and the squares of the two bfloat16 numbers of a register."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    fma = fragments.mlir_math.fma
    for x in (
        arith.shli(register, utils.c(16, i32)),
        arith.andi(register, utils.c(-65536, i32)),
    ):
        number = utils.bitcast(x, f32)
        total = fma(number, number, total)
    return total


def one(x):
    return fragments.vector.broadcast(ir.VectorType.get((1,), x.type), x)


def _integers(registers, layout):
    """An array of int32 in a strided layout of single numbers."""
    kind = layout.to_mgpu()
    values = np.empty(kind.registers_shape((128 * len(registers),)), object)
    for i, x in zip(np.ndindex(values.shape), registers, strict=True):
        values[i] = one(x)
    return mgpu.FragmentedArray(_registers=values, _layout=kind, _is_signed=True)
