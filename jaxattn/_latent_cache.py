"""Packed rows of latent caches: DeepSeek-V3.2's 656 bytes, V4's 584 bytes and the indexer's 132 or 68 bytes a token.

    fp8_ds_mla, [P, page, 656]      512 e4m3 | 4 float32 scales, amax / 448 of 128 numbers | 64 bfloat16
    v4, [P, bytes]                  page rows of (448 e4m3 | 64 bfloat16 = 576 bytes), then page rows of 8 scale bytes
    indexer_fp8, [P, bytes]         page rows of 128 e4m3, then page float32 scales, powers of two
    indexer_mxfp4, [P, bytes]       page rows of 64 bytes with two codes each, then page rows of 4 UE8M0 bytes

A page of v4 is padded to a multiple of 576 bytes: 37440 for 64 tokens. Sources: vLLM 0.26.0 csrc/cache_kernels.cu,
vllm/models/deepseek_v4/common/ops/cache_utils.py and fused_compress_quant_cache.py.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from jaxattn.quant import mx
from jaxattn.quant import primitives as p
from pallas_kernels import _exact

LATENT, ROTARY = 512, 64
"""Widths of V3.2's latent and of the rotary part; V4's 512 numbers end with the rotary part."""
NOPE = LATENT - ROTARY
DS_MLA_BYTES = LATENT + 4 * (LATENT // 128) + 2 * ROTARY
FLOOR = 1e-4
"""Smallest amax of V4 and the indexer; V3.2 has the smallest normal float32 as its smallest scale."""


@dataclass(frozen=True)
class Paged:
    """A format whose pages hold rows first and scales behind them."""

    row: int
    """Bytes of a row."""
    scales: int
    """Bytes of its scales."""
    width: int
    """Numbers that a row stands for."""

    def least(self, page: int) -> int:
        """Bytes that a page of `page` rows needs at least."""
        return page * (self.row + self.scales)


PAGED = {
    "v4": Paged(NOPE + 2 * ROTARY, 8, LATENT),
    "indexer_fp8": Paged(128, 4, 128),
    "indexer_mxfp4": Paged(64, 4, 128),
}


def v4_page_bytes(page: int) -> int:
    """Bytes of a padded V4 page: `page * 584`, rounded up to a multiple of 576."""
    row = PAGED["v4"].row
    return -(-PAGED["v4"].least(page) // row) * row


def _flat_bytes(x: Array) -> UInt8[Array, "... bytes"]:
    codes = lax.bitcast_convert_type(x, jnp.uint8)
    return codes if codes.ndim == x.ndim else codes.reshape(*x.shape[:-1], codes.shape[-2] * codes.shape[-1])


def _values(codes: UInt8[Array, "... bytes"], dtype) -> Array:
    size = jnp.dtype(dtype).itemsize
    parts = codes.reshape(*codes.shape[:-1], codes.shape[-1] // size, size) if size > 1 else codes
    return lax.bitcast_convert_type(parts, dtype)


def float8_codes(x: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """e4m3 bytes of `x`, also for float64."""
    return lax.bitcast_convert_type(p.to_float8(x.astype(jnp.float32)), jnp.uint8)


def float8_values(codes: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """float32 values of e4m3 bytes."""
    return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)


def bfloat16(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`x` rounded to bfloat16, in its own dtype."""
    return _exact.rounded(x, jnp.bfloat16)


# ---------------------------------------------------------------- V3.2
def encode_ds_mla(latent: Float[Array, "N 512"], rotary: Float[Array, "N 64"]) -> UInt8[Array, "N 656"]:
    """Rows of `fp8_ds_mla`; both parts are rounded to bfloat16 first (bfloat16 data is not changed)."""
    groups = p.grouped(bfloat16(p.wide(latent)).astype(jnp.float32), 128)
    scale = jnp.maximum(p.divide(p.amax(groups, -1), p.E4M3_MAX), p.TINY)
    codes = float8_codes(p.divide(groups, scale)).reshape(latent.shape)
    parts = (codes, _flat_bytes(scale[..., 0]), _flat_bytes(p.rounded(p.wide(rotary), jnp.bfloat16)))
    return jnp.concatenate(parts, -1)


def decode_ds_mla(rows: UInt8[Array, "... 656"]) -> Float[Array, "... 576"]:
    """float32 numbers `bf16(code * scale)` of the latent, then the rotary part."""
    codes, scales, rotary = jnp.split(rows, (LATENT, DS_MLA_BYTES - 2 * ROTARY), -1)
    latent = p.grouped(float8_values(codes), 128) * _values(scales, jnp.float32)[..., None]
    latent = bfloat16(p.ungrouped(latent, LATENT))
    return jnp.concatenate([latent, _values(rotary, jnp.bfloat16).astype(jnp.float32)], -1)


# ---------------------------------------------------------------- V4 and its indexer
def encode_v4(nope: Float[Array, "N 448"], rotary: Float[Array, "N 64"]) -> tuple[Array, Array]:
    """Row bytes [N, 576] and scale bytes [N, 8] of numbers that are rounded to bfloat16 first."""
    groups = p.grouped(bfloat16(p.wide(nope)).astype(jnp.float32), 64)
    scale = power_of_two_code(p.amax(groups, -1))
    codes = float8_codes(p.divide_by_ue8m0(groups, scale)).reshape(nope.shape)
    row = jnp.concatenate([codes, _flat_bytes(p.rounded(p.wide(rotary), jnp.bfloat16))], -1)
    return row, jnp.pad(scale[..., 0], ((0, 0), (0, 1)))


def decode_v4(rows: UInt8[Array, "... 576"], scales: UInt8[Array, "... 8"]) -> Float[Array, "... 512"]:
    """float32 numbers `bf16(code * 2^(byte - 127))`, then the rotary part."""
    nope = p.grouped(float8_values(rows[..., :NOPE]), 64) * p.ue8m0_value(scales[..., :7])[..., None]
    rotary = _values(rows[..., NOPE:], jnp.bfloat16).astype(jnp.float32)
    return jnp.concatenate([bfloat16(p.ungrouped(nope, NOPE)), rotary], -1)


def encode_indexer(x: Float[Array, "N 128"], format: str) -> tuple[Array, Array]:
    """Row and scale bytes of an indexer's key, which is rounded to bfloat16 first."""
    x = bfloat16(p.wide(x)).astype(jnp.float32)
    if format == "indexer_mxfp4":
        return mx.quantize(x, "mxfp4")
    scale = power_of_two_code(p.amax(x, -1))
    return float8_codes(p.divide_by_ue8m0(x, scale)), _flat_bytes(p.ue8m0_value(scale))


def decode_indexer(rows: UInt8[Array, "... row"], scales: UInt8[Array, "... 4"]) -> tuple[Array, Array]:
    """float32 values of the codes [..., 128] and of the scales: [..., 1] (FP8) or [..., 4] (MXFP4)."""
    if rows.shape[-1] == PAGED["indexer_mxfp4"].row:
        return p.from_e2m1(p.unpack_nibbles(rows)), p.ue8m0_value(scales)
    return float8_values(rows), _values(scales, jnp.float32)


def power_of_two_code(top: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """UE8M0 byte of `2^ceil(log2(max(top, 1e-4) / 448))`."""
    return p.ue8m0_ceil(p.divide(jnp.maximum(top, FLOOR), p.E4M3_MAX))


# ---------------------------------------------------------------- pages
def split_pages(cache: UInt8[Array, "P bytes"], format: str, page: int) -> tuple[Array, Array]:
    """Rows [P, page, row] and scales [P, page, scales] of a paged format."""
    f, P = PAGED[format], cache.shape[0]
    rows, scales = cache[:, : page * f.row], cache[:, page * f.row : f.least(page)]
    return rows.reshape(P, page, f.row), scales.reshape(P, page, f.scales)


def insert(
    cache: UInt8[Array, "P bytes"], rows: Array, scales: Array, slots: Int[Array, " N"], format: str, page: int
) -> UInt8[Array, "P bytes"]:
    """The cache with rows and scales in their slots; slots outside the cache are skipped.

    Pages and places in them are separate indices: a page's number times its bytes would not fit 32 bits.
    """
    f, P = PAGED[format], cache.shape[0]
    number, place = place_of(slots, P, page)
    column = place[:, None] * f.row + jnp.arange(f.row)
    cache = cache.at[number[:, None], column].set(rows, mode="drop")
    column = page * f.row + place[:, None] * f.scales + jnp.arange(f.scales)
    return cache.at[number[:, None], column].set(scales, mode="drop")


def place_of(slots: Int[Array, " N"], P: int, page: int) -> tuple[Int[Array, " N"], Int[Array, " N"]]:
    """Page and place of each slot; page P, which no write reaches, for those outside the cache."""
    inside = (slots >= 0) & (slots < P * page)
    return jnp.where(inside, slots // page, P), jnp.where(inside, slots % page, 0)


def check_pages(op: str, cache: Array, format: str, page: int) -> None:
    """Raise `ValueError` unless the pages of a packed cache [P, bytes] are large enough.

    Raises:
        ValueError: with the least number of bytes.
    """
    least = PAGED[format].least(page)
    if cache.shape[1] < least:
        raise ValueError(
            f"{op}: a page of {page} {format} rows needs at least {least} bytes, got a cache of pages of "
            f"{cache.shape[1]}"
        )
