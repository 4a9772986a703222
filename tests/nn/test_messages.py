"""Every user error of the Flax modules, matched on its filled-in text."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxattn.nn import PagedAttention, PagedBatch, PagedKVCache

N, M, H, K, D, PAGE, POOL = 5, 24, 4, 2, 64, 16, 6
FP8 = "float8_e4m3fn"


def exactly(text):
    return f"^{re.escape(text)}$"


def zeros(*shape, dtype="float32"):
    return jnp.zeros(shape, dtype)


def layer(**options):
    return PagedAttention(**{"features": M, "heads": H, "kv_heads": K, "head_dim": D} | options, rngs=nnx.Rngs(0))


def cache(**options):
    return PagedKVCache(
        **{"num_pages": POOL, "page": PAGE, "kv_heads": K, "head_dim": D, "dtype": "bfloat16"} | options
    )


def batch(**changes):
    tables = {
        "page_table": jnp.array([[5, 2, 0], [1, 3, 4]]),
        "lengths": jnp.array([20, 4]),
        "query_start": jnp.array([0, 1, 5]),
    }
    return PagedBatch.from_lengths(**tables | {"tokens": N, "page": PAGE} | changes)


FLOATS = "bfloat16 or float16 or float32 or float64"
CONSTRUCTORS = {
    "layer-heads": (
        lambda: layer(heads=7),
        ValueError,
        "PagedAttention: heads must be a multiple of kv_heads, got heads=7 and kv_heads=2",
    ),
    "layer-features": (
        lambda: layer(features=0),
        ValueError,
        "PagedAttention: features must be at least 1, got 0",
    ),
    "layer-window": (
        lambda: layer(window=2.5),
        TypeError,
        "PagedAttention: window is compiled in and must be a Python integer, got float",
    ),
    "layer-softcap": (
        lambda: layer(softcap=0),
        ValueError,
        "PagedAttention: softcap must be positive and finite or None, got 0",
    ),
    "layer-scale": (
        lambda: layer(scale=-1.0),
        ValueError,
        "PagedAttention: scale must be positive and finite or None, got -1.0",
    ),
    "layer-dtype": (lambda: layer(dtype=FP8), TypeError, f"PagedAttention: dtype must have dtype {FLOATS}, got {FP8}"),
    "cache-pages": (
        lambda: cache(num_pages=-1),
        ValueError,
        "PagedKVCache: num_pages must be at least 1, got -1",
    ),
    "cache-dtype": (
        lambda: cache(dtype="int8"),
        TypeError,
        f"PagedKVCache: dtype must have dtype {FLOATS} or {FP8}, got int8",
    ),
    "cache-scale": (
        lambda: cache(k_scale=0.1),
        ValueError,
        f"PagedKVCache: k_scale belongs to a {FP8} cache, but dtype is bfloat16; leave it out",
    ),
    "cache-scale-zero": (
        lambda: cache(dtype=FP8, v_scale=0.0),
        ValueError,
        "PagedKVCache: v_scale must be positive and finite or None, got 0.0",
    ),
    "batch-int64": (
        lambda: batch(lengths=np.array([20, 4])),
        TypeError,
        "PagedBatch: lengths must have dtype int32, got int64",
    ),
    "batch-B": (
        lambda: batch(lengths=jnp.array([20])),
        ValueError,
        "PagedBatch: lengths must be [B] with B=2 (from page_table), got shape (1,)",
    ),
    "batch-page": (
        lambda: batch(page=0),
        ValueError,
        "PagedBatch: tokens must be at least 0, page and the table's width at least 1, got tokens=5, page=0, width 3",
    ),
}


@pytest.mark.parametrize(("make", "error", "message"), CONSTRUCTORS.values(), ids=CONSTRUCTORS)
def test_constructor(make, error, message):
    with pytest.raises(error, match=exactly(message)):
        make()


LAYER_CALLS = {
    "x-features": (
        {"x": zeros(N, 8, dtype="bfloat16")},
        ValueError,
        "x must be packed tokens [N M] with M=24, got shape (5, 8)",
    ),
    "x-batched": (
        {"x": zeros(1, N, M, dtype="bfloat16")},
        ValueError,
        "x must be packed tokens [N M] with M=24, got shape (1, 5, 24)",
    ),
    "x-list": ({"x": [1.0]}, ValueError, "x must be packed tokens [N M] with M=24, got list"),
    "x-dtype": ({"x": zeros(N, M)}, TypeError, "x must have dtype bfloat16, got float32; cast it to the layer's dtype"),
    "x-rows": (
        {"x": zeros(6, M, dtype="bfloat16")},
        ValueError,
        "slots must be [N] with N=6 (from x), got shape (5,)",
    ),
    "cache-heads": (
        {"cache": lambda: cache(kv_heads=4)},
        ValueError,
        "the cache must hold K=2 heads of D=64, got K=4 and D=64",
    ),
    "rotary-dtype": (
        {"rotary": lambda x, positions: x.astype(jnp.float32)},
        ValueError,
        "rotary must keep the shape and dtype of q, bfloat16[5, 4, 64], got float32[5, 4, 64]",
    ),
}


@pytest.mark.parametrize(("changes", "error", "message"), LAYER_CALLS.values(), ids=LAYER_CALLS)
def test_layer_call(changes, error, message):
    attention = layer(rotary=changes.get("rotary"))
    pool = changes.get("cache", cache)()
    with pytest.raises(error, match=exactly(f"PagedAttention: {message}")):
        attention(changes.get("x", zeros(N, M, dtype="bfloat16")), pool, batch())


def test_cache_of_another_dtype():
    message = "PagedKVCache.update: k must have dtype float32, got bfloat16; cast it or the cache"
    with pytest.raises(TypeError, match=exactly(message)):
        layer()(zeros(N, M, dtype="bfloat16"), cache(dtype="float32"), batch())


def test_cache_update_of_another_shape():
    message = "PagedKVCache.update: v must be [N K D] with N=5 (from k), got shape (4, 2, 64)"
    with pytest.raises(ValueError, match=exactly(message)):
        cache().update(
            zeros(5, K, D, dtype="bfloat16"), zeros(4, K, D, dtype="bfloat16"), jnp.arange(5, dtype=jnp.int32)
        )


def test_layer_passes_the_implementation_on():
    message = (
        "paged_attention: implementation='mosaic' cannot run this call: the head dim must be 64, 128 or 256, got 8"
    )
    with pytest.raises(NotImplementedError, match=exactly(message)):
        layer(head_dim=8, implementation="mosaic")(zeros(N, M, dtype="bfloat16"), cache(head_dim=8), batch())
    with pytest.raises(ValueError, match="did you mean 'reference'"):
        layer(implementation="refrence")(zeros(N, M, dtype="bfloat16"), cache(), batch())
