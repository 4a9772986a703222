"""Where a share of the work begins, found by the lanes of a warp: 32 requests at once. Compiled only."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic, _words
from pallas_kernels._words import Memory, Word, asm, both, less, select
from pallas_kernels.mla._plan import BLOCK, TOLD, Plan

MOST = 1024
"""Requests, with the padding behind them, that a warp looks at; code grows with them."""
_LANES = 32
_ROOM = 16
"""First free number in the row of shared memory that results go through."""


def fits(x: Plan) -> bool:
    return x.config.warp_scan and not x.interpreted and x.B < MOST


def find(x: Plan, r: Any, number) -> tuple[Any, ...]:
    """Of a share: whether tiles stay whole, the size of a share, all units, its request and units before that."""

    def emit(context, starts, lengths, told, number):
        del context
        lane, number, zero = _words.Thread().lane, _words.scalar(number), Word.of(0)

        def request(chunk: int) -> tuple[Word, Word, Word]:
            """A request, its tiles, and the blocks of each, at least one; 0 tiles behind the last request."""
            b = lane + _LANES * chunk
            real, there = less(b, x.B), less(b, x.B + 1)

            def start(n: Word) -> Word:
                return _clip(Memory(starts).wide(n, 4).load(0, 4), x.N)

            first = start(_least(b, x.B))
            end = select(real, start(_least(b + 1, x.B)), x.N)
            length = Memory(lengths).wide(_least(b, x.B - 1), 4).load(0, 4)
            length = select(real, _clip(length, x.pages * x.page), 0)
            rows = _most(end + first * -1, 0) * x.H
            tiles = select(there, _over(rows + (x.rows - 1), x.rows), 0)
            return b, tiles, _most(_over(length + (BLOCK - 1), BLOCK), 1)

        chunks = range(-(-(x.B + 1) // _LANES))
        units = tiles = longest = zero
        for chunk in chunks:
            _, count, blocks = request(chunk)
            units, tiles = units + count * blocks, tiles + count
            longest = _most(longest, select(less(0, count), blocks, 0))
        units, tiles, longest = _sum(units), _sum(tiles), _together("redux.sync.max.s32 $0, $1, 0xffffffff;", longest)
        size = _over(units + (x.grid - 1), x.grid)
        whole = both(less(tiles, x.grid + 1), less(longest * 8, size * 9 + 1))
        total, size = select(whole, tiles, units), select(whole, 1, size)
        begin = _least(number * size, total)
        before = found = base = zero
        for chunk in chunks:
            b, count, blocks = request(chunk)
            mine = count * select(whole, 1, blocks)
            up_to = mine
            for distance in (1, 2, 4, 8, 16):
                moved = f"shfl.sync.up.b32 u|p, $1, {distance}, 0, 0xffffffff; @!p mov.b32 u, 0; add.s32 $0, $1, u;"
                up_to = _together("{.reg .pred p; .reg .b32 u; " + moved + "}", up_to)
            prefix = before + up_to + mine * -1
            here = both(less(0, mine), less(prefix, begin + 1))
            found, base = (_most(old, select(here, new, 0)) for old, new in ((found, b), (base, prefix)))
            before = before + _sum(mine)
        found, base = (_together("redux.sync.max.s32 $0, $1, 0xffffffff;", word) for word in (found, base))
        for i, word in enumerate((select(whole, 1, 0), size, total, found, base)):
            Memory(told).store(4 * (_ROOM + i), word, 4)

    ref = plgpu.RefType()
    inline: Any = plgpu.inline_mgpu(arg_types=(ref, ref, ref, plgpu.Layout.WG_SPLAT))
    inline(emit)(r.query_start, r.lengths, r.told.at[TOLD], jnp.asarray(number, jnp.int32))
    whole, *others = (r.told[TOLD, _ROOM + i] for i in range(5))
    return whole > 0, *others


def _least(a: Word, b: int | Word) -> Word:
    return asm("min.s32 $0, $1, $2;", a, b)


def _most(a: Word, b: int | Word) -> Word:
    return asm("max.s32 $0, $1, $2;", a, b)


def _clip(a: Word, most: int) -> Word:
    return _least(_most(a, 0), most)


def _over(a: Word, divisor: int) -> Word:
    """Of a number that is not negative."""
    return asm(f"div.u32 $0, $1, {divisor};", a)


def _together(text: str, word: Word) -> Word:
    """An instruction of all lanes of the warp."""
    kind = _mosaic.ir.IntegerType.get_signless(32)
    return Word(
        _mosaic.gpu_utils.inline_ptx(text, word.value, result_types=kind, has_side_effects=True, convergent=True)
    )


def _sum(word: Word) -> Word:
    return _together("redux.sync.add.s32 $0, $1, 0xffffffff;", word)
