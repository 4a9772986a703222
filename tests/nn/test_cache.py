"""What the cache and its tables promise: which slots are written, with which bits."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jaxattn.nn import PagedBatch, PagedKVCache

K, D, PAGE, POOL = 2, 16, 16, 9
TABLE = np.array([[5, 2, 7, 0], [8, 1, 3, 6]], np.int32)


def pool(dtype="float32", fill=0.0, **options) -> PagedKVCache:
    cache = PagedKVCache(POOL, PAGE, K, D, dtype, **options)
    for pages in (cache.k, cache.v):
        pages[...] = jnp.full(pages.shape, fill, dtype)
    return cache


def batch_of(lengths, start, tokens) -> PagedBatch:
    return PagedBatch.from_lengths(
        jnp.asarray(TABLE), jnp.asarray(lengths, jnp.int32), jnp.asarray(start, jnp.int32), tokens=tokens, page=PAGE
    )


def bits(x) -> np.ndarray:
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


# ---------------------------------------------------------------- writing
@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32", "float8_e4m3fn"))
def test_only_the_batch_s_slots_are_written(rng, dtype):
    """NaN in the rows of padding shows a write through slot -1, which indexing would take for the last slot."""
    cache = pool(dtype, fill=3.0)
    k, v = rng.standard_normal((2, 25, K, D)).astype(np.float32)
    k[20:], v[20:] = np.nan, np.nan
    k, v = (jnp.asarray(x, "bfloat16" if dtype == "float8_e4m3fn" else dtype) for x in (k, v))
    nnx.jit(PagedKVCache.update)(cache, k, v, batch_of((18, 2), (0, 18, 20), 25).slots)
    for x, pages in ((k, cache.k), (v, cache.v)):
        expected = np.full((POOL, PAGE, K, D), 3.0, jnp.dtype(dtype))
        row = 0
        for b, n in enumerate((18, 2)):
            for i in range(n):
                expected[TABLE[b, i // PAGE], i % PAGE] = np.asarray(x[row]).astype(jnp.dtype(dtype))
                row += 1
        np.testing.assert_array_equal(bits(pages[...]), bits(expected))


@pytest.mark.parametrize("slot", (-1, -(2**31), POOL * PAGE, 2**31 - 1))
def test_slot_outside_the_pool_is_not_written(slot):
    cache = pool()
    ones = jnp.ones((1, K, D))
    cache.update(ones, ones, jnp.array([slot], jnp.int32))
    assert not np.asarray(cache.k[...]).any()
    assert not np.asarray(cache.v[...]).any()


def test_float8_codes(rng):
    """Division, saturation and NaN to the bit; halfway values tell a division from a product with the reciprocal."""
    codes = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    halfway = (codes[1:] + codes[:-1]) / 2
    scales = {"k_scale": 0.37, "v_scale": 1.9}
    values = [rng.standard_normal(700) * 30, np.arange(-900, 900, 2.5), [np.nan, np.inf, -np.inf]]
    values += [halfway * np.float32(scale) for scale in scales.values()]
    values = np.resize(np.concatenate(values), (62, K, D)).astype(np.float32)
    cache = pool("float8_e4m3fn", **scales)
    slots = rng.permutation(POOL * PAGE)[:62].astype(np.int32)
    nnx.jit(PagedKVCache.update)(cache, jnp.asarray(values), jnp.asarray(values), jnp.asarray(slots))
    for pages, scale in ((cache.k, 0.37), (cache.v, 1.9)):
        scaled = np.clip(values / np.float32(scale), -448, 448)
        got = np.asarray(pages[...]).reshape(POOL * PAGE, K, D)[slots]
        np.testing.assert_array_equal(bits(got), bits(scaled.astype(ml_dtypes.float8_e4m3fn)))
        assert np.isnan(got.astype(np.float32)).sum() == np.isnan(values).sum() > 0
        assert np.nanmax(got.astype(np.float32)) == 448


# ---------------------------------------------------------------- batches
def test_from_lengths_by_hand():
    batch = PagedBatch.from_lengths(
        jnp.array([[9, 4], [1, 7], [2, 2**31 - 1], [3, 0]], jnp.int32),
        jnp.array([3, 0, 1, 2], jnp.int32),  # two more tokens, nothing, one new request, one more token
        jnp.array([0, 2, 2, 3, 4], jnp.int32),
        tokens=6,
        page=2,
    )
    np.testing.assert_array_equal(batch.slots, [9 * 2 + 1, 4 * 2, 2 * 2, 3 * 2 + 1, -1, -1])
    np.testing.assert_array_equal(batch.positions, [1, 2, 0, 1, 0, 0])


@pytest.mark.parametrize("page", (1, 16, 128))
def test_from_lengths_never_wraps_into_the_pool(page):
    entries = np.array([[-1], [2**31 - 1], [-(2**31)], [2**31 // page]], np.int64).astype(np.int32)
    batch = PagedBatch.from_lengths(
        jnp.asarray(entries), jnp.ones(4, jnp.int32), jnp.arange(5, dtype=jnp.int32), tokens=4, page=page
    )
    slots = np.asarray(batch.slots)
    assert ((slots == -1) | (slots >= 2**30)).all(), slots
    beyond = PagedBatch.from_lengths(
        jnp.zeros((1, 1), jnp.int32), jnp.array([page + 1]), jnp.array([0, 2]), tokens=2, page=page
    )
    np.testing.assert_array_equal(beyond.slots, [page - 1, -1])
    negative = PagedBatch.from_lengths(
        jnp.zeros((1, 1), jnp.int32), jnp.array([1]), jnp.array([0, 2]), tokens=2, page=page
    )
    np.testing.assert_array_equal(negative.slots, [-1, 0])


def test_from_lengths_under_jit_and_without_requests():
    table, lengths, start = jnp.asarray(TABLE), jnp.array([20, 3]), jnp.array([0, 18, 21])
    build = functools.partial(PagedBatch.from_lengths, tokens=24, page=PAGE)
    eager, jitted = build(table, lengths, start), jax.jit(build)(table, lengths, start)
    jax.tree.map(np.testing.assert_array_equal, eager, jitted)
    empty = build(table[:0], lengths[:0], start[:1])
    assert (np.asarray(empty.slots) == -1).all()
    assert empty.slots.shape == (24,)


def test_check_reads_a_batch():
    cache = pool()
    cache.check(batch_of((18, 2), (0, 18, 20), 20))
    with pytest.raises(ValueError, match=re.escape("lengths[1] must lie between the request's 3 query tokens")):
        cache.check(batch_of((18, 2), (0, 18, 21), 21))
