"""Weights of four bits as E4M3 codes in shared memory, for FP8 products of experts with many tokens.

An MXFP4 weight is E2M1 times a power of two for each 32 inputs of a feature; FP8 products want one scale for a block of
128 inputs, as FP8 blocks have it. E2M1 has one bit behind its first, E4M3 three and 15 more exponents, so the powers
of a block go into its codes, beside the largest of them:

    code = e4m3(e2m1 * 2^(LIFT - d)),   d = largest exponent of 128 features x 128 inputs - the group's own

That is exact for d up to `EXACT`; beyond, codes are rounded to multiples of 2^-9, which is at most 2^-18 of the largest
number that the block could hold. Eight magnitudes are two registers, and PRMT picks four of them at once.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _decode, _expert_rows, _inline, _mosaic, _nibbles

ir, arith, llvm, vector, utils = _inline.ir, _inline.arith, _inline.llvm, _inline.vector, _inline.utils

BLOCK, GROUP = 128, 32
"""Inputs, and features, that have one scale in the products; inputs that have one in the weight."""
RAW = 3
"""Fetches of undecoded weights in flight."""
LIFT = 6
"""Of a block's largest power: 6 * 2^6 is the largest E2M1 that E4M3 holds."""
EXACT = 14
"""d up to which codes are exact: 1.5 * 2^(6 - 14) is 3 * 2^-9."""
_DEEPEST = 19
"""d from which on all codes are zero."""
_CODE = _decode.Code(kind="e2m1", dtype=jnp.dtype(jnp.bfloat16))
_STRIDED = plgpu.Layout.WG_STRIDED((BLOCK,), 1)

i32 = jnp.int32


def table() -> jax.Array:
    """int32 [20, 2]: for every d the codes of 0, 0.5, 1, 1.5, 2, 3, 4 and 6, a byte each."""
    powers = np.exp2(LIFT - np.arange(_DEEPEST + 1.0))[:, None]
    codes = (np.asarray(_decode._E2M1) * powers).astype(jnp.float8_e4m3fn)
    return jnp.asarray(np.ascontiguousarray(codes).view("<i4"))


def scratch(features: int, stages: int, parts: int) -> dict[str, Any]:
    """What a thread block needs besides: undecoded weights of `parts` blocks, and the largest powers on their way."""
    span = parts * BLOCK // 2
    return {
        "raw_ring": plgpu.SMEM((RAW, features, span), jnp.uint8, transforms=_inline.span(span)),
        "raw_full": plgpu.Barrier(num_arrivals=2, num_barriers=RAW),
        "tops_ring": plgpu.SMEM((2, 2, 4), i32),
        "power_ring": plgpu.SMEM((stages, 2), jnp.float32),
    }


def smem_bytes(features: int, stages: int, parts: int) -> int:
    """Of `scratch`."""
    return RAW * features * parts * (BLOCK // 2) + 64 + 8 * stages + 2048


# ---------------------------------------------------------------- the warpgroup that loads
def load(x: Any, r: Any, place: Any, count: Any) -> None:
    """Fetch rows and weights of all tiles of a thread block, and decode the weights.

    Args:
        x: plan of the product.
        r: its references.
        place: of a turn the tile, which of the tiles side by side, and the number of its first step.
        count: turns.
    """
    c, total = x.config, count * x.steps
    parts = 2 if c.whole else 1
    fetches = lax.div(total, i32(parts))

    def where(at):
        turn = lax.div(at, i32(x.steps))
        tile, across, first = place(turn)
        return tile, across, at - first

    def fetch(number):
        tile, across, k = where(number * parts)
        slot, width = lax.rem(number, i32(RAW)), parts * BLOCK // 2
        for half in range(2):
            inputs = pl.ds(k * (BLOCK // 2), width)
            weight = _expert_rows.weight(x, r, r.experts[tile], across, half, inputs)
            to = r.raw_ring.at[slot, pl.ds(half * c.half, c.half)]
            plgpu.copy_gmem_to_smem(weight, to, r.raw_full.at[slot])

    def scales(at):
        tile, across, k = where(jnp.clip(at, 0, jnp.maximum(total - 1, 0)))
        lines = [_nibbles.Lines(r.weight_scale, half=half if x.act else 0, turns=x.turns) for half in range(2)]
        starts = [across * x.width + (0 if x.act else half * c.half) for half in range(2)]
        given = zip(lines, starts, strict=True)
        return tuple(_nibbles.load_lines(line, r.experts[tile], at, k, BLOCK, x.N - BLOCK // 2) for line, at in given)

    def step(at, carry, part, number):
        now, later = carry
        tile, _, k = where(at)
        slot, raw = lax.rem(at, i32(c.stages)), lax.rem(number, i32(RAW))
        pl.when(at >= c.stages)(lambda: plgpu.barrier_wait(r.empty.at[slot]))
        _expert_rows.fetch(x, r, tile, k, slot)
        leave_largest(r.tops_ring.at[lax.rem(at + 1, i32(2))], later)
        if part == 0:
            plgpu.barrier_wait(r.raw_full.at[raw])
        tops = r.tops_ring.at[lax.rem(at, i32(2))]
        decode(r.b_ring.at[slot, 0], r.power_ring.at[slot], r.raw_ring.at[raw], now, tops, r.table, part)
        plgpu.commit_smem()
        plgpu.barrier_arrive(r.full.at[slot])
        return later, scales(at + 2)

    def steps(number, carry):
        for part in range(parts):
            carry = step(number * parts + part, carry, part, number)
        pl.when(number + RAW < fetches)(lambda: fetch(number + RAW))
        return carry

    for i in range(RAW):
        pl.when(fetches > i)(lambda i=i: fetch(i32(i)))
    now = scales(i32(0))
    leave_largest(r.tops_ring.at[0], now)
    plgpu.commit_smem()
    lax.fori_loop(0, fetches, steps, (now, scales(i32(1))))


def leave_largest(tops: Any, words: tuple[jax.Array, ...]) -> None:
    """The largest byte of each half's words and each 32 features, int32 [2, 4] in shared memory.

    Args:
        tops: where.
        words: of `_nibbles.load_lines`, int32 [128] of each half.
    """
    if _mosaic.interpreting():
        tops[...] = jnp.stack([jnp.max(_bytes(x), 1).reshape(4, -1).max(1) for x in words])
        return

    def emit(context, tops, *words):
        del context
        e = _Emitter()
        warp = _inline.bits(utils.thread_idx(), 5, 3, 2)
        for half, word in enumerate(words):
            largest = e.largest(e.word(word))
            e.store(tops, arith.addi(warp, e.const(16 * half)), [largest])

    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _STRIDED, _STRIDED))
    inline(emit)(tops, *words)


def decode(out: Any, powers: Any, raw: Any, words: tuple[jax.Array, ...], tops: Any, codes: Any, part: int = 0) -> None:
    """Both halves' codes and their scales, but for `2^-LIFT`.

    Args:
        out: float8_e4m3fn [256, 128] in shared memory, see `_inline.span`.
        powers: float32 [2], likewise.
        raw: uint8 [256, 64] or [256, 128], swizzled by spans of their rows.
        words: int32 [128] of each half: the powers of a feature's four groups, a byte each.
        tops: what `leave_largest` left of them.
        codes: `table` in global memory.
        part: which 64 bytes of the rows of `raw`.
    """
    width = raw.shape[1]
    if _mosaic.interpreting():
        largest = jnp.max(tops[...], 1)
        for half, word in enumerate(words):
            d = jnp.minimum(largest[half] - _bytes(word), _DEEPEST)
            power = lax.bitcast_convert_type((127 + LIFT - d) << 23, jnp.float32)
            given = raw[half * BLOCK : (half + 1) * BLOCK, part * BLOCK // 2 : (part + 1) * BLOCK // 2]
            nibbles = jnp.stack([given & 15, given >> 4], -1).reshape(BLOCK, BLOCK)
            values = _decode.values(_CODE, nibbles, None, None).astype(jnp.float32) * jnp.repeat(power, GROUP, 1)
            out[half * BLOCK : (half + 1) * BLOCK] = values.astype(out.dtype)
        powers[...] = _nibbles.power(largest, 0)
        return

    def emit(context, out, powers, raw, first, second, tops, codes):
        del context
        e = _Emitter()
        row = e.opaque(_inline.bits(utils.thread_idx(), 0, BLOCK - 1, 0))
        swizzle = _inline.bits(row, 0, 7, 0)
        raw_swizzle = swizzle if width == BLOCK else _inline.bits(row, 1, 3, 0)
        for half, word in enumerate((e.word(first), e.word(second))):
            largest = e.load(tops, e.const(16 * half), 16)
            top = e.top(largest)
            e.store(powers, e.const(4 * half), [e.power(top)])
            for group in range(BLOCK // GROUP):
                d = arith.minsi(arith.subi(top, _inline.bits(word, 8 * group, 255, 0)), e.const(_DEEPEST))
                magnitudes = e.load(codes, arith.shli(d, e.const(3)), 8)
                at = arith.shli(arith.xori(raw_swizzle, e.const(4 * part + group)), e.const(4))
                at = arith.addi(arith.addi(arith.muli(row, e.const(width)), at), e.const(half * BLOCK * width))
                given = e.load(raw, at, 16)
                for pair in range(2):
                    chunk = arith.shli(arith.xori(swizzle, e.const(2 * group + pair)), e.const(4))
                    to = arith.addi(arith.addi(arith.shli(row, e.const(7)), chunk), e.const(half * BLOCK * BLOCK))
                    e.store(out, to, [x for w in given[2 * pair : 2 * pair + 2] for x in e.codes(w, magnitudes)])

    spans = (_inline.span(), (), _inline.span(width))
    types = (*map(plgpu.RefType, spans), _STRIDED, _STRIDED, plgpu.RefType(), plgpu.RefType())
    inline: Any = plgpu.inline_mgpu(arg_types=types)
    inline(emit)(out, powers, raw, *words, tops, codes)


def _bytes(words: jax.Array) -> jax.Array:
    """[n, 4]."""
    return jnp.stack([(words >> 8 * i) & 255 for i in range(4)], 1)


class _Emitter(_decode._Emitter):
    """The instructions of `leave_largest` and `decode`."""

    def __init__(self):
        super().__init__(_CODE)

    def word(self, array):
        return self.element(array.registers.item(), 0)

    def opaque(self, x):
        """`x`, of which the compiler knows nothing: it adds constants where it would otherwise set bits, which takes a
        register for each address.
        """
        return llvm.inline_asm(self.i32, [x], "mov.b32 $0, $1;", "=r,r", asm_dialect=0, has_side_effects=False)

    def top(self, values):
        """The largest of four."""
        a, b, c, d = values
        return arith.maxui(arith.maxui(a, b), arith.maxui(c, d))

    def largest(self, word):
        """The largest byte of all of a warp's words."""
        mine = self.top([_inline.bits(word, 8 * i, 255, 0) for i in range(4)])
        asm = "redux.sync.max.u32 $0, $1, 0xffffffff;"
        return llvm.inline_asm(self.i32, [mine], asm, "=r,r", asm_dialect=0, has_side_effects=True)

    def power(self, byte):
        """The bits of float32 `2^(byte - 127)`; 255 is NaN."""
        nan = _inline.bits(arith.addi(byte, self.const(1)), 8, 1, 22)
        return arith.ori(arith.maxui(arith.shli(byte, self.const(23)), self.const(1 << 22)), nan)

    def codes(self, word, magnitudes):
        """Eight codes of a word in their order, two registers."""
        which, even = self.masked(word, 0x77777777), self.right(word, -4)
        low, high = magnitudes
        out = []
        for selected, signs in ((which, 0x5140), (self.right(which, 16), 0x7362)):
            sign = self.permute(even, word, self.const(signs))
            out.append(self.picked(sign, 0x80808080, self.permute(low, high, selected)))
        return out

    def store(self, ref, offset, values):
        """Words at a byte offset."""
        byte, pointer = ir.IntegerType.get_signless(8), utils.memref_ptr(ref)
        at = llvm.getelementptr(pointer.type, pointer, [offset], [-(2**31)], byte, llvm.GEPNoWrapFlags.none)
        both = llvm.mlir_undef(ir.VectorType.get((len(values),), self.i32))
        for i, value in enumerate(values):
            both = vector.insert(value, both, [], [i])
        llvm.store(both, at, alignment=4 * len(values))
