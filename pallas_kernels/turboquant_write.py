"""Writes of keys and values into a packed TurboQuant cache on Mosaic GPU, in place; see `jaxattn.ops.turboquant_write`.

A thread block handles a few tokens with all their KV heads. A head lies in neighbouring lanes, eight numbers each, and
stays in registers: norm and rotation are butterflies, three steps within a lane and the others by shuffles, so sums are
float32 and have the same bits as the reference's. The packed slots of a token are put together in shared memory, one
contiguous row, and copied from there.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _exact, _mosaic, _rows, _words
from pallas_kernels._words import Memory, Thread, Word, asm, select, shuffle

_DTYPES = ("bfloat16", "float16", "float32")
HEAD_DIMS = (64, 128, 256)
_VEC = 8
"""Neighbouring numbers in a lane: what three bytes of 3-bit codes hold."""
_TILES = (1, 2, 4)
_EPSILON = 1e-8

f32, i32 = jnp.float32, jnp.int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """`tiles`: how many of the smallest tiles of whole tokens a thread block takes at once."""

    tiles: int = 1

    def __post_init__(self):
        if self.tiles not in _TILES:
            raise ValueError(f"tiles={self.tiles} must be one of {', '.join(map(str, _TILES))}")


def why_not(*, key, pages, **_) -> str | None:
    """None if the kernel can run these arguments, else one sentence."""
    dtype, (_, K, D) = jnp.dtype(key.dtype).name, key.shape
    if dtype not in _DTYPES:
        return f"key and value must be {', '.join(_DTYPES)}, got {dtype}"
    if D not in HEAD_DIMS:
        return f"the head dim must be {_mosaic.either(HEAD_DIMS)}, got {D}"
    if K == 0 or _tokens(K, D) * K * D > 16 * 1024:
        return f"whole tokens must fill tiles of at most 16384 numbers, got K={K} heads of {D}"
    if pages.shape[0] * pages.shape[1] >= 2**31:
        return f"the cache must have fewer than 2^31 slots, got {pages.shape[0]} pages of {pages.shape[1]}"
    return None


def default_config(*, key, **_) -> Config:
    """Two tiles a block where they are small."""
    _, K, D = key.shape
    return Config(tiles=2 if _tokens(K, D) * K * D <= 2048 else 1)


def configs(*, key, **_) -> Iterable[Config]:
    """All legal configurations."""
    _, K, D = key.shape
    return [Config(tiles=n) for n in _TILES if n == 1 or n * _tokens(K, D) * K * D <= 16 * 1024]


def _tokens(K: int, D: int) -> int:
    """Tokens of the smallest tile: its rows are whole tokens and fill the layout."""
    return _rows.smallest(D, _VEC) // math.gcd(_rows.smallest(D, _VEC), K)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """What device code knows: `tokens` of `K` heads a block, slots of `slot` bytes."""

    tokens: int
    K: int
    D: int
    slot: int
    key_bits: int
    value_bits: int
    midpoints: tuple[float, ...]

    @property
    def row(self) -> int:
        """Bytes of a token."""
        return self.K * self.slot

    @property
    def pitch(self) -> int:
        """Bytes of a token in shared memory."""
        return -(-self.row // 16) * 16

    @property
    def key_bytes(self) -> int:
        """Bytes of a key's codes."""
        return self.D * self.key_bits // 8

    @property
    def value_offset(self) -> int:
        """First byte of the value codes."""
        return self.key_bytes + (0 if self.key_bits == 8 else 2)

    @property
    def lanes(self) -> int:
        """Neighbouring lanes that hold a head."""
        return self.D // _VEC

    @property
    def layout(self) -> Any:
        """Of heads as rows in registers."""
        return _rows.layout(self.D, _VEC)


def turboquant_write(*, config: Config, key, value, pages, slots, preset, key_bits, value_bits, midpoints):
    """Launch; arguments as prepared by `jaxattn.ops.turboquant_write`."""
    del preset
    T, K, D = key.shape
    if not T:
        return pages

    @jax.custom_batching.custom_vmap
    def write(pages, key, value, slots):
        tokens = config.tiles * _tokens(K, D)
        plan = _Plan(
            tokens=tokens,
            K=K,
            D=D,
            slot=pages.shape[-1],
            key_bits=key_bits,
            value_bits=value_bits,
            midpoints=midpoints,
        )
        return _launch(plan, pages, key, value, slots)

    @write.def_vmap
    def _(size, batched, *args):
        args = jax.tree.map(lambda x, has: x if has else jnp.broadcast_to(x, (size, *x.shape)), args, tuple(batched))
        S = args[0].shape[1] * args[0].shape[2]
        pages, key, value, slots = (x.reshape(-1, *x.shape[2:]) for x in args)
        shift = jnp.repeat(jnp.arange(size, dtype=slots.dtype) * S, slots.shape[0] // size)
        slots = jnp.where((slots >= 0) & (slots < S), slots + shift, -1)
        return write(pages, key, value, slots).reshape(size, -1, *pages.shape[1:]), True

    return write(pages, key, value, slots)


def _launch(x: _Plan, pages, key, value, slots) -> jax.Array:
    T, S = slots.shape[0], pages.shape[0] * pages.shape[1]
    missing = max(0, x.tokens - T)
    slots = jnp.where((slots >= 0) & (slots < S), slots, -1).astype(i32)
    slots = jnp.pad(slots, (0, missing), constant_values=-1)
    rows = [jnp.pad(r, [(0, missing), (0, 0), (0, 0)]).reshape(-1, x.D) for r in (key, value)]

    def body(pages, key, value, slots, staging):
        block = lax.axis_index("block")
        # the last block starts early, and leaves to its neighbour what that one writes
        start = jnp.minimum(block * x.tokens, slots.shape[0] - x.tokens)
        part = pl.ds(start * x.K, x.tokens * x.K)
        k, v = (plgpu.load(ref.at[part], layout=x.layout, optimized=False).astype(f32) for ref in (key, value))
        if _mosaic.interpreting():
            packed = _interpreted(x, k, v)
            for t in range(x.tokens):

                @pl.when((start + t >= block * x.tokens) & (slots[start + t] >= 0))
                def _(t=t):
                    pages[slots[start + t]] = packed[t]

            return

        def build(context, staging, k, v):
            del context
            _pack(x, staging, k, v)

        layout, ref = x.layout, plgpu.RefType()
        inline: Any = plgpu.inline_mgpu(arg_types=(ref, layout, layout))
        inline(build)(staging, k, v)
        splat = plgpu.Layout.WG_SPLAT

        def copy(context, pages, slots, staging, start, first):
            del context
            _words.barrier()
            places = _words.scalar(start), _words.scalar(first)
            rows = {"rows": x.tokens, "size": x.row, "pitch": x.pitch}
            _words.scatter(Memory(staging), Memory(pages), Memory(slots), *places, **rows)

        inline: Any = plgpu.inline_mgpu(arg_types=(ref, ref, ref, splat, splat))
        inline(copy)(pages, slots, staging, start, block * x.tokens)

    body.__name__ = "turboquant_write"
    blocks = pl.cdiv(T, x.tokens)
    launch = plgpu.kernel(
        body,
        out_type=(),
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=[plgpu.SMEM((x.tokens, x.pitch), jnp.uint8)],
    )
    written = pl.run_state(lambda ref: launch(ref, *rows, slots))(pages.reshape(S, x.row))
    return written.reshape(pages.shape)


# ---------------------------------------------------------------- device code
def _pack(x: _Plan, staging: Any, key: Any, value: Any) -> None:
    """Quantize rows of heads and write their slots to `staging`, `pitch` bytes a token."""
    thread = Thread()
    lane, per_warp = thread.lane & (x.lanes - 1), 32 // x.lanes
    keys, values = (_chunks(a) for a in (key, value))
    for n, (k, v) in enumerate(zip(keys, values, strict=True)):
        head = (thread.warp * per_warp) + (thread.lane >> x.lanes.bit_length() - 1) + n * 4 * per_warp
        token = asm(f"div.u32 $0, $1, {x.K};", head)
        place = Memory(staging).at(token * (x.pitch - x.row) + head * x.slot)
        if x.key_bits == 8:
            mine = place.at(lane << 3)
            for i in range(0, _VEC, 2):
                codes = "{.reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, $2, $1; cvt.u32.u16 $0, h;}"
                mine.store(i, asm(codes, k[i], k[i + 1]), 2)
        else:
            codes, norm = _key_codes(x, k, lane)
            _store_codes(place, codes, x.key_bits, lane, 0)
            place.store(x.key_bytes, _float16(norm), 2)
        codes, scale, low = _value_codes(x, v)
        _store_codes(place, codes, x.value_bits, lane, x.value_offset)
        end = x.value_offset + x.D * x.value_bits // 8
        place.store(end, _float16(scale), 2)
        place.store(end + 2, _float16(low), 2)


def _chunks(array: Any) -> list[list[Word]]:
    """A thread's float32 numbers, eight neighbours at a time."""
    words = _words.words_of(array)
    return [words[i : i + _VEC] for i in range(0, len(words), _VEC)]


def _key_codes(x: _Plan, k: list[Word], lane: Word) -> tuple[list[Word], Word]:
    squares = [asm("mul.rn.f32 $0, $1, $1;", a) for a in k]
    while len(squares) > 1:
        squares = [_plus(*squares[i : i + 2]) for i in range(0, len(squares), 2)]
    (total,) = squares
    distances = [1 << i for i in range(x.lanes.bit_length() - 1)]
    for distance in distances:
        total = _plus(total, shuffle(total, distance))
    norm = asm("sqrt.rn.f32 $0, $1;", total)
    length = _plus(norm, _words.float_word(_EPSILON))
    y = [asm("div.rn.f32 $0, $1, $2;", a, length) for a in k]
    for half in (1, 2, 4):
        for i in range(_VEC):
            if not i & half:
                y[i], y[i + half] = _plus(y[i], y[i + half]), asm("sub.rn.f32 $0, $1, $2;", y[i], y[i + half])
    for distance in distances:
        minus = (lane & distance) << 32 - distance.bit_length()
        y = [_plus(shuffle(a, distance), a ^ minus) for a in y]
    root = _words.float_word(x.D**-0.5)
    return [_bucket(asm("mul.rn.f32 $0, $1, $2;", a, root), x.midpoints) for a in y], norm


def _bucket(y: Word, bounds: tuple[float, ...]) -> Word:
    """How many of the rising bounds are at most y, by halving."""
    count, code, choices = len(bounds) + 1, Word.of(0), [float(b) for b in bounds]
    bits, taken = count.bit_length() - 1, []
    for bit in reversed(range(bits)):
        # the bounds between which the bits found so far decide, as a tree of selections
        candidates = [_words.float_word(choices[(i << bit + 1) + (1 << bit) - 1]) for i in range(1 << len(taken))]
        for condition in reversed(taken):
            candidates = [select(condition, candidates[i + 1], candidates[i]) for i in range(0, len(candidates), 2)]
        condition = _words.at_least(y, candidates[0])
        code = code + select(condition, 1 << bit, 0)
        taken.append(condition)
    return code


def _value_codes(x: _Plan, v: list[Word]) -> tuple[list[Word], Word, Word]:
    low, high, most = v, v, 2**x.value_bits - 1
    while len(low) > 1:
        low = [asm("min.NaN.f32 $0, $1, $2;", *low[i : i + 2]) for i in range(0, len(low), 2)]
        high = [asm("max.NaN.f32 $0, $1, $2;", *high[i : i + 2]) for i in range(0, len(high), 2)]
    (low,), (high,) = low, high
    for i in range(x.lanes.bit_length() - 1):
        low = asm("min.NaN.f32 $0, $1, $2;", low, shuffle(low, 1 << i))
        high = asm("max.NaN.f32 $0, $1, $2;", high, shuffle(high, 1 << i))
    range_ = asm("sub.rn.f32 $0, $1, $2;", high, low)
    scale = asm("mul.rn.f32 $0, $1, $2;", range_, _words.float_word(1 / most))
    scale = asm("max.NaN.f32 $0, $1, $2;", scale, _words.float_word(_EPSILON))
    inverse = asm("rcp.rn.f32 $0, $1;", scale)
    codes = []
    for a in v:
        steps = asm("mul.rn.f32 $0, $1, $2;", asm("sub.rn.f32 $0, $1, $2;", a, low), inverse)
        number = asm("cvt.rzi.s32.f32 $0, $1;", _plus(steps, _words.float_word(0.5)))
        codes.append(asm(f"{{.reg .s32 a; max.s32 a, $1, 0; min.s32 $0, a, {most};}}", number))
    return codes, scale, low


def _store_codes(place: Memory, codes: list[Word], bits: int, lane: Word, offset: int) -> None:
    """Eight codes of this lane: two or one and a half of two bytes."""
    word = codes[0]
    for i, code in enumerate(codes[1:], 1):
        word = word | (code << bits * i)
    mine = place.at(lane * bits)
    size = 2 if bits == 4 else 1
    for i in range(0, bits, size):
        mine.store(offset + i, word >> 8 * i, size)


def _float16(x: Word) -> Word:
    return asm("{.reg .b16 h; cvt.rn.f16.f32 h, $1; cvt.u32.u16 $0, h;}", x)


def _plus(a: Word, b: Word) -> Word:
    return asm("add.rn.f32 $0, $1, $2;", a, b)


# ---------------------------------------------------------------- the same, interpreted
def _interpreted(x: _Plan, k, v):
    """uint8 [tokens, row]: what `_pack` writes."""
    parts = []
    if x.key_bits == 8:
        codes = jnp.where(jnp.isnan(k), jnp.nan, jnp.clip(k, -448.0, 448.0)).astype(jnp.float8_e4m3fn)
        parts.append(lax.bitcast_convert_type(codes, jnp.uint8))
    else:
        total = k * k
        while total.shape[1] > 1:
            total = total[:, ::2] + total[:, 1::2]
        norm = _exact.root(total)
        y, half = _exact.divide(k, jnp.broadcast_to(norm + f32(_EPSILON), k.shape)), 1
        while half < x.D:
            pairs = y.reshape(-1, x.D // (2 * half), 2, half)
            y = jnp.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2).reshape(k.shape)
            half *= 2
        y = y * f32(x.D**-0.5)
        codes = sum((y >= f32(bound)).astype(i32) for bound in x.midpoints)
        parts += [_packed(codes, x.key_bits), _bytes(norm)]
    low, high, most = v.min(1, keepdims=True), v.max(1, keepdims=True), 2**x.value_bits - 1
    scale = jnp.maximum((high - low) * f32(1 / most), f32(_EPSILON))
    steps = (v - low) * _exact.divide(jnp.ones_like(scale), scale) + f32(0.5)
    codes = jnp.where(jnp.isnan(steps), 0, jnp.clip(steps, 0, most)).astype(i32)
    parts += [_packed(codes, x.value_bits), _bytes(scale), _bytes(low)]
    return jnp.concatenate(parts, 1).reshape(x.tokens, x.row)


def _packed(codes, bits: int):
    size = 8 if bits == 3 else 2
    groups = codes.reshape(codes.shape[0], -1, size)
    word = sum(groups[:, :, i] << bits * i for i in range(size))
    split = [(word >> 8 * i) & 255 for i in range(bits * size // 8)]
    return jnp.stack(split, -1).astype(jnp.uint8).reshape(codes.shape[0], -1)


def _bytes(number):
    bits = lax.bitcast_convert_type(number.astype(jnp.float16), jnp.uint16)
    return jnp.concatenate([bits & 255, bits >> 8], 1).astype(jnp.uint8)
