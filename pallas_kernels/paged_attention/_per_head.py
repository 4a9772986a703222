"""Caches with one scale per token and head, as the kernels read them: int8, float8_e4m3fn, and two of 4 bits in a byte.

Codes are exact in bfloat16, so wgmma multiplies them as they are. The scales of a block arrive beside it, those of all
KV heads, as they lie in the cache: key scales multiply the columns of the scores, value scales those of P before P is
rounded. 4-bit codes have a zero point in the low bits of their scale, subtracted while they are unpacked.
"""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic, _words
from pallas_kernels._online_softmax import ACC
from pallas_kernels._words import Memory, Thread
from pallas_kernels.paged_attention._common import PIECE

OPTIONAL = ("k_scale_pages", "v_scale_pages", "k_scales", "v_scales")
"""References that a kernel has with such a cache only."""
CODES = ("int8", "float8_e4m3fn", "uint8")
_ROW = 16
"""Scales in a row of TMA's, as many as tokens in the smallest page."""
_HEADS = 64
"""256 rows, the most of one copy, for 64 tokens."""
_COLUMN = ACC.reduce(0)
_BASE = 0x43004300
"""128 in both halves: a code or'd into the mantissa is added."""

f32, bf16, i32 = jnp.float32, jnp.bfloat16, jnp.int32


def width(x) -> int:
    """Stored numbers of a head."""
    return x.D // 2 if x.cache_dtype.name == "uint8" else x.D


def why_not(x) -> str | None:
    """None if the kernels read such a cache, else one sentence."""
    if x.cache_dtype.name not in CODES:
        return f"with scale pages the cache must be {_mosaic.either(CODES)}, got {x.cache_dtype.name}"
    if x.K > _HEADS:
        return f"with scale pages there may be {_HEADS} KV heads, got {x.K}"
    return None


def pitch(x) -> int:
    """Rows of TMA's that 16 tokens take in shared memory: K, and one more if a copy of so few brings an odd number.

    A copy by TMA starts at a multiple of 128 bytes there, two rows.
    """
    return x.K + x.K % 2 if min(x.page, x.block_kv) == _ROW else x.K


def inputs(x, args: Any) -> dict[str, Any]:
    """The scales of each page, whatever the number of heads, in rows that suit TMA."""
    if not x.per_head:
        return {}
    shape = x.pool, x.page * x.K // _ROW, _ROW
    return {name: args[name].reshape(shape) for name in ("k_scale_pages", "v_scale_pages")}


def scratch(x, *lead: int) -> dict[str, Any]:
    """Where the scales of the blocks on their way go."""
    memory = plgpu.SMEM((*lead, x.num_stages, place(x, x.block_kv) // (4 * _ROW), _ROW), f32)
    return {"k_scales": memory, "v_scales": memory} if x.per_head else {}


def fetch(x, r: Any, ring: Any, source: Any, to: Any, count: int, bar: Any) -> None:
    """Start the copy of `count` tokens' scales, keys' or values' as `ring` is.

    `source` is a page and its first slot, `to` a stage and the first token there.
    """
    pages, scales = (r.k_scale_pages, r.k_scales) if ring is r.k_ring else (r.v_scale_pages, r.v_scales)
    (page, slot), (stage, token) = source, to
    size = count * x.K // _ROW
    first = lax.div(slot, i32(16)) * x.K if count < x.page else 0  # 16 tokens, the least, are K rows
    taken, given = pl.ds(first, size), pl.ds(place(x, token) // (4 * _ROW), size)
    plgpu.copy_gmem_to_smem(pages.at[page, taken], scales.at[stage, given], bar)


def columns(x, scales: Any, head: Any, hole=None):
    """Scales of one KV head as numbers of columns, float32 [block_kv]; `scales` are the block's.

    `hole` (block start, low, high) names the keys that some row sees; what belongs to others becomes zero.
    """
    count, K = x.block_kv, x.K
    if _mosaic.interpreting():
        value = _column(x, scales, head)
    else:

        def build(context, scales, head):
            del context
            mine = Memory(scales).at((Thread().column * (8 * K)) + (_words.scalar(head) << 2))
            words = [mine.load(place(x, 8 * j + e), 4) for j in range(count // 8) for e in range(2)]
            return _words.fragment(words, (count,), _COLUMN, "f32")

        out = plgpu.ShapeDtypeStruct((count,), f32, layout=_COLUMN)
        inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT), return_type=out)
        value = inline(build)(scales, head)
    return finished(x, value, _COLUMN, hole)


def finished(x, value, layout, hole):
    """Loaded scales in `layout` without the zero points in their low bits; zero outside the hole, see `columns`."""
    if x.cache_dtype.name == "uint8":
        value = lax.bitcast_convert_type(lax.bitcast_convert_type(value, i32) & -16, f32)
    if hole is not None:
        start, low, high = hole
        key = start + plgpu.broadcasted_iota(i32, value.shape, 0, layout=layout)
        value = jnp.where((key >= low) & (key < high), value, 0.0)
    return value


def place(x, token: int) -> int:
    """Bytes from a block's first scale to those of a token."""
    return token // _ROW * 4 * _ROW * pitch(x) + token % _ROW * 4 * x.K


def down(column, like):
    """A number per column, repeated over the rows of `like`."""
    return plgpu.layout_cast(lax.broadcast_in_dim(column, like.shape, [1]), ACC)


def numbers(x, codes: Any, scales: Any, head: Any, layout: Any, span: int, first: int = 0):
    """Codes in shared memory as bfloat16 in `layout`, zero points subtracted.

    Args:
        x: plan.
        codes: [rows, columns], or uint8 [rows, columns / 2].
        scales: of the block.
        head: KV head.
        layout: `_mosaic.strips` of the result.
        span: columns of its tiles.
        first: token of the block that the first row is.
    """
    if x.cache_dtype.name == "int8":
        return plgpu.load(codes, layout=layout).astype(bf16)
    if x.cache_dtype.name != "uint8":
        return plgpu.load(codes, layout=layout).astype(f32).astype(bf16)
    shape = (codes.shape[0], 2 * codes.shape[1])
    if _mosaic.interpreting():
        value, zero = codes[...].astype(i32), _column(x, scales, head)[first : first + shape[0]]
        zero = lax.bitcast_convert_type(zero, i32) & 15
        pairs = jnp.stack([value & 15, value >> 4], -1).reshape(shape)
        return (pairs - zero[:, None]).astype(f32).astype(bf16)
    narrow, rows, pieces = _nibble_layout(span), 256 // span, shape[1] // span

    def build(context, scales, packed, head):
        del context
        thread, out, base = Thread(), [], _words.Word.of(0)
        row = (thread.warp * rows) + (thread.lane >> (span // 8).bit_length() - 1)
        # tiles of 16 or 32 rows, and of 32 the warps' second half belongs to the next 16 tokens
        skipped = ((row >> 4) * (4 * _ROW * (pitch(x) - x.K))) if 4 * rows > _ROW else 0
        mine = Memory(scales).at((row * (4 * x.K)) + (_words.scalar(head) << 2)).at(skipped)
        for n, word in enumerate(_words.words_of(packed)):
            if n % pieces == 0:
                base = ((mine.load(place(x, first + 4 * rows * (n // pieces)), 4) & 15) * 0x10001) | _BASE
            high = word >> 4
            for i in range(4):
                pick = f"prmt.b32 s, $1, $2, 0x{4 + i}{4 + i}{i}{i};"
                text = f"{{.reg .b32 s; {pick} lop3.b32 s, s, 0x000F000F, {_BASE}, 0xEA; sub.bf16x2 $0, s, $3;}}"
                out.append(_words.asm(text, word, high, base))
        return _words.fragment(out, shape, layout, "bf16")

    out = plgpu.ShapeDtypeStruct(shape, bf16, layout=layout)
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), narrow, plgpu.Layout.WG_SPLAT), return_type=out)
    return inline(build)(scales, plgpu.load(codes, layout=narrow, optimized=False), head)


def pieces(x, raw: Any, per_token: Any, layout: Any, span: int) -> Iterator[tuple[int, Any]]:
    """First column and `numbers` of each piece of a block; `per_token` are the scales, which block, and the head."""
    (scales, at, head), packed = per_token, x.D // width(x)
    for column in range(0, raw.shape[1] * packed, PIECE):
        codes = raw.at[:, pl.ds(column // packed, PIECE // packed)]
        yield column, numbers(x, codes, scales.at[at], head, layout, span)


def tokens(x, scales):
    """Scales of a block as they lie in shared memory as [block_kv, K]; for the interpreter."""
    return scales.reshape(-1, pitch(x) * _ROW)[:, : x.K * _ROW].reshape(-1, x.K)


def _column(x, scales: Any, head: Any):
    return lax.dynamic_index_in_dim(tokens(x, scales[...]), head, 1, keepdims=False)


def _nibble_layout(span: int) -> Any:
    """Layout of bytes whose pairs of numbers are laid out as `_mosaic.strips` of that span."""
    rows, half = 256 // span, span // 2
    tiling = plgpu.Tiling(((4 * rows, half), (rows, half), (4,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
