"""The latent attention layer: chunks, decode, caches in every format, messages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxattn import mla, rope_table, softmax_scale
from jaxattn.nn import LatentCache, MLAttention, PagedBatch

M, H = 32, 4


def layer(dtype="float32", **sizes):
    small = {"q_rank": 24, "kv_rank": 16, "nope_dim": 12, "value_dim": 20} | sizes
    table = rope_table(8, 64)
    return MLAttention(M, H, table=table, scale=softmax_scale(20), dtype=dtype, rngs=nnx.Rngs(0), **small)


def batch(lengths, queries, page=4, tokens=None):
    pages = max(-(-n // page) for n in lengths)
    table = jnp.arange(len(lengths) * pages, dtype=jnp.int32).reshape(len(lengths), pages)
    start = jnp.asarray(np.cumsum([0, *queries]).astype(np.int32))
    return PagedBatch.from_lengths(
        table, jnp.array(lengths, jnp.int32), start, tokens=tokens or sum(queries), page=page
    )


def expanded(module, x):
    """One request from position 0, by the textbook: keys and values of every head."""
    w = {
        n: np.asarray(getattr(module, n).kernel[...], np.float64)
        for n in ("q_a_proj", "q_b_proj", "kv_b_proj", "o_proj")
    }
    w["kv_a"] = np.asarray(module.kv_a_proj_with_mqa.kernel[...], np.float64)
    table = np.asarray(module.table[...], np.float64)

    def norm(y):
        return y / np.sqrt((y**2).mean(-1, keepdims=True) + module.eps)

    def turn(y):
        cos, sin = np.split(table[: y.shape[0]], 2, -1)
        cos, sin = (t.reshape(t.shape[0], *[1] * (y.ndim - 2), -1) for t in (cos, sin))
        a, b = y[..., ::2], y[..., 1::2]
        return np.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(y.shape)

    N = len(x)
    q = (norm(x @ w["q_a_proj"]) @ w["q_b_proj"]).reshape(N, H, 20)
    joined = x @ w["kv_a"]
    kv = (norm(joined[:, :16]) @ w["kv_b_proj"]).reshape(N, H, 32)
    key = np.concatenate([kv[..., :12], np.repeat(turn(joined[:, 16:])[:, None], H, 1)], -1)
    q = np.concatenate([q[..., :12], turn(q[..., 12:])], -1)
    s = np.einsum("thd,shd->hts", q, key) * module.scale
    s = np.where(np.tri(N, dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    o = np.einsum("hts,shv->thv", p / p.sum(-1, keepdims=True), kv[..., 12:])
    return o.reshape(N, -1) @ w["o_proj"]


def test_prefill_is_expanded_attention_and_decode_continues_it(rng):
    module, x = layer(), jnp.asarray(rng.standard_normal((9, M)), jnp.float32)
    truth = expanded(module, np.asarray(x, np.float64))
    bound = 256 * np.finfo(np.float32).eps * np.abs(truth).max()
    whole = module(x, LatentCache(4, 4, dtype="float32", kv_rank=16, rope_dim=8), batch([9], [9]))
    assert np.abs(whole - truth).max() <= bound
    cache = LatentCache(4, 4, dtype="float32", kv_rank=16, rope_dim=8)
    parts = [module(x[:5], cache, batch([5], [5]))]
    parts += [module(x[n : n + 1], cache, batch([n + 1], [1])) for n in range(5, 9)]
    assert np.abs(jnp.concatenate(parts) - truth).max() <= bound


def test_halves_are_neighbours_with_the_pairs_moved(rng):
    x = jnp.asarray(rng.standard_normal((5, M)), jnp.float32)
    near, far = layer(q_rank=None), layer(q_rank=None, interleaved=False)
    moved = np.arange(8).reshape(4, 2).T.reshape(-1)  # where the numbers of neighbours stand among halves
    columns = np.concatenate([np.arange(12), 12 + moved])
    q = near.q_proj.kernel[...].reshape(M, H, 20)[..., columns].reshape(M, H * 20)
    kv = near.kv_a_proj_with_mqa.kernel[...]
    far.q_proj.kernel[...] = q
    far.kv_a_proj_with_mqa.kernel[...] = jnp.concatenate([kv[:, :16], kv[:, 16 + moved]], 1)
    for name in ("kv_b_proj", "o_proj"):
        getattr(far, name).kernel[...] = getattr(near, name).kernel[...]
    outs = [m(x, LatentCache(2, 4, dtype="float32", kv_rank=16, rope_dim=8), batch([5], [5])) for m in (near, far)]
    assert np.abs(outs[0] - outs[1]).max() <= 64 * np.finfo(np.float32).eps * np.abs(outs[0]).max()


@pytest.mark.parametrize("format", ["fp8", "fp8_ds_mla"])
def test_quantized_caches(format, rng):
    module = layer("bfloat16", kv_rank=512, nope_dim=12)
    table = rope_table(64, 64)
    module = MLAttention(M, H, table=table, scale=0.1, q_rank=24, nope_dim=12, value_dim=20, rngs=nnx.Rngs(0))
    x = jnp.asarray(rng.standard_normal((6, M)), jnp.bfloat16)
    outs = [np.asarray(module(x, LatentCache(2, 4, format=f), batch([6], [6])), np.float32) for f in ("plain", format)]
    assert np.abs(outs[1] - outs[0]).max() <= np.abs(outs[0]).max() / 8
    assert (outs[0] != outs[1]).any()


def test_expanded_prefill_is_absorbed_attention(rng):
    """Requests with and without earlier tokens, one without new ones, and padding, whose table entries are wild."""
    module, tokens = layer(), 10
    old, new = [7, 0, 5, 2], [3, 4, 0, 1]
    pages, x = 4, jnp.asarray(rng.standard_normal((sum(old) + tokens, M)), jnp.float32)
    table = np.full((4, pages), 2**31 - 1, np.int32)
    used = iter(rng.permutation(16))
    for b, n in enumerate(np.add(old, new).tolist()):
        table[b, : -(-n // 4)] = [next(used) for _ in range(-(-n // 4))]

    def step(lengths, queries, tokens):
        start = jnp.asarray(np.cumsum([0, *queries]).astype(np.int32))
        lengths = jnp.array(lengths, jnp.int32)
        return PagedBatch.from_lengths(jnp.asarray(table), lengths, start, tokens=tokens, page=4)

    outs = []
    for expand in (False, True):
        cache = LatentCache(16, 4, dtype="float32", kv_rank=16, rope_dim=8)
        cache.rows[...] = jnp.full_like(cache.rows[...], jnp.nan)
        module(x[: sum(old)], cache, step(old, old, sum(old)))
        run = nnx.jit(lambda m, x, c, b, expand: m(x, c, b, expand=expand, chunk=3), static_argnums=4)
        outs.append(np.asarray(run(module, x[sum(old) :], cache, step(np.add(old, new), new, tokens), expand)))
    assert np.abs(outs[0] - outs[1]).max() <= 256 * np.finfo(np.float32).eps * np.abs(outs[0]).max()
    assert (outs[1][8:] == 0).all() and (outs[1][:8] != 0).any()


@pytest.mark.parametrize("format", ["fp8", "fp8_ds_mla"])
def test_a_cache_reads_rows_as_attention_does(format, rng):
    """The attention of a lone row is its value; a slot outside the cache holds zeros."""
    cache = LatentCache(3, 4, format=format, **({"scale": 0.5} if format == "fp8" else {}))
    latent, rotary = (jnp.asarray(rng.standard_normal((2, n)), jnp.bfloat16) for n in (512, 64))
    cache.update(latent, rotary, jnp.array([0, 7]))
    rows = cache.read(jnp.array([0, -1, 7]), jnp.bfloat16)
    o = mla(
        jnp.ones((1, 1, 576), jnp.bfloat16),
        cache.rows[...],
        jnp.zeros((1, 1), jnp.int32),
        jnp.ones(1, jnp.int32),
        jnp.arange(2),
        scale=1.0,
        format=format,
        cache_scale=None if cache.scale is None else cache.scale[...],
    )
    np.testing.assert_array_equal(o[0, 0], rows[0, :512])
    assert (rows[1] == 0).all() and np.abs(rows[2, 512:] - rotary[1]).max() <= 2.0**-4 * np.abs(rotary[1]).max()


def test_one_jitted_step_without_padding_in_the_way(rng):
    module, x = layer(), jnp.asarray(rng.standard_normal((8, M)), jnp.float32)
    cache = LatentCache(4, 4, dtype="float32", kv_rank=16, rope_dim=8)
    plain = module(x[:5], LatentCache(4, 4, dtype="float32", kv_rank=16, rope_dim=8), batch([3, 2], [3, 2]))
    step = nnx.jit(lambda m, x, c, b: m(x, c, b))
    padded = step(module, x, cache, batch([3, 2], [3, 2], tokens=8))
    assert np.abs(padded[:5] - plain).max() <= 64 * np.finfo(np.float32).eps * np.abs(plain).max()
    assert (np.asarray(padded[5:]) == 0).all()
    jax.block_until_ready(padded)


def test_messages(rng):
    module, cache = layer(), LatentCache(4, 4, dtype="float32", kv_rank=16, rope_dim=8)
    with pytest.raises(
        ValueError, match=r"MLAttention: x must be packed tokens \[N M\] with M=32, got shape \(3, 31\)"
    ):
        module(jnp.ones((3, 31)), cache, batch([3], [3]))
    with pytest.raises(TypeError, match="MLAttention: x must have dtype float32, got bfloat16; cast it"):
        module(jnp.ones((3, M), jnp.bfloat16), cache, batch([3], [3]))
    with pytest.raises(ValueError, match="MLAttention: format must be None or 'fp8_block', got 'mxfp4'"):
        layer(format="mxfp4")
    with pytest.raises(ValueError, match="LatentCache: format must be plain, fp8 or fp8_ds_mla, got 'v4'"):
        LatentCache(4, 4, format="v4")
