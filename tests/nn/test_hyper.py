"""Hyper-connections as modules: the pipeline is its ops."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxattn import mhc_head, mhc_post, mhc_pre
from jaxattn.nn import HyperConnections, HyperHead

M, C, N = 16, 4, 3


def test_around_a_layer(rng):
    module = HyperConnections(M, C, rngs=nnx.Rngs(0))
    streams = jnp.asarray(rng.standard_normal((N, C, M)), jnp.bfloat16)
    x, post, comb = mhc_pre(streams, module.fn[...], module.scale[...], module.base[...])
    np.testing.assert_array_equal(module(streams, lambda x: 2 * x), mhc_post(streams, 2 * x, post, comb))


def test_repeated_embeddings_stay_alike_only_at_first(rng):
    """Equal streams give equal rows of the mixture, whatever the matrix: columns sum to one."""
    module = HyperConnections(M, C, rngs=nnx.Rngs(1))
    embedding = jnp.asarray(rng.standard_normal((N, M)), jnp.float32)
    streams = jnp.repeat(embedding[:, None], C, 1)
    out = module(streams, lambda x: 0 * x)
    assert np.abs(out - streams).max() <= 32 * np.finfo(np.float32).eps * np.abs(streams).max() + 4e-6 * 4


def test_head(rng):
    module, streams = HyperHead(M, C, rngs=nnx.Rngs(0)), jnp.asarray(rng.standard_normal((N, C, M)), jnp.bfloat16)
    expected = mhc_head(streams, module.fn[...], module.scale[...], module.base[...])
    np.testing.assert_array_equal(module(streams), expected)
