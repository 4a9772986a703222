"""Per-thread device code on 32-bit words: bytes from shared memory, bit fields, byte permutations, pairs of float16.

Used inside `plgpu.inline_mgpu`: a warpgroup's threads each hold their own words, and `fragment` hands them to Mosaic as
the registers of an array. The interpreter knows none of this; a kernel that uses it has the same step in jnp beside it.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pallas_kernels._mosaic import arith, gpu, gpu_utils, ir, llvm, vector


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)


class Word:
    """A 32-bit register of each thread; operators make code."""

    def __init__(self, value: Any):
        self.value = value

    @staticmethod
    def of(x: Any) -> "Word":
        """A constant as a word; words stay."""
        if isinstance(x, Word):
            return x
        x = int(x) & 0xFFFFFFFF
        return Word(arith.constant(_i32(), ir.IntegerAttr.get(_i32(), x - (x >> 31 << 32))))

    def _with(self, make: Any, other: Any) -> "Word":
        return Word(make(self.value, Word.of(other).value))

    def __and__(self, other: Any) -> "Word":
        return self._with(arith.andi, other)

    def __or__(self, other: Any) -> "Word":
        return self._with(arith.ori, other)

    def __xor__(self, other: Any) -> "Word":
        return self._with(arith.xori, other)

    def __add__(self, other: Any) -> "Word":
        return self._with(arith.addi, other)

    def __mul__(self, other: Any) -> "Word":
        return self._with(arith.muli, other)

    def __lshift__(self, other: Any) -> "Word":
        return self._with(arith.shli, other) if not isinstance(other, int) or other else self

    def __rshift__(self, other: Any) -> "Word":
        return self._with(arith.shrui, other) if not isinstance(other, int) or other else self

    def __invert__(self) -> "Word":
        return self ^ -1


def asm(instruction: str, *operands: Any) -> Word:
    """One instruction without side effects: `$0` is the result, `$1`, `$2` ... the operands."""
    values = [Word.of(x).value for x in operands]
    constraints = ",".join(["=r", *["r"] * len(values)])
    return Word(llvm.inline_asm(_i32(), values, instruction, constraints, has_side_effects=False, asm_dialect=0))


def permute(low: Any, high: Any, selector: Any) -> Word:
    """Four bytes out of the eight of `high:low`; nibble i of the selector's low half (below 8) names byte i."""
    return asm("prmt.b32 $0, $1, $2, $3;", low, high, selector)


def at_least(x: Word, bound: Word) -> Any:
    """True where one float32 number is at least the other, false for NaN; for `select`."""
    a, b = (arith.bitcast(ir.F32Type.get(), y.value) for y in (x, bound))
    return arith.cmpf(arith.CmpFPredicate.OGE, a, b)


def float_word(x: float) -> Word:
    """A float32 constant."""
    return Word.of(int(np.float32(x).view(np.int32)))


def less(a: Any, b: Any) -> Any:
    """Signed comparison, for `select`."""
    return arith.cmpi(arith.CmpIPredicate.slt, Word.of(a).value, Word.of(b).value)


def both(a: Any, b: Any) -> Any:
    """Two conditions."""
    return arith.andi(a, b)


def select(condition: Any, a: Any, b: Any) -> Word:
    """A where the condition holds, else b."""
    return Word(arith.select(condition, Word.of(a).value, Word.of(b).value))


# ---------------------------------------------------------------- who and where
class Thread:
    """A thread's place: `index` in its warpgroup, `warp`, `lane`, `group` = lane // 4, `column` = lane % 4."""

    def __init__(self):
        index = Word(llvm.inline_asm(_i32(), [], "mov.u32 $0, %tid.x;", "=r", has_side_effects=True, asm_dialect=0))
        self.index = index & 127
        self.warpgroup = index >> 7
        self.warp, self.lane = self.index >> 5, index & 31
        self.group, self.column = self.lane >> 2, self.lane & 3


def scalar(x: Any) -> Word:
    """A scalar argument of inlined code."""
    return Word(x.registers.item() if hasattr(x, "registers") else x)


class Memory:
    """Bytes in shared or global memory from a reference's start, or any pointer, on."""

    def __init__(self, ref: Any):
        self.pointer = gpu_utils.memref_ptr(ref) if isinstance(ref.type, ir.MemRefType) else ref

    def at(self, offset: Any) -> "Memory":
        """The same memory, `offset` bytes (a word or a number) further on."""
        place = offset if isinstance(offset, int) else offset.value
        return Memory(gpu_utils.getelementptr(self.pointer, [place], ir.IntegerType.get_signless(8)))

    def load(self, offset: int, size: int) -> Word:
        """1, 2 or 4 bytes, aligned to as much, zero-extended."""
        loaded = llvm.load(ir.IntegerType.get_signless(8 * size), self.at(offset).pointer, alignment=size)
        return Word(loaded if size == 4 else arith.extui(_i32(), loaded))

    def wide(self, offset: Word, stride: int) -> "Memory":
        """The same memory, `offset * stride` bytes further on, computed in 64 bits."""
        i64 = ir.IntegerType.get_signless(64)
        far = arith.muli(arith.extsi(i64, offset.value), arith.constant(i64, ir.IntegerAttr.get(i64, stride)))
        return Memory(gpu_utils.getelementptr(self.pointer, [far], ir.IntegerType.get_signless(8)))

    def store(self, offset: int, value: Any, size: int) -> None:
        """The low 1, 2 or 4 bytes of a word, aligned to as much."""
        raw = Word.of(value).value
        if size < 4:
            raw = arith.trunci(ir.IntegerType.get_signless(8 * size), raw)
        llvm.store(raw, self.at(offset).pointer, alignment=size)

    def store_if(self, condition: Any, value: Any) -> None:
        """A word to global memory, aligned, where the condition holds."""
        text = "{.reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.b32 [$0], $1;}"
        gpu_utils.inline_ptx(text, self.pointer, Word.of(value).value, arith.extui(_i32(), condition))

    def copy(self, destination: "Memory", size: int, condition: Any) -> None:
        """Copy 2, 4 or 16 bytes of shared memory to global memory, aligned to as much, where the condition holds."""
        count = max(1, size // 4)
        kind = {2: "b16", 4: "b32", 16: "v4.b32"}[size]
        names = [f"r{i}" for i in range(count)]
        value = "{" + ", ".join(names) + "}" if count > 1 else names[0]
        text = (
            "{.reg .pred p; .reg .b" + f"{8 * min(size, 4)} {', '.join(names)}; setp.ne.b32 p, $2, 0; "
            f"@p ld.shared.{kind} {value}, [$0]; @p st.global.{kind} [$1], {value};" + "}"
        )
        flag = arith.extui(_i32(), condition)
        gpu_utils.inline_ptx(text, self.pointer, destination.pointer, flag)


def barrier() -> None:
    """Wait for all threads of the warpgroup."""
    gpu_utils.warpgroup_barrier()


def scatter(
    source: Memory, target: Memory, slots: Memory, start: Word, first: Word, *, rows: int, size: int, pitch: int
) -> None:
    """Copy rows of shared memory to the slots of a cache in global memory, by all threads of the warpgroup.

    Unlike TMA, whose copies start at multiples of 128 bytes in shared memory, this takes rows of any even size.

    Args:
        source: rows, aligned to 16 bytes; row i starts `i * pitch` bytes from its start. Everyone must have written.
        target: the cache, aligned to 16 bytes, `size` bytes a slot.
        slots: int32; row i belongs into slot number `slots[start + i]`, and nowhere if that is negative.
        start: see `slots`.
        first: rows with `start + i` below it are left out.
        rows: how many.
        size: bytes of a row.
        pitch: bytes from row to row in shared memory.
    """
    width = next(n for n in (16, 4, 2) if size % n == pitch % n == 0)
    index, pieces = Thread().index, size // width
    for i in range(-(-rows * pieces // 128)):
        number = index + i * 128
        row = asm(f"div.u32 $0, $1, {pieces};", number)
        inside = less(row, rows)
        row = select(inside, row, 0)
        offset = asm(f"rem.u32 $0, $1, {pieces};", number) * width
        slot = slots.wide(start + row, 4).load(0, 4)
        named = both(less(-1, slot), less(first, start + row + 1))
        source.at(row * pitch + offset).copy(target.wide(slot, size).at(offset), width, both(inside, named))


def shuffle(x: Word, distance: int) -> Word:
    """The word of the lane whose number differs in that bit."""
    return Word(gpu_utils.shfl_bfly(x.value, distance))


def same_lane(register: Any) -> Any:
    """A register of an array, 32 bits or a multiple, exchanged within its lane: the same, but fixed in its place."""
    kind = ir.VectorType(register.type)
    count = kind.shape[0] * gpu_utils.bitwidth(kind.element_type) // 32
    bits = gpu_utils.bitcast(register, ir.VectorType.get((count,), _i32()))
    for i in range(count):
        word = gpu_utils.shfl_bfly(vector.extract(bits, dynamic_position=[], static_position=[i]), 0)
        bits = vector.insert(word, bits, dynamic_position=[], static_position=[i])
    return gpu_utils.bitcast(bits, kind)


def ballot(x: Word) -> Word:
    """A bit for each lane of the warp, set where its word is not 0."""
    text = "{.reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff;}"
    ballot = gpu_utils.inline_ptx(text, x.value, result_types=_i32(), has_side_effects=True, convergent=True)
    return Word(ballot)


def population(x: Word) -> Word:
    """How many bits are set."""
    return asm("popc.b32 $0, $1;", x)


def lanes_below() -> Word:
    """A bit for each lane with a lower number."""
    return asm("mov.u32 $0, %lanemask_lt;")


# ---------------------------------------------------------------- registers of arrays
def words_of(array: Any) -> list[Word]:
    """An array's registers, in order, as words: one per 32-bit number or pair of 16-bit numbers."""
    out = []
    for register in array.registers.flat:
        count = ir.VectorType(register.type).shape[0] * gpu_utils.bitwidth(ir.VectorType(register.type).element_type)
        bits = gpu_utils.bitcast(register, ir.VectorType.get((count // 32,), _i32()))
        for i in range(count // 32):
            out.append(Word(vector.extract(bits, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))))
    return out


def fragment(words: Iterable[Word], shape: Sequence[int], layout: Any, element: str) -> Any:
    """The array of `shape` in `layout` whose registers are `words`; `element` is f16, bf16, f32 or i32."""
    kind = {"f16": ir.F16Type, "bf16": ir.BF16Type, "f32": ir.F32Type}.get(element)
    kind = _i32() if kind is None else kind.get()
    layout = layout.to_mgpu()
    each = layout.vector_length * gpu_utils.bitwidth(kind) // 32
    flat, words = [], list(words)
    for i in range(0, len(words), each):
        bits = llvm.mlir_undef(ir.VectorType.get((each,), _i32()))
        for n, word in enumerate(words[i : i + each]):
            bits = vector.insert(word.value, bits, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([n]))
        flat.append(gpu_utils.bitcast(bits, ir.VectorType.get((layout.vector_length,), kind)))
    registers = np.empty(len(flat), object)
    registers[:] = flat
    signed = True if element == "i32" else None
    registers = registers.reshape(layout.registers_shape(tuple(shape)))
    return gpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)
