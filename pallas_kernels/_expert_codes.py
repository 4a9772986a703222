"""MXFP4 weights as E5M2 codes in registers, with the powers of 128 inputs folded in, for FP8 products of many tokens.

An MXFP4 weight is E2M1 times a power of two for each 32 inputs of a feature. A product that is scaled once for 128
inputs wants one power for four such groups: the largest. What the others are smaller by goes into their codes, for
which E5M2 has room:

    code = e5m2(e2m1 * 2^(LIFT - d)),   d = largest exponent of a feature's 128 inputs - the group's own

E2M1 has one bit behind its first, E5M2 two, so that is exact for d up to `EXACT`; groups that are smaller still become
zero, which they are but for 2^-27 of the largest number that the feature could hold there. Eight magnitudes are two
registers, which whoever loads leaves in shared memory for each group, and PRMT picks four of them at once.

The weight is wgmma's A operand. As in `_nibbles` a lane takes sixteen neighbouring inputs of a row out of 64:

    input 64 b + 16 c + 8 m + 4 k + i  goes to place 64 b + 32 m + 16 k + 4 c + i  (lane c of four)
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _decode, _inline, _mosaic, _nibbles

ir, arith, llvm, vector = _inline.ir, _inline.arith, _inline.llvm, _inline.vector
fragments, utils = _inline.fragments, _inline.utils

FEATURES, INPUTS, GROUP, HALF = _nibbles.FEATURES, _nibbles.INPUTS, 32, 64
LIFT = 13
"""Of the largest power: 6 * 2^13 is the largest E2M1 that E5M2 holds."""
EXACT = 26
"""d up to which codes are exact: 0.5 * 2^(13 - 26) is 2^-14, the smallest normal number."""
LOWEST = -22
"""Exponent of the least scale of a group of 128 activations: that of an amax of 1e-4."""
_FIRST, _LAST = 0x06040000, 0x0E0C0A08
"""E5M2 of 0, 0.5, 1 and 1.5, then 2, 3, 4 and 6, a byte each, less an exponent that is added to each but the zero."""
_ONES = 0x01010101
_COLUMN = plgpu.Layout.WGMMA.reduce(0)
_WORDS = 16
"""Registers of a lane for 64 x 128 codes."""
_CODE = _decode.Code(kind="e2m1", dtype=jnp.dtype(jnp.bfloat16))
_LAYOUT = plgpu.Layout.WG_STRIDED((128 * _WORDS,), 1)
_OUT = plgpu.ShapeDtypeStruct((128 * _WORDS,), jnp.int32, layout=_LAYOUT)


def permute(x: jax.Array) -> jax.Array:
    """`x` [..., K] in the order of inputs that the products want; K a multiple of 64."""
    *rest, K = x.shape
    y = x.reshape(*rest, K // HALF, 4, 2, 2, 4)  # c m k i
    first = len(rest) + 1
    return y.transpose(*range(first), *(first + i for i in (1, 2, 0, 3))).reshape(x.shape)


def _column(thread):
    # feature 16 c + 8 m + 4 k + i lies in warp c, lanes 4 (4 k + i) to 4 (4 k + i) + 3
    k_i = arith.addi(_inline.bits(thread, 4, 1, 4), _inline.bits(thread, 2, 3, 0))
    return arith.addi(k_i, _inline.bits(thread, 5, 3, 2))


ORDER = _inline.Order(permute, _column, 32)


# ---------------------------------------------------------------- the warpgroup that loads
def tables(words: jax.Array) -> jax.Array:
    """int32 [n, 4, 2]: for every group of int32 words [n] of four powers the codes of E2M1's eight magnitudes."""
    d = jnp.max(_bytes(words), 1, keepdims=True) - _bytes(words)
    exponent = (EXACT + 1 - d) << 2
    both = jnp.stack([_FIRST + exponent * (_ONES - 1), _LAST + exponent * _ONES], -1)
    return jnp.where((d <= EXACT)[..., None], both, 0)


def store_tables(ref: Any, powers: Any, words: jax.Array) -> None:
    """Leave tables and largest powers of two of each feature.

    Args:
        ref: int32 [128 n, 8] in plain shared memory, see `tables`.
        powers: float32 [128 n], likewise: `2^(byte - 127)` of the largest byte, NaN for 255.
        words: int32 [128 n] of `_nibbles.load_lines`.
    """
    if _mosaic.interpreting():
        ref[...] = tables(words).reshape(ref.shape)
        powers[...] = _nibbles.power(jnp.max(_bytes(words), 1), 0)
        return

    def emit(context, ref, powers, words):
        del context
        e, thread = _Emitter(), _inline.bits(utils.thread_idx(), 0, 127, 0)
        for i, register in enumerate(words.registers.flat):
            given = [_inline.bits(e.element(register, 0), 8 * s, 255, 0) for s in range(4)]
            top = e.top(given)
            row = arith.addi(thread, e.const(128 * i))
            e.store(powers, arith.shli(row, e.const(2)), [e.power(top)])
            parts = [x for byte in given for x in e.table(arith.subi(top, byte))]
            for half in range(2):
                at = arith.addi(arith.shli(row, e.const(5)), e.const(16 * half))
                e.store(ref, at, parts[4 * half : 4 * half + 4])

    strided = plgpu.Layout.WG_STRIDED(words.shape, 1)
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), strided))
    inline(emit)(ref, powers, words)


def _bytes(words: jax.Array) -> jax.Array:
    """[n, 4]."""
    return jnp.stack([(words >> 8 * i) & 255 for i in range(4)], 1)


# ---------------------------------------------------------------- those that multiply
def fetch(words: Any, tables: Any, part: int = 0) -> jax.Array:
    """Load what `decode` takes.

    Args:
        words: E2M1 codes, uint8 [64, 64] or [64, 128] in shared memory, swizzled by spans of their rows.
        tables: int32 [64, 8] of `store_tables`.
        part: which 64 bytes of the rows of words.
    """
    if _mosaic.interpreting():
        picked = _nibbles._part(words, part)
        codes = jnp.stack([picked & 15, picked >> 4], -1).reshape(FEATURES, INPUTS)
        raw = tables[...].reshape(FEATURES, 4, 2)
        magnitudes = jnp.stack([(raw >> 8 * i) & 255 for i in range(4)], -1).reshape(FEATURES, 4, 8)
        magnitudes = lax.bitcast_convert_type(magnitudes.astype(jnp.uint8), jnp.float8_e5m2).astype(jnp.float32)
        magnitudes = jnp.repeat(magnitudes, GROUP, 1)
        value = sum(jnp.where(codes & 7 == i, magnitudes[:, :, i], 0) for i in range(8))
        return permute(jnp.where(codes > 7, -value, value))
    width = words.shape[1]

    def emit(context, words, tables):
        del context
        return _inline.words(_Emitter(width, part).fetched(words, tables), _LAYOUT, (128 * _WORDS,))

    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(_inline.span(width)), plgpu.RefType()), return_type=_OUT)
    return inline(emit)(words, tables)


def decode(fetched: jax.Array) -> jax.Array:
    """The A operand of 64 features and 128 inputs, for `start`."""
    return _through(fetched, lambda e, given: e.operand(given))


def kept(codes: jax.Array) -> jax.Array:
    """`codes`, which LLVM must have by now."""
    return _through(codes, lambda e, given: _inline.assembly([], given, _WORDS, [], jnp.int32))


def _through(codes: jax.Array, work: Callable[[Any, list[Any]], Any]) -> jax.Array:
    """What `work(emitter, registers)` makes of them; interpreted, codes are what they are."""
    if _mosaic.interpreting():
        return codes

    def emit(context, codes):
        del context
        e = _Emitter()
        given = [e.element(register, 0) for register in codes.registers.flat]
        return _inline.words(work(e, given), _LAYOUT, (128 * _WORDS,))

    inline: Any = plgpu.inline_mgpu(arg_types=(_LAYOUT,), return_type=_OUT)
    return inline(emit)(codes)


def start(codes: jax.Array, x: Any, over: jax.Array) -> jax.Array:
    """Start the product of `decode`'s codes with x: float32 [64, n], to be `_inline.settle`d.

    Args:
        codes: of `decode`; they must stay until then.
        x: float8_e4m3fn [n, 128] in the order of `permute`, see `_inline.span`.
        over: float32 [64, n], settled and used up by now, whose registers this one takes.
    """
    n = x.shape[0]
    if _mosaic.interpreting():
        rows = x[...].astype(jnp.float32)
        return lax.dot_general(codes, rows, (((1,), (1,)), ((), ())), precision="highest")

    def emit(context, codes, x, over):
        del context
        e = _Emitter()
        given = [e.element(register, 0) for register in codes.registers.flat]
        return _inline.array(e.issued(given, x, _inline.registers(over), n), n, jnp.float32)

    types = (_LAYOUT, plgpu.RefType(_inline.span()), _inline.WGMMA)
    out = plgpu.ShapeDtypeStruct((FEATURES, n), jnp.float32, layout=_inline.WGMMA)
    inline: Any = plgpu.inline_mgpu(arg_types=types, return_type=out)
    return inline(emit)(codes, x, over)


def sums(x: Any, r: Any, warpgroup, expert, features, first) -> tuple:
    """Sums over all inputs, [64, n] of both halves: one product at a time, whose scales follow.

    Another warpgroup's products fill the gaps. What the next one is decoded of is loaded meanwhile, but for a step's
    first. With `overlap` it is decoded as well: ptxas waits for a product as early as it can, but moves nothing over a
    loop, such as that of a barrier.
    """
    del expert, features
    c, mine = x.config, pl.ds(warpgroup * FEATURES, FEATURES)

    def fetched(slot, part, half):
        return fetch(r.w_ring.at[slot, half, mine], r.table_ring.at[slot, part, half, mine], part)

    def added(slot, part, half, total, product):
        row = plgpu.load(r.scale_ring.at[slot, part], layout=_COLUMN, optimized=False)
        power = plgpu.load(r.power_ring.at[slot, part, half, mine], layout=_inline.ROW, optimized=False)
        return add_scaled(total, power, row, product)

    def meet():
        plgpu.barrier_arrive(r.meeting.at[warpgroup])
        plgpu.barrier_wait(r.meeting.at[warpgroup])

    def step(k, carry):
        *totals, product = carry
        slot = lax.rem(first + k, jnp.int32(c.stages))
        plgpu.barrier_wait(r.full.at[slot])
        order = [*itertools.product(range(x.parts), range(2))]
        given = fetched(slot, *order[0])
        for (part, half), then in zip(order, [*order[1:], None], strict=True):
            ready = c.overlap > 1 and (part, half) != order[0]
            codes = given if ready else decode(given)
            product = start(codes, r.x_ring.at[slot, part], product)
            given = fetched(slot, *then) if then else given
            if then and c.overlap > 1:
                given = kept(decode(given))
                meet()
            product = _inline.settle(product, 0)
            totals[half] = added(slot, part, half, totals[half], product)
        _inline.release_reads()
        plgpu.barrier_arrive(r.empty.at[slot])
        return *totals, product

    zero = plgpu.layout_cast(jnp.zeros((FEATURES, c.tokens), jnp.float32), _inline.WGMMA)
    return lax.fori_loop(0, x.steps, step, (zero, zero, zero))[:2]


def add_scaled(sums: jax.Array, features: jax.Array, rows: jax.Array, product: jax.Array) -> jax.Array:
    """`sums + product * (features[:, None] * rows)` in float32: both scales first, for which no product is waited.

    Args:
        sums: float32 [64, n] in the layout of wgmma.
        features: float32 [64] in that of its rows.
        rows: float32 [n] in that of its columns.
        product: float32 [64, n].
    """
    if _mosaic.interpreting():
        return sums + product * (features[:, None] * rows)

    def emit(context, sums, features, rows, product):
        del context
        shape, layout = sums.shape, fragments.WGMMA_LAYOUT
        scale = features.broadcast_in_dim(shape, (0,), layout) * rows.broadcast_in_dim(shape, (1,), layout)
        return _inline.multiply_add(product, scale, sums)

    out = plgpu.ShapeDtypeStruct(sums.shape, jnp.float32, layout=_inline.WGMMA)
    types = (_inline.WGMMA, _inline.ROW, _inline.WGMMA.reduce(0), _inline.WGMMA)
    inline: Any = plgpu.inline_mgpu(arg_types=types, return_type=out)
    return inline(emit)(sums, features, rows, product)


class _Emitter(_nibbles._Emitter):
    """The instructions of this file."""

    def __init__(self, width: int = 64, part: int = 0):
        super().__init__(_CODE, "ue8m0", width, part)

    def top(self, values):
        """The largest of four."""
        a, b, c, d = values
        return arith.maxui(arith.maxui(a, b), arith.maxui(c, d))

    def power(self, byte):
        """The bits of float32 `2^(byte - 127)`; 255 is NaN."""
        nan = _inline.bits(arith.addi(byte, self.const(1)), 8, 1, 22)
        return arith.ori(arith.maxui(arith.shli(byte, self.const(23)), self.const(1 << 22)), nan)

    def table(self, d):
        """The eight codes of a group whose power is 2^-d of the largest."""
        exponent = arith.shli(arith.subi(self.const(EXACT + 1), d), self.const(2))
        some = arith.cmpi(arith.CmpIPredicate.ule, d, self.const(EXACT))
        both = ((_FIRST, _ONES - 1), (_LAST, _ONES))
        found = [arith.addi(arith.muli(exponent, self.const(ones)), self.const(base)) for base, ones in both]
        return [arith.select(some, x, self.const(0)) for x in found]

    def fetched(self, words, tables):
        """For both rows and both halves of inputs two words, and the codes of the magnitudes."""
        given, lane = self.lane_words(words), self.masked(utils.thread_idx(), 3)
        start = arith.addi(self.right(_nibbles._row(), -5), self.right(self.right(lane, 1), -3))
        found = []
        for h in range(2):
            for b in range(2):
                found += given[4 * h + 2 * b : 4 * h + 2 * b + 2]
                found += self.load(tables, arith.addi(start, self.const(256 * h + 16 * b)), 8)
        return found

    def operand(self, fetched):
        """Four registers for each of four instructions."""
        rows = []
        for h in range(2):
            codes = []
            for at in (8 * h, 8 * h + 4):
                codes += [self.codes(word, fetched[at + 2 : at + 4]) for word in fetched[at : at + 2]]
            rows.append(codes)
        return [rows[h][step][k] for step in range(4) for k in range(2) for h in range(2)]

    def codes(self, word, magnitudes):
        """Eight codes of a word in their order, two registers."""
        which, even = self.masked(word, 0x77777777), self.right(word, -4)
        low, high = magnitudes
        out = []
        for selected, signs in ((which, 0x5140), (self.right(which, 16), 0x7362)):
            sign = self.permute(even, word, self.const(signs))
            out.append(self.picked(sign, 0x80808080, self.permute(low, high, selected)))
        return out

    def issued(self, codes, x, over, n: int):
        """Four instructions over 128 inputs, the first of which overwrites its registers."""
        base, step = _inline.descriptor(x, n)
        count = n // 2
        first = count + len(over)
        acc = "{" + ", ".join(f"${i}" for i in range(count)) + "}"
        lines = [".reg .pred p;", ".reg .b64 db;", "setp.ne.b32 p, 0, 0;", "wgmma.fence.sync.aligned;"]
        for k in range(4):
            a = "{" + ", ".join(f"${first + 4 * k + i}" for i in range(4)) + "}"
            lines += [f"add.s64 db, ${first + _WORDS}, {step * k};"]
            lines += [f"wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e5m2.e4m3 {acc}, {a}, db, p, 1, 1;"]
            lines += ["setp.eq.b32 p, 0, 0;"] if k == 0 else []
        lines += ["wgmma.commit_group.sync.aligned;"]
        return _inline.assembly(lines, over, count, [*((c, "r") for c in codes), (base, "l")], jnp.float32)

    def store(self, ref, offset, values):
        """Words at a byte offset."""
        byte, pointer = ir.IntegerType.get_signless(8), utils.memref_ptr(ref)
        at = llvm.getelementptr(pointer.type, pointer, [offset], [-(2**31)], byte, llvm.GEPNoWrapFlags.none)
        both = llvm.mlir_undef(ir.VectorType.get((len(values),), self.i32))
        for i, value in enumerate(values):
            both = vector.insert(value, both, [], [i])
        llvm.store(both, at, alignment=4 * len(values))
