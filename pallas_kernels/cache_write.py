"""Writes of new keys and values into a paged cache on Mosaic GPU, in place; see `jaxattn.ops.cache_write`.

One thread block a token: its row of all KV heads goes through registers to the slot's place. Pages are flattened to
slots, so that one 64-bit product gives the address. Nothing else of the cache is touched: the arrays are passed as
references, and a caller that donates them pays for no copy.

Where each head has a scale, heads are rows in registers. If one token's heads are fewer than the rows of the smallest
tile, several tokens share a tile, whose codes and scales reach their slots through shared memory, copied by the
threads: a token's codes start anywhere there, TMA's copies at multiples of 128 bytes.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic, _rows, _words
from pallas_kernels._words import Memory

_DTYPES = ("bfloat16", "float16", "float32")
_FP8_MAX, _INT8_MAX, _INT4_MAX = 448.0, 127.0, 15.0
_FIRST = 16
"""vLLM rotates heads of at least as many numbers by two products, the first of this size."""
_SCALE_FLOOR = 1e-6
_THREADS = 128
_TOKENS = (1, 2, 4)
_MOST = 16_384
"""Numbers of a tile: 128 a lane."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """`tokens`: how many tokens, or groups of tokens that share a tile, a thread block writes."""

    tokens: int = 1

    def __post_init__(self):
        if self.tokens not in _TOKENS:
            raise ValueError(f"tokens={self.tokens} must be one of {', '.join(map(str, _TOKENS))}")


def why_not(*, key, value, k_pages, mode, **_) -> str | None:
    """None if the kernel can run these arguments, else one sentence."""
    dtype = jnp.dtype(key.dtype).name
    if dtype not in _DTYPES:
        return f"key and value must be {', '.join(_DTYPES)}, got {dtype}"
    if k_pages.shape[0] * k_pages.shape[1] >= 2**31:
        return f"the cache must have fewer than 2^31 slots, got {k_pages.shape[0]} pages of {k_pages.shape[1]}"
    for name, x in (("key", key), ("value", value)):
        _, K, D = x.shape
        if mode in ("copy", "fp8"):
            if K * D % _THREADS:
                return f"a token's {name}s must be a multiple of {_THREADS} numbers, got K={K} heads of {D}"
        elif D % _rows.vector(dtype):
            return f"one scale a head needs {name} heads of a multiple of {_rows.vector(dtype)} numbers, got {D}"
        elif mode == "int4_token_head" and D < _FIRST:
            return f"rotated {name} heads must hold at least {_FIRST} numbers, got {D}"
    if not mode.endswith("token_head") or not _together(key, value, mode):
        return None
    if (size := _tile(key, value)) > _MOST:
        shapes = f"K={key.shape[1]} heads of {key.shape[2]} and {value.shape[2]}"
        return f"a tile of whole tokens would hold {size} numbers, more than {_MOST}, with {shapes}"
    return None


def default_config(**_) -> Config:
    """One token a block: the hardware's own scheduler hides the latency of the slot numbers."""
    return Config()


def configs(*, key, value, mode, **_) -> Iterable[Config]:
    """All legal configurations."""
    most = _MOST // _tile(key, value) if _together(key, value, mode) else max(_TOKENS)
    return [Config(tokens=n) for n in _TOKENS if n <= most]


def cache_write(
    *,
    config: Config,
    key,
    value,
    k_pages,
    v_pages,
    slots,
    k_scale,
    v_scale,
    k_scale_pages,
    v_scale_pages,
    mode,
    signs=None,
):
    """Launch; arguments as prepared by `jaxattn.ops.cache_write`, `signs` [D] or more those of a rotation."""
    caches = tuple(x for x in (k_pages, v_pages, k_scale_pages, v_scale_pages) if x is not None)
    scales = tuple(x.astype(jnp.float32).reshape(1) for x in (k_scale, v_scale)) if mode == "fp8" else ()
    if signs is not None:
        scales = tuple(signs[: x.shape[-1]].astype(jnp.float32) for x in (key, value))
    if not key.shape[0]:
        return caches
    per_head = mode.endswith("token_head")

    @jax.custom_batching.custom_vmap
    def write(caches, new, slots, scales):
        if _together(key, value, mode):
            return _launch_groups(config, caches, new, slots, scales)
        return _launch(config, caches, new, slots, scales, per_head=per_head)

    signed = scales

    @write.def_vmap
    def _(size, batched, *args):
        if per_head:  # signs, the same for all
            args, batched = (*args[:3], ()), (*batched[:3], ())
        args = jax.tree.map(lambda x, has: x if has else jnp.broadcast_to(x, (size, *x.shape)), args, tuple(batched))
        S = args[0][0].shape[1] * args[0][0].shape[2]
        caches, new, slots, scales = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), args)
        shift = jnp.repeat(jnp.arange(size, dtype=slots.dtype) * S, slots.shape[0] // size)
        slots = jnp.where((slots >= 0) & (slots < S), slots + shift, -1)
        out = write(caches, new, slots, signed if per_head else scales)
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
                    for n, (new_ref, page, scale_page) in enumerate(zip(new_refs, pages, scale_pages, strict=True)):
                        _write_heads(new_ref.at[t], page.at[at], scale_page.at[at], *scale_refs[n : n + 1])
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


def _launch_groups(config: Config, caches, new, slots, signs) -> tuple[jax.Array, ...]:
    """Write T tokens, `tokens` a thread block in tiles of heads; the last block leaves to its neighbour what is its."""
    T, S, K = slots.shape[0], caches[0].shape[0] * caches[0].shape[1], caches[0].shape[2]
    slotted = [x.reshape(S, *x.shape[2:]) for x in caches]
    tokens = config.tokens * _group(*new)
    missing = max(0, tokens - T)
    slots = jnp.pad(
        jnp.where((slots >= 0) & (slots < S), slots, -1).astype(jnp.int32), (0, missing), constant_values=-1
    )
    new = [jnp.pad(x, [(0, missing), (0, 0), (0, 0)]).reshape(-1, x.shape[2]) for x in new]
    rows, last = tokens * K, max(T, tokens) - tokens

    def body(*refs, k_codes, v_codes, k_scales, v_scales):
        (k_pages, v_pages, k_scale_pages, v_scale_pages, k, v, slots_ref), signs_refs = refs[:7], refs[7:]
        block = lax.axis_index("block")
        start = jnp.minimum(block * tokens, last)
        sides = (k, k_codes, k_scales, k_pages, k_scale_pages), (v, v_codes, v_scales, v_pages, v_scale_pages)
        for n, (ref, codes, scales) in enumerate(side[:3] for side in sides):
            layout = _rows.layout(ref.shape[1], _rows.vector(ref.dtype))
            x = plgpu.load(ref.at[pl.ds(start * K, rows)], layout=layout, optimized=False)
            codes[...], scales[...] = _encode(x, codes.dtype, layout, *signs_refs[n : n + 1])
        if _mosaic.interpreting():
            for t in range(tokens):
                slot = slots_ref[start + t]

                @pl.when((start + t >= block * tokens) & (slot >= 0))
                def _(t=t, slot=slot):
                    for _, codes, scales, page, scale_page in sides:
                        page[slot] = codes[pl.ds(t * K, K)]
                        for h in range(K):
                            scale_page[slot, h] = scales[t * K + h]

            return

        def copy(context, slots_ref, start, first, *refs):
            del context
            _words.barrier()
            slots, *places = Memory(slots_ref), _words.scalar(start), _words.scalar(first)
            for source, target in zip(refs[::2], refs[1::2], strict=True):
                size = K * source.type.shape[-1] if len(source.type.shape) == 2 else 4 * K
                _words.scatter(Memory(source), Memory(target), slots, *places, rows=tokens, size=size, pitch=size)

        ref, splat = plgpu.RefType(), plgpu.Layout.WG_SPLAT
        pairs = [ref for side in sides for ref in (side[1], side[3], side[2], side[4])]
        inline: Any = plgpu.inline_mgpu(arg_types=(ref, splat, splat, *[ref] * len(pairs)))
        inline(copy)(slots_ref, start, block * tokens, *pairs)

    body.__name__ = "cache_write"
    scratch = {
        "k_codes": plgpu.SMEM((rows, caches[0].shape[3]), caches[0].dtype),
        "v_codes": plgpu.SMEM((rows, caches[1].shape[3]), caches[1].dtype),
        "k_scales": plgpu.SMEM((rows,), jnp.float32),
        "v_scales": plgpu.SMEM((rows,), jnp.float32),
    }
    grid = (pl.cdiv(T, tokens),)
    launch = plgpu.kernel(body, out_type=(), grid=grid, grid_names=("block",), scratch_types=scratch)
    written = pl.run_state(lambda refs: launch(*refs, *new, slots, *signs))(slotted)
    return tuple(x.reshape(cache.shape) for x, cache in zip(written, caches, strict=True))


def _write_heads(new, page, scale_page, *signs) -> None:
    """Quantise one token's heads [K, D], each with its own scale."""
    K, D = new.shape
    quantize, limit = (_int8, _INT8_MAX) if page.dtype == jnp.int8 else (_fp8, _FP8_MAX)
    vec = _rows.vector(new.dtype)
    if _heads_as_rows(K, D, new.dtype):
        layout = _rows.layout(D, vec)
        codes, scale = _encode(plgpu.load(new, layout=layout, optimized=False), page.dtype, layout, *signs)
        _mosaic.store(scale_page, scale)
        _mosaic.store(page, codes)
        return
    while D % (_THREADS * vec):
        vec //= 2
    layout = plgpu.Layout.WG_STRIDED((D,), vec_size=vec)
    for h in range(K):
        x = plgpu.load(new.at[h], layout=layout, optimized=False).astype(jnp.float32)
        amax = lax.broadcast(jnp.max(jnp.abs(x)), (D,))
        scale, inverse = _scale(amax, limit, layout)
        scale_page[h] = jnp.max(scale)
        page[h] = quantize(_product(x, inverse, layout))


def _encode(x: jax.Array, stored: Any, layout: Any, *signs) -> tuple[jax.Array, jax.Array]:
    """Codes and scales of heads as rows [N, D]; `signs` are those of a rotation."""
    if signs:
        return _int4(x, layout, *signs)
    quantize, limit = (_int8, _INT8_MAX) if stored == jnp.int8 else (_fp8, _FP8_MAX)
    x = x.astype(jnp.float32)
    scale, inverse = _scale(jnp.max(jnp.abs(x), axis=1), limit, layout.reduce(1))
    return quantize(_product(x, lax.broadcast_in_dim(inverse, x.shape, [0]), layout)), scale


def _int4(x: jax.Array, layout: Any, signs) -> tuple[jax.Array, jax.Array]:
    """Packed codes [N, D / 2] of rotated heads, and scales with zero points in their low bits."""
    shape, dtype, D, row = x.shape, x.dtype, x.shape[1], layout.reduce(1)

    def rounded(y, dtype):
        return y.astype(dtype).astype(jnp.float32)

    sign = lax.broadcast_in_dim(plgpu.load(signs, layout=layout.reduce(0), optimized=False), shape, [1])
    y = rounded(x.astype(jnp.float32) * sign, jnp.bfloat16)
    y = rounded(_mosaic.butterflies(y, _FIRST, layout) * 0.25, jnp.bfloat16)
    root = float(np.asarray((D // _FIRST) ** -0.5).astype(jnp.bfloat16))
    y = rounded(_mosaic.butterflies(y, D, layout, _FIRST) * root, jnp.bfloat16)
    y = rounded(y * np.float32(D**0.5), dtype)
    low, high = jnp.min(y, axis=1), jnp.max(y, axis=1)
    scale, inverse = _scale(high - low, _INT4_MAX, row)
    zero = _half_away(_product(-low, inverse, row), 0.0, _INT4_MAX)
    spread = [lax.broadcast_in_dim(r, shape, [0]) for r in (inverse, zero)]
    codes = _half_away(_product(y, spread[0], layout) + spread[1], 0.0, _INT4_MAX).astype(jnp.int32)
    vec = _rows.vector(dtype)
    packed = _mosaic.pack_nibbles(codes, layout, _rows.layout(D // 2, vec // 2))
    bits = lax.bitcast_convert_type(scale, jnp.int32) & -16
    return packed, lax.bitcast_convert_type(bits | zero.astype(jnp.int32), jnp.float32)


def _scale(amax: jax.Array, limit: float, layout: Any) -> tuple[jax.Array, jax.Array]:
    """Scale and its reciprocal, each rounded once, from the largest magnitudes, or ranges, in `layout`."""
    scale = jnp.maximum(amax * np.float32(1 / limit), _SCALE_FLOOR)  # as vLLM: not the quotient
    return scale, _mosaic.divide(jnp.full_like(scale, 1.0), scale, layout)


def _product(x: jax.Array, y: jax.Array, layout: Any) -> jax.Array:
    """`x * y`, rounded: not joined with a sum that follows."""
    return _mosaic.pointwise("mul.rn.f32", jnp.multiply, layout, x, y)


def _heads_as_rows(K: int, D: int, dtype: Any) -> bool:
    vec = _rows.vector(dtype)
    return D % vec == 0 and K % _rows.smallest(D, vec) == 0


def _group(*sides: Any) -> int:
    """Tokens whose heads fill whole tiles, of all arrays [T, K, D]."""
    least = math.lcm(*(_rows.smallest(x.shape[2], _rows.vector(x.dtype)) for x in sides))
    return least // math.gcd(least, sides[0].shape[1])


def _tile(key: Any, value: Any) -> int:
    """Numbers of the larger tile of as many tokens."""
    return _group(key, value) * key.shape[1] * max(key.shape[2], value.shape[2])


def _together(key: Any, value: Any, mode: str) -> bool:
    """Several tokens share a tile."""
    return mode.endswith("token_head") and any(
        not _heads_as_rows(x.shape[1], x.shape[2], x.dtype)
        and (mode == "int4_token_head" or x.shape[2] % _THREADS != 0)
        for x in (key, value)
    )


def _half_away(x: jax.Array, low: float, high: float) -> jax.Array:
    """Nearest integer within [low, high] as float32, ties away from zero."""
    return jnp.clip(jnp.where(x >= 0, x + 0.5, x - 0.5), low, high).astype(jnp.int32).astype(jnp.float32)


def _fp8(x: jax.Array) -> jax.Array:
    """Saturating conversion, NaN stays NaN."""
    return jnp.clip(x, -_FP8_MAX, _FP8_MAX).astype(jnp.float8_e4m3fn)


def _int8(x: jax.Array) -> jax.Array:
    """Nearest integer, ties away from zero: half is added before the conversion truncates."""
    return jnp.clip(jnp.where(x >= 0, x + 0.5, x - 0.5), -128.0, 127.0).astype(jnp.int8)
