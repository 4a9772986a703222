"""Products of one activation row with 4-bit integers: the inner steps of weight-only products of a single token.

All of the row lies in shared memory as it is. Without a swizzle wgmma's B operand is made of lines of 16 bytes, eight
neighbouring ones below each other, here inputs 8 i, 8 i + 8, ..: the first column of the product is that of the row,
the seven others mean nothing. Where the two lines of an instruction lie is free, so each may have codes of one kind:

    codes 0 and 2 of a word    lines 0 and 2 of four    as they are
    codes 1 and 3              lines 1 and 3            16 times too large, where they stand in the word

Codes are not made whole numbers: in float16 they are subnormal, 2^-24 of themselves, in bfloat16 128 is added to them.
Zero points come off the sum, `sum_m (q_m - z) x_m = sum_m q_m x_m - z sum_m x_m`, where the sum of inputs is the same
for all features (`input_sums`). So a pair of codes takes one instruction and a fourth of a shift, not two. An infinite
input gives NaN.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _decode, _inline, _mosaic
from pallas_kernels._decode import FEATURES, INPUTS

ir, arith, llvm, vector = _inline.ir, _inline.arith, _inline.llvm, _inline.vector
utils = _inline.utils
COLUMNS = 8
"""Of a product, the first one means something."""
_LINE = 16
_BF16_BASE = 128


def input_sums(x: Any, sums: Any, warpgroup: jax.Array, parts: int, deep: int) -> None:
    """Add up the inputs of a warpgroup's tiles: `deep` of every `parts`, from `warpgroup * deep` on.

    Args:
        x: 16-bit numbers [tiles, 128] in plain shared memory.
        sums: float32 [steps * deep] in shared memory; behind the last tile it repeats.
        warpgroup: index.
        parts: tiles of a step.
        deep: tiles of a step that are the warpgroup's.
    """
    tiles, count = x.shape[0], sums.shape[0]
    if _mosaic.interpreting():
        found = jnp.sum(x[...].astype(jnp.float32), 1)
        n = jnp.arange(count)
        sums[...] = found[jnp.minimum(n // deep * parts + warpgroup * deep + n % deep, tiles - 1)]
        return

    def emit(context, x, sums, warpgroup):
        del context
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        thread, kind = utils.thread_idx(), ir.MemRefType(x.type).element_type
        four, wide = ir.VectorType.get((4,), kind), ir.VectorType.get((4,), f32)
        lane, warp = _inline.bits(thread, 0, 31, 2), _inline.bits(thread, 5, 3, 0)
        own = arith.muli(warpgroup.registers.item(), utils.c(deep, i32))
        totals, places = [], []  # all loads, then all sums, then all stores: nothing waits for one of another tile
        for first in range(0, count, 4):
            n = arith.minsi(arith.addi(warp, utils.c(first, i32)), utils.c(count - 1, i32))
            step, inside = arith.divui(n, utils.c(deep, i32)), arith.remui(n, utils.c(deep, i32))
            tile = arith.addi(arith.addi(arith.muli(step, utils.c(parts, i32)), own), inside)
            tile = arith.minsi(tile, utils.c(tiles - 1, i32))
            at = arith.addi(arith.muli(tile, utils.c(INPUTS, i32)), lane)
            loaded = llvm.load(four, utils.getelementptr(utils.memref_ptr(x), [at], kind), alignment=8)
            numbers = arith.extf(wide, loaded)
            a, b, c, d = (llvm.extractelement(numbers, utils.c(i, i32)) for i in range(4))
            totals.append(arith.addf(arith.addf(a, b), arith.addf(c, d)))
            places.append(utils.getelementptr(utils.memref_ptr(sums), [n], f32))
        for hop in (1, 2, 4, 8, 16):
            totals = [arith.addf(total, utils.shfl_bfly(total, hop)) for total in totals]
        for total, place in zip(totals, places, strict=True):
            llvm.store(total, place)
        utils.warpgroup_barrier()

    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), _inline.WGMMA))
    inline(emit)(x, sums, jnp.asarray(warpgroup, jnp.int32))


def start(code: _decode.Code, words: Any, x: Any, over: jax.Array | None = None) -> jax.Array:
    """Start the product of a tile's codes, as they are, and a row: two groups of instructions, to be `_inline.settle`d.

    Args:
        code: kind "u4".
        words: int32 [4, 256] in plain shared memory, see `_decode.pack`.
        x: 16-bit numbers [128] in plain shared memory; 112 bytes behind them are read, too.
        over: a settled array that is used up by now, whose registers this one takes.

    Returns:
        float32 [64, 16], what `add` takes.
    """
    if _mosaic.interpreting():
        codes = _decode.unpack(words[...].reshape(1, 1, -1), 4).astype(jnp.float32)
        product = jnp.sum(codes * x[...].astype(jnp.float32), 1)
        _inline.release_reads()
        return lax.broadcast_in_dim(product, (FEATURES, 2 * COLUMNS), [0])

    def emit(context, words, x, *over):
        del context
        registers = _inline.registers(over[0]) if over else []
        return _inline.array(_Emitter(code).begun(registers, words, x), 2 * COLUMNS, jnp.float32)

    given = () if over is None else (over,)
    out = plgpu.ShapeDtypeStruct((FEATURES, 2 * COLUMNS), jnp.float32, layout=_inline.WGMMA)
    types = (plgpu.RefType(), plgpu.RefType(), *(_inline.WGMMA for _ in given))
    inline: Any = plgpu.inline_mgpu(arg_types=types, return_type=out)
    return inline(emit)(words, x, *given)


def add(
    code: _decode.Code, sums: jax.Array, product: jax.Array, scales: Any, zeros: Any, inputs: Any, at: jax.Array
) -> jax.Array:
    """`sums + scale * (product - zero * inputs[at])`, of which the first column means something.

    Args:
        code: of the tile.
        sums: float32 [64, 8] in the layout of wgmma.
        product: of `start`, settled.
        scales: 16-bit numbers [1, 64] in plain shared memory.
        zeros: likewise, None = 8.
        inputs: of `input_sums`.
        at: which.
    """
    if _mosaic.interpreting():
        scale, zero = (
            None if x is None else _decode.untiled_scales(x[...].reshape(1, 1, -1), 1)[:, 0].astype(jnp.float32)
            for x in (scales, zeros)
        )
        row = scale * (product[:, 0] - (8.0 if zero is None else zero) * inputs[at])
        return sums + lax.broadcast_in_dim(row, sums.shape, [0])

    def emit(context, sums, product, inputs, at, *refs):
        del context
        numbers = _Emitter(code).added(_inline.registers(sums), _inline.registers(product), inputs, at, *refs)
        return _inline.array(numbers, COLUMNS, jnp.float32)

    given = (scales,) if zeros is None else (scales, zeros)
    out = plgpu.ShapeDtypeStruct(sums.shape, jnp.float32, layout=_inline.WGMMA)
    ref, acc = plgpu.RefType(), _inline.WGMMA
    inline: Any = plgpu.inline_mgpu(arg_types=(acc, acc, ref, acc, *(ref for _ in given)), return_type=out)
    return inline(emit)(sums, product, inputs, jnp.asarray(at, jnp.int32), *given)


def store(ref: Any, first: jax.Array, value: jax.Array) -> None:
    """`ref[0, first : first + 64] = value[:, 0]`, a row in global memory, from registers.

    Args:
        ref: 16-bit numbers [1, F].
        first: feature.
        value: 16-bit numbers [64, 8] in the layout of wgmma.
    """
    if _mosaic.interpreting():
        _mosaic.store(ref.at[0, pl.ds(first, FEATURES)], value[:, 0])
        return

    def emit(context, ref, first, value):
        del context
        i16, i32, i64 = (ir.IntegerType.get_signless(n) for n in (16, 32, 64))
        thread, kind = utils.thread_idx(), ir.MemRefType(ref.type).element_type
        row = arith.addi(_inline.bits(thread, 5, 3, 4), _inline.bits(thread, 2, 7, 0))
        feature, lane = arith.addi(first.registers.item(), row), arith.andi(thread, utils.c(3, i32))
        for half, register in enumerate(value.registers.flat):
            at = arith.addi(feature, utils.c(8 * half, i32))
            number = utils.bitcast(llvm.extractelement(register, utils.c(0, i32)), i16)
            at = llvm.ptrtoint(i64, utils.getelementptr(utils.memref_ptr(ref), [at], kind))
            text = "{ .reg .pred p; setp.eq.b32 p, $2, 0; @p st.global.b16 [$0], $1; }"
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"), [at, number, lane], text, "l,h,r", asm_dialect=0, has_side_effects=True
            )

    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _inline.WGMMA, _inline.WGMMA))
    inline(emit)(ref, jnp.asarray(first, jnp.int32), value)


class _Emitter(_decode._Emitter):
    """The instructions of `start` and `add`."""

    def begun(self, sums, words, x):
        first = arith.muli(self.masked(utils.thread_idx(), 127), self.const(16))
        loaded = [self.load(words, arith.addi(first, self.const(2048 * h)), 16) for h in range(2)]
        base = self.lines(x)
        for half in range(2):
            sums = self.issue_lines(sums, loaded, base, half)
        return sums

    def lines(self, x):
        """The descriptor of a row: no swizzle, and an instruction's second line is 32 bytes behind its first.

        That is the leading byte offset; the other one leads to columns 8 to 15, which there are not.
        """
        apart = 2 * _LINE
        return _inline.mma_utils.encode_descriptor(x, apart, apart, None)

    def codes(self, word, kind: int):
        """Pairs 0 and 2 of a word (kind 0) or 1 and 3 (kind 1)."""
        found = []
        for shift in (0, 8):
            if self.bf16:
                found.append(self.picked(self.right(word, shift + 4 * kind), 0x000F000F, 0x43004300))
            else:
                found.append(self.masked(self.right(word, shift), 0x00F000F0 if kind else 0x000F000F))
        return found

    def issue_lines(self, sums, words, base, half: int):
        """Four instructions over 64 inputs: even lines into the first four registers, odd ones into the others."""
        name, count = ("bf16" if self.bf16 else "f16"), COLUMNS
        first = count + len(sums)
        lines = [".reg .pred p;", ".reg .b64 db;", f"setp.{'eq' if half else 'ne'}.b32 p, 0, 0;"]
        lines += ["wgmma.fence.sync.aligned;"]
        flat = []
        for j in (2 * half, 2 * half + 1):
            for kind in range(2):
                acc = "{" + ", ".join(f"${4 * kind + i}" for i in range(4)) + "}"
                a = "{" + ", ".join(f"${first + len(flat) + i}" for i in range(4)) + "}"
                pairs = [self.codes(words[h][j], kind) for h in range(2)]
                flat += [pairs[h][column] for column in range(2) for h in range(2)]
                lines += [f"add.s64 db, ${first + 16}, {4 * j + kind};"]
                lines += [f"wgmma.mma_async.sync.aligned.m64n8k16.f32.{name}.{name} {acc}, {a}, db, p, 1, 1, 0;"]
            lines += ["setp.eq.b32 p, 0, 0;"] if j == 0 else []
        lines += ["wgmma.commit_group.sync.aligned;"]
        return _inline.assembly(lines, sums, count, [*((f, "r") for f in flat), (base, "l")], jnp.float32)

    def added(self, sums, product, inputs, at, scales, zeros=None):
        f32, fma = ir.F32Type.get(), _inline.fragments.mlir_math.fma
        pointer = utils.getelementptr(utils.memref_ptr(inputs), [at.registers.item()], f32)
        total = llvm.load(f32, pointer, alignment=4)
        offset, factors = (_BF16_BASE, (1.0, 1.0)) if self.bf16 else (0, (2.0**24, 2.0**20))
        scale, out = self.row_numbers(scales), []
        zero = None if zeros is None else self.row_numbers(zeros)
        for h in range(2):
            z = arith.constant(f32, 8.0 + offset)
            if zero is not None:
                z = arith.addf(zero[h], arith.constant(f32, float(offset))) if offset else zero[h]
            value = sums[2 * h]
            for kind, factor in enumerate(factors):
                by = scale[h] if factor == 1 else arith.mulf(scale[h], arith.constant(f32, factor))
                value = fma(by, product[4 * kind + 2 * h], value)
            out += [fma(arith.negf(arith.mulf(scale[h], z)), total, value)] * 2
        return out
