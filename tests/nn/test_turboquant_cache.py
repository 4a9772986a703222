"""The packed cache inside `PagedAttention`: decode, first chunks, continuations; which layers get one."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxattn.nn import PagedAttention, PagedBatch, PagedKVCache, TurboQuantKVCache, turboquant_caches
from jaxattn.nn import turboquant_cache as module
from jaxattn.ops.turboquant_attention import turboquant_attention
from jaxattn.quant import turboquant
from parity import tolerances

M, H, K, D, PAGE, POOL = 48, 4, 2, 64, 16, 30
TABLE = np.random.default_rng(3).permutation(POOL).astype(np.int32).reshape(2, 15)


def build(**options) -> PagedAttention:
    return PagedAttention(
        M, H, K, D, dtype="float32", precision="highest", implementation="reference", rngs=nnx.Rngs(1), **options
    )


def packed(preset="4bit_nc") -> TurboQuantKVCache:
    return TurboQuantKVCache(POOL, PAGE, K, D, preset)


def batch(done, counts, padding=0) -> PagedBatch:
    """Requests that have `done` tokens after this step, `counts` of them new."""
    start = jnp.asarray(np.concatenate([[0], np.cumsum(counts)]), jnp.int32)
    lengths = jnp.asarray(done, jnp.int32)
    return PagedBatch.from_lengths(jnp.asarray(TABLE), lengths, start, tokens=int(start[-1]) + padding, page=PAGE)


@nnx.jit
def step(layer, x, cache, tables):
    return layer(x, cache, tables)


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerances.SAME_LAYER * float(np.abs(b).max()))


def projected(layer, x):
    return (linear(x).reshape(len(x), -1, D) for linear in (layer.q_proj, layer.k_proj, layer.v_proj))


# ---------------------------------------------------------------- what new tokens attend to
@pytest.mark.parametrize("preset", turboquant.PRESETS)
def test_the_first_chunk_attends_to_keys_as_they_are_and_stores_them_packed(preset, rng):
    layer, cache, plain = build(), packed(preset), PagedKVCache(POOL, PAGE, K, D, "float32")
    x = jnp.asarray(rng.standard_normal((23, M)), jnp.float32)
    tables = batch([14, 6], [14, 6], padding=3)
    close(step(layer, x, cache, tables), step(layer, x, plain, tables))
    _, k, v = projected(layer, x[:14])
    slots = np.asarray(cache.pages[...])[TABLE[0, 0], :14]
    np.testing.assert_array_equal(slots, turboquant.quantize(k, v, preset))


def test_decode_attends_to_packed_keys_its_own_included(rng):
    layer, cache = build(), packed()
    x = jnp.asarray(rng.standard_normal((22, M)), jnp.float32)
    step(layer, x[:20], cache, batch([14, 6], [14, 6]))
    got = step(layer, x[20:], cache, batch([15, 7], [1, 1]))
    q = layer.q_proj(x[20:]).reshape(2, H, D)
    tables = batch([15, 7], [1, 1])
    o = turboquant_attention(
        q, cache.pages[...], tables.page_table, tables.lengths, tables.query_start, preset="4bit_nc"
    )
    close(got, layer.o_proj(o.reshape(2, -1)))


@pytest.mark.parametrize("new", [5, 130])
def test_a_continuation_attends_to_packed_keys_and_a_long_one_to_its_own_as_they_are(new, rng):
    layer, cache = build(), packed()
    x = jnp.asarray(rng.standard_normal((20 + new, M)), jnp.float32)
    step(layer, x[:20], cache, batch([20, 0], [20, 0]))
    got = step(layer, x[20:], cache, batch([20 + new, 0], [new, 0]))
    q, k, v = projected(layer, x)
    slots = cache.pages[...][TABLE[0]].reshape(-1, K, 70)[: 20 + new]
    keys, values = turboquant.dequantize(slots, D, "4bit_nc")
    if new > module.CONTINUATION:
        keys, values = keys.at[20:].set(k[20:]), values.at[20:].set(v[20:])
    s = jnp.einsum("nkgd,skd->nkgs", q[20:].reshape(new, K, H // K, D), keys, precision="highest") * D**-0.5
    seen = jnp.arange(20 + new) <= 20 + jnp.arange(new)[:, None]
    p = jax.nn.softmax(jnp.where(seen[:, None, None], s, -jnp.inf), -1)
    o = jnp.einsum("nkgs,skd->nkgd", p, values, precision="highest")
    close(got, layer.o_proj(o.reshape(new, -1)))


def test_requests_of_one_batch_do_not_mix(rng):
    """A decoding request beside a first chunk gives what it gives alone."""
    layer = build()
    x = jnp.asarray(rng.standard_normal((30, M)), jnp.float32)
    caches = packed(), packed()
    for cache in caches:
        step(layer, x[:9], cache, batch([9, 0], [9, 0]))
    both = step(layer, jnp.concatenate([x[9:10], x[15:30]]), caches[0], batch([10, 15], [1, 15]))
    alone = step(layer, x[9:10], caches[1], batch([10, 0], [1, 0]))
    close(both[:1], alone)


def test_more_bits_are_nearer_to_an_uncompressed_cache(rng):
    layer = build()
    x = jnp.asarray(rng.standard_normal((61, M)), jnp.float32)
    outputs = []
    for cache in (PagedKVCache(POOL, PAGE, K, D, "float32"), packed("k8v4"), packed("4bit_nc"), packed("3bit_nc")):
        step(layer, x[:60], cache, batch([60, 0], [60, 0]))
        outputs.append(np.asarray(step(layer, x[60:], cache, batch([61, 0], [1, 0]))))
    errors = [np.linalg.norm(o - outputs[0]) for o in outputs[1:]]
    assert 0 < errors[0] < errors[1] < errors[2] < np.linalg.norm(outputs[0]) / 2


# ---------------------------------------------------------------- which layers, messages
def test_boundary_layers_keep_their_dtype():
    caches = turboquant_caches(7, 4, PAGE, K, D, "3bit_nc")
    assert [type(c) for c in caches] == [PagedKVCache] * 2 + [TurboQuantKVCache] * 3 + [PagedKVCache] * 2
    assert caches[0].k.dtype == jnp.bfloat16 and caches[2].preset == "3bit_nc"
    assert all(isinstance(c, TurboQuantKVCache) for c in turboquant_caches(3, 4, PAGE, K, D, hybrid=True))


def test_check_reads_the_tables(rng):
    with pytest.raises(ValueError, match=re.escape("lengths[0] must lie between the request's 1 query tokens")):
        packed().check(batch([500, 3], [1, 1]))


@pytest.mark.parametrize(
    ("options", "name"), [({"sinks": True}, "sinks"), ({"window": 5}, "window"), ({"softcap": 2.0}, "softcap")]
)
def test_what_packed_caches_do_not_have_is_refused(options, name):
    with pytest.raises(NotImplementedError) as raised:
        build(**options)(jnp.zeros((2, M)), packed(), batch([1, 1], [1, 1]))
    assert str(raised.value) == f"TurboQuantKVCache: attention over packed slots has no {name}; use PagedKVCache"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"preset": "8bit"}, "TurboQuantKVCache: preset must be one of k8v4, 4bit_nc, k3v4_nc, 3bit_nc, got '8bit'"),
        (
            {"head_dim": 80},
            "TurboQuantKVCache: TurboQuant rotates heads and packs eight codes: D must be a power of two >= 8, got 80",
        ),
        ({"page": 0}, "TurboQuantKVCache: page must be at least 1, got 0"),
    ],
)
def test_messages(change, message):
    with pytest.raises(ValueError) as raised:
        TurboQuantKVCache(**{"num_pages": 3, "page": 16, "kv_heads": 2, "head_dim": 64} | change)
    assert str(raised.value) == message


def test_another_head_shape_is_named():
    with pytest.raises(ValueError, match=re.escape("the cache must hold K=2 heads of D=64, got K=3 and D=64")):
        build()(jnp.zeros((2, M)), TurboQuantKVCache(POOL, PAGE, 3, D), batch([1, 1], [1, 1]))
