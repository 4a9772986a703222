"""Prefill two prompts of different lengths in one batch, then decode one token of each."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxattn.nn import PagedAttention, PagedBatch, PagedKVCache

attention = PagedAttention(features=512, heads=8, kv_heads=2, head_dim=64, sinks=True, window=128, rngs=nnx.Rngs(0))
cache = PagedKVCache(num_pages=8, page=16, kv_heads=2, head_dim=64)
page_table = jnp.array([[5, 0], [7, 1]])  # two requests, any free pages
step = nnx.jit(PagedAttention.__call__, donate_argnums=(0, 2))

prompts = jax.random.normal(jax.random.key(0), (25, 512), jnp.bfloat16)  # 20 tokens of one request, 5 of the other
batch = PagedBatch.from_lengths(page_table, jnp.array([20, 5]), jnp.array([0, 20, 25]), tokens=25, page=16)
print("prefill", step(attention, prompts, cache, batch).shape)

new = jax.random.normal(jax.random.key(1), (2, 512), jnp.bfloat16)  # one more token of each
batch = PagedBatch.from_lengths(page_table, jnp.array([21, 6]), jnp.array([0, 1, 2]), tokens=2, page=16)
print("decode", step(attention, new, cache, batch).shape)
