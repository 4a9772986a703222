"""Flax NNX modules: parameters, projections and cache state around one op call each."""

from jaxattn.nn.attention import PagedAttention
from jaxattn.nn.cache import KVPages, PagedBatch, PagedKVCache

__all__ = ["KVPages", "PagedAttention", "PagedBatch", "PagedKVCache"]
