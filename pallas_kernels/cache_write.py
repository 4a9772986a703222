"""Writes of new keys and values into a paged cache on Mosaic GPU, in place; see `jaxattn.ops.cache_write`.

One thread block a token: its row of all KV heads goes through registers to the slot's place. Pages are flattened to
slots, so that one 64-bit product gives the address. Nothing else of the cache is touched: the arrays are passed as
references, and a caller that donates them pays for no copy.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic, _rows

_DTYPES = ("bfloat16", "float16", "float32")
_FP8_MAX, _INT8_MAX = 448.0, 127.0
_SCALE_FLOOR = 1e-6
_THREADS = 128
_TOKENS = (1, 2, 4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """`tokens`: how many tokens a thread block writes, one after the other."""

    tokens: int = 1

    def __post_init__(self):
        if self.tokens not in _TOKENS:
            raise ValueError(f"tokens={self.tokens} must be one of {', '.join(map(str, _TOKENS))}")


def why_not(*, key, value, k_pages, mode, **_) -> str | None:
    """None if the kernel can run these arguments, else one sentence."""
    dtype = jnp.dtype(key.dtype).name
    if mode == "int4_token_head":
        return "the Hadamard rotation of int4 caches has no Mosaic form; use the reference"
    if dtype not in _DTYPES:
        return f"key and value must be {', '.join(_DTYPES)}, got {dtype}"
    if k_pages.shape[0] * k_pages.shape[1] >= 2**31:
        return f"the cache must have fewer than 2^31 slots, got {k_pages.shape[0]} pages of {k_pages.shape[1]}"
    for name, x in (("key", key), ("value", value)):
        _, K, D = x.shape
        if mode in ("copy", "fp8"):
            if K * D % _THREADS:
                return f"a token's {name}s must be a multiple of {_THREADS} numbers, got K={K} heads of {D}"
        elif not _heads_as_rows(K, D, key.dtype) and D % _THREADS:
            return (
                f"one scale a head needs a head dim of {_THREADS}n or a multiple of "
                f"{_rows.smallest(D, _rows.vector(dtype))} heads, got {name} with K={K} heads of {D}"
            )
    return None


def default_config(**_) -> Config:
    """One token a block: the hardware's own scheduler hides the latency of the slot numbers."""
    return Config()


def configs(**_) -> Iterable[Config]:
    """All legal configurations."""
    return [Config(tokens=n) for n in _TOKENS]


def cache_write(
    *, config: Config, key, value, k_pages, v_pages, slots, k_scale, v_scale, k_scale_pages, v_scale_pages, mode
):
    """Launch; arguments as prepared by `jaxattn.ops.cache_write`."""
    caches = tuple(x for x in (k_pages, v_pages, k_scale_pages, v_scale_pages) if x is not None)
    scales = tuple(x.astype(jnp.float32).reshape(1) for x in (k_scale, v_scale)) if mode == "fp8" else ()
    if not key.shape[0]:
        return caches

    @jax.custom_batching.custom_vmap
    def write(caches, new, slots, scales):
        return _launch(config, caches, new, slots, scales, per_head=mode.endswith("token_head"))

    @write.def_vmap
    def _(size, batched, *args):
        args = jax.tree.map(lambda x, has: x if has else jnp.broadcast_to(x, (size, *x.shape)), args, tuple(batched))
        S = args[0][0].shape[1] * args[0][0].shape[2]
        caches, new, slots, scales = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), args)
        shift = jnp.repeat(jnp.arange(size, dtype=slots.dtype) * S, slots.shape[0] // size)
        slots = jnp.where((slots >= 0) & (slots < S), slots + shift, -1)
        out = write(caches, new, slots, scales)
        return tuple(x.reshape(size, -1, *x.shape[1:]) for x in out), (True,) * len(out)

    return write(caches, (key, value), slots, scales)


def _launch(config: Config, caches, new, slots, scales, *, per_head: bool) -> tuple[jax.Array, ...]:
    """Write T tokens; `scales` are [G], each for T / G tokens in turn."""
    T, S = slots.shape[0], caches[0].shape[0] * caches[0].shape[1]
    slotted = [x.reshape(S, *x.shape[2:]) if per_head else x.reshape(S, -1) for x in caches]
    new = [x if per_head else x.reshape(T, -1) for x in new]

    def body(*refs):
        pages, scale_pages, inputs = refs[:2], refs[2 : len(caches)], refs[len(caches) :]
        new_refs, slots_ref, scale_refs = inputs[:2], inputs[2], inputs[3:]
        first = lax.axis_index("block") * config.tokens

        def token(t):
            slot = slots_ref[t]

            @pl.when((slot >= 0) & (slot < S))
            def _():
                at = slot.astype(jnp.int32)
                if per_head:
                    for new_ref, page, scale_page in zip(new_refs, pages, scale_pages, strict=True):
                        _write_heads(new_ref.at[t], page.at[at], scale_page.at[at])
                    return
                group = lax.div(t, jnp.int32(T // scales[0].shape[0])) if scales else None
                numbers = [ref[group] for ref in scale_refs] or [None, None]
                # both loads before the first store, which waits for the whole block
                rows = [_row(ref.at[t], number) for ref, number in zip(new_refs, numbers, strict=True)]
                for page, row in zip(pages, rows, strict=True):
                    page[at] = row

        token(first)
        for j in range(1, config.tokens):
            pl.when(first + j < T)(lambda j=j: token(first + j))

    body.__name__ = "cache_write"
    blocks = pl.cdiv(T, config.tokens)
    launch = plgpu.kernel(body, out_type=(), grid=(blocks,), grid_names=("block",))
    written = pl.run_state(lambda refs: launch(*refs, *new, slots, *scales))(slotted)
    return tuple(x.reshape(cache.shape) for x, cache in zip(written, caches, strict=True))


def _row(new, scale) -> jax.Array:
    """One token's row [K * D] as it is, or `e4m3(x / scale)`."""
    (size,) = new.shape
    vec = _rows.vector(new.dtype)
    while size % (_THREADS * vec):
        vec //= 2
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=vec)
    x = plgpu.load(new, layout=layout, optimized=False)
    if scale is None:
        return x
    return _fp8(_mosaic.divide(x.astype(jnp.float32), lax.broadcast(scale, (size,)), layout))


def _write_heads(new, page, scale_page) -> None:
    """Quantise one token's heads [K, D], each with its own scale."""
    K, D = new.shape
    quantize, limit = (_int8, _INT8_MAX) if page.dtype == jnp.int8 else (_fp8, _FP8_MAX)
    vec = _rows.vector(new.dtype)
    if _heads_as_rows(K, D, new.dtype):
        layout = _rows.layout(D, vec)
        x = plgpu.load(new, layout=layout, optimized=False).astype(jnp.float32)
        scale, inverse = _scale(jnp.max(jnp.abs(x), axis=1), limit, layout.reduce(1))
        _mosaic.store(scale_page, scale)
        page[...] = quantize(x * lax.broadcast_in_dim(inverse, (K, D), [0]))
        return
    while D % (_THREADS * vec):
        vec //= 2
    layout = plgpu.Layout.WG_STRIDED((D,), vec_size=vec)
    for h in range(K):
        x = plgpu.load(new.at[h], layout=layout, optimized=False).astype(jnp.float32)
        amax = lax.broadcast(jnp.max(jnp.abs(x)), (D,))
        scale, inverse = _scale(amax, limit, layout)
        scale_page[h] = jnp.max(scale)
        page[h] = quantize(x * inverse)


def _scale(amax: jax.Array, limit: float, layout: Any) -> tuple[jax.Array, jax.Array]:
    """Scale and its reciprocal, each rounded once, from the largest magnitudes in `layout`."""
    scale = jnp.maximum(_mosaic.divide(amax, jnp.full_like(amax, limit), layout), _SCALE_FLOOR)
    return scale, _mosaic.divide(jnp.full_like(scale, 1.0), scale, layout)


def _heads_as_rows(K: int, D: int, dtype: Any) -> bool:
    vec = _rows.vector(dtype)
    return D % vec == 0 and K % _rows.smallest(D, vec) == 0


def _fp8(x: jax.Array) -> jax.Array:
    """Saturating conversion, NaN stays NaN."""
    return jnp.clip(x, -_FP8_MAX, _FP8_MAX).astype(jnp.float8_e4m3fn)


def _int8(x: jax.Array) -> jax.Array:
    """Nearest integer, ties away from zero: half is added before the conversion truncates."""
    return jnp.clip(jnp.where(x >= 0, x + 0.5, x - 0.5), -128.0, 127.0).astype(jnp.int8)
