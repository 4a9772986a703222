"""Where a share of the work begins: the request that it finds itself in, among lengths that only the device knows.

Two ways to the same numbers. One by one is plain scalar code, for the interpreter and for any batch. The other has the
lanes of a warp look at 32 requests at once: the search is all that a thread block does before its first fetch.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic, _words
from pallas_kernels._words import Memory, Word, asm, both, less, select
from pallas_kernels.mla._plan import BLOCK, TOLD, Plan

MOST = 1024
"""Requests, with the padding behind them, that a warp looks at; code grows with them."""
_UNROLL = 4
_LANES = 32
_ROOM = 16
"""First free number in the row of shared memory that results go through."""

i32 = jnp.int32


def find(x: Plan, r: Any, number) -> tuple[Any, ...]:
    """Of a share: whether tiles stay whole, the size of a share, all units, its request and units before that.

    A unit is a block of keys of a tile, or a tile if all stay whole: where every tile can have a thread block to itself
    and none takes more than an eighth longer than a fair share.
    """
    return _one_by_one(x, r, number) if x.interpreted or x.B >= MOST else _at_once(x, r, number)


# ---------------------------------------------------------------- one by one
def start_of(x: Plan, r: Any, b):
    """First token of request b."""
    return jnp.clip(r.query_start[b], 0, x.N)


def request(x: Plan, r: Any, b):
    """First token, end and length of request b; request B is the padding behind the last one: no keys."""
    some, real = jnp.minimum(b, x.B - 1), b < x.B
    end = jnp.where(real, start_of(x, r, some + 1), x.N)
    return start_of(x, r, b), end, jnp.where(real, jnp.clip(r.lengths[some], 0, x.pages * x.page), 0)


def work(x: Plan, r: Any, b):
    """Tiles of request b, and blocks of each, at least one."""
    start, end, length = request(x, r, b)
    tiles = lax.div(jnp.maximum(end - start, 0) * x.H + (x.rows - 1), i32(x.rows))
    return tiles, jnp.maximum(lax.div(length + (BLOCK - 1), i32(BLOCK)), 1)


def _one_by_one(x: Plan, r: Any, number) -> tuple[Any, ...]:
    def scan(step, state):
        """step(b, tiles of request b, blocks of each, state) over all requests, the loads of several at once."""

        def several(n, state):
            each = []
            for k in range(_UNROLL):
                b = jnp.minimum(n * _UNROLL + k, x.B)
                tiles, blocks = work(x, r, b)
                each.append((b, jnp.where(n * _UNROLL + k <= x.B, tiles, 0), blocks))
            for b, tiles, blocks in each:
                state = step(b, tiles, blocks, state)
            return state

        return lax.fori_loop(0, -(-(x.B + 1) // _UNROLL), several, state)

    def add(b, tiles, blocks, state):
        units, total, longest = state
        longest = jnp.maximum(longest, jnp.where(tiles > 0, blocks, 0))
        return units + tiles * blocks, total + tiles, longest

    units, tiles, longest = scan(add, (i32(0), i32(0), i32(0)))
    size = lax.div(units + (x.grid - 1), i32(x.grid))
    whole = (tiles <= x.grid) & (longest * 8 <= size * 9)
    total, size = jnp.where(whole, tiles, units), jnp.where(whole, 1, size)
    begin = jnp.minimum(number * size, total)

    def locate(b, tiles, blocks, state):
        prefix, found, base = state
        units = tiles * jnp.where(whole, 1, blocks)
        here = (units > 0) & (prefix <= begin)
        return prefix + units, jnp.where(here, b, found), jnp.where(here, prefix, base)

    return whole, size, total, *scan(locate, (i32(0), i32(0), i32(0)))[1:]


# ---------------------------------------------------------------- at once
def _at_once(x: Plan, r: Any, number) -> tuple[Any, ...]:
    def emit(context, starts, lengths, told, number):
        del context
        lane, number, zero = _words.Thread().lane, _words.scalar(number), Word.of(0)

        def own(chunk: int) -> tuple[Word, Word, Word]:
            """The lane's own request, its tiles, and blocks of each, at least one; 0 tiles behind the last request."""
            b = lane + _LANES * chunk
            real, there = less(b, x.B), less(b, x.B + 1)

            def begin_of(n: Word) -> Word:
                return _clip(Memory(starts).wide(n, 4).load(0, 4), x.N)

            first = begin_of(_least(b, x.B))
            end = select(real, begin_of(_least(b + 1, x.B)), x.N)
            length = Memory(lengths).wide(_least(b, x.B - 1), 4).load(0, 4)
            length = select(real, _clip(length, x.pages * x.page), 0)
            rows = _most(end + first * -1, 0) * x.H
            tiles = select(there, _over(rows + (x.rows - 1), x.rows), 0)
            return b, tiles, _most(_over(length + (BLOCK - 1), BLOCK), 1)

        chunks = range(-(-(x.B + 1) // _LANES))
        units = tiles = longest = zero
        for chunk in chunks:
            _, count, blocks = own(chunk)
            units, tiles = units + count * blocks, tiles + count
            longest = _most(longest, select(less(0, count), blocks, 0))
        units, tiles, longest = _sum(units), _sum(tiles), _together("redux.sync.max.s32 $0, $1, 0xffffffff;", longest)
        size = _over(units + (x.grid - 1), x.grid)
        whole = both(less(tiles, x.grid + 1), less(longest * 8, size * 9 + 1))
        total, size = select(whole, tiles, units), select(whole, 1, size)
        begin = _least(number * size, total)
        before = found = base = zero
        for chunk in chunks:
            b, count, blocks = own(chunk)
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
