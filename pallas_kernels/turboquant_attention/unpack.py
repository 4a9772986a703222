"""Packed TurboQuant slots in shared memory -> operands of wgmma in registers.

A block of 64 tokens holds the slots of all KV heads, as they lie in the cache. A thread reads what its own registers
need and nothing is written back: keys become operand A of `K q^T`, [64 tokens, D], values operand A of `V^T P^T`,
[D, 64 tokens], both float16.

In operand A thread (warp, group, column) owns rows `16 warp + group` and 8 below, and columns
`8 j + 2 column + {0, 1}`. Which number of a head is which column of the first product, or row of the second, is free,
so that every thread's share of a slot is contiguous: `query_order` and `output_order` say how.

4-bit codes index a table of 16 levels that is antisymmetric: eight magnitudes, as two tables of eight bytes each, are
looked up with `prmt`, four at a time, and the sign is put in. 3-bit codes are spread to nibbles first. Value codes are
put into the mantissa of 1024, which is then subtracted.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic, _words
from pallas_kernels._words import Memory, Thread, Word, permute, select

TOKENS = 64
"""Tokens of a block."""
KEYS = 64
"""Numbers of a key that are unpacked at once."""
f16, f32 = jnp.float16, jnp.float32
ACC = plgpu.Layout.WGMMA
ROW, COLUMN = ACC.reduce(1), ACC.reduce(0)
_TINY = 1e-16
"""Added to the squared length of a key's levels."""
_ONE = 0x64006400
"""1024 in both halves: a code or'd into the mantissa is added."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slots:
    """Where things lie in a block: `row` bytes a token, `slot` bytes a head, `heads` heads for each warpgroup.

    Behind every `run` tokens are `pad` bytes. `values` numbers of a value are unpacked at once.
    """

    D: int
    values: int
    run: int
    pad: int
    row: int
    slot: int
    heads: int
    key_bits: int
    value_bits: int
    norm_correction: bool
    levels: tuple[float, ...]
    """Of the key codes, rising; empty for e4m3 keys."""

    @property
    def key_bytes(self) -> int:
        """Bytes of a key's codes; its norm follows."""
        return self.D * self.key_bits // 8

    @property
    def value_offset(self) -> int:
        """First byte of the value codes."""
        return self.key_bytes + (0 if self.key_bits == 8 else 2)

    @property
    def value_end(self) -> int:
        """Where scale and minimum lie."""
        return self.value_offset + self.D * self.value_bits // 8


def query_order(D: int, key_bits: int) -> np.ndarray:
    """Number of a head that stands in each column of the first product."""
    d = np.arange(D)
    if key_bits == 8:
        return d.reshape(D // 16, 4, 2, 2).transpose(0, 2, 1, 3).ravel()
    if key_bits == 4:
        return d.reshape(D // 32, 4, 4, 2).transpose(0, 2, 1, 3).ravel()
    return d.reshape(4, D // 32, 4, 2).transpose(1, 2, 0, 3).ravel()


def output_order(D: int) -> np.ndarray:
    """Row of the second product that holds each number of a head."""
    rows = np.empty(D, np.int32)
    x = np.arange(D)
    tile, warp, half, group = x // 64, x // 16 % 4, x // 8 % 2, x % 8
    rows[(D // 32) * (8 * warp + group) + 2 * tile + half] = x
    return rows


# ---------------------------------------------------------------- keys
def key_operand(x: Slots, raw: Any, wg: Any, i: int, piece: int):
    """Levels of head i of warpgroup wg, float16 [64, KEYS]: a piece of `query_order`, and what their squares add up to.

    The squares of this thread's columns, float32 [64] for `key_factor`; None without norm correction. They are added as
    float16, in four chains a row.
    """
    if _mosaic.interpreting():
        key = _interpreted_key(x, _slot(x, raw, wg, i)[:, : x.key_bytes])[:, piece * KEYS : (piece + 1) * KEYS]
        return key, jnp.sum(key.astype(f32) ** 2, 1) if x.norm_correction else None

    def build(context, raw):
        del context
        thread = Thread()
        first = _head(x, raw, thread, (thread.warp << 4) + thread.group, i)
        slots = [first, first.at(8 * x.row)]  # the rows of operand A that this thread holds a part of
        halves = [_key_words(x, slot, thread, i, piece) for slot in slots]
        words = [word for pair in zip(*halves, strict=True) for word in pair]
        key = _words.fragment(words, (TOKENS, KEYS), ACC, "f16")
        if not x.norm_correction:
            return key
        return [key, _words.fragment([_squares(half) for half in halves], (TOKENS,), ROW, "f32")]

    key = plgpu.ShapeDtypeStruct((TOKENS, KEYS), f16, layout=ACC)
    squares = plgpu.ShapeDtypeStruct((TOKENS,), f32, layout=ROW)
    inline: Any = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=[key, squares] if x.norm_correction else key
    )
    out = inline(build)(raw)
    return tuple(out) if x.norm_correction else (out, None)


def key_factor(x: Slots, raw: Any, wg: Any, i: int, squares: list[Any]):
    """What a row of scores is multiplied with, float32 [64]: the stored norm, over the levels' length if `squares`."""
    if _mosaic.interpreting():
        norm = _half(_slot(x, raw, wg, i), x.key_bytes)
        return norm * lax.rsqrt(sum(squares) + _TINY) if squares else norm

    def build(context, raw, *squares):
        del context
        thread = Thread()
        first = _head(x, raw, thread, (thread.warp << 4) + thread.group, i)
        parts, out = [_words.words_of(s) for s in squares], []
        for half in range(2):
            number = first.load(8 * x.row * half + x.key_bytes, 2)
            norm = _words.asm("{.reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, l;}", number)
            if parts:
                total = functools.reduce(_plus, [part[half] for part in parts])
                for distance in (1, 2):
                    total = _plus(total, _words.shuffle(total, distance))
                inverse = _words.asm("rsqrt.approx.f32 $0, $1;", _plus(total, _words.float_word(_TINY)))
                norm = _words.asm("mul.f32 $0, $1, $2;", norm, inverse)
            out.append(norm)
        return _words.fragment(out, (TOKENS,), ROW, "f32")

    return _inline(build, (TOKENS,), f32, ROW, 1, *[ROW] * len(squares))(raw, *squares)


def _interpreted_key(x: Slots, codes: Any):
    if x.key_bits == 8:
        key = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(f16)
        return key.reshape(TOKENS, -1, 4, 2, 2).swapaxes(2, 3).reshape(TOKENS, x.D)
    codes = _codes(codes, x.key_bits)
    key: Any = sum(jnp.where(codes == n, level, 0) for n, level in enumerate(x.levels))
    key = key.astype(f16)
    if x.key_bits == 4:
        ordered = key.reshape(TOKENS, -1, 4, 4, 2).swapaxes(2, 3)
    else:
        ordered = key.reshape(TOKENS, 4, -1, 4, 2).transpose(0, 2, 3, 1, 4)
    return ordered.reshape(TOKENS, x.D)


def _squares(pairs: list[Word]) -> Word:
    """Sum of the squares of pairs of float16, as float32."""
    chains = []
    for n, pair in enumerate(pairs):
        if n < 4:
            chains.append(_words.asm("mul.rn.f16x2 $0, $1, $1;", pair))
        else:
            chains[n % 4] = _words.asm("fma.rn.f16x2 $0, $1, $1, $2;", pair, chains[n % 4])
    while len(chains) > 1:
        chains = [_words.asm("add.rn.f16x2 $0, $1, $2;", *chains[n : n + 2]) for n in range(0, len(chains), 2)]
    halves = (
        "{.reg .b16 l, h; .reg .f32 a, b; mov.b32 {l, h}, $1; cvt.f32.f16 a, l; cvt.f32.f16 b, h; add.f32 $0, a, b;}"
    )
    return _words.asm(halves, chains[0])


def _key_words(x: Slots, place: Memory, thread: Thread, i: int, piece: int) -> list[Word]:
    """Pairs of float16: this thread's share of a piece of one key, in the order of its registers."""
    out = []
    if x.key_bits == 3:
        share = 3 * x.D // 32
        mine = place.at(thread.column * share).at(6 * piece)  # 16 numbers
        halves = _halves(mine, 3, _aligned(x, i) and share % 4 == 0 and piece % 2 == 0)
        for n in range(2):
            out += _looked_up(_spread(_three_bytes(halves, 3 * n)), *_tables(x.levels))
        return out
    mine, size = place.at(thread.column << 2), KEYS * x.key_bits // 8
    for offset in range(size * piece, size * (piece + 1), 16):
        word = _word(mine, offset, _aligned(x, i))
        if x.key_bits == 8:
            out += [
                _words.asm("{.reg .b16 l, h; mov.b32 {l, h}, $1; cvt.rn.f16x2.e4m3x2 $0, l;}", part)
                for part in (word, word >> 16)
            ]
        else:
            out += _signed(word, *_tables(x.levels[8:]))
    return out


def _tables(levels: tuple[float, ...]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Low and high bytes of eight float16 numbers, four to a word."""
    bits = np.asarray(levels, np.float16).view(np.uint16).astype(np.int64)
    shifts = 8 * np.arange(4)

    def words(x):
        return int((x[:4] << shifts).sum()), int((x[4:] << shifts).sum())

    return words(bits & 255), words(bits >> 8)


def _signed(word: Word, low: tuple[int, int], high: tuple[int, int]) -> list[Word]:
    """Eight 4-bit codes -> four pairs; code 7 - m and code 8 + m are -+ magnitude m."""
    negative = ~(word >> 3) & 0x11111111
    magnitude = (word ^ (negative * 7)) & 0x77777777
    out = []
    for part in range(2):
        m, s = magnitude >> 16 * part, negative >> 16 * part
        top = permute(*high, m) | permute(0x8000, 0, s)
        out += _interleaved(permute(*low, m), top)
    return out


def _looked_up(codes: Word, low: tuple[int, int], high: tuple[int, int]) -> list[Word]:
    """Eight codes below 8, each in a nibble -> four pairs."""
    out = []
    for part in range(2):
        c = codes >> 16 * part
        out += _interleaved(permute(*low, c), permute(*high, c))
    return out


def _interleaved(low: Word, high: Word) -> list[Word]:
    """Four low and four high bytes -> two pairs of 16 bits."""
    return [permute(low, high, 0x5140), permute(low, high, 0x7362)]


def _spread(word: Word) -> Word:
    """Eight 3-bit fields, from bit 0 on (the upper byte may hold anything) -> eight nibbles."""
    word = (word & 0xFFF) + (word & 0xFFF000) * 16
    word = word + (word & 0x0FC00FC0) * 3
    return word + (word & 0x38383838)


# ---------------------------------------------------------------- values
def stage_scales(x: Slots, raw: Any, scales: Any, wg: Any, valid: Any) -> None:
    """Write each token's scale and minimum to `scales` float16 [heads, 2, 64], zeros from token `valid` on."""
    if _mosaic.interpreting():
        for i in range(x.heads):
            slot = _slot(x, raw, wg, i)
            for n in range(2):
                number = _half(slot, x.value_end + 2 * n).astype(f16)
                scales[i, n] = jnp.where(lax.iota(jnp.int32, TOKENS) < valid, number, 0)
        return

    def build(context, raw, scales, valid):
        del context
        thread = Thread()
        token, which = thread.index & (TOKENS - 1), thread.index >> 6
        seen = _words.less(token, _words.scalar(valid))
        for i in range(x.heads):
            number = _head(x, raw, thread, token, i).at(which << 1).load(x.value_end, 2)
            Memory(scales).at(thread.index << 1).store(4 * TOKENS * i, select(seen, number, 0), 2)

    _inline(build, None, None, None, 2, plgpu.Layout.WG_SPLAT)(raw, scales, valid)


def value_operand(x: Slots, raw: Any, scales: Any, wg: Any, i: int, piece: int):
    """float16 [values, 64] of head i of warpgroup wg: `code * scale + minimum`, a piece of `output_order`."""
    size = x.values
    if _mosaic.interpreting():
        slot = _slot(x, raw, wg, i)
        codes = _codes(slot[:, x.value_offset : x.value_end], x.value_bits).astype(f32)
        scale, low = (scales[i, n].astype(f32)[:, None] for n in range(2))
        value = (codes * scale + low).astype(f16)
        value = value.reshape(TOKENS, 4, 8, -1, 2).transpose(3, 1, 4, 2, 0).reshape(x.D, TOKENS)
        return value[piece * size : (piece + 1) * size]

    def build(context, raw, scales):
        del context
        thread = Thread()
        steps = Memory(scales).at(thread.column << 2)
        first = _head(x, raw, thread, thread.column << 1, i)
        bit = ((thread.warp << 3) + thread.group) * (x.D // 32 * x.value_bits) + piece * (size // 32 * x.value_bits)
        first, bit, out = first.at(bit >> 3), bit & 7, {}
        for j in range(TOKENS // 8):
            pairs = _code_pairs(x, first.at(8 * j * x.row + 8 * j // x.run * x.pad), bit)
            scale, low = (steps.load(4 * TOKENS * i + 2 * TOKENS * n + 16 * j, 4) for n in range(2))
            for n, pair in enumerate(pairs):
                code = _words.asm("sub.rn.f16x2 $0, $1, $2;", pair | _ONE, _ONE)
                out[n // 2, j, n % 2] = _words.asm("fma.rn.f16x2 $0, $1, $2, $3;", code, scale, low)
        return _words.fragment([out[key] for key in sorted(out)], (size, TOKENS), ACC, "f16")

    return _inline(build, (size, TOKENS), f16, ACC, 2)(raw, scales)


def _code_pairs(x: Slots, place: Memory, bit: Word) -> list[Word]:
    """Two or four codes of this thread, of two neighbouring tokens, a pair for each number of the head.

    They start in the byte at `place`, `bit` bits into it (4-bit codes: at its start).
    """
    count = x.values // 32

    def paired(offset, size):
        start = x.value_offset + offset
        return place.load(start, size) | (place.load(start + x.row, size) << 16)

    if x.value_bits == 4:
        word = paired(0, count // 2)
    else:
        word = (paired(0, 1) | (paired(1, 1) << 8)) >> bit
    mask = 2**x.value_bits - 1
    return [(word >> x.value_bits * n) & (mask | mask << 16) for n in range(count)]


# ---------------------------------------------------------------- between the products
def column_maxima(scores: list[Any], room: Any) -> list[Any]:
    """Largest of each column of float32 [64, rows] arrays, each [rows]; `room` is float32 [arrays, 4, rows]."""
    if _mosaic.interpreting():
        return [jnp.max(s, axis=0) for s in scores]
    rows = scores[0].shape[1]

    def build(context, room, *scores):
        del context
        thread = Thread()
        mine = Memory(room).at((thread.warp * (4 * rows)) + (thread.column << 3))
        for i, s in enumerate(scores):
            words = _words.words_of(s)
            for j in range(rows // 8):
                for e in range(2):
                    top = _maximum(words[4 * j + e], words[4 * j + 2 + e])
                    for distance in (4, 8, 16):
                        top = _maximum(top, _words.shuffle(top, distance))
                    mine.store(16 * rows * i + 32 * j + 4 * e, top, 4)
        _words.barrier()
        others, out = Memory(room).at(thread.column << 3), []
        for i in range(len(scores)):
            words = []
            for j in range(rows // 8):
                for e in range(2):
                    a, b, c, d = (others.load(4 * rows * (4 * i + w) + 32 * j + 4 * e, 4) for w in range(4))
                    words.append(_maximum(_maximum(a, b), _maximum(c, d)))
            out.append(_words.fragment(words, (rows,), COLUMN, "f32"))
        return out

    kind = plgpu.ShapeDtypeStruct((rows,), f32, layout=COLUMN)
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[ACC] * len(scores)), return_type=[kind] * len(scores))
    return inline(build)(room, *scores)


def column_sum(a: Any, room: Any):
    """Sum of each column of float32 [64, rows]; `room` as in `column_maxima`."""
    if _mosaic.interpreting():
        return jnp.sum(a, axis=0)
    rows = a.shape[1]

    def build(context, room, a):
        del context
        thread = Thread()
        mine, others = Memory(room).at((thread.warp * (4 * rows)) + (thread.column << 3)), None
        words = _words.words_of(a)
        _words.barrier()
        for j in range(rows // 8):
            for e in range(2):
                total = _plus(words[4 * j + e], words[4 * j + 2 + e])
                for distance in (4, 8, 16):
                    total = _plus(total, _words.shuffle(total, distance))
                mine.store(32 * j + 4 * e, total, 4)
        _words.barrier()
        others, out = Memory(room).at(thread.column << 3), []
        for j in range(rows // 8):
            for e in range(2):
                a, b, c, d = (others.load(4 * rows * w + 32 * j + 4 * e, 4) for w in range(4))
                out.append(_plus(_plus(a, b), _plus(c, d)))
        return _words.fragment(out, (rows,), COLUMN, "f32")

    return _inline(build, (rows,), f32, COLUMN, 1, ACC)(room, a)


def store_transposed(tile: Any, p: Any, transforms: Any) -> None:
    """Write float16 [64, rows] to `tile` [rows, 64] in shared memory with a swizzle of 128 bytes."""
    if _mosaic.interpreting():
        tile[...] = p.T
        return

    def build(context, tile, p):
        del context
        thread = Thread()
        words = _words.words_of(p)
        for half in range(2):
            chunk = (thread.warp << 1) + half
            for e in range(2):
                row = (thread.column << 1) + e
                mine = Memory(tile).at((row << 7) + ((chunk ^ row) << 4) + (thread.group << 1))
                for j in range(p.shape[1] // 8):
                    mine.store(1024 * j, words[2 * j + half] >> 16 * e, 2)

    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), ACC))
    inline(build)(tile, p)


def _maximum(a: Word, b: Word) -> Word:
    return _words.asm("max.NaN.f32 $0, $1, $2;", a, b)


def _plus(a: Word, b: Word) -> Word:
    return _words.asm("add.f32 $0, $1, $2;", a, b)


# ---------------------------------------------------------------- reading a block
def _inline(build: Any, shape: Any, dtype: Any, layout: Any, *kinds: Any) -> Any:
    """`inline_mgpu` for references (their number comes first in `kinds`, or no number) and arrays (their layouts)."""
    types = [t for kind in kinds for t in ([plgpu.RefType()] * kind if isinstance(kind, int) else [kind])]
    out = None if shape is None else plgpu.ShapeDtypeStruct(shape, dtype, layout=layout)
    inline: Any = plgpu.inline_mgpu(arg_types=tuple(types), return_type=out)
    return inline(build)


def _head(x: Slots, raw: Any, thread: Thread, token: Word, i: int) -> Memory:
    """A token's slot of head i of this warpgroup."""
    place = token * x.row + thread.warpgroup * (x.heads * x.slot)
    if x.pad and x.run < TOKENS:
        place = place + (token >> x.run.bit_length() - 1) * x.pad
    return Memory(raw).at(place).at(i * x.slot)  # constants fold


def _aligned(x: Slots, i: int) -> bool:
    """Slots of head i of every warpgroup start at a multiple of four bytes."""
    return x.row % 4 == 0 and x.pad % 4 == 0 and x.heads * x.slot % 4 == 0 and i * x.slot % 4 == 0


def _word(place: Memory, offset: int, aligned: bool) -> Word:
    if aligned:
        return place.load(offset, 4)
    return place.load(offset, 2) | (place.load(offset + 2, 2) << 16)


def _halves(place: Memory, count: int, aligned: bool) -> list[Word]:
    """Consecutive 16-bit numbers."""
    if not aligned:
        return [place.load(2 * n, 2) for n in range(count)]
    words = [place.load(4 * n, 4) for n in range(count // 2)]
    rest = [place.load(2 * n, 2) for n in range(count - count % 2, count)]
    return [half for word in words for half in (word & 0xFFFF, word >> 16)] + rest


def _three_bytes(halves: list[Word], byte: int) -> Word:
    """Three bytes from byte `byte` on; the upper byte of the word holds anything."""
    first, odd = divmod(byte, 2)
    if not odd:
        return halves[first] | (halves[first + 1] << 16)
    return (halves[first] >> 8) | (halves[first + 1] << 8)


def _slot(x: Slots, raw: Any, wg: Any, i: int):
    """uint8 [64, slot] of a head; interpreted only."""
    block = raw[...].reshape(TOKENS // x.run, x.run * x.row + x.pad)[:, : x.run * x.row].reshape(TOKENS, x.row)
    return lax.dynamic_slice(block, (0, (wg * x.heads + i) * x.slot), (TOKENS, x.slot))


def _half(slot: Any, offset: int):
    bits = slot[:, offset].astype(jnp.uint16) | (slot[:, offset + 1].astype(jnp.uint16) << 8)
    return lax.bitcast_convert_type(bits, f16).astype(f32)


def _codes(packed: Any, bits: int):
    """Codes of packed bytes; interpreted only."""
    size = 3 if bits == 3 else 1
    groups = packed.reshape(TOKENS, -1, size).astype(jnp.int32)
    word = sum(groups[:, :, n] << 8 * n for n in range(size))
    return jnp.stack([(word >> bits * n) & (2**bits - 1) for n in range(8 * size // bits)], -1).reshape(TOKENS, -1)
