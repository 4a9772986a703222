"""Rows of a latent cache, dequantized, on Mosaic GPU: one thread block a row; see `jaxattn.ops.latent_cache_gather`.

Arrays of device code are 128 numbers or more, packed rows are not made of such: V4's seven rows of codes are read as
two times four, one of them twice, and the bytes of a bfloat16 number by two lanes that add them up. The cache comes in
several views, none of them a copy.
"""

import dataclasses
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _codes, _frames, _mosaic, _packed_rows
from pallas_kernels import _plans as plans
from pallas_kernels._frames import Frame

_HALF = Frame((4, 64), 2, narrow=False)
"""Four of V4's rows of codes."""
_PAIRS = Frame((64, 2), 1, narrow=False)
"""Bytes of the rotary part."""
_ROTARY = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(_packed_rows.Config):
    """As that of `_packed_rows`."""


def why_not(*, cache, page_table, format, dtype, **_) -> str | None:
    """None if the kernel can run these arguments, else one sentence."""
    given = jnp.dtype(cache.dtype if format == "plain" else dtype).name
    if given not in plans.DTYPES:
        return f"the result must be {_mosaic.either(plans.DTYPES)}, got {given}"
    if not page_table.shape[1] or not cache.shape[0]:
        return "there are no pages"
    if format == "v4":
        return None if cache.shape[1] % 64 == 0 else f"a page must be a multiple of 64 bytes, got {cache.shape[1]}"
    found = _frames.line(cache.shape[2], cache.dtype) if format == "plain" else None
    return found if isinstance(found, str) else None


def default_config(**_) -> Config:
    """One token a block."""
    return Config()


def configs(**_) -> Iterable[Config]:
    """All legal configurations."""
    return Config.choices()


def latent_cache_gather(*, config: Config, cache, page_table, lengths, gathered, rows, format, page, dtype):
    """Launch; arguments as prepared by `jaxattn.ops.latent_cache_gather`."""
    tokens = config.tokens
    (B, pages), P, size = page_table.shape, cache.shape[0], cache.shape[1] if page is None else page
    views, shape, kind, read = {"v4": _v4, "fp8_ds_mla": _ds_mla, "plain": _plain}[format](cache, size, dtype)
    if not B * rows:
        return jnp.zeros((B, rows, math.prod(shape)), kind)
    zeros = _zeros(shape, kind)

    def body(lengths_ref, gathered_ref, table_ref, *refs):
        *refs, o_ref = refs
        b = lax.axis_index("request")

        def one(row):
            count = gathered_ref[b]
            position = lengths_ref[b] - count + row
            column = lax.div(position, jnp.int32(size))
            asked = (row < count) & (position >= 0) & (column < pages)
            number = table_ref[b, jnp.where(asked, column, 0)]
            asked = asked & (number >= 0)

            @pl.when(asked)
            def _():
                read(jnp.minimum(number, P - 1), lax.rem(position, jnp.int32(size)), refs, o_ref.at[b, row])

            @pl.when(jnp.logical_not(asked))
            def _():
                zeros(o_ref.at[b, row])

        _packed_rows.each_token(tokens, rows, one)

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((B, rows, *shape), kind),
        grid=(pl.cdiv(rows, tokens), B),
        grid_names=("block", "request"),
        kernel_name="latent_cache_gather",
    )(lengths, gathered, page_table, *views)
    return out.reshape(B, rows, math.prod(shape))


def _zeros(shape, dtype):
    """A function that clears a row of the result."""
    line = _frames.line(shape[-1], dtype) if len(shape) == 1 else None

    def clear(out):
        if line is not None:
            assert not isinstance(line, str), line
            for start in line.starts:
                zero = plgpu.layout_cast(jnp.zeros(line.frame.shape, dtype), line.frame.numbers)
                _mosaic.store(line.part(out, start), zero)
            return
        zero = plgpu.layout_cast(jnp.zeros(_HALF.shape, dtype), _HALF.numbers)
        for start in {0, 4, shape[0] - 4}:
            _mosaic.store(out.at[pl.ds(start, 4)], zero)

    return clear


def _float8_values(codes):
    return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)


def _rotary(pairs, dtype):
    """bfloat16 numbers [64] from their bytes [64, 2], of a row of the result."""
    byte = plgpu.load(pairs, layout=_PAIRS.numbers, optimized=False).astype(jnp.int32)
    place = plgpu.broadcasted_iota(jnp.int32, _PAIRS.shape, 1, layout=_PAIRS.numbers)
    bits = jnp.sum(byte << (16 + 8 * place), 1)
    return lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)


def _v4(cache, page, dtype):
    P, width = cache.shape
    views = [cache.reshape(P, width // 64, 64), cache, cache.reshape(P, width // 2, 2)]

    def read(number, place, refs, out):
        codes, scales, pairs = refs
        for start in (0, 3):
            x = _HALF.load(codes.at[number, pl.ds(place * 9 + start, 4)])
            where = page * _packed_rows.V4_ROW + place * _packed_rows.V4_SCALES + start
            scale = plgpu.load(scales.at[number, pl.ds(where, 4)], layout=_HALF.shared, optimized=False)
            x = _float8_values(x) * _HALF.spread(_codes.power(scale.astype(jnp.int32)))
            _mosaic.store(out.at[pl.ds(start, 4)], _codes.rounded(x, jnp.bfloat16).astype(dtype))
        where = lax.div(place * _packed_rows.V4_ROW + 448, jnp.int32(2))
        _mosaic.store(out.at[7], _rotary(pairs.at[number, pl.ds(where, _ROTARY)], dtype))

    return views, (8, 64), jnp.dtype(dtype), read


def _ds_mla(cache, page, dtype):
    slots = cache.shape[0] * page
    flat = cache.reshape(slots, _packed_rows.DS_MLA_BYTES)
    views = [flat.reshape(slots, -1, 16), flat, flat.reshape(slots, -1, 2)]
    source = Frame((32, 16), 4, narrow=False)
    frame = _packed_rows.V4

    def read(number, place, refs, out):
        codes, flat, pairs = refs
        slot = number * page + place
        x = source.load(codes.at[slot, pl.ds(0, 32)])
        x = _float8_values(_mosaic.relabel(x, source.numbers, frame.shape, frame.numbers))
        row = plgpu.broadcasted_iota(jnp.int32, frame.shape, 0, layout=frame.numbers)
        bits = jnp.zeros_like(row)
        for group in range(4):
            parts = [flat[slot, 512 + 4 * group + i].astype(jnp.int32) << (8 * i) for i in range(4)]
            bits = jnp.where((row >> 1) == group, parts[0] | parts[1] | parts[2] | parts[3], bits)
        scale = lax.bitcast_convert_type(bits, jnp.float32)
        _mosaic.store(out.at[pl.ds(0, 8)], _codes.rounded(x * scale, jnp.bfloat16).astype(dtype))
        _mosaic.store(out.at[8], _rotary(pairs.at[slot, pl.ds(264, _ROTARY)], dtype))

    return views, (9, 64), jnp.dtype(dtype), read


def _plain(cache, page, dtype):
    del dtype
    width = cache.shape[2]
    line = _frames.line(width, cache.dtype)
    assert not isinstance(line, str), line

    def read(number, place, refs, out):
        [flat] = refs
        for start in line.starts:
            _mosaic.store(line.part(out, start), line.frame.load(line.at(flat, number * page + place, start)))

    return [cache.reshape(-1, width)], (width,), cache.dtype, read
