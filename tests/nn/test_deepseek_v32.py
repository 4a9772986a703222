"""DeepSeek-V3.2's attention: the chosen tokens by brute force, dense attention, decode, packed caches, messages."""

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxattn import indexer_keys, rope_table, softmax_scale
from jaxattn.nn import DeepseekV32Attention, LatentCache, LayerNorm, MLAttention, PagedBatch, V32Cache

M, H = 32, 4
PLAIN: dict[str, Any] = {"format": "plain", "dtype": "float32", "kv_rank": 16, "rope_dim": 8, "index_dim": 16}
SIZES: dict[str, Any] = {"q_rank": 24, "kv_rank": 16, "nope_dim": 12, "value_dim": 20}
INDEX: dict[str, Any] = {"index_heads": 3, "index_dim": 16}


step = nnx.jit(lambda module, x, cache, batch: module(x, cache, batch))


def layer(topk, kind=DeepseekV32Attention, dtype="float32", **sizes):
    table = rope_table(8 if sizes.get("kv_rank", 16) == 16 else 64, 64)
    more: dict[str, Any] = {} if kind is MLAttention else INDEX | {"index_topk": topk}
    more |= {name: sizes.pop(name) for name in tuple(sizes) if name.startswith("index")}
    options = SIZES | sizes | more
    module = kind(M, H, table=table, scale=softmax_scale(20), dtype=dtype, **options, rngs=nnx.Rngs(0))
    if kind is DeepseekV32Attention:
        module.indexer.k_norm.weight[...] = jnp.linspace(0.5, 1.5, module.indexer.dim)
        module.indexer.k_norm.bias[...] = jnp.linspace(-0.5, 0.7, module.indexer.dim)
    return module


def batch(lengths, queries, page=4, tokens=None, table=None):
    """Sixteen tokens of pages for each request, so that all lengths have one shape."""
    if table is None:
        pages = -(-16 // page)
        table = jnp.arange(len(lengths) * pages, dtype=jnp.int32).reshape(len(lengths), pages)
    start = jnp.asarray(np.cumsum([0, *queries]).astype(np.int32))
    lengths = jnp.array(lengths, jnp.int32)
    return PagedBatch.from_lengths(jnp.asarray(table), lengths, start, tokens=tokens or sum(queries), page=page)


def brute(module, x, topk):
    """One request from position 0 in float64: every head's keys and values, softmax over the chosen tokens alone."""
    index, N, Dr = module.indexer, len(x), module.rope_dim
    linear = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    w = {n: np.asarray(getattr(module, n).kernel[...], np.float64) for n in linear}
    w |= {n: np.asarray(getattr(index, n).kernel[...], np.float64) for n in ("wq_b", "wk", "weights_proj")}
    cos, sin = np.split(np.asarray(module.table[...], np.float64)[:N], 2, -1)

    def norm(y):
        return y / np.sqrt((y**2).mean(-1, keepdims=True) + module.eps)

    def turn(y, halves):
        c, s = (t.reshape(N, *[1] * (y.ndim - 2), -1) for t in (cos, sin))
        a, b = np.split(y, 2, -1) if halves else (y[..., ::2], y[..., 1::2])
        parts = a * c - b * s, b * c + a * s
        return np.concatenate(parts, -1) if halves else np.stack(parts, -1).reshape(y.shape)

    low = norm(x @ w["q_a_proj"])
    keys = x @ w["wk"]
    keys = keys - keys.mean(-1, keepdims=True)
    keys = keys / np.sqrt((keys**2).mean(-1, keepdims=True) + 1e-6)
    keys = keys * np.asarray(index.k_norm.weight[...]) + np.asarray(index.k_norm.bias[...])
    heads = (low @ w["wq_b"]).reshape(N, index.heads, index.dim)
    keys, heads = (np.concatenate([turn(y[..., :Dr], True), y[..., Dr:]], -1) for y in (keys, heads))
    scores = np.maximum(np.einsum("nhd,sd->nhs", heads, keys), 0)
    scores = np.einsum("nh,nhs->ns", x @ w["weights_proj"], scores)
    seen = np.zeros((N, N), bool)
    for n in range(N):
        seen[n, np.argsort(-scores[n, : n + 1], kind="stable")[:topk]] = True

    q = (low @ w["q_b_proj"]).reshape(N, H, -1)
    joined, nope, R = x @ w["kv_a_proj_with_mqa"], module.nope_dim, module.kv_rank
    kv = (norm(joined[:, :R]) @ w["kv_b_proj"]).reshape(N, H, -1)
    key = np.concatenate([kv[..., :nope], np.repeat(turn(joined[:, R:], False)[:, None], H, 1)], -1)
    q = np.concatenate([q[..., :nope], turn(q[..., nope:], False)], -1)
    s = np.where(seen, np.einsum("thd,shd->hts", q, key) * module.scale, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    o = np.einsum("hts,shv->thv", p / p.sum(-1, keepdims=True), kv[..., nope:])
    return o.reshape(N, -1) @ w["o_proj"]


def close(got, want, factor=256):
    want = np.asarray(want, np.float64)
    assert np.abs(np.asarray(got, np.float64) - want).max() <= factor * np.finfo(np.float32).eps * np.abs(want).max()


@pytest.mark.parametrize("topk", [1, 4, 32])
def test_prefill_attends_to_the_chosen_and_decode_continues_it(topk, rng):
    module, x = layer(topk), jnp.asarray(rng.standard_normal((13, M)), jnp.float32)
    truth = brute(module, np.asarray(x, np.float64), topk)
    close(step(module, x, V32Cache(4, 4, **PLAIN), batch([13], [13])), truth)
    cache = V32Cache(4, 4, **PLAIN)
    parts = [step(module, x[:5], cache, batch([5], [5]))]
    parts += [step(module, x[n : n + 1], cache, batch([n + 1], [1])) for n in range(5, 13)]
    close(jnp.concatenate(parts), truth)
    if topk < 13:
        dense = brute(module, np.asarray(x, np.float64), 13)
        assert np.abs(dense - truth).max() > np.abs(truth).max() / 100


def test_with_as_many_as_there_are_it_is_dense_attention(rng):
    """Requests in decode and prefill, padding, shuffled pages, wild table entries and NaN in every free page."""
    sparse, dense = layer(16), layer(16, MLAttention)
    for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"):
        getattr(dense, name).kernel[...] = getattr(sparse, name).kernel[...]
    old, new, tokens = [7, 0, 5], [1, 6, 3], 12
    table = np.full((3, 3), 2**31 - 1, np.int32)
    free = iter(rng.permutation(12))
    for b, n in enumerate(np.add(old, new).tolist()):
        table[b, : -(-n // 4)] = [next(free) for _ in range(-(-n // 4))]
    first = jnp.asarray(rng.standard_normal((12, M)), jnp.float32)
    x = jnp.asarray(rng.standard_normal((tokens, M)), jnp.float32).at[10:].set(jnp.nan)
    kept, other = V32Cache(12, 4, **PLAIN), LatentCache(12, 4, dtype="float32", kv_rank=16, rope_dim=8)
    for variable in (kept.latent.rows, kept.keys, other.rows):
        variable[...] = jnp.full_like(variable[...], jnp.nan)
    outs = []
    for module, cache in ((sparse, kept), (dense, other)):
        step(module, first, cache, batch(old, old, table=table))
        outs.append(step(module, x, cache, batch(np.add(old, new), new, tokens=tokens, table=table))[:10])
    close(outs[0], outs[1])


def packed():
    return layer(5, dtype="bfloat16", kv_rank=512, index_heads=16, index_dim=128)


def test_packed_caches_hold_what_plain_ones_do(rng):
    module, x = packed(), jnp.asarray(rng.standard_normal((9, M)), jnp.bfloat16)
    caches = V32Cache(4, 4), V32Cache(4, 4, format="plain")
    module.indexer.topk = 16
    outs = [np.asarray(step(module, x, cache, batch([9], [9])), np.float32) for cache in caches]
    assert (outs[0] != outs[1]).any()
    assert np.abs(outs[0] - outs[1]).max() <= np.abs(outs[1]).max() / 8
    keys, scales = indexer_keys(caches[0].keys[...], jnp.arange(4)[None], page=4)
    keys = np.asarray(keys, np.float32)[0, :9] * np.asarray(scales)[0, :9, None]
    plain = np.asarray(caches[1].keys[...], np.float32).reshape(16, 128)[:9]
    assert (np.abs(keys - plain) <= np.maximum(np.abs(plain) / 16, np.asarray(scales)[0, :9, None] * 2.0**-10)).all()
    assert np.log2(np.asarray(scales)[0, :9]).tolist() == np.ceil(np.log2(np.abs(plain).max(1) / 448)).tolist()


def test_decode_is_prefill_over_packed_caches(rng):
    """The same codes, so the same choices; outputs differ by roundings of the products before them."""
    module, x = packed(), jnp.asarray(rng.standard_normal((9, M)), jnp.bfloat16)
    whole, cache = V32Cache(4, 4), V32Cache(4, 4)
    together = np.asarray(step(module, x, whole, batch([9], [9])), np.float32)
    alone = [step(module, x[n : n + 1], cache, batch([n + 1], [1])) for n in range(9)]
    alone = np.asarray(jnp.concatenate(alone), np.float32)
    assert np.abs(alone - together).max() <= 4 * 2.0**-8 * np.abs(together).max()


def test_layer_norm(rng):
    norm, x = LayerNorm(16, eps=1e-3), rng.standard_normal((5, 16)) * 3 + 7
    norm.weight[...], norm.bias[...] = jnp.linspace(-1, 2, 16), jnp.linspace(3, 1, 16)
    want = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-3)
    want = want * np.linspace(-1, 2, 16) + np.linspace(3, 1, 16)
    close(norm(jnp.asarray(x, jnp.float32)), want, 16)
    assert norm(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16


def test_quantized_projections_are_those_of_the_checkpoint():
    module = layer(4, dtype="bfloat16", format="fp8_block", ue8m0=True)
    kinds = {name: type(getattr(module.indexer, name)).__name__ for name in ("wq_b", "wk", "weights_proj")}
    assert kinds == {"wq_b": "QuantizedLinear", "wk": "QuantizedLinear", "weights_proj": "Linear"}


WRONG = {
    "format": (lambda: V32Cache(2, format="fp8"), "V32Cache: format must be fp8_ds_mla or plain, got 'fp8'"),
    "packed": (
        lambda: V32Cache(2, kv_rank=16),
        "V32Cache: format fp8_ds_mla needs kv_rank, rope_dim = 512, 64, got 16, 64",
    ),
    "keys": (lambda: V32Cache(2, index_dim=64), "V32Cache: index_format indexer_fp8 needs index_dim = 128, got 64"),
    "key format": (
        lambda: V32Cache(2, index_format="indexer_mxfp4"),
        "V32Cache: index_format must be indexer_fp8 or plain, got 'indexer_mxfp4'",
    ),
    "pages": (lambda: V32Cache(0), "V32Cache: num_pages must be at least 1, got 0"),
    "topk": (lambda: layer(0), "DeepseekV32Attention: index_topk must be at least 1, got 0"),
    "width": (
        lambda: layer(2, index_dim=4),
        "DeepseekV32Attention: index_dim must be at least that of the table, 8, got 4",
    ),
    "cache": (
        lambda: layer(2)(jnp.ones((1, M)), V32Cache(1, 4, **PLAIN | {"index_dim": 8}), batch([1], [1])),
        "DeepseekV32Attention: this layer takes a cache of index_dim=16, got one of 8",
    ),
    "features": (
        lambda: layer(2)(jnp.ones((1, 5)), V32Cache(1, 4, **PLAIN), batch([1], [1])),
        "DeepseekV32Attention: x must be packed tokens [N M] with M=32, got shape (1, 5)",
    ),
}


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_wrong_calls(call, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call()


def test_a_wrong_dtype():
    with pytest.raises(TypeError, match="DeepseekV32Attention: x must have dtype float32, got bfloat16; cast it to"):
        layer(2)(jnp.ones((1, M), jnp.bfloat16), V32Cache(1, 4, **PLAIN), batch([1], [1]))
