"""DeepSeek-V4's layers: streaming is one shot, the layer is its parts, one jitted step, MTP, plain caches, FP8 linears.

Compiling is what takes time here: modules are filled by numpy, and every kind of attention has one compiled step of a
fixed number of rows for two requests, whose lengths, tables and padding are data.
"""

import dataclasses
import functools
import zlib
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxattn import (
    _products,
    compressor,
    grouped_projection,
    indexer,
    indexer_keys,
    indexer_q,
    inv_rope_fp8_quant,
    mhc_post,
    mhc_pre,
    q_kv_rms_norm,
    qnorm_rope_kv_insert,
    rms_norm_quant,
    rope,
    rope_table,
    sparse_mla,
)
from jaxattn.nn import (
    DeepseekV4Attention,
    DeepseekV4DecoderLayer,
    FusedMoE,
    MoEConfig,
    MTPBlock,
    V4Batch,
    V4Cache,
)
from jaxattn.nn.deepseek_v4 import Compressor, Indexer
from jaxattn.nn.deepseek_v4_cache import CompressorState
from jaxattn.nn.linear import project
from jaxattn.quant import mx
from pallas_kernels import _mosaic

M, H, REQUESTS = 64, 4, 2
SMALL = {"q_rank": 32, "groups": 2, "o_rank": 128, "index_heads": 4, "index_topk": 3}
ROWS = {1: 16, 4: 16, 128: 136}


@functools.cache
def table():
    with jax.ensure_compile_time_eval():  # the first caller may be traced
        return rope_table(64, 512, base=160000.0)


def filled(make):
    """The module that `make` makes, its parameters drawn by numpy: nothing is compiled."""
    module = nnx.eval_shape(make)
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        rng, shape, name = np.random.default_rng(zlib.crc32(str(path).encode())), variable.shape, path[-1]
        if name == "table":
            value = table()
        elif name in ("wo_a_scale", "weight_scale_inv"):
            value = np.full(shape, 2.0**-5, np.float32)
        elif len(shape) < 2:
            value = np.zeros(shape) if name in ("attn_sink", "base") else np.ones(shape)
        else:
            width = (
                1.0 if variable.dtype == jnp.float8_e4m3fn else shape[-1 if name in ("fn", "w13", "w2") else 0] ** -0.5
            )
            value = rng.standard_normal(shape, np.float32) * width
        variable.set_value(jnp.asarray(np.asarray(value).astype(variable.dtype)))
    return module


@functools.cache
def attention(ratio, **changes):
    options = SMALL | changes
    return filled(lambda: DeepseekV4Attention(M, H, ratio=ratio, table=table(), rngs=nnx.Rngs(0), **options))


def batch(lengths, new, ratio, *, tokens=None, order=None):
    """Two requests of these lengths, of which so many tokens are new in this step."""
    pages = {"window_table": 8, "entry_table": 2, "state_table": 512 // (4 if ratio == 4 else 8)}
    tables = {}
    for name, n in pages.items():
        rows = np.arange(REQUESTS * n, dtype=np.int32).reshape(REQUESTS, n)
        tables[name] = jnp.asarray(rows[:, ::-1].copy() if order == "reversed" else rows)
    start = np.cumsum([0, *new]).astype(np.int32)
    return V4Batch.from_lengths(
        jnp.asarray(lengths, jnp.int32), jnp.asarray(start), **tables, tokens=tokens or ROWS[ratio]
    )


def cache(ratio, **options):
    state = REQUESTS * 512 // (4 if ratio == 4 else 8)
    return V4Cache(ratio, window_pages=8 * REQUESTS, entry_pages=2 * REQUESTS, state_pages=state, **options)


@nnx.jit
def run(module, x, cache, batch):
    return module(x, cache, batch)


def step(module, x, kept, lengths, new, **options):
    """Attention output of the new tokens of both requests, `x` filled up with NaN."""
    rows = ROWS[module.ratio]
    padded = np.full((rows, M), np.nan, x.dtype)
    padded[: len(x)] = x
    y = run(module, jnp.asarray(padded), kept, batch(lengths, new, module.ratio, **options))
    return np.asarray(y[: len(x)], np.float32)


@pytest.mark.parametrize(("ratio", "steps"), [(1, (6, 3, 3)), (4, (6, 3, 3)), (128, (127, 3, 3))])
def test_tokens_in_steps_are_one_shot(ratio, steps, rng):
    """One program, so that only the caches lie between both; a changed list would be far off."""
    module, n = attention(ratio), sum(steps)
    x = rng.standard_normal((n, M)).astype(jnp.bfloat16)
    whole = step(module, x, cache(ratio), (n, 0), (n, 0))
    outs, kept, last = [], cache(ratio), 0
    for new in steps:
        first, last = last, last + new
        outs.append(step(module, x[first:last], kept, (last, 0), (new, 0)))
    assert np.isfinite(whole).all()
    error = np.abs(np.concatenate(outs) - whole).max(-1)
    assert (error <= np.abs(whole).max() / 16).all()


def test_page_order_and_neighbours_change_nothing(rng):
    module, n = attention(4), 8
    x = rng.standard_normal((n, M)).astype(jnp.bfloat16)
    alone = step(module, x, cache(4), (n, 0), (n, 0))
    np.testing.assert_array_equal(step(module, x, cache(4), (n, 0), (n, 0), order="reversed"), alone)
    both = step(module, np.concatenate([x, -x]), cache(4), (n, n), (n, n))
    np.testing.assert_array_equal(both[:n], alone)


def test_padding_does_nothing(rng):
    x = rng.standard_normal((8, M)).astype(jnp.bfloat16)
    kept, other = cache(4), cache(4)
    step(attention(4), x[:5], kept, (5, 0), (5, 0))
    x[5:] = 3
    step(attention(4), x, other, (5, 0), (5, 0))
    for a, b in zip(*(jax.tree.leaves(nnx.state(c)) for c in (kept, other)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_plain_caches_round_to_the_dtype_alone(rng):
    """In float32, plain caches and projections are the FP8 ones but for their roundings, and chunks are one shot."""
    options = {"dtype": jnp.float32, "output_format": "none"}
    exact, x = attention(4, **options), rng.standard_normal((12, M)).astype(np.float32)
    plain = {"format": "plain", "dtype": jnp.float32}
    whole = step(exact, x, cache(4, **plain), (12, 0), (12, 0))
    kept = cache(4, **plain)
    parts = [step(exact, x[a:b], kept, (b, 0), (b - a, 0)) for a, b in ((0, 5), (5, 11), (11, 12))]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert kept.window.dtype == kept.main.entries.dtype == kept.index.entries.dtype == jnp.float32


def test_linears_in_fp8_are_quantized_layers():
    module = attention(1, linear_format="fp8_block")
    kinds = {name: type(getattr(module, name)).__name__ for name in ("wq_a", "wq_b", "wkv", "wo_b")}
    assert set(kinds.values()) == {"QuantizedLinear"} and module.wo_a.dtype == jnp.float8_e4m3fn
    assert type(attention(4, linear_format="fp8_block").indexer.wq_b).__name__ == "QuantizedLinear"


def indexed(implementation=None):
    options: dict[str, Any] = {"heads": 16, "dim": 128, "topk": 5, "eps": 1e-6, "dtype": jnp.float32}
    return filled(lambda: Indexer(M, 32, **options, implementation=implementation, rngs=nnx.Rngs(0)))


def copied(module, entries, x, q, where, format):
    """The same choice from keys of all requests side by side: what the module must not make."""
    fp4, plain = format == "indexer_mxfp4", format == "plain"
    heads, weights = module.wq_b(q).reshape(len(x), 16, 128), module.weights_proj(x)
    if plain:
        codes, weights = rope(heads, where.positions, table()), weights * 128**-0.5 * 16**-0.5
    else:
        codes, weights, *scale = indexer_q(heads, weights, where.positions, table(), format="mxfp4" if fp4 else "fp8")
        codes = mx.dequantize(codes, scale[0]) if fp4 else codes
    keys, scales = indexer_keys(entries, where.entry_table, format=format, page=64)
    start, count = where.request * keys.shape[1], jnp.maximum(where.positions + 1, 0) // 4
    return indexer(codes, weights, keys.reshape(-1, 128), scales.reshape(-1), start, start + count, topk=5)


def pages(rng, format, slots):
    """Five pages of 64 keys: random ones in these slots, NaN everywhere else."""
    if format == "plain":
        keys = np.full((5, 64, 128), np.nan, np.float32)
        keys[slots // 64, slots % 64] = rng.standard_normal((len(slots), 128))
        return jnp.asarray(keys)
    row, kept = (128, "<f4") if format == "indexer_fp8" else (64, "u1")
    cache = np.full((5, 64 * (row + 4)), 0xFF, np.uint8)
    codes, scales = cache[:, : 64 * row].reshape(5, 64, row), cache[:, 64 * row :].reshape(5, 64, 4).copy()
    codes[slots // 64, slots % 64] = rng.integers(0, 256, (len(slots), row)) & 0xBF  # E4M3 below 2, any two of E2M1
    some = rng.uniform(0.1, 1, (len(slots), 1)) if kept == "<f4" else rng.integers(120, 130, (len(slots), 4))
    scales[slots // 64, slots % 64] = some.astype(kept).view(np.uint8)
    cache[:, 64 * row :] = scales.reshape(5, 256)
    return jnp.asarray(cache)


@pytest.mark.parametrize("format", ["indexer_fp8", "indexer_mxfp4", "plain"])
def test_the_indexer_reads_its_pages_and_what_is_seen_of_them(format, rng):
    """Ragged requests, one in decode and one in prefill, and padding; everything else in the cache is NaN."""
    where = batch((408, 8), (1, 3), 4, tokens=5)
    kept = CompressorState(5, 1, ratio=4, dim=128, format=format, dtype=jnp.float32)
    kept.entries[...] = pages(rng, format, np.concatenate([np.arange(102), 128 + np.arange(2)]))
    x, q = (np.full((5, n), np.nan, np.float32) for n in (M, 32))
    x[:4], q[:4] = rng.standard_normal((4, M)), rng.standard_normal((4, 32))
    with mock.patch.object(Compressor, "__call__"):
        forward = nnx.jit(lambda module, x, q, cache, where: module(x, q, table(), cache, where))
        found = np.asarray(forward(indexed(), x, q, kept, where))
        if format != "plain":
            with _mosaic.interpret():
                np.testing.assert_array_equal(forward(indexed("mosaic"), x, q, kept, where), found)
    copy = nnx.jit(functools.partial(copied, format=format))
    np.testing.assert_array_equal(found, copy(indexed(), kept.entries[...], x, q, where))
    assert (found >= 0).sum(1).tolist() == [5, 1, 1, 2, 0]


def largest(jaxpr):
    """Numbers of the largest array that a program makes."""
    sizes = [0]
    for equation in jaxpr.eqns:
        sizes += [np.prod(out.aval.shape) for out in equation.outvars]
        for value in equation.params.values():
            if hasattr(inner := getattr(value, "jaxpr", value), "eqns"):
                sizes.append(largest(inner))
    return int(max(sizes))


def test_the_indexer_copies_no_cache():
    """16 pages for each of two requests in the table, of a cache of four: a copy would be by far the largest array."""
    where = batch((408, 10), (1, 10), 4, tokens=16)
    where = dataclasses.replace(where, entry_table=jnp.tile(where.entry_table, 8))
    kept = CompressorState(4, 1, ratio=4, dim=128, format="indexer_fp8")
    x, q, copy = jnp.ones((16, M)), jnp.ones((16, 32)), 2 * 16 * 64 * 128

    def program(choose):
        with mock.patch.object(Compressor, "__call__"), _mosaic.interpret():
            return jax.make_jaxpr(choose)(x, q, where).jaxpr

    module = indexed("mosaic")
    lean = program(lambda x, q, where: module(x, q, table(), kept, where))
    assert "indexer_topk" in str(lean) and largest(lean) <= kept.entries.size < copy // 4
    assert largest(program(lambda *args: copied(module, kept.entries[...], *args, "indexer_fp8"))) >= copy


def small_moe(**changes):
    sizes = {"features": M, "experts": 4, "width": 32, "top_k": 2, "scoring": "sqrtsoftplus", "limit": 10.0}
    return MoEConfig(**sizes | changes)


@functools.cache
def layer(ratio):
    return filled(
        lambda: DeepseekV4DecoderLayer(M, H, small_moe(), ratio=ratio, table=table(), rngs=nnx.Rngs(0), **SMALL)
    )


def test_a_decoder_layer_is_its_parts(rng):
    """Attention and experts are stand-ins here: they have tests of their own, this is about what goes in and out."""
    seen = []

    def attend(self, x, cache, batch):
        seen.append((cache, batch))
        return x * 2 + 1

    def experts(self, x, tokens=None):
        seen.append(tokens)
        return x * 3 - 1

    own, kept, where, tokens = layer(4), cache(4), batch((6, 0), (6, 0), 4, tokens=6), jnp.arange(6)
    streams = jnp.asarray(rng.standard_normal((6, 4, M)), jnp.bfloat16)
    with mock.patch.object(DeepseekV4Attention, "__call__", attend), mock.patch.object(FusedMoE, "__call__", experts):
        out = own(streams, kept, where, tokens)
        own(streams, kept, where)
    assert seen[0] == (kept, where) and seen[1] is tokens and seen[3] is None
    x, post, comb = mhc_pre(streams, *(getattr(own.attn_hc, n)[...] for n in ("fn", "scale", "base")))
    mixed = mhc_post(streams, rms_norm_quant(x, own.attn_norm[...]) * 2 + 1, post, comb)
    x, post, comb = mhc_pre(mixed, *(getattr(own.ffn_hc, n)[...] for n in ("fn", "scale", "base")))
    np.testing.assert_array_equal(out, mhc_post(mixed, rms_norm_quant(x, own.ffn_norm[...]) * 3 - 1, post, comb))


def composed(a, x, kept, lengths):
    """Attention of a C4A layer by the ops alone, whole requests at once; lists of slots are loops over tokens."""
    request = np.repeat(np.arange(REQUESTS), lengths).astype(np.int32)
    at = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)
    rows = {n: jnp.arange(REQUESTS * n, dtype=jnp.int32).reshape(REQUESTS, n) for n in (2, 128)}
    cos_sin, N, heads = table(), len(x), a.indexer.heads
    q, kv = q_kv_rms_norm(project(a.wq_a, x), project(a.wkv, x), a.q_norm[...], a.kv_norm[...])
    where: dict[str, Any] = {"format": "v4", "page": 64}
    own = project(a.wq_b, q).reshape(N, H, 512)
    own, window = qnorm_rope_kv_insert(own, kv, at, cos_sin, kept.window[...], 512 * request + at, **where)

    def entries(c, state):
        kv, score = (_products.einsum("nm,mw->nw", x, w[...]) for w in (c.wkv, c.wgate))
        ended = np.where(at % 4 == 3, 128 * request + at // 4, -1).astype(np.int32)
        place = kv, score, c.ape[...], c.norm[...], at, request, cos_sin, state.state[...], rows[128]
        return compressor(*place, state.entries[...], ended, format=state.format, page=64)[0]

    main, keys = entries(a.compressor, kept.main), entries(a.indexer.compressor, kept.index)
    weights = project(a.indexer.weights_proj, x)
    codes, weights = indexer_q(project(a.indexer.wq_b, q).reshape(N, heads, 128), weights, at, cos_sin)
    k, scale = indexer_keys(keys, rows[2], format="indexer_fp8", page=64)
    start, count = 128 * request, (at + 1) // 4
    best = np.asarray(indexer(codes, weights, k.reshape(-1, 128), scale.reshape(-1), start, start + count, topk=3))
    seen, chosen = np.full((2, N, 128), -1, np.int32)
    for n, (b, p) in enumerate(zip(request, at, strict=True)):
        seen[n, : p + 1] = 512 * b + np.arange(p + 1)
        chosen[n, :3] = [128 * b + e if e >= 0 else -1 for e in best[n]]
    more = {"extra_cache": main, "extra_indices": chosen, "extra_counts": (chosen >= 0).sum(1).astype(np.int32)}
    o = sparse_mla(own, window, seen, counts=at + 1, sinks=a.attn_sink[...], **more, **where, extra_page=64)
    y = grouped_projection(*inv_rope_fp8_quant(o, at, cos_sin, groups=2), a.wo_a[...], a.wo_a_scale[...])
    return project(a.wo_b, y.reshape(N, -1)), best


def test_a_c4a_layer_is_the_composition_of_its_ops(rng):
    """With its FP8 caches and everything else that is rounded, to the bit; entries are chosen among more than three."""
    own, lengths = layer(4), (18, 5)
    x = jnp.asarray(rng.standard_normal((sum(lengths), 4, M)), jnp.bfloat16)
    out = own(x, cache(4), batch(lengths, lengths, 4, tokens=len(x)))

    def gates(module):
        return (getattr(module, name)[...] for name in ("fn", "scale", "base"))

    inner, post, comb = mhc_pre(x, *gates(own.attn_hc))
    y, best = composed(own.attn, rms_norm_quant(inner, own.attn_norm[...]), cache(4), lengths)
    mixed = mhc_post(x, y, post, comb)
    inner, post, comb = mhc_pre(mixed, *gates(own.ffn_hc))
    expected = mhc_post(mixed, own.ffn(rms_norm_quant(inner, own.ffn_norm[...])), post, comb)
    np.testing.assert_array_equal(out, expected)
    assert (best[15:18] >= 0).all(), "four entries to choose from"


def test_mtp_feeds_itself(rng):
    block = filled(lambda: MTPBlock(M, layer(1), rngs=nnx.Rngs(1)))
    forward = nnx.jit(lambda block, e, streams, cache, batch: block(e, streams, cache, batch))
    embedding = jnp.asarray(rng.standard_normal((2, M)), jnp.bfloat16)
    streams, kept = jnp.asarray(rng.standard_normal((2, 4, M)), jnp.bfloat16), cache(1)
    masked = embedding.at[0].set(jnp.nan)
    one, head = forward(block, masked, streams, kept, batch((2, 0), (2, 0), 1, tokens=2))
    assert one.shape == streams.shape and head.shape == (2, M)
    assert np.isfinite(np.asarray(head, np.float32)).all()
    two, _ = forward(block, embedding, one, kept, batch((4, 0), (2, 0), 1, tokens=2))
    assert np.isfinite(np.asarray(two, np.float32)).all()
    assert np.abs(np.asarray(two, np.float32) - np.asarray(one, np.float32)).max() > 0
    with pytest.raises(ValueError, match=r"MTPBlock: the layer must be window-only \(ratio 1\), got ratio 4"):
        MTPBlock(M, layer(4), rngs=nnx.Rngs(0))


def test_messages():
    def attend(ratio, **changes):
        return nnx.eval_shape(
            lambda: DeepseekV4Attention(M, H, ratio=ratio, table=table(), rngs=nnx.Rngs(0), **SMALL | changes)
        )

    with pytest.raises(ValueError, match="DeepseekV4Attention: ratio must be 1, 4 or 128, got 8"):
        attend(8)
    with pytest.raises(ValueError, match="heads must be a multiple of groups, got heads=4 and groups=3"):
        attend(1, groups=3)
    with pytest.raises(ValueError, match="DeepseekV4Attention: linear_format must be none or fp8_block, got 'fp4'"):
        attend(1, linear_format="fp4")
    with pytest.raises(ValueError, match="takes M=64 and a cache of ratio 4, got M=64 and ratio 1"):
        attention(4)(jnp.ones((2, M), jnp.bfloat16), cache(1), batch((2, 0), (2, 0), 1, tokens=2))
    refused = "indexer: implementation='mosaic' cannot run this call: the heads must be 16, 32, 64 or 128, got H=4"
    with _mosaic.interpret(), pytest.raises(NotImplementedError, match=refused):
        step(attention(4, index_implementation="mosaic"), np.ones((2, M), jnp.bfloat16), cache(4), (2, 0), (2, 0))
    with pytest.raises(ValueError, match="V4Cache: ratio must be 1, 4 or 128, got 2"):
        V4Cache(2, window_pages=1)
    with pytest.raises(ValueError, match="V4Cache: format must be v4 or plain, got 'fp8'"):
        V4Cache(4, window_pages=1, format="fp8")
    with pytest.raises(ValueError, match="with format 'plain', index_format must be plain, got 'indexer_fp8'"):
        V4Cache(4, window_pages=1, format="plain", index_format="indexer_fp8")
    with pytest.raises(ValueError, match="the experts must have features=64, got 32"):
        DeepseekV4DecoderLayer(M, H, small_moe(features=32), ratio=1, table=table(), rngs=nnx.Rngs(0), **SMALL)
