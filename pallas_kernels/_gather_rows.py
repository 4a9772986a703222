"""Device code that brings listed rows of a latent cache into shared memory as wgmma reads them (sm_90a).

A warpgroup fetches a block of rows, each from wherever its entry of the list says. TMA would need a copy for every 128
bytes of a row, so that rows are copied 16 bytes at a time by all threads: `cp.async` for rows of 16-bit numbers, whose
arrival a barrier counts, or by way of registers for packed rows (`_latent_cache`, format v4), which are dequantized to
bfloat16 on the way. Entries that do not count become zeros and are not read.

Shared memory of a block is [pieces of 64 columns, rows, 64] in 128-byte swizzle: 16 bytes number c of row r lie at
c ^ (r & 7). What travels between the steps (`locate`, then `copy` or `load` and `unpack`) are words of each thread, as
int32 arrays without a meaning of their own. An address whose lowest bit is set is that of an entry that does not count.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _inline, _mosaic

ir, arith, llvm, vector = _inline.ir, _inline.arith, _inline.llvm, _inline.vector
utils = _inline.utils
THREADS = 128
PIECE = 64
"""Columns of a swizzle span of 16-bit numbers."""
CODES, ROTARY = 448, 64
"""Numbers of a packed row: float8_e4m3fn, then bfloat16."""
ROW_BYTES = CODES + 2 * ROTARY
SCALE_BYTES = 8
"""Of a row; behind the rows of a page."""
LANES = {"plain": 8, "v4": 4}
"""Threads that share a row."""
WORDS = {"plain": 2, "v4": 4}
"""Words per row that `locate` gives: where the row is, and its scales."""
RAW = 4 * (CODES // PIECE + 2) + 2
"""Words of a thread that hold its part of a packed row."""
_INF = 0xFF800000


def words(count: int) -> Any:
    """Layout of `count` words of each thread."""
    return plgpu.Layout.WG_STRIDED((THREADS * count,), vec_size=1)


def passes(format: str, rows: int) -> int:
    """Rows of a block that one thread has a part in."""
    return rows * LANES[format] // THREADS


@dataclasses.dataclass(frozen=True)
class Source:
    """A cache and the lists of its rows."""

    cache: Any
    indices: Any
    format: str
    rows: int
    """Of the cache."""
    stride: int
    """Bytes of a row of a plain cache, of a page of a packed one."""
    page: int
    """Rows of a page."""
    width: int
    """Entries of a list."""


def locate(sources: Sequence[Source], token: Any, starts: Sequence[Any], ends: Sequence[Any], which: Any, rows: int):
    """Addresses of the rows of a block, as words.

    Args:
        sources: one cache or two.
        token: whose list.
        starts: for each source the block's first entry.
        ends: for each source how many entries the token's list has.
        which: 0 or 1, the source that the block belongs to.
        rows: of the block.
    """
    format, n = sources[0].format, len(sources)
    count = WORDS[format] * passes(format, rows)

    def emit(context, refs, numbers):
        del context
        e = _Emitter()
        token, which, *rest = (x.registers.item() for x in numbers)
        starts, ends = rest[:n], rest[n:]
        second = None if n == 1 else arith.cmpi(arith.CmpIPredicate.ne, which, e.const(0))

        def choose(values):
            return values[0] if second is None else arith.select(second, values[1], values[0])

        bases = [e.address(cache) for cache, _ in refs]
        lists = [
            e.offset(e.address(indices), arith.muli(e.wide(token), e.const64(4 * s.width)))
            for (_, indices), s in zip(refs, sources, strict=True)
        ]
        base, entries, start, end = (choose(x) for x in (bases, lists, starts, ends))
        limit, stride, page = (choose([e.const(getattr(s, f)) for s in sources]) for f in ("rows", "stride", "page"))
        first = arith.shrui(e.thread(), e.const(LANES[format].bit_length() - 1))
        out = []
        for i in range(passes(format, rows)):
            entry = arith.addi(start, arith.addi(first, e.const(i * THREADS // LANES[format])))
            inside = arith.cmpi(arith.CmpIPredicate.slt, entry, end)
            index = e.load_entry(e.offset(entries, arith.muli(e.wide(entry), e.const64(4))), inside)
            valid = arith.andi(inside, arith.cmpi(arith.CmpIPredicate.ult, index, limit))
            if format == "plain":
                parts = [e.offset(base, arith.muli(e.wide(index), e.wide(stride)))]
            else:
                number, place = arith.divui(index, page), arith.remui(index, page)
                origin = e.offset(base, arith.muli(e.wide(number), e.wide(stride)))
                at = arith.addi(
                    arith.muli(page, e.const(ROW_BYTES)),
                    arith.muli(place, e.const(SCALE_BYTES)),
                )
                row = e.offset(origin, e.wide(arith.muli(place, e.const(ROW_BYTES))))
                parts = [row, e.offset(origin, e.wide(at))]
            for part in parts:
                out += e.halves(arith.select(valid, part, arith.ori(base, e.const64(1))))
        return e.array(out)

    refs = [(s.cache, s.indices) for s in sources]
    numbers = [jnp.asarray(x, jnp.int32) for x in (token, which, *starts, *ends)]
    return _call(emit, ([(plgpu.RefType(), plgpu.RefType())] * n, [_SCALAR] * len(numbers)), count)(refs, numbers)


def copy(found: jax.Array, block: Any, mask: Any, pieces: range, rows: int) -> None:
    """Start to copy pieces of the rows of a plain cache; `_mosaic.arrive_when_copied` says when they are there.

    Args:
        found: what `locate` gave.
        block: [pieces, rows, 64] in shared memory.
        mask: float32 [rows] in shared memory that becomes 0 or -inf (entries that do not count), or None.
        pieces: which.
        rows: of the block.
    """

    def emit(context, found, block, *mask):
        del context
        e, given = _Emitter(), e_registers(found)
        thread = e.thread()
        place, row = arith.andi(thread, e.const(7)), arith.shrui(thread, e.const(3))
        to = e.shared(block, e.swizzled(row, place))
        across = e.wide(arith.muli(place, e.const(16)))
        for i in range(passes("plain", rows)):
            source, valid = e.whole(given[2 * i], given[2 * i + 1])
            size = arith.select(valid, e.const(16), e.const(0))
            if mask:
                e.store_mask(mask[0], arith.addi(row, e.const(16 * i)), valid, place)
            e.copy(to, e.offset(source, across), size, [(p * rows * 128 + i * 16 * 128, p * 128) for p in pieces])

    given = (found, block) + (() if mask is None else (mask,))
    types = (words(2 * passes("plain", rows)), _TILE, *(() if mask is None else (plgpu.RefType(),)))
    _call(emit, types, 0)(*given)


def load(found: jax.Array, number: int, rows: int) -> jax.Array:
    """Start to load every thread's part of a packed row, the `number`-th of its block, as words."""

    def emit(context, found):
        del context
        e = _Emitter()
        (row, valid), scales = e.row(e_registers(found), number)
        return e.array(e.load_row(row, scales, valid))

    return _call(emit, (words(4 * passes("v4", rows)),), RAW)(found)


def unpack(raw: jax.Array, found: jax.Array, number: int, block: Any, mask: Any, rows: int, ahead: Any):
    """Dequantize the parts that `load` brought, store them, and start to load those of another row in their place.

    Args:
        raw: what `load` gave for `found` and `number`.
        found: what `locate` gave.
        number: which of the thread's rows.
        block: [8, rows, 64] bfloat16 in shared memory.
        mask: float32 [rows] in shared memory that becomes 0 or -inf.
        rows: of the block.
        ahead: (found, number) of the row to load, of a block as large.

    Returns:
        what `load` would have given for `ahead`.
    """

    def emit(context, raw, found, following, block, mask):
        del context
        e = _Emitter()
        given = e_registers(raw)
        (_, valid), _ = e.row(e_registers(found), number)
        (next_row, more), next_scales = e.row(e_registers(following), ahead[1])
        thread = e.thread()
        lane, place = arith.andi(thread, e.const(3)), arith.shrui(thread, e.const(2))
        place = arith.addi(place, e.const(32 * number))
        e.store_mask(mask, place, valid, lane)
        scales, out = given[-2:], []
        targets = [
            e.shared(block, e.swizzled(place, arith.addi(arith.shli(lane, e.const(1)), e.const(h)))) for h in (0, 1)
        ]
        parts = e.row_parts()
        for j in range(CODES // PIECE):
            chunk, factor = given[4 * j : 4 * j + 4], e.power(scales[j // 4], j % 4)
            numbers = [pair for word in chunk for pair in e.dequantized(word, factor)]
            for half in range(2):
                e.store(targets[half], numbers[4 * half : 4 * half + 4], j * rows * 128)
            out += e.load16(next_row, more, *parts[j])
        for half in range(2):
            j = CODES // PIECE + half
            e.store(targets[half], given[4 * j : 4 * j + 4], (CODES // PIECE) * rows * 128)
            out += e.load16(next_row, more, *parts[j])
        return e.array(out + e.load_scales(next_scales, more))

    many = words(4 * passes("v4", rows))
    types = (words(RAW), many, many, _TILE, plgpu.RefType())
    return _call(emit, types, RAW)(raw, found, ahead[0], block, mask)


_SCALAR = plgpu.Layout.WG_SPLAT
_TILE = plgpu.RefType(_mosaic.swizzled(128, bytes_per_value=2))


def _call(emit, types, count: int):
    kind = plgpu.ShapeDtypeStruct((THREADS * count,), jnp.int32, layout=words(count)) if count else None
    inline: Any = plgpu.inline_mgpu(arg_types=types, **({"return_type": kind} if count else {}))
    return inline(emit)


def e_registers(array) -> list:
    """The words of `words`."""
    i32 = ir.IntegerType.get_signless(32)
    zero = llvm.ConstantOp(i32, ir.IntegerAttr.get(i32, 0)).result
    return [llvm.extractelement(x, zero) for x in array.registers.flat]


class _Emitter:
    """Writes instructions."""

    def __init__(self):
        self.i32, self.i64 = (ir.IntegerType.get_signless(n) for n in (32, 64))

    # ---- numbers
    def const(self, x: int):
        return utils.c(x - (1 << 32) if x >= 1 << 31 else x, self.i32)

    def const64(self, x: int):
        return utils.c(x, self.i64)

    def wide(self, x):
        return arith.extui(self.i64, x)

    def wide32(self, flag):
        return arith.extui(self.i32, flag)

    def thread(self):
        return arith.andi(utils.thread_idx(), self.const(THREADS - 1))

    def halves(self, x):
        high = arith.shrui(x, self.const64(32))
        return [arith.trunci(self.i32, x), arith.trunci(self.i32, high)]

    def whole(self, low, high):
        """An address, and whether it counts."""
        valid = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(low, self.const(1)), self.const(0))
        low = arith.andi(low, self.const(0xFFFFFFFE))
        return arith.ori(self.wide(low), arith.shli(self.wide(high), self.const64(32))), valid

    def row(self, found, number: int):
        low, high, *scales = found[4 * number : 4 * number + 4]
        return self.whole(low, high), self.whole(*scales)[0]

    def array(self, values):
        one = ir.VectorType.get((1,), self.i32)
        registers = np.empty(len(values), object)
        for i, x in enumerate(values):
            registers[i] = vector.broadcast(one, x)
        layout = words(len(values)).to_mgpu()
        return _inline.mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)

    # ---- addresses
    def address(self, ref):
        return llvm.ptrtoint(self.i64, utils.memref_ptr(ref))

    def offset(self, base, by):
        return arith.addi(base, by)

    def shared(self, ref, by):
        """32-bit address in shared memory."""
        return arith.addi(arith.trunci(self.i32, llvm.ptrtoint(self.i64, utils.memref_ptr(ref))), by)

    def swizzled(self, row, place):
        """Byte of 16 bytes number `place` of a row within a piece."""
        place = arith.xori(place, arith.andi(row, self.const(7)))
        return arith.addi(arith.muli(row, self.const(128)), arith.muli(place, self.const(16)))

    def row_parts(self):
        """(bytes that depend on the thread, constant bytes) of its parts of a packed row."""
        lane = arith.andi(self.thread(), self.const(3))
        codes, rest = (self.wide(arith.muli(lane, self.const(n))) for n in (16, 32))
        return [(codes, PIECE * j) for j in range(CODES // PIECE)] + [(rest, CODES + 16 * h) for h in range(2)]

    # ---- memory
    def asm(self, text: str, letters: str, inputs, outputs: int = 0):
        kind = llvm.StructType.get_literal([self.i32] * outputs) if outputs > 1 else self.i32 if outputs else None
        constraints = ",".join(["=r"] * outputs + list(letters))
        out = llvm.inline_asm(kind, inputs, text, constraints, asm_dialect=0, has_side_effects=True)
        if outputs < 2:
            return out
        return [llvm.extractvalue(self.i32, out, [i]) for i in range(outputs)]

    def load_entry(self, address, inside):
        text = "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, -1; @p ld.global.nc.b32 $0, [$1]; }"
        return self.asm(text, "lr", [address, self.wide32(inside)], 1)

    def load16(self, row, valid, by, constant: int):
        """16 bytes of a row, zeros if it does not count."""
        text = (
            "{ .reg .pred p; .reg .b64 a; setp.ne.s32 p, $6, 0; add.s64 a, $4, $5; "
            "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
            f"@p ld.global.L1::no_allocate.v4.b32 {{$0, $1, $2, $3}}, [a+{constant}]; }}"
        )
        return self.asm(text, "llr", [row, by, self.wide32(valid)], 4)

    def load_scales(self, scales, valid):
        text = (
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; mov.b32 $0, 0; mov.b32 $1, 0; "
            "@p ld.global.L1::no_allocate.v2.b32 {$0, $1}, [$2]; }"
        )
        return self.asm(text, "lr", [scales, self.wide32(valid)], 2)

    def load_row(self, row, scales, valid):
        out = []
        for part in self.row_parts():
            out += self.load16(row, valid, *part)
        return out + self.load_scales(scales, valid)

    def copy(self, to, source, size, offsets):
        lines = [f"cp.async.cg.shared.global [$0+{a}], [$1+{b}], 16, $2;" for a, b in offsets]
        self.asm(" ".join(lines), "rlr", [to, source, size])

    def store(self, to, values, constant: int):
        self.asm(f"st.shared.v4.b32 [$0+{constant}], {{$1, $2, $3, $4}};", "rrrrr", [to, *values])

    def store_mask(self, mask, row, valid, lane):
        """The first of a row's threads says whether it counts."""
        value = arith.select(valid, self.const(0), self.const(_INF))
        to = self.shared(mask, arith.muli(row, self.const(4)))
        text = "{ .reg .pred p; setp.eq.s32 p, $2, 0; @p st.shared.b32 [$0], $1; }"
        self.asm(text, "rrr", [to, value, lane])

    # ---- packed numbers
    def power(self, word, i: int):
        """A pair of bfloat16 2^(byte - 127) of byte i: 2^-127 is below the normal numbers, and 255 stands for NaN."""
        byte = arith.andi(arith.shrui(word, self.const(8 * i)), self.const(255))
        bits = arith.shli(byte, self.const(7))
        for code, special in ((0, 0x0040), (255, 0x7FC0)):
            here = arith.cmpi(arith.CmpIPredicate.eq, byte, self.const(code))
            bits = arith.select(here, self.const(special), bits)
        return arith.ori(bits, arith.shli(bits, self.const(16)))

    def dequantized(self, word, factor):
        """Two words of two bfloat16 numbers each: the e4m3 codes of a word times a power of two."""
        out = []
        for selector in (0x1404, 0x3424):
            text = (
                "{ .reg .b32 x, y; "
                f"prmt.b32 x, $1, 0, {selector}; "
                "shr.u32 y, x, 4; and.b32 y, y, 0x07F007F0; "
                "lop3.b32 x, x, 0x80008000, y, 0xEA; "
                f"mul.rn.bf16x2 x, x, {'$3'}; mul.rn.bf16x2 $0, x, $2; }}"
            )
            lift = self.const(_pair(2.0**120))
            out.append(self.asm(text, "rrr", [word, factor, lift], 1))
        return out


def _pair(number: float) -> int:
    bits = int(np.asarray(number, jnp.bfloat16).view(np.uint16))
    return bits | bits << 16
