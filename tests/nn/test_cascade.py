"""The layer for shared prefixes gives what paged attention gives, over the same cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxattn.nn import CascadeAttention, PagedAttention, PagedBatch, PagedKVCache, SharedPrefixes, TurboQuantKVCache
from parity import tolerances

M, H, K, D, PAGE, POOL = 24, 4, 2, 16, 16, 12
TABLE = np.array([[5, 2, 7, 0], [5, 2, 1, 3], [5, 8, 6, 4]], np.int32)  # two pages of two requests, one of all three
LENGTHS, STARTS = (40, 33, 20), (0, 1, 2, 4)


def layer(kind=CascadeAttention, **options):
    built = kind(
        M, H, K, D, dtype="float32", precision="highest", implementation="reference", rngs=nnx.Rngs(3), **options
    )
    if built.sinks is not None:
        built.sinks[...] = jnp.linspace(-1, 2, H)
    return built


def cache(rng, dtype="float32", **options):
    pool = PagedKVCache(POOL, PAGE, K, D, dtype, **options)
    for pages in (pool.k, pool.v):
        pages[...] = jnp.asarray(rng.standard_normal(pages.shape), dtype)
    return pool


def batch():
    tables = (jnp.asarray(x, jnp.int32) for x in (TABLE, LENGTHS, STARTS))
    return PagedBatch.from_lengths(*tables, tokens=STARTS[-1], page=PAGE)


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("options", [{}, {"sinks": True, "softcap": 2.0}])
@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_it_is_paged_attention(rng, levels, options, dtype):
    x = jnp.asarray(rng.standard_normal((STARTS[-1], M)), jnp.float32)
    pools = [cache(np.random.default_rng(1), dtype) for _ in range(2)]
    prefixes = SharedPrefixes.find(batch(), PAGE, levels=levels)
    prefixes.check(batch(), PAGE)
    assert (np.asarray(prefixes.shared).max(), prefixes.shared.shape) == (32 if levels == 2 else 16, (levels, 3))
    flat = layer(PagedAttention, **options)(x, pools[0], batch())
    ours = nnx.jit(CascadeAttention.__call__)(layer(**options), x, pools[1], batch(), prefixes)
    np.testing.assert_allclose(ours, flat, rtol=0, atol=tolerances.SAME_SUMS * float(jnp.abs(flat).max()))
    for a, b in zip(*((pool.k[...], pool.v[...]) for pool in pools), strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def test_the_layers_take_turns_on_one_cache(rng):
    pool, one, other = cache(rng), layer(), layer(PagedAttention)
    nnx.update(other, nnx.state(one))
    x = jnp.asarray(rng.standard_normal((STARTS[-1], M)), jnp.float32)
    y = one(x, pool, batch(), SharedPrefixes.find(batch(), PAGE))
    again = other(x, pool, batch())  # writes the same keys and values once more
    np.testing.assert_allclose(y, again, rtol=0, atol=tolerances.SAME_SUMS * float(jnp.abs(again).max()))


def test_without_prefixes_it_is_paged_attention_to_the_bit(rng):
    x = jnp.asarray(rng.standard_normal((STARTS[-1], M)), jnp.float32)
    pools = [cache(np.random.default_rng(1)) for _ in range(2)]
    np.testing.assert_array_equal(layer()(x, pools[0], batch()), layer(PagedAttention)(x, pools[1], batch()))


def test_new_prefixes_do_not_compile_again(rng):
    traces = []

    @jax.jit
    def step(x, prefixes, seed):
        traces.append(1)
        return layer()(x, cache(np.random.default_rng(0)), batch(), prefixes) + seed

    x = jnp.asarray(rng.standard_normal((STARTS[-1], M)), jnp.float32)
    found = SharedPrefixes.find(batch(), PAGE)
    nothing = SharedPrefixes(found.group_start, 0 * found.shared)
    a, b = (np.asarray(step(x, p, 0)) for p in (found, nothing))
    assert len(traces) == 1
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerances.SAME_SUMS * np.abs(a).max())


def test_messages(rng):
    with pytest.raises(ValueError, match="CascadeAttention: a window hides what requests share, got window=8"):
        layer(window=8)
    x = jnp.zeros((STARTS[-1], M), jnp.float32)
    with pytest.raises(ValueError, match="a TurboQuantKVCache cannot be read in parts; leave prefixes out"):
        layer()(x, TurboQuantKVCache(POOL, PAGE, K, D, "k8v4"), batch(), SharedPrefixes.find(batch(), PAGE))
    coded = PagedKVCache(POOL, PAGE, K, D, "int8", per_head=True)
    with pytest.raises(ValueError, match="a cache with scales per token and head cannot be read in parts"):
        layer()(x, coded, batch(), SharedPrefixes.find(batch(), PAGE))
    wrong = SharedPrefixes(jnp.zeros((1, 3), jnp.int32), jnp.zeros((1, 3), jnp.int32))
    with pytest.raises(ValueError, match=r"shared must be \[L G\] with G=2 \(from group_start\), got shape \(1, 3\)"):
        layer()(x, cache(rng), batch(), wrong)


# ---------------------------------------------------------------- caches with scales per token and head
@pytest.mark.parametrize(("stored", "error"), [("int8", 0.03), ("float8_e4m3fn", 0.15), ("uint8", 0.6)])
def test_paged_attention_reads_what_it_wrote(rng, stored, error):
    x = jnp.asarray(rng.standard_normal((STARTS[-1], M)), jnp.float32)
    plain, coded = PagedKVCache(POOL, PAGE, K, D, "float32"), PagedKVCache(POOL, PAGE, K, D, stored, per_head=True)
    tables = (jnp.asarray(v, jnp.int32) for v in (TABLE, (1, 1, 2), STARTS))
    first = PagedBatch.from_lengths(*tables, tokens=STARTS[-1], page=PAGE)
    exact, ours = (layer(PagedAttention)(x, pool, first) for pool in (plain, coded))
    off = float(jnp.abs(ours - exact).max() / jnp.abs(exact).max())
    assert tolerances.FLOAT64 < off < error
    assert coded.heads == (K, D) and coded.k.shape[3] == (D // 2 if stored == "uint8" else D)
    assert float(coded.scales["k_scale_pages"].max()) > 0


def test_messages_of_coded_caches():
    with pytest.raises(
        ValueError, match="with per_head=True every token and head has its own scale; leave k_scale out"
    ):
        PagedKVCache(POOL, PAGE, K, D, "int8", per_head=True, k_scale=0.5)
    with pytest.raises(TypeError, match="dtype must have dtype int8 or float8_e4m3fn or uint8, got bfloat16"):
        PagedKVCache(POOL, PAGE, K, D, per_head=True)
    with pytest.raises(ValueError, match="uint8 holds two numbers in a byte, head_dim must be even, got 17"):
        PagedKVCache(POOL, PAGE, K, 17, "uint8", per_head=True)
