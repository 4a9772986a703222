"""Embeddings of prompts: the pooled last states of a causal model, with the chunked prefill of `generation`."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from jaxattn import _checks
from jaxattn.models.generation import _check_prompts, _chunks

_OP = "embed"
POOLINGS = ("last", "mean")


class Embedder:
    """A model and its compiled step; every call has room for the same number of prompts and tokens."""

    def __init__(self, model: Any, requests: int, capacity: int, *, pooling: str = "last", chunk: int = 512):
        """Split the model.

        Args:
            model: as for `generate`, with `config.features`, the width M, and the decoder in `model.model`, which
                returns the normed last states.
            requests: prompts of a call at most.
            capacity: tokens of a prompt at most.
            pooling: `last`: the state of the last token; `mean` of all tokens.
            chunk: rows of a step.

        Raises:
            TypeError, ValueError: an argument.
        """
        _checks.check_count(_OP, requests=requests, capacity=capacity, chunk=chunk)
        if pooling not in POOLINGS:
            raise ValueError(f"{_OP}: pooling must be {' or '.join(POOLINGS)}, got {pooling!r}")
        if capacity > model.config.max_positions:
            raise ValueError(
                f"{_OP}: capacity must stay within the model's {model.config.max_positions} positions, got {capacity}"
            )
        self.model, self.requests, self.capacity, self.pooling, self.chunk = model, requests, capacity, pooling, chunk
        self._graph, self._weights = nnx.split(model)
        self._step = jax.jit(functools.partial(_step, self._graph, pooling), donate_argnums=(1, 2), static_argnums=0)

    def __call__(self, prompts: Sequence[Sequence[int]], *, normalize: bool = True) -> Float[np.ndarray, "B M"]:
        """One vector for each prompt, float32, of length 1 if `normalize`.

        Raises:
            ValueError: too many prompts, or one that is empty, too long, or has ids outside of the vocabulary.
        """
        longest = _check_prompts(prompts, self.model.config)
        if len(prompts) > self.requests:
            raise ValueError(f"{_OP}: at most {self.requests} prompts are required, got {len(prompts)}")
        if longest > self.capacity:
            raise ValueError(f"{_OP}: prompts must have at most {self.capacity} tokens, got {longest}")
        count = np.array([len(p) for p in prompts] + [0] * (self.requests - len(prompts)), np.int32)
        sequences = np.zeros((self.requests, self.capacity), np.int32)
        for b, prompt in enumerate(prompts):
            sequences[b, : len(prompt)] = prompt
        cache, tables = self.model.make_cache(self.requests, self.capacity)
        graph, pages = nnx.split(cache)
        pooled = jnp.zeros((self.requests, self.model.config.features), jnp.float32)
        for tokens, lengths, start, last in _chunks(sequences, count, self.chunk):
            pages, pooled = self._step(graph, pages, pooled, self._weights, tables, tokens, lengths, start, last)
        out = np.asarray(pooled, np.float32)[: len(prompts)]
        if self.pooling == "mean":
            out = out / count[: len(prompts), None]
        if normalize:
            size = np.sqrt(np.square(out).sum(-1, keepdims=True))
            out = np.divide(out, size, out=np.zeros_like(out), where=size > 0)
        return out


def _step(model_graph, pooling, cache_graph, pages, pooled, weights, tables, tokens, lengths, start, last):
    """One chunk; `pooled [B, M]` float32 takes the last states of prompts that end in it, or adds up all."""
    model, cache = nnx.merge(model_graph, weights), nnx.merge(cache_graph, pages)
    batch = model.make_batch(tables, lengths, start, tokens=tokens.shape[0])
    requests = lengths.shape[0]
    if pooling == "last":
        states = model.model(tokens, cache, batch, jnp.maximum(start[1:] - 1, 0)).astype(jnp.float32)
        pooled = jnp.where(last[:, None], states, pooled)
    else:
        states = model.model(tokens, cache, batch).astype(jnp.float32)
        owner = (
            jnp.searchsorted(start, jnp.arange(tokens.shape[0]), side="right", method="compare_all") - 1
        )  # padding: beyond the last
        padded = jnp.where((owner < requests)[:, None], states, 0)
        pooled = pooled + jax.ops.segment_sum(padded, owner, num_segments=requests + 1)[:requests]
    return nnx.state(cache), pooled
