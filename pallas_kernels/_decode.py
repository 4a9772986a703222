"""Weights of 4 or 8 bits decoded in registers and multiplied from there: the inner step of weight-only products.

A weight [features, inputs] is cut into tiles of 64 features and 128 inputs, each stored as the registers that wgmma's A
operand wants, so that a thread loads its 64 codes with 16-byte loads and no lane needs another's:

    feature 16 w + 8 h + r, input 8 t + 2 c + e    of a tile, in warp w, lane 4 r + c, registers (t, h), half e
    word    [h, w, r, c, j]      4 bits: t = 4 j + i, nibble i + 4 e
            [h, v, w, r, c, j]   8 bits: t = 8 v + 2 j + i, byte i + 2 e

Scales (and zero points) of a tile lie feature pair by feature pair: [w, r, group, h]. What a code becomes is rounded as
the formats say: `(q - zero) * scale` to the dtype of the activations, once. `values` is the same arithmetic in jnp.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _inline, _mosaic

ir, arith, llvm, vector = _inline.ir, _inline.arith, _inline.llvm, _inline.vector
fragments, utils = _inline.fragments, _inline.utils
FEATURES, INPUTS = 64, 128
"""A tile."""
HALF = 64
"""Inputs of one swizzle span of the activations."""
BITS = {"u4": 4, "e2m1": 4, "book": 4, "u8": 8, "s8": 8, "e4m3": 8}
"""Kinds of codes and their bits: unsigned with a zero point, two's complement, floats, numbers of a codebook."""
LOWERED = 2.0**-126
"""What codes are multiplied with in `Code.lowered`."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Code:
    """How a weight is stored."""

    kind: str
    """One of `BITS`."""
    dtype: Any
    """bfloat16 or float16: of the activations."""
    scale: str | None = None
    """ "value": a number, "pair": the sum of two (float32 in 16 bits each), None: codes are multiplied as they are."""
    groups: int = 1
    """Scales of a feature within a tile."""
    zeros: bool = False
    """Unsigned codes: zero points are given, else they are half of the range."""
    lowered: bool = False
    """Kind "e2m1" in bfloat16: codes are read as `LOWERED` of themselves, which saves a product; scales must be large
    enough, and whoever takes the sums makes up for it."""
    book: tuple[float, ...] = ()
    """The sixteen numbers of kind "book"."""
    in_place: bool = False
    """Kind "u4" in float16: every other code is read where it stands, 16 times too large, instead of shifted: there are
    ten bits of mantissa. The same numbers."""

    @property
    def words(self) -> int:
        """32-bit words of a tile."""
        return FEATURES * INPUTS * BITS[self.kind] // 32

    @property
    def scale_count(self) -> int:
        """Numbers in the scales of a tile."""
        return FEATURES * self.groups * (2 if self.scale == "pair" else 1)


# ---------------------------------------------------------------- layout, in jnp
def pack(codes: jax.Array, bits: int) -> jax.Array:
    """Words (int32) [tiles of features, tiles of inputs, words] of uint8 codes [features, inputs], whole tiles."""
    F, K = codes.shape
    tiles = F // FEATURES, K // INPUTS
    if bits == 8:
        x = codes.reshape(tiles[0], 4, 2, 8, tiles[1], 2, 4, 2, 4, 2)  # w h r | v j i c e
        x = x.transpose(0, 4, 2, 5, 1, 3, 8, 6, 9, 7)  # h v w r c j | e i
    else:
        x = codes.reshape(tiles[0], 4, 2, 8, tiles[1], 4, 4, 4, 2)  # w h r | j i c e
        x = x.transpose(0, 4, 2, 1, 3, 7, 5, 8, 6)  # h w r c j | e i
    return _words(x.reshape(*tiles, -1, 32 // bits), bits)


def _words(parts: jax.Array, bits: int) -> jax.Array:
    shifts = jnp.arange(parts.shape[-1], dtype=jnp.uint32) * bits
    return lax.bitcast_convert_type(jnp.sum(parts.astype(jnp.uint32) << shifts, -1, dtype=jnp.uint32), jnp.int32)


def unpack(words: jax.Array, bits: int) -> jax.Array:
    """The codes of `pack`."""
    raw = lax.bitcast_convert_type(words, jnp.uint32)
    per = 32 // bits
    x = ((raw[..., None] >> (jnp.arange(per, dtype=jnp.uint32) * bits)) & (2**bits - 1)).astype(jnp.uint8)
    tiles = words.shape[:2]
    if bits == 8:
        x = x.reshape(*tiles, 2, 2, 4, 8, 4, 4, 2, 2).transpose(0, 4, 2, 5, 1, 3, 7, 9, 6, 8)
    else:
        x = x.reshape(*tiles, 2, 4, 8, 4, 4, 2, 4).transpose(0, 3, 2, 4, 1, 6, 8, 5, 7)
    return x.reshape(tiles[0] * FEATURES, tiles[1] * INPUTS)


def tiled_scales(scales: jax.Array, groups: int) -> jax.Array:
    """Scales [features, G] or [features, G, 2] as [tiles of features, G / groups, numbers of a tile]."""
    F, G, *pair = scales.shape
    x = scales.reshape(F // 64, 4, 2, 8, G // groups, groups, *pair)  # w h r | k g
    x = jnp.moveaxis(x, (4, 1, 3, 5, 2), (1, 2, 3, 4, 5))  # k w r g h
    return x.reshape(F // 64, G // groups, -1)


def untiled_scales(tiled: jax.Array, groups: int, pair: bool = False) -> jax.Array:
    """The inverse of `tiled_scales`."""
    T, K, _ = tiled.shape
    x = tiled.reshape(T, K, 4, 8, groups, 2, *((2,) if pair else ()))
    x = jnp.moveaxis(x, (1, 2, 3, 4, 5), (4, 1, 3, 5, 2))
    return x.reshape(T * FEATURES, K * groups, *((2,) if pair else ()))


# ---------------------------------------------------------------- arithmetic, in jnp
def values(code: Code, codes: jax.Array, scales: Any, zeros: Any, wide: Any = jnp.float32) -> jax.Array:
    """The weight [features, inputs] in the dtype `wide`, not rounded; codes are uint8, scales untiled [features, G]."""

    def spread(x):
        return jnp.repeat(x.astype(wide), codes.shape[1] // x.shape[1], axis=1)

    v: Any
    if code.kind in ("u4", "u8"):
        v = codes.astype(wide) - (2 ** (BITS[code.kind] - 1) if zeros is None else spread(zeros))
    elif code.kind == "s8":
        v = lax.bitcast_convert_type(codes, jnp.int8).astype(wide)
    elif code.kind == "e4m3":
        v = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(wide)
    else:
        book = code.book or (*_E2M1, *(-x for x in _E2M1))
        v = sum(jnp.where(codes == i, jnp.asarray(x, jnp.float32).astype(wide), 0) for i, x in enumerate(book))
    if scales is None:
        return v
    if code.scale == "pair":
        return v * (spread(scales[..., 0]) + spread(scales[..., 1]))
    if code.lowered:
        scales = scales.astype(wide) * LOWERED
    return v * spread(scales)


# ---------------------------------------------------------------- device code
def start(
    code: Code,
    sums: jax.Array | None,
    tile: tuple[Any, Any, Any, Any],
    spare: Any,
    boxed: bool = False,
    over: jax.Array | None = None,
) -> jax.Array:
    """Start `sums + W x.T` over a tile: two groups of instructions, to be `_inline.settle`d.

    Args:
        code: how the tile is stored.
        sums: float32 [64, n] in the layout of wgmma, settled or not; None = 0.
        tile: the words (int32 [words / 256, 256]), scales ([groups, 64], pairs [2 * groups, 64]) or None, zero points
            ([groups, 64]) or None, all in plain shared memory, and activations ([2, n, 64], see `_inline.span`).
            Without scales the codes are multiplied as they are.
        spare: [2, 64, 64] in shared memory for the interpreter, else None.
        boxed: activations are [n, 128], see `_inline.spans`.
        over: with `sums` None, a settled array that is used up by now, whose registers this one takes.
    """
    words, scales, zeros, x = tile
    n = x.shape[0] if boxed else x.shape[1]
    if _mosaic.interpreting():
        halves = [x.at[:, pl.ds(half * HALF, HALF)] if boxed else x.at[half] for half in range(2)]
        product = _interpreted(code, words, scales, zeros, halves, n, spare)
        return product if sums is None else sums + product
    names = [i for i, ref in enumerate(tile) if ref is not None]
    given, fresh = tuple(a for a in (sums, over) if a is not None), sums is None

    def emit(context, *refs):
        del context
        acc, refs = refs[: len(given)], dict(zip(names, refs[len(given) :], strict=True))
        halves = [utils.memref_slice(refs[3], (0, half) if boxed else half) for half in range(2)]
        registers = _inline.registers(acc[0]) if given else []
        words, scales, zeros = (refs.get(i) for i in range(3))
        registers = _Emitter(code).started(registers, words, scales, zeros, halves, n, fresh)
        return _inline.array(registers, n, jnp.float32)

    x_type = plgpu.RefType(_inline.spans(n) if boxed else _inline.span())
    types = [x_type if i == 3 else plgpu.RefType() for i in names]
    out = plgpu.ShapeDtypeStruct((FEATURES, n), jnp.float32, layout=_inline.WGMMA)
    inline: Any = plgpu.inline_mgpu(arg_types=(*(_inline.WGMMA for _ in given), *types), return_type=out)
    return inline(emit)(*given, *(tile[i] for i in names))


def row_scales(code: Code, ref: Any) -> jax.Array:
    """The scales of a tile with one group, float32 [64] in the layout of wgmma's rows.

    Args:
        code: how the tile is stored; `scale` is "value", `groups` 1.
        ref: [1, 64] in plain shared memory.
    """
    if _mosaic.interpreting():
        return untiled_scales(ref[...].reshape(1, 1, -1), 1)[:, 0].astype(jnp.float32)

    def emit(context, ref):
        del context
        return _Emitter(code).row_scales(ref)

    out = plgpu.ShapeDtypeStruct((FEATURES,), jnp.float32, layout=_inline.ROW)
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=out)
    return inline(emit)(ref)


def _interpreted(code: Code, words, scales, zeros, x, n: int, spare):
    """The product of one tile, by way of shared memory."""

    def loaded(ref, pair=False):
        return None if ref is None else untiled_scales(ref[...].reshape(1, 1, -1), code.groups, pair)

    codes = unpack(words[...].reshape(1, 1, -1), BITS[code.kind])
    w = values(code, codes, loaded(scales, code.scale == "pair"), loaded(zeros)).astype(code.dtype)
    for half in range(2):
        spare[half] = w[:, half * HALF : (half + 1) * HALF]
    plgpu.commit_smem()

    def product(part):
        for half in range(2):
            plgpu.wgmma(part, spare.at[half], x[half].T)
        return part[...]

    return pl.run_scoped(product, _mosaic.ACC((FEATURES, n), jnp.float32))


class _Emitter:
    """Writes the instructions of `multiply`; registers are 32-bit values, numbers come in pairs."""

    def __init__(self, code: Code):
        self.code = code
        self.i32 = ir.IntegerType.get_signless(32)
        self.bf16 = code.dtype == jnp.bfloat16
        self.pair = ir.VectorType.get((2,), ir.BF16Type.get() if self.bf16 else ir.F16Type.get())
        self.one = ir.VectorType.get((1,), self.i32)

    # ---- small words
    def const(self, x: int):
        return utils.c(x - (1 << 32) if x >= 1 << 31 else x, self.i32)

    def both(self, number: float):
        """A pair of one number."""
        dtype = jnp.bfloat16 if self.bf16 else jnp.float16
        bits = int(np.asarray(number, dtype).view(np.uint16))
        assert float(np.asarray(number, dtype)) == number
        return self.numbers(self.const(bits | bits << 16))

    def numbers(self, bits):
        return vector.bitcast(self.pair, vector.broadcast(self.one, bits))

    def bits(self, numbers):
        return self.element(vector.bitcast(self.one, numbers), 0)

    def element(self, x, i: int):
        return llvm.extractelement(x, llvm.ConstantOp(self.i32, ir.IntegerAttr.get(self.i32, i)).result)

    def right(self, x, n: int):
        return x if n == 0 else arith.shrui(x, self.const(n)) if n > 0 else arith.shli(x, self.const(-n))

    def picked(self, x, mask: int, more: Any):
        """`x & mask | more`, one instruction."""
        more = self.const(more) if isinstance(more, int) else more
        asm = "lop3.b32 $0, $1, $2, $3, 0xEA;"
        return llvm.inline_asm(
            self.i32, [x, self.const(mask), more], asm, "=r,r,r,r", asm_dialect=0, has_side_effects=False
        )

    def flipped(self, x, mask: int, other: int):
        """`x & mask ^ other`, one instruction."""
        asm = "lop3.b32 $0, $1, $2, $3, 0x6A;"
        given = [x, self.const(mask), self.const(other)]
        return llvm.inline_asm(self.i32, given, asm, "=r,r,r,r", asm_dialect=0, has_side_effects=False)

    def masked(self, x, mask: int):
        return arith.andi(x, self.const(mask))

    def permute(self, a, b, selector):
        """Four bytes of a and b."""
        asm = "prmt.b32 $0, $1, $2, $3;"
        return llvm.inline_asm(self.i32, [a, b, selector], asm, "=r,r,r,r", asm_dialect=0, has_side_effects=False)

    def fma(self, a, b, c):
        """`a * b + c` of pairs, one instruction, rounded once; math.fma widens 16-bit numbers, seven instructions."""
        return llvm.intr_fma(a, b, c)

    # ---- loads
    def load(self, ref, offset, size: int):
        """Words of `size` bytes (2, 4 or a multiple) at a byte offset, 16 bytes a load; two bytes are half a word."""
        pointer, out = utils.memref_ptr(ref), []
        byte, short = (ir.IntegerType.get_signless(n) for n in (8, 16))
        none = llvm.GEPNoWrapFlags.none
        for start in range(0, size, 16):
            at = arith.addi(offset, self.const(start))
            at = llvm.getelementptr(pointer.type, pointer, [at], [-(2**31)], byte, none)
            width = min(16, size - start)
            if width < 4:
                return [arith.extui(self.i32, llvm.load(short, at, alignment=2))]
            loaded = llvm.load(ir.VectorType.get((width // 4,), self.i32), at, alignment=width)
            out += [self.element(loaded, i) for i in range(width // 4)]
        return out

    # ---- scales
    def group_numbers(self, ref, pairs: bool):
        """For each group and each of the thread's two features the scale twice, with `pairs` both parts of it so."""
        code, per = self.code, 4 if pairs else 2  # bytes of a scale
        row = self.right(self.masked(utils.thread_idx(), 127), 2)  # 8 w + r
        size = 2 * code.groups * per
        words = self.load(ref, arith.muli(row, self.const(size)), size)
        out = []
        for at in range(0, size, per):
            word = words[at // 4]
            halves = [self.numbers(self.permute(word, word, self.const(s))) for s in (0x1010, 0x3232)]
            out.append(tuple(halves) if pairs else halves[at % 4 // 2])
        return out

    def row_scales(self, ref):
        """Of a tile with one group, float32 by wgmma's rows."""
        layout, numbers = fragments.WGMMA_ROW_LAYOUT, self.row_numbers(ref)
        registers = np.empty(layout.registers_shape((FEATURES,)), object)
        for i, number in zip(np.ndindex(registers.shape), numbers, strict=True):
            registers[i] = vector.broadcast(ir.VectorType.get((1,), number.type), number)
        return _inline.mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    def row_numbers(self, ref):
        """Float32 numbers of the thread's two rows, of a tile with one group."""
        row = self.right(self.masked(utils.thread_idx(), 127), 2)
        pair = self.numbers(self.load(ref, self.right(row, -2), 4)[0])
        wide = arith.extf(ir.VectorType.get((2,), ir.F32Type.get()), pair)
        return [self.element(wide, half) for half in range(2)]

    # ---- codes
    def decoded(self, word, i: int, zero):
        """The i-th pair of numbers of a word, before the scale; exact."""
        kind = self.code.kind
        if self.code.in_place:
            plain, large = zero
            y = self.right(word, 8 * (i // 2))
            if i % 2 == 0:
                return arith.subf(self.numbers(self.picked(y, 0x000F000F, 0x64006400)), plain)
            return self.fma(self.numbers(self.picked(y, 0x00F000F0, 0x64006400)), self.both(2.0**-4), large)
        if kind == "u4":
            magic = 0x43004300 if self.bf16 else 0x64006400
            return arith.subf(self.numbers(self.picked(self.right(word, 4 * i), 0x000F000F, magic)), zero)
        if kind == "e2m1":
            y = self.right(word, 4 * i - 12)
            shift, mask, power = (6, 0x01C001C0, 126) if self.bf16 else (3, 0x0E000E00, 14)
            return self.placed(y, shift, mask, power)
        if kind == "e4m3":
            y = self.right(word, 8 * i - 8)
            shift, mask, power = (4, 0x07F007F0, 120) if self.bf16 else (1, 0x3F803F80, 8)
            return self.placed(y, shift, mask, power)
        y = self.right(word, 8 * i)
        if not self.bf16:
            v = self.picked(y, 0x00FF00FF, 0x64006400)
            v = arith.xori(v, self.const(0x00800080)) if kind == "s8" else v
            return arith.subf(self.numbers(v), zero)
        # seven bits behind 128, and the eighth chooses what is added: -256 or -128, so that -128..127 comes out
        low = self.numbers(self.picked(y, 0x007F007F, 0x43004300))
        top = self.flipped(y, 0x00800080, 0xC300C300 if kind == "s8" else 0xC380C380)
        whole = arith.addf(low, self.numbers(top))
        return whole if zero is None else arith.subf(whole, zero)

    def placed(self, y, shift: int, mask: int, power: int):
        """Sign and bits of a small float where the wider type has them; `power` makes up for the bias."""
        v = self.numbers(self.picked(y, 0x80008000, self.masked(self.right(y, shift), mask)))
        return v if self.code.lowered else arith.mulf(v, self.both(2.0**power))

    def looked_up(self, word):
        """Kind "book": for each of four pairs the number's upper and lower part, by byte permutations."""
        book = np.asarray(self.code.book, np.float32)
        dtype = jnp.bfloat16 if self.bf16 else jnp.float16
        upper = book.astype(dtype)
        lower = (book - upper.astype(np.float32)).astype(dtype)
        out = []
        tables = []
        for part in (upper, lower):
            raw = part.view(np.uint16)
            for byte in range(2):
                plane = ((raw >> (8 * byte)) & 0xFF).astype(np.uint32)
                tables.append([sum(int(plane[4 * q + b]) << (8 * b) for b in range(4)) for q in range(4)])
        planes = []  # [e][table]
        for e in range(2):
            codes = self.right(word, 16 * e)
            selector = self.masked(codes, 0x7777)
            upper_half = self.permute(self.const(0xFF00), self.const(0), self.masked(self.right(codes, 3), 0x1111))
            lower_half = arith.xori(upper_half, self.const(0xFFFFFFFF))
            found = []
            for q in tables:
                first = self.permute(self.const(q[0]), self.const(q[1]), selector)
                second = self.permute(self.const(q[2]), self.const(q[3]), selector)
                found.append(arith.ori(arith.andi(first, lower_half), arith.andi(second, upper_half)))
            planes.append(found)
        for part in range(2):
            halves = []  # [e][i // 2]: two 16-bit numbers
            for e in range(2):
                low, high = planes[e][2 * part], planes[e][2 * part + 1]
                halves.append([self.permute(low, high, self.const(s)) for s in (0x5140, 0x7362)])
            out.append(
                [
                    self.numbers(
                        self.permute(halves[0][i // 2], halves[1][i // 2], self.const((0x5410, 0x7632)[i % 2]))
                    )
                    for i in range(4)
                ]
            )
        return list(zip(*out, strict=True))

    def fragment(self, words, scales, zeros):
        """The same of words and numbers: [t][h] 32-bit values."""
        code = self.code
        per = 4 if BITS[code.kind] == 4 else 2  # pairs of a word
        out = [[None, None] for _ in range(INPUTS // 8)]
        for h in range(2):
            mine = words[h * len(words) // 2 : (h + 1) * len(words) // 2]
            for j, word in enumerate(mine):
                book = self.looked_up(word) if code.kind == "book" else None
                for i in range(per):
                    t = per * j + i
                    at = 2 * (t * code.groups // (INPUTS // 8)) + h
                    scale = None if scales is None else scales[at]
                    if book is not None:
                        assert isinstance(scale, tuple)
                        high, low = book[i]
                        v = arith.mulf(low, scale[0])
                        v = self.fma(high, scale[0], self.fma(high, scale[1], v))
                    else:
                        v = self.decoded(word, i, zeros[at] if isinstance(zeros, list) else zeros)
                        if isinstance(scale, tuple):
                            v = self.fma(v, scale[0], arith.mulf(v, scale[1]))
                        elif scale is not None:
                            v = arith.mulf(v, scale)
                    out[t][h] = self.bits(v)
        return out

    # ---- the product
    def offsets(self, zeros):
        """What is subtracted from codes as `decoded` finds them: one pair, one for each group and feature, or None."""
        kind, half = self.code.kind, 2.0 ** (BITS[self.code.kind] - 1)
        base = {("u4", True): 128.0, ("u4", False): 1024.0, ("u8", True): -128.0, ("u8", False): 1024.0}
        if kind == "s8":
            return None if self.bf16 else self.both(1152.0)
        if kind not in ("u4", "u8"):
            return None
        offset = base[kind, self.bf16]
        if self.code.in_place:  # of codes as they are, and -(1024 / 16 + zero) of those 16 times too large
            if zeros is None:
                return self.both(offset + half), self.both(-64.0 - half)
            numbers = self.group_numbers(zeros, False)
            return [(arith.addf(z, self.both(offset)), arith.subf(self.both(-64.0), z)) for z in numbers]
        if zeros is None:
            return self.both(offset + half) if offset + half else None
        return [arith.addf(z, self.both(offset)) for z in self.group_numbers(zeros, False)]

    def fragments(self, words, scales, zeros):
        """All registers of a tile, decoded."""
        start = arith.muli(self.masked(utils.thread_idx(), 127), self.const(16))
        loaded = []
        for i in range(self.code.words // 512):
            loaded += self.load(words, arith.addi(start, self.const(2048 * i)), 16)
        numbers = None if scales is None else self.group_numbers(scales, self.code.scale == "pair")
        return self.fragment(loaded, numbers, self.offsets(zeros))

    def started(self, sums, words, scales, zeros, x, n: int, fresh: bool):
        """`sums`, or with `fresh` 0 in their registers, plus the product of a tile, which is under way."""
        registers = self.fragments(words, scales, zeros)
        for half in range(2):
            sums = self.issue(sums, registers[8 * half : 8 * half + 8], x[half], n, fresh and half == 0)
        return sums

    def issue(self, sums, registers, x, n: int, fresh: bool = False):
        """Four instructions over 64 inputs; `registers` [8][2]."""
        base, step = _inline.descriptor(x, n, HALF)
        name, count = ("bf16" if self.bf16 else "f16"), n // 2
        first = count + len(sums)
        acc = "{" + ", ".join(f"${i}" for i in range(count)) + "}"
        lines = [".reg .pred p;", ".reg .b64 db;", f"setp.{'ne' if fresh else 'eq'}.b32 p, 0, 0;"]
        lines += ["wgmma.fence.sync.aligned;"]
        for k in range(4):
            a = "{" + ", ".join(f"${first + 4 * k + i}" for i in range(4)) + "}"
            lines += [f"add.s64 db, ${first + 16}, {step * k};"]
            lines += [f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{name}.{name} {acc}, {a}, db, p, 1, 1, 0;"]
            lines += ["setp.eq.b32 p, 0, 0;"] if fresh and k == 0 else []
        lines += ["wgmma.commit_group.sync.aligned;"]
        flat = [registers[2 * k + column][h] for k in range(4) for column in range(2) for h in range(2)]
        return _inline.assembly(lines, sums, count, [*((f, "r") for f in flat), (base, "l")], jnp.float32)
