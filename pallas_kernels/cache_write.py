"""Writes of new keys and values into a paged cache on Mosaic GPU, in place; see `jaxattn.ops.cache_write`.

One thread block a token: its row of all KV heads goes through registers to the slot's place. Pages are flattened to
slots, so that one 64-bit product gives the address. Nothing else of the cache is touched: the arrays are passed as
references, and a caller that donates them pays for no copy.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _rows

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
                f"one scale a head needs head dim {_THREADS}n or a multiple of {_rows.smallest(D, _rows.vector(dtype))} "
                f"heads, got {name} with K={K} heads of {D}"
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
    T = key.shape[0]
    caches = [x for x in (k_pages, v_pages, k_scale_pages, v_scale_pages) if x is not None]
    if T == 0:
        return tuple(caches)
    S = k_pages.shape[0] * k_pages.shape[1]
    per_head = mode.endswith("token_head")
    flat = [x if per_head else x.reshape(T, -1) for x in (key, value)]
    inputs = [*flat, slots]
    if mode == "fp8":
        inputs += [x.astype(jnp.float32).reshape(1) for x in (k_scale, v_scale)]
    refs = [jax.new_ref(x.reshape(S, *x.shape[2:]) if per_head else x.reshape(S, -1)) for x in caches]

    def body(*refs):
        pages, scale_pages, inputs = refs[:2], refs[2 : len(caches)], refs[len(caches) :]
        new, slots_ref, scales = inputs[:2], inputs[2], inputs[3:]
        first = lax.axis_index("block") * config.tokens

        def token(t):
            slot = slots_ref[t]

            @pl.when((slot >= 0) & (slot < S))
            def _():
                at = slot.astype(jnp.int32)
                for side in range(2):
                    if per_head:
                        _write_heads(new[side].at[t], pages[side].at[at], scale_pages[side].at[at])
                    else:
                        scale = scales[side][0] if scales else None
                        _write_row(new[side].at[t], pages[side].at[at], scale)

        for j in range(config.tokens):
            t = first + j
            if j == 0:
                token(t)
            else:
                pl.when(t < T)(lambda t=t: token(t))

    body.__name__ = "cache_write"
    blocks = pl.cdiv(T, config.tokens)
    plgpu.kernel(body, out_type=(), grid=(blocks,), grid_names=("block",))(*refs, *inputs)
    return tuple(jax.freeze(ref).reshape(x.shape) for ref, x in zip(refs, caches, strict=True))


def _write_row(new, page, scale) -> None:
    """Copy one token's row [K * D], or write `e4m3(x / scale)`."""
    (size,) = new.shape
    vec = _rows.vector(new.dtype)
    while size % (_THREADS * vec):
        vec //= 2
    x = plgpu.load(new, layout=plgpu.Layout.WG_STRIDED((size,), vec_size=vec), optimized=False)
    page[...] = x if scale is None else _fp8(x.astype(jnp.float32) / scale)


def _write_heads(new, page, scale_page) -> None:
    """Quantise one token's heads [K, D], each with its own scale."""
    K, D = new.shape
    quantize, limit = (_int8, _INT8_MAX) if page.dtype == jnp.int8 else (_fp8, _FP8_MAX)
    vec = _rows.vector(new.dtype)
    if _heads_as_rows(K, D, new.dtype):
        x = plgpu.load(new, layout=_rows.layout(D, vec), optimized=False).astype(jnp.float32)
        scale = jnp.maximum(jnp.max(jnp.abs(x), axis=1) / limit, _SCALE_FLOOR)
        scale_page[...] = scale
        page[...] = quantize(x * lax.broadcast_in_dim(1.0 / scale, (K, D), [0]))
        return
    while D % (_THREADS * vec):
        vec //= 2
    for h in range(K):
        x = plgpu.load(new.at[h], layout=plgpu.Layout.WG_STRIDED((D,), vec_size=vec), optimized=False)
        x = x.astype(jnp.float32)
        scale = jnp.maximum(jnp.max(jnp.abs(x)) / limit, _SCALE_FLOOR)
        scale_page[h] = scale
        page[h] = quantize(x * (1.0 / scale))


def _heads_as_rows(K: int, D: int, dtype: Any) -> bool:
    vec = _rows.vector(dtype)
    return D % vec == 0 and K % _rows.smallest(D, vec) == 0


def _fp8(x: jax.Array) -> jax.Array:
    """Saturating conversion, NaN stays NaN."""
    return jnp.clip(x, -_FP8_MAX, _FP8_MAX).astype(jnp.float8_e4m3fn)


def _int8(x: jax.Array) -> jax.Array:
    """Nearest integer, ties away from zero: half is added before the conversion truncates."""
    return jnp.clip(jnp.where(x >= 0, x + 0.5, x - 0.5), -128.0, 127.0).astype(jnp.int8)
