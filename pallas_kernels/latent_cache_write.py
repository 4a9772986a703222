"""Writes of latent rows into a paged cache on Mosaic GPU, in place; see `jaxattn.ops.latent_cache_write`.

A thread block loads the numbers of its tokens before it knows their slots. Packed rows are written by `_packed_rows`;
the others are lines, whose pieces go to the slot as they are, or divided by the scale.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _codes, _frames, _mosaic, _packed_rows
from pallas_kernels import _plans as plans


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(_packed_rows.Config):
    """As that of `_packed_rows`, but that the tokens of a block are loaded together."""


def why_not(*, latent, rotary, cache, format, page, **_) -> str | None:
    """None if the kernel can run these arguments, else one sentence."""
    if jnp.dtype(latent.dtype).name not in plans.DTYPES:
        return f"latent and rotary must be {_mosaic.either(plans.DTYPES)}, got {jnp.dtype(latent.dtype).name}"
    if cache.shape[0] * (page or cache.shape[1]) >= 2**31:
        return f"the cache must have fewer than 2^31 slots, got {cache.shape[0]} pages"
    if format == "v4":
        return f"a page must be a multiple of 4 bytes, got {cache.shape[1]}" if cache.shape[1] % 4 else None
    if format in ("indexer_fp8", "indexer_mxfp4"):
        return f"a page must be a multiple of 32 bytes, got {cache.shape[1]}" if cache.shape[1] % 32 else None
    if format == "fp8_ds_mla":
        return None
    found = _frames.line(latent.shape[1] + rotary.shape[1], latent.dtype)
    return found if isinstance(found, str) else None


def default_config(**_) -> Config:
    """One token a block."""
    return Config()


def configs(**_) -> Iterable[Config]:
    """All legal configurations."""
    return Config.choices()


def latent_cache_write(*, config: Config, latent, rotary, cache, slots, format, scale, page):
    """Launch; arguments as prepared by `jaxattn.ops.latent_cache_write`."""
    N, tokens = latent.shape[0], config.tokens
    if not N:
        return cache
    size = cache.shape[1] if page is None else page
    S = cache.shape[0] * size
    if format == "indexer_fp8":
        flat = cache.reshape(cache.shape[0], -1, 32)
    else:
        flat = cache if page is not None else cache.reshape(S, cache.shape[2])
    load, hold, write, arrays = _WRITERS.get(format, _line)(latent, rotary, scale, size)

    def body(slots_ref, *refs):
        *inputs, cache_ref = refs

        block = [lax.axis_index("block") * tokens + j for j in range(tokens)]
        inside = [(token, jnp.minimum(token, N - 1)) if N % tokens else (0, token) for token in block]
        loaded = [(slots_ref[token], load(token, inputs)) for _wanted, token in inside]
        loaded = [(slot, hold(numbers)) for slot, numbers in loaded]
        for (wanted, _given), (slot, numbers) in zip(inside, loaded, strict=True):

            @pl.when((slot >= 0) & (slot < S) & (wanted < N))
            def _(slot=slot, numbers=numbers):
                write(slot, numbers, inputs, cache_ref)

    body.__name__ = "latent_cache_write"
    launch = plgpu.kernel(body, out_type=(), grid=(pl.cdiv(N, tokens),), grid_names=("block",))
    (written,) = _packed_rows.in_place(lambda ref: launch(slots, *arrays, ref), [flat])
    return written.reshape(cache.shape)


def _v4(latent, rotary, scale, page):
    del scale
    x = jnp.concatenate([latent, rotary], 1).reshape(-1, *_packed_rows.V4.shape)

    def load(token, inputs):
        return _packed_rows.V4.load(inputs[0].at[token])

    def write(slot, numbers, inputs, cache):
        del inputs
        _packed_rows.put_v4(cache, _packed_rows.place_of(slot, page), _frames.wide(numbers))

    def hold(numbers):
        return _packed_rows.held(numbers, _packed_rows.V4.numbers)

    return load, hold, write, [x]


def _ds_mla(latent, rotary, scale, page):
    del scale, page

    def load(token, inputs):
        numbers = _packed_rows.DS_MLA.load(inputs[0].at[token])
        return numbers, _packed_rows.load_ds_mla_rotary(inputs[1], token)

    def write(slot, loaded, inputs, cache):
        del inputs
        numbers, rotary = loaded
        _packed_rows.put_ds_mla(cache, slot.astype(jnp.int32), _frames.wide(numbers), rotary)

    def hold(loaded):
        numbers, rotary = loaded
        return _packed_rows.held(numbers, _packed_rows.DS_MLA.numbers), _packed_rows.held(rotary, _packed_rows.PAIRS)

    return load, hold, write, [latent.reshape(-1, *_packed_rows.DS_MLA.shape), rotary.astype(jnp.bfloat16)]


def _key(put: Callable[..., None]) -> Callable[..., Any]:
    """Keys of the indexer."""

    def prepared(latent, rotary, scale, page):
        del scale
        x = jnp.concatenate([latent, rotary], 1).reshape(-1, *_packed_rows.INDEXER.shape)

        def load(token, inputs):
            return _packed_rows.INDEXER.load(inputs[0].at[token])

        def write(slot, numbers, inputs, cache):
            del inputs
            put(cache, _packed_rows.place_of(slot, page), _frames.wide(numbers))

        def hold(numbers):  # one of 16 bits a thread, not a word
            return numbers

        return load, hold, write, [x]

    return prepared


def _line(latent, rotary, scale, page):
    del page
    x = jnp.concatenate([latent, rotary], 1)
    line = _frames.line(x.shape[1], x.dtype)
    assert not isinstance(line, str), line

    def load(token, inputs):
        return [line.frame.load(line.at(inputs[0], token, start)) for start in line.starts]

    def write(slot, pieces, inputs, cache):
        at = slot.astype(jnp.int32)
        for start, piece in zip(line.starts, pieces, strict=True):
            if scale is not None:
                piece = line.frame.divide(_frames.wide(piece), line.frame.full(inputs[1][0]))
                piece = _codes.float8(piece)
            _mosaic.store(line.at(cache, at, start), piece)

    def hold(pieces):
        # one number of 16 bits is not a word
        whole = line.vec * x.dtype.itemsize >= 4
        return [_packed_rows.held(piece, line.frame.numbers) for piece in pieces] if whole else pieces

    return load, hold, write, [x] + ([] if scale is None else [scale.astype(jnp.float32).reshape(1)])


_WRITERS = {
    "v4": _v4,
    "fp8_ds_mla": _ds_mla,
    "indexer_fp8": _key(_packed_rows.put_indexer_fp8),
    "indexer_mxfp4": _key(_packed_rows.put_indexer_mxfp4),
}
"""Those of the formats that are no lines."""
