"""Checkpoints' 4-bit weights decoded in registers: the inner steps of grouped products.

Rows [features, inputs / 2], the even input in the low four bits, are loaded as they are. What makes that possible is
that a product does not care in which order inputs are added: wgmma's A operand wants two neighbouring inputs out of
eight in a lane, we give it sixteen neighbouring ones out of 64 and put the activations into the same order (`permute`).
So a lane loads whole words, and its inputs have one scale a row, whatever the size of a group.

    16-bit products     input 64 b + 16 c + 8 j + 4 e + i  goes to place 64 b + 32 j + 8 i + 2 c + e   (lane c of four)
    8-bit products      input 32 s + 8 c + 2 m + k         goes to place 32 s + 16 k + 4 c + m

`multiply` decodes to the dtype of 16-bit activations, scale included: what `_decode` does, on another layout. `start8`
decodes E2M1 to E4M3, one instruction for each 32 inputs, and leaves the scales to the sums.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _decode, _inline, _mosaic

ir, arith, llvm, vector = _inline.ir, _inline.arith, _inline.llvm, _inline.vector
fragments, utils = _inline.fragments, _inline.utils
FEATURES, INPUTS = _decode.FEATURES, _decode.INPUTS
"""Of a tile."""
RUN = 16
"""Neighbouring inputs of a lane, which must have one scale."""
GROUP = 32
"""Inputs of one 8-bit instruction, and of a scale there."""
LIFT = 63
"""Powers of two that E2M1 weights in bfloat16 are too small by: 2^-126 as they are placed, 2^63 in their scales."""
LIFT8 = 6
"""The same of E4M3 codes."""
_BITS = {1: jnp.uint8, 2: jnp.uint16}


def permute(x: jax.Array) -> jax.Array:
    """`x` [..., K] in the order of inputs that the products want; K a multiple of 64, of 32 for 8-bit numbers."""
    *rest, K = x.shape
    if x.dtype.itemsize == 1:
        y = x.reshape(*rest, K // GROUP, 4, 4, 2)  # c m k
        order = (2, 0, 1)
    else:
        y = x.reshape(*rest, K // 64, 4, 2, 2, 4)  # c j e i
        order = (1, 3, 0, 2)
    first = len(rest) + 1
    return y.transpose(*range(first), *(first + i for i in order)).reshape(x.shape)


def restore(x: jax.Array) -> jax.Array:
    """The 8-bit numbers of `permute`, in their own order."""
    *rest, K = x.shape
    y = x.reshape(*rest, K // GROUP, 2, 4, 4)  # k c m
    return jnp.moveaxis(y, -3, -1).reshape(x.shape)


def unpacked(words: jax.Array, eight: bool) -> jax.Array:
    """Codes [64, 128] of bytes [64, 64], in the order of the products."""
    codes = jnp.stack([words & 15, words >> 4], -1).reshape(words.shape[0], -1)
    return permute(codes if eight else codes.astype(jnp.uint16))


def _column(thread):
    return arith.addi(
        arith.addi(_inline.bits(thread, 2, 3, 3), _inline.bits(thread, 4, 1, 0)), _inline.bits(thread, 5, 3, 1)
    )


ORDER = _inline.Order(permute, _column, 32)


# ---------------------------------------------------------------- scales
def raw(scales: jax.Array) -> jax.Array:
    """The bits of scales."""
    return lax.bitcast_convert_type(scales, _BITS[scales.dtype.itemsize])


@dataclasses.dataclass(frozen=True)
class Lines:
    """Where a feature's scales lie: uint8 or uint16 [E, H, N, G] in global memory, or [E, N, 2, G] with `turns`.

    With `nibbles` two features share a byte: neighbours, [E, H, N / 2, G], or a gate and its up, [E, N, 1, G].
    """

    ref: Any
    half: int = 0
    """Which H (0 gates, 1 ups)."""
    turns: bool = False
    """Gates and ups in turn."""
    nibbles: bool = False
    """Of four bits, the even feature's or the gate's below."""

    @property
    def groups(self) -> int:
        return self.ref.shape[3]

    def column(self, expert: Any, row: Any, at: Any) -> jax.Array:
        """Interpreted: int32 [64] of one group, whose number is cut to those that there are."""
        neighbours, both = self.nibbles and not self.turns, self.nibbles and self.turns
        count = FEATURES // 2 if neighbours else FEATURES
        rows, at = pl.ds(row // 2 if neighbours else row, count), jnp.minimum(at, self.groups - 1)
        place = (expert, rows, 0 if both else self.half, at) if self.turns else (expert, self.half, rows, at)
        value = self.ref[place].astype(jnp.int32)
        if both:
            return (value >> 4 * self.half) & 15
        return jnp.stack([value & 15, value >> 4], 1).reshape(-1) if neighbours else value

    def offsets(self, expert: Any, row: Any, lane_row: Any) -> list[Any]:
        """Number of the first group of each of a thread's two rows, as instructions."""
        return [self.offset(expert, arith.addi(row, arith.addi(lane_row, _const(8 * h)))) for h in range(2)]

    def offset(self, expert: Any, line: Any) -> Any:
        """Number of a row's first group, as instructions."""
        _, H, N, G = self.ref.shape
        N, H, step = (H, N, N * G) if self.turns else (N, H, G)
        first = self.half % H * (G if self.turns else N * G)
        line = arith.shrui(line, _const(1)) if self.nibbles and not self.turns else line
        line = arith.addi(arith.muli(line, _const(step)), _const(first))
        return arith.addi(arith.muli(expert, _const(N * H * G)), line)


def _const(x: int):
    return utils.c(x, ir.IntegerType.get_signless(32))


def _row():
    """The thread's first row."""
    thread = utils.thread_idx()
    return arith.addi(_inline.bits(thread, 5, 3, 4), _inline.bits(thread, 2, 7, 0))


def _fetch(pointer, offset, size: int, count: int = 1):
    """A number of `count` bytes at `offset` times `size` bytes in global memory, as 32 bits."""
    i32, byte, kind = (ir.IntegerType.get_signless(n) for n in (32, 8, 8 * count))
    offset = arith.muli(offset, _const(size))
    at = llvm.getelementptr(pointer.type, pointer, [offset], [-(2**31)], byte, llvm.GEPNoWrapFlags.none)
    value = llvm.load(kind, at, alignment=count)
    return value if count == 4 else arith.extui(i32, value)


def load(lines: Lines, expert: Any, row: Any, tile: Any, group: int) -> jax.Array:
    """The bits that belong to a tile's weights, int32 [64, 8] in the layout of wgmma.

    Column 2 c + b belongs to the inputs 64 b + 16 c to 64 b + 16 c + 15 of the tile; behind the last group it is the
    last one's.

    Args:
        lines: of the scales or zero points.
        expert: index.
        row: of the first of 64 features.
        tile: of 128 inputs.
        group: inputs that share a scale, a multiple of 16.
    """
    runs, last = group // RUN, lines.groups - 1
    if _mosaic.interpreting():
        return jnp.stack(
            [lines.column(expert, row, (8 * tile + 4 * b + c) // runs) for c in range(4) for b in range(2)], 1
        )
    size = jnp.dtype(lines.ref.dtype).itemsize

    def emit(context, ref, *at):
        del context
        expert, row, tile = (x.registers.item() for x in at)
        pointer, mine, lane = utils.memref_ptr(ref), _row(), arith.andi(utils.thread_idx(), _const(3))
        odd = _const(lines.half) if lines.turns else arith.andi(mine, _const(1))
        shift = arith.muli(odd, _const(4))
        columns = []
        for b in range(2):
            run = arith.addi(arith.muli(tile, _const(8)), arith.addi(_const(4 * b), lane))
            columns.append(arith.minsi(arith.divui(run, _const(runs)), _const(last)))
        registers = []
        for first in lines.offsets(expert, row, mine):
            both = llvm.mlir_undef(ir.VectorType.get((2,), ir.IntegerType.get_signless(32)))
            for b, column in enumerate(columns):
                value = _fetch(pointer, arith.addi(first, column), size, size)
                value = arith.andi(arith.shrui(value, shift), _const(15)) if lines.nibbles else value
                both = vector.insert(value, both, [], [b])
            registers.append(both)
        return _fragmented(registers, fragments.WGMMA_LAYOUT, (FEATURES, 8))

    return _inlined(emit, lines.ref, (expert, row, tile), (FEATURES, 8), _inline.WGMMA)


def load_words(lines: Lines, expert: Any, row: Any, tile: Any) -> jax.Array:
    """Four bytes of each of 64 rows and a tile of inputs, int32 [64] by wgmma's rows; the last one repeats."""
    if _mosaic.interpreting():
        word = lines.column(expert, row, 4 * tile)
        for s in range(1, 4):
            word = word | (lines.column(expert, row, 4 * tile + s) << (8 * s))
        return word

    def emit(context, ref, *at):
        del context
        expert, row, tile = (x.registers.item() for x in at)
        registers = [_word(lines, ref, first, tile) for first in lines.offsets(expert, row, _row())]
        return _fragmented(registers, fragments.WGMMA_ROW_LAYOUT, (FEATURES,))

    return _inlined(emit, lines.ref, (expert, row, tile), (FEATURES,), _inline.ROW)


def load_lines(lines: Lines, expert: Any, row: Any, tile: Any, count: int, last: int) -> jax.Array:
    """What `load_words` finds, for `count` rows, once each: int32 [count], thread by thread of a warpgroup.

    Args:
        lines: of the scales.
        expert: index.
        row: first of the rows.
        tile: of 128 inputs.
        count: a multiple of 128.
        last: no 64 rows begin behind this one; those that would begin here.
    """
    if _mosaic.interpreting():
        starts = [jnp.minimum(row + first, last) for first in range(0, count, FEATURES)]
        return jnp.concatenate([load_words(lines, expert, at, tile) for at in starts])
    layout = fragments.WGStridedFragLayout((count,), 1)

    def emit(context, ref, *at):
        del context
        expert, row, tile = (x.registers.item() for x in at)
        thread, registers = utils.thread_idx(), []
        for first in range(0, count, 128):
            start = arith.addi(row, arith.addi(_const(first), _inline.bits(thread, 6, 1, 6)))
            line = arith.addi(arith.minsi(start, _const(last)), _inline.bits(thread, 0, FEATURES - 1, 0))
            registers.append(_word(lines, ref, lines.offset(expert, line), tile))
        return _fragmented(registers, layout, (count,))

    return _inlined(emit, lines.ref, (expert, row, tile), (count,), plgpu.Layout.WG_STRIDED((count,), 1))


def prefetch_lines(lines: Lines, expert: Any, row: Any, count: int, last: int) -> None:
    """Fetch what `load_lines` loads, over all inputs, to the L2 cache."""
    if _mosaic.interpreting():
        return
    size = jnp.dtype(lines.ref.dtype).itemsize
    length = lines.groups * size
    lines_of = [*range(0, length, 128), *([length - 1] if length % 128 else [])]

    def emit(context, ref, *at):
        del context
        expert, row = (x.registers.item() for x in at)
        pointer, byte = utils.memref_ptr(ref), ir.IntegerType.get_signless(8)
        thread, wide = utils.thread_idx(), ir.IntegerType.get_signless(64)
        for first in range(0, count, 128):
            start = arith.addi(row, arith.addi(_const(first), _inline.bits(thread, 6, 1, 6)))
            line = arith.addi(arith.minsi(start, _const(last)), _inline.bits(thread, 0, FEATURES - 1, 0))
            offset = arith.muli(lines.offset(expert, line), _const(size))
            for ahead in lines_of:
                there = arith.addi(offset, _const(ahead))
                there = llvm.getelementptr(pointer.type, pointer, [there], [-(2**31)], byte, llvm.GEPNoWrapFlags.none)
                given = [llvm.ptrtoint(wide, there)]
                llvm.inline_asm(
                    ir.Type.parse("!llvm.void"), given, "prefetch.global.L2 [$0];", "l", has_side_effects=True
                )

    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _inline.WGMMA, _inline.WGMMA))
    inline(emit)(lines.ref, *(jnp.asarray(x, jnp.int32) for x in (expert, row)))


def _word(lines, ref, first, tile):
    """Four bytes that begin at four times `tile` of the row whose first number is `first`, a vector of one."""
    pointer, value, G = utils.memref_ptr(ref), _const(0), lines.groups
    whole = 4 if G % 4 == 0 else 1
    for s in range(0, 4, whole):
        column = arith.addi(arith.muli(tile, _const(4)), _const(s))
        found = _fetch(pointer, arith.addi(first, arith.minsi(column, _const(G - whole))), 1, whole)
        value = arith.ori(value, arith.shli(found, _const(8 * s)))
    return vector.broadcast(ir.VectorType.get((1,), ir.IntegerType.get_signless(32)), value)


def _fragmented(registers, layout, shape, signed: bool | None = True):
    values = np.empty(len(registers), object)
    values[:] = registers
    values = values.reshape(layout.registers_shape(shape))
    return _inline.mgpu.FragmentedArray(_registers=values, _layout=layout, _is_signed=signed)


def _inlined(emit, ref, scalars, shape, layout):
    out = plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=layout)
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *(_inline.WGMMA,) * len(scalars)), return_type=out)
    return inline(emit)(ref, *(jnp.asarray(x, jnp.int32) for x in scalars))


def power(words: jax.Array, s: int) -> jax.Array:
    """float32 `2^(byte - 127)` of byte s of words; 0 is 2^-127, 255 NaN."""
    byte = (words >> (8 * s)) & 255
    bits = jnp.maximum(byte << 23, 1 << 22) | (((byte + 1) >> 8) << 22)
    return lax.bitcast_convert_type(bits, jnp.float32)


def store_powers(ref: Any, words: jax.Array) -> None:
    """`ref[i, s] = power(words, s)[i]`, float32 [count, 4] in plain shared memory, of words of `load_lines`."""
    if _mosaic.interpreting():
        ref[...] = jnp.stack([power(words, s) for s in range(4)], 1)
        return

    def emit(context, ref, words):
        del context
        f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        pointer, thread = utils.memref_ptr(ref), _inline.bits(utils.thread_idx(), 0, 127, 2)
        for i, register in enumerate(words.registers.flat):
            word, powers = vector.extract(register, [], [0]), llvm.mlir_undef(ir.VectorType.get((4,), i32))
            for s in range(4):
                byte = _inline.bits(word, 8 * s, 255, 0)
                nan = _inline.bits(arith.addi(byte, _const(1)), 8, 1, 22)
                bits = arith.ori(arith.maxui(arith.shli(byte, _const(23)), _const(1 << 22)), nan)
                powers = vector.insert(bits, powers, [], [s])
            at = utils.getelementptr(pointer, [arith.addi(thread, _const(512 * i))], f32)
            llvm.store(powers, at, alignment=16)

    strided = plgpu.Layout.WG_STRIDED(words.shape, 1)
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), strided))
    inline(emit)(ref, words)


def load_powers(ref: Any) -> tuple[jax.Array, ...]:
    """The columns of float32 [64, 4] that `store_powers` left, by wgmma's rows."""
    if _mosaic.interpreting():
        value = ref[...]
        _inline.release_reads()
        return tuple(value[:, s] for s in range(4))

    def emit(context, ref):
        del context
        f32 = ir.F32Type.get()
        pointer, four, one = utils.memref_ptr(ref), ir.VectorType.get((4,), f32), ir.VectorType.get((1,), f32)
        row, rows = arith.shli(_row(), _const(2)), []
        for h in range(2):
            at = utils.getelementptr(pointer, [arith.addi(row, _const(32 * h))], f32)
            rows.append(llvm.load(four, at, alignment=16))
        columns = [[vector.broadcast(one, vector.extract(x, [], [s])) for x in rows] for s in range(4)]
        return [_fragmented(column, fragments.WGMMA_ROW_LAYOUT, (FEATURES,), None) for column in columns]

    out = [plgpu.ShapeDtypeStruct((FEATURES,), jnp.float32, layout=_inline.ROW)] * 4
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=out)
    return tuple(inline(emit)(ref))


# ---------------------------------------------------------------- 16-bit products
def lifted(code: _decode.Code) -> float:
    """What sums of `multiply` must be multiplied with."""
    return 2.0**LIFT if code.lowered else 1.0


def numbers(code: _decode.Code, kind: str, bits: jax.Array) -> jax.Array:
    """What the scales of `load` mean, for the interpreter: the weight's dtype, with the lift."""
    if kind == "ue8m0":
        byte = jnp.minimum(bits + LIFT, 255)
        wide = (byte << 7) | (((byte + 1) >> 8) << 6)
        return lax.bitcast_convert_type(wide.astype(jnp.uint16), jnp.bfloat16)
    if kind == "e4m3":
        return lax.bitcast_convert_type(bits.astype(jnp.uint8), jnp.float8_e4m3fn).astype(jnp.bfloat16) * 2.0**LIFT
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), code.dtype)


def multiply(
    code: _decode.Code,
    kind: str,
    sums: Sequence[jax.Array],
    words: Sequence[Any],
    scales: Sequence[jax.Array],
    zeros: Sequence[jax.Array] | None,
    x: Any,
    part: int = 0,
) -> tuple[jax.Array, ...]:
    """`sums + W x.T` of a tile of 128 inputs for each of some weights [64, 128], waited for at the end.

    Args:
        code: kind "e2m1" (bfloat16, `lowered`) or "u4", two groups.
        kind: of the scales: "ue8m0", "e4m3" or "value", numbers of the code's dtype.
        sums: float32 [64, n] in the layout of wgmma, one for each weight.
        words: uint8 [64, 64] or [64, 128] in shared memory, swizzled by spans of their rows.
        scales: of `load`.
        zeros: of `load`, None = 8.
        x: activations [2, n, 64], see `_inline.span`.
        part: which 64 bytes of the rows of words.
    """
    n, count = sums[0].shape[1], len(sums)
    if _mosaic.interpreting():
        out = []
        for i in range(count):
            codes = unpacked(_part(words[i], part), False).astype(jnp.uint8)
            scale = _spread(numbers(code, kind, scales[i]).astype(jnp.float32))
            w = _decode.values(code, codes, scale, None if zeros is None else _spread(zeros[i])).astype(code.dtype)
            y = jnp.concatenate([x[0], x[1]], 1)
            out.append(sums[i] + _product(w, y))
        return tuple(out)
    some = zeros is not None

    def emit(context, x, *given):
        del context
        parts = [given[i * count : (i + 1) * count] for i in range(4 if some else 3)]
        return _Emitter(code, kind, words[0].shape[1], part).products(x, *parts, n=n)

    ref, flat = plgpu.RefType(_inline.span(words[0].shape[1])), (*sums, *words, *scales, *(zeros or ()))
    acc = _inline.WGMMA
    types = (acc,) * count + (ref,) * count + (acc,) * ((1 + some) * count)
    out = [plgpu.ShapeDtypeStruct(sums[0].shape, jnp.float32, layout=acc)] * count
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(_inline.span()), *types), return_type=out)
    return tuple(inline(emit)(x, *flat))


def start(
    code: _decode.Code,
    kind: str,
    sums: jax.Array,
    words: Any,
    scales: jax.Array,
    zeros: jax.Array | None,
    x: Any,
    part: int = 0,
) -> jax.Array:
    """`multiply` of one weight, only started: two groups of instructions, to be `_inline.settle`d."""
    if _mosaic.interpreting():
        return multiply(code, kind, [sums], [words], [scales], None if zeros is None else [zeros], x, part)[0]
    n, width = sums.shape[1], words.shape[1]

    def emit(context, x, sums, words, scales, *zeros):
        del context
        acc = _Emitter(code, kind, width, part).begun(x, _inline.registers(sums), words, scales, *zeros, n=n)
        return _inline.array(acc, n, jnp.float32)

    given, acc = () if zeros is None else (zeros,), _inline.WGMMA
    types = (plgpu.RefType(_inline.span()), acc, plgpu.RefType(_inline.span(width)), acc, *(acc for _ in given))
    out = plgpu.ShapeDtypeStruct(sums.shape, jnp.float32, layout=acc)
    inline: Any = plgpu.inline_mgpu(arg_types=types, return_type=out)
    return inline(emit)(x, sums, words, scales, *given)


def _part(words: Any, part: int) -> jax.Array:
    return words[...][:, part * INPUTS // 2 : (part + 1) * INPUTS // 2]


def _spread(columns: jax.Array) -> jax.Array:
    """[64, 8] of `load` for each of the 128 places of inputs."""
    y = columns.reshape(FEATURES, 4, 2).transpose(0, 2, 1)[:, :, None, :, None]  # b, (j i), c, e
    return jnp.broadcast_to(y, (FEATURES, 2, 8, 4, 2)).reshape(FEATURES, INPUTS)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), precision="highest")


class _Emitter(_decode._Emitter):
    """The instructions of `multiply` and `start8`."""

    def __init__(self, code: _decode.Code, kind: str, width: int, part: int):
        super().__init__(code)
        self.kind, self.width, self.first = kind, width, 4 * part  # bytes of a row, its first chunk of 16 bytes

    def products(self, x, sums, words, scales, zeros=None, *, n: int):
        accs = [
            self.begun(x, _inline.registers(acc), words[i], scales[i], zeros[i] if zeros else None, n=n)
            for i, acc in enumerate(sums)
        ]
        flat, each = _inline.wait([x for acc in accs for x in acc], 0, jnp.float32), len(accs[0])
        return [_inline.array(flat[i * each : (i + 1) * each], n, jnp.float32) for i in range(len(accs))]

    def begun(self, x, acc, words, scales, zeros=None, *, n: int):
        zero = self.offsets(None) if zeros is None else self.zero_points(zeros)
        tile = self.fragment(self.lane_words(words), self.scale_numbers(scales), zero)
        for half in range(2):
            acc = self.issue(acc, tile[8 * half : 8 * half + 8], utils.memref_slice(x, half), n)
        return acc

    def place(self):
        """Byte offset of the thread's first row, and what its chunks of 16 bytes are swizzled with."""
        thread = utils.thread_idx()
        swizzle = _inline.bits(thread, 3, 3, 0) if self.width == 64 else _inline.bits(thread, 2, 7, 0)
        return arith.muli(_row(), self.const(self.width)), swizzle, self.masked(thread, 3)

    def lane_words(self, ref):
        """For both rows the four words of a lane."""
        start, swizzle, lane = self.place()
        out = []
        for h in range(2):
            for b in range(2):
                chunk = arith.xori(arith.addi(self.right(lane, 1), self.const(self.first + 2 * b)), swizzle)
                at = arith.addi(arith.muli(chunk, self.const(16)), arith.muli(self.masked(lane, 1), self.const(8)))
                out += self.load(ref, arith.addi(arith.addi(start, at), self.const(8 * self.width * h)), 8)
        return out

    def columns(self, array):
        """The registers of `load`: [b][h], 32 bits each."""
        both = list(array.registers.flat)
        return [self.element(both[h], b) for b in range(2) for h in range(2)]

    def twice(self, low):
        """A 16-bit number in both halves."""
        return self.permute(low, low, self.const(0x1010))

    def scale_numbers(self, array):
        out = []
        for bits in self.columns(array):
            if self.kind == "ue8m0":
                byte = arith.minsi(arith.addi(bits, self.const(LIFT)), self.const(255))
                nan = self.right(self.right(arith.addi(byte, self.const(1)), 8), -6)
                number = arith.ori(self.right(byte, -7), nan)
                out.append(self.numbers(self.twice(number)))
            elif self.kind == "e4m3":
                low = arith.ori(self.right(self.masked(bits, 0x80), -8), self.right(self.masked(bits, 0x7F), -4))
                number = arith.mulf(self.numbers(self.twice(low)), self.both(2.0**120))
                out.append(arith.mulf(number, self.both(2.0**LIFT)))
            else:
                out.append(self.numbers(self.twice(bits)))
        return out

    def zero_points(self, array):
        base = 0x4300 if self.bf16 else 0x6400
        return [self.numbers(self.twice(arith.ori(bits, self.const(base)))) for bits in self.columns(array)]

    # ---- 8 bits
    def codes8(self, ref, s: int):
        """A operand of inputs 32 s to 32 s + 31: four registers of four E4M3 numbers, 2^-6 of E2M1's."""
        start, swizzle, lane = self.place()
        chunk = arith.xori(self.const(self.first + s), swizzle)
        at = arith.addi(arith.addi(start, arith.muli(chunk, self.const(16))), arith.muli(lane, self.const(4)))
        rows = [self.load(ref, arith.addi(at, self.const(8 * self.width * h)), 4)[0] for h in range(2)]
        even = [self.picked(self.right(w, -4), 0x80808080, self.masked(self.right(w, -2), 0x1C1C1C1C)) for w in rows]
        odd = [self.picked(w, 0x80808080, self.masked(self.right(w, 2), 0x1C1C1C1C)) for w in rows]
        return [*even, *odd]

    def issue8(self, ref, x, s: int, over: list, n: int):
        """One product, which overwrites its registers."""
        base, step = _inline.descriptor(x, n)
        count = n // 2
        first = count + len(over)
        acc, a = (
            "{" + ", ".join(f"${i}" for i in range(at, at + number)) + "}" for at, number in ((0, count), (first, 4))
        )
        lines = [".reg .pred p;", ".reg .b64 db;", "setp.ne.b32 p, 0, 0;", "wgmma.fence.sync.aligned;"]
        lines += [f"add.s64 db, ${first + 4}, {step * s};"]
        lines += [f"wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 {acc}, {a}, db, p, 1, 1;"]
        lines += ["wgmma.commit_group.sync.aligned;"]
        given = [*((f, "r") for f in self.codes8(ref, s)), (base, "l")]
        return _inline.array(_inline.assembly(lines, over, count, given, jnp.float32), n, jnp.float32)


# ---------------------------------------------------------------- 8-bit products
_EIGHT = _decode.Code(kind="e2m1", dtype=jnp.dtype(jnp.bfloat16), scale="value", groups=2, lowered=True)


def start8(words: Any, x: Any, s: int, over: jax.Array | None = None, part: int = 0) -> jax.Array:
    """Start `2^-6 W x.T` over the inputs 32 s to 32 s + 31 of a tile: float32 [64, n], to be `_inline.settle`d.

    Args:
        words: E2M1 codes, uint8 [64, 64] or [64, 128] in shared memory, swizzled by spans of their rows.
        x: float8_e4m3fn [n, 128] in the order of `permute`, see `_inline.span`.
        s: 0 to 3.
        over: a settled array that is used up by now, whose registers this one takes.
        part: which 64 bytes of the rows of words.
    """
    n, at = x.shape[0], slice(s * GROUP, (s + 1) * GROUP)
    if _mosaic.interpreting():
        codes = _decode.values(_EIGHT, unpacked(_part(words, part), True)[:, at], None, None) * 2.0**-LIFT8
        return _product(codes, x[...][:, at])

    width = words.shape[1]

    def emit(context, words, x, *over):
        del context
        return _Emitter(_EIGHT, "ue8m0", width, part).issue8(words, x, s, _inline.registers(over[0]) if over else [], n)

    given = () if over is None else (over,)
    out = plgpu.ShapeDtypeStruct((FEATURES, n), jnp.float32, layout=_inline.WGMMA)
    types = (plgpu.RefType(_inline.span(width)), plgpu.RefType(_inline.span()), *(_inline.WGMMA for _ in given))
    inline: Any = plgpu.inline_mgpu(arg_types=types, return_type=out)
    return inline(emit)(words, x, *given)
