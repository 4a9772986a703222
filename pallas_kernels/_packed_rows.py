"""Packed rows of latent caches on Mosaic GPU: codes, scales and the rotary part of one token, straight to their place.

A warpgroup holds a token's numbers as rows that each have a scale, four neighbours in a lane: the codes of a lane are
one word. Words go to memory one by one, because no array has the shape of a packed row.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _codes, _mosaic, _words
from pallas_kernels._frames import Frame
from pallas_kernels._words import Memory, Thread, select

V4 = Frame((8, 64), 4, narrow=False)
"""V4's 512 numbers: seven rows of codes, and the rotary part."""
V4_ROW, V4_SCALES = 576, 8
"""Bytes of a V4 row and of its scales."""
FLOOR = 1e-4
"""Smallest largest magnitude of V4's and the indexer's rows."""
_TOKENS = (1, 2, 4)


# ---------------------------------------------------------------- launches that write in place, token by token
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """`tokens`: how many tokens a thread block handles, one after the other."""

    tokens: int = 1

    def __post_init__(self):
        if self.tokens not in _TOKENS:
            raise ValueError(f"tokens must be {_mosaic.either(_TOKENS)}, got {self.tokens}")

    @classmethod
    def choices(cls) -> list[Self]:
        """All legal configurations."""
        return [cls(tokens=n) for n in _TOKENS]


def each_token(tokens: int, N: int, do: Callable[[Any], None]) -> None:
    """Run `do(token)` for the tokens of a thread block, whose number is the grid's axis "block", out of N."""
    first = lax.axis_index("block") * tokens
    if tokens == 1:
        do(first)
        return
    lax.fori_loop(0, tokens, lambda j, _: pl.when(first + j < N)(lambda: do(first + j)), None)


def in_place(launch: Callable[..., Any], written: Sequence[jax.Array], out: Sequence[jax.ShapeDtypeStruct] = ()) -> Any:
    """`written`, updated where they lie, and `out`, both given as references to `launch`, a kernel without outputs.

    What the kernel leaves of `out` is NaN interpreted, and anything on the card.
    """

    def fresh(x):
        if not _mosaic.interpreting():
            return jax.lax.empty(x.shape, x.dtype)
        return jnp.full(x.shape, jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 99, x.dtype)

    return pl.run_state(lambda refs: launch(*refs))((*written, *map(fresh, out)))


def held(x: jax.Array, layout: Any) -> jax.Array:
    """`x`, of a type and in a layout whose registers are 32 bits or a multiple, loaded before any later branch.

    Compilers move a load behind the branch in which alone it is used, and with it the wait for memory. They leave what
    a warp exchanges where it is, so the words are exchanged with nobody.
    """
    if _mosaic.interpreting():
        return x
    out = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)

    def emit(context, array):
        del context
        registers = array.registers.copy()
        for i, register in np.ndenumerate(registers):
            registers[i] = _words.same_lane(register)
        return type(array)(_registers=registers, _layout=array.layout, _is_signed=array.is_signed)

    inline: Any = plgpu.inline_mgpu(arg_types=(layout,), return_type=out)
    return inline(emit)(plgpu.layout_cast(x, layout))


# ---------------------------------------------------------------- rows
@dataclasses.dataclass(frozen=True)
class Place:
    """A slot: page and place in it, scalars."""

    number: Any
    place: Any
    page: int
    """Slots of a page."""


def place_of(slot: jax.Array, page: int) -> Place:
    """Where a slot lies that is not negative."""
    slot = slot.astype(jnp.int32)
    return Place(lax.div(slot, jnp.int32(page)), lax.rem(slot, jnp.int32(page)), page)


def power_codes(frame: Frame, x: jax.Array) -> jax.Array:
    """Biased exponents of the scales of float32 rows: `ceil(log2(max(amax, 1e-4) / 448)) + 127`, int32."""
    top = jnp.maximum(frame.largest([x]), frame.full(FLOOR))
    return _codes.exponent(frame.divide_rows(top, _codes.LIMITS[_codes.E4M3]), up=True)


def float8_bytes(x: jax.Array) -> jax.Array:
    """e4m3 codes as bytes."""
    return lax.bitcast_convert_type(_codes.float8(x), jnp.uint8)


def put_v4(cache: Any, at: Place, x: jax.Array) -> None:
    """Write a token's row and scales.

    Args:
        cache: uint8 [pages, bytes] in global memory.
        at: the slot.
        x: float32 numbers [8, 64] as `V4` holds them, rotated, not yet rounded to bfloat16.
    """
    x = _codes.rounded(x, jnp.bfloat16)
    scales = power_codes(V4, x)
    codes = float8_bytes(_codes.over_power(V4, x, _codes.power(scales)))
    halves = x.astype(jnp.bfloat16)
    if _mosaic.interpreting():
        turned = lax.bitcast_convert_type(halves[7], jnp.uint8).reshape(128)
        row = jnp.concatenate([codes[:7].reshape(448), turned])
        cache[at.number, pl.ds(at.place * V4_ROW, V4_ROW)] = row
        scales = jnp.where(jnp.arange(8) < 7, scales, 0).astype(jnp.uint8)
        cache[at.number, pl.ds(at.page * V4_ROW + at.place * V4_SCALES, V4_SCALES)] = scales
        return
    width, splat = cache.shape[1], plgpu.Layout.WG_SPLAT

    def emit(context, cache, codes, halves, scales, number, place):
        del context
        thread, place = Thread(), _words.scalar(place)
        row, column = thread.index >> 4, (thread.index & 15) << 2
        [code], (low, high), [scale] = (_words.words_of(x) for x in (codes, halves, scales))
        memory = Memory(cache).wide(_words.scalar(number), width)
        coded = _words.less(row, 7)
        start = place * V4_ROW
        first = select(coded, start + (row << 6) + column, start + 448 + (column << 1))
        # a lane of codes writes its word twice, so that none has to branch
        memory.at(first).store(0, select(coded, code, low), 4)
        memory.at(select(coded, first, first + 4)).store(0, select(coded, code, high), 4)
        memory.at(place * V4_SCALES + row).store(at.page * V4_ROW, select(coded, scale, 0), 1)

    layout = V4.numbers
    types = (plgpu.RefType(), layout, layout, V4.shared, splat, splat)
    inline: Any = plgpu.inline_mgpu(arg_types=types)
    inline(emit)(cache, codes, halves, scales, at.number, at.place)


DS_MLA = Frame((4, 128), 4, narrow=False)
"""The 512 numbers of V3.2's latent: a warp has a row."""
DS_MLA_BYTES = 512 + 4 * 4 + 2 * 64


def put_ds_mla(cache: Any, slot: Any, x: jax.Array, rotary: Any) -> None:
    """Write a token's row of 656 bytes.

    Args:
        cache: uint8 [slots, 656] in global memory.
        slot: int32.
        x: float32 numbers [4, 128] as `DS_MLA` holds them, not yet rounded to bfloat16.
        rotary: bfloat16 [64], as `load_ds_mla_rotary` gives it.
    """
    x = _codes.rounded(x, jnp.bfloat16)
    limit = _codes.LIMITS[_codes.E4M3]
    scales = jnp.maximum(DS_MLA.divide_rows(DS_MLA.largest([x]), limit), DS_MLA.full(_codes.TINY))
    codes = float8_bytes(DS_MLA.divide(x, scales))
    if _mosaic.interpreting():
        parts = (codes, scales, rotary)
        parts = [lax.bitcast_convert_type(a, jnp.uint8).reshape(-1) for a in parts]
        cache[slot] = jnp.concatenate(parts)
        return

    def emit(context, cache, rotary, codes, scales, slot):
        del context
        thread = Thread()
        [code], [scale], [turned] = (_words.words_of(x) for x in (codes, scales, rotary))
        row = Memory(cache).wide(_words.scalar(slot), DS_MLA_BYTES)
        row.at((thread.warp << 7) + (thread.lane << 2)).store(0, code, 4)
        row.at(thread.warp << 2).store(512, scale, 4)
        # each warp copies the rotary part
        row.at(thread.lane << 2).store(528, turned, 4)

    types = (plgpu.RefType(), PAIRS, DS_MLA.numbers, DS_MLA.shared, plgpu.Layout.WG_SPLAT)
    inline: Any = plgpu.inline_mgpu(arg_types=types)
    inline(emit)(cache, rotary, codes, scales, slot)


PAIRS = Frame((4, 64), 2, narrow=True).numbers.reduce(0)
"""[64], two neighbours in a lane, the same in each warp."""


def load_ds_mla_rotary(rotary: Any, token: Any) -> jax.Array:
    """Row `token` of bfloat16 [N, 64] in global memory, for `put_ds_mla`."""
    return plgpu.load(rotary.at[token], layout=PAIRS, optimized=False)


INDEXER = Frame((4, 32), 1, narrow=False)
"""An indexer key's 128 numbers, one a lane; a warp has a group of MXFP4."""
MXFP4_ROW = 64
"""Bytes of an MXFP4 key without its scales."""


def put_indexer_fp8(cache: Any, at: Place, x: jax.Array) -> None:
    """Write an indexer key's codes and its scale.

    Args:
        cache: uint8 [pages, bytes / 32, 32] in global memory.
        at: the slot.
        x: float32 numbers [4, 32] as `INDEXER` holds them, not yet rounded to bfloat16.
    """
    x = _codes.rounded(x, jnp.bfloat16)
    top = INDEXER.full(jnp.max(jnp.maximum(INDEXER.largest([x]), INDEXER.full(FLOOR))))
    scale = _codes.exponent(INDEXER.divide_rows(top, _codes.LIMITS[_codes.E4M3]), up=True)
    codes = float8_bytes(_codes.over_power(INDEXER, x, _codes.power(scale)))
    _mosaic.store(cache.at[at.number, pl.ds(at.place * 4, 4)], codes)
    index = plgpu.broadcasted_iota(jnp.int32, (4,), 0, layout=INDEXER.shared)
    number = jnp.where(index == 3, scale >> 1, jnp.where(index == 2, (scale & 1) << 7, 0))  # bytes of 2^(scale - 127)
    line, column = lax.div(at.place, jnp.int32(8)), lax.rem(at.place, jnp.int32(8)) * 4
    _mosaic.store(cache.at[at.number, at.page * 4 + line, pl.ds(column, 4)], number.astype(jnp.uint8))


def put_indexer_mxfp4(cache: Any, at: Place, x: jax.Array) -> None:
    """Write an indexer key's 4-bit codes and the scales of each 32.

    Args:
        cache: uint8 [pages, bytes] in global memory, the bytes a multiple of 4.
        at: the slot.
        x: float32 numbers [4, 32] as `INDEXER` holds them, not yet rounded to bfloat16.
    """
    x = _codes.rounded(x, jnp.bfloat16)
    scales = _codes.mxfp4_exponent(INDEXER, INDEXER.largest([x]))
    codes = _codes.e2m1(INDEXER, _codes.over_power(INDEXER, x, _codes.power(scales)))
    if _mosaic.interpreting():
        pairs = codes.reshape(MXFP4_ROW, 2)
        cache[at.number, pl.ds(at.place * MXFP4_ROW, MXFP4_ROW)] = (pairs[:, 0] | (pairs[:, 1] << 4)).astype(jnp.uint8)
        cache[at.number, pl.ds(at.page * MXFP4_ROW + at.place * 4, 4)] = scales.astype(jnp.uint8)
        return
    width, splat = cache.shape[1], plgpu.Layout.WG_SPLAT

    def emit(context, cache, codes, scales, number, place):
        del context
        thread, place = Thread(), _words.scalar(place)
        [word], [scale] = (_words.words_of(x) for x in (codes, scales))
        word = word << ((thread.lane & 7) << 2)
        for distance in (1, 2, 4):
            word = word | _words.shuffle(word, distance)
        memory = Memory(cache).wide(_words.scalar(number), width)
        # eight lanes write one word, a warp one byte: that costs less than a branch
        memory.at(place * MXFP4_ROW + (thread.warp << 4) + ((thread.lane >> 3) << 2)).store(0, word, 4)
        memory.at((place << 2) + thread.warp).store(at.page * MXFP4_ROW, scale, 1)

    types = (plgpu.RefType(), INDEXER.numbers, INDEXER.shared, splat, splat)
    inline: Any = plgpu.inline_mgpu(arg_types=types)
    inline(emit)(cache, codes, scales, at.number, at.place)
