"""Generation of tokens with paged caches: chunked prefill of ragged prompts, then one compiled step a token.

What a model must offer, see `CausalLM`:

    model.config                                    with vocab_size, max_positions and stops
    model.make_cache(requests, capacity)            an NNX module of all caches, and tables: a pytree of int32 arrays
                                                    that gives each request room for `capacity` tokens
    model.make_batch(tables, lengths, query_start, tokens=N)      the batch that the layers take, from traced values
    model(tokens, cache, batch, rows=rows)          logits of the named packed rows; the cache is updated

`lengths [B]` count a request's tokens with those of this step, `query_start [B+1]` are exclusive prefix sums of this
step's tokens; packed rows from `query_start[B]` on are padding. A request without a token in this step keeps its
length, and a request that has ended has length 0 and one row, which is padding as well.

Shapes depend on the number of requests, the capacity and the chunk alone: other prompt lengths compile nothing.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxattn import _checks
from jaxattn.models.sampling import Sampling, sample

_OP = "generate"


class Config(Protocol):
    """What `generate` reads of a model's configuration."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        ...

    @property
    def max_positions(self) -> int:
        """Tokens of a request, prompt included."""
        ...

    @property
    def stops(self) -> tuple[int, ...]:
        """Token ids that end a request."""
        ...


class CausalLM(Protocol):
    """What `generate` needs of a model, a `nnx.Module`; see the module's docstring."""

    @property
    def config(self) -> Config:
        """Of the model."""
        ...

    def make_cache(self, requests: int, capacity: int) -> tuple[nnx.Module, Any]:
        """Caches of all layers, and tables with room for `capacity` tokens of each request."""
        ...

    def make_batch(
        self, tables: Any, lengths: Int32[Array, " B"], query_start: Int32[Array, " B+1"], *, tokens: int
    ) -> Any:
        """The batch of a step of `tokens` packed rows."""
        ...

    def __call__(
        self, tokens: Int32[Array, " N"], cache: Any, batch: Any, *, rows: Int32[Array, " R"] | None = None
    ) -> Float[Array, "R V"]:
        """Logits of the named rows, None = all; updates the cache."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """All of a running batch: `sequences [B, capacity]` of prompt and new tokens, `lengths [B]` of these, which of the
    tokens are in the cache is `lengths` for prompts and `lengths - 1` afterwards, `limits [B]`, `ended [B]`.
    """

    sequences: Int32[Array, "B capacity"]
    lengths: Int32[Array, " B"]
    limits: Int32[Array, " B"]
    ended: Array


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: Iterable[int] | None = None,
    capacity: int | None = None,
    chunk: int = 512,
    steps_per_read: int = 16,
) -> list[list[int]]:
    """New tokens of every prompt, the stop token included.

    Args:
        model: a `CausalLM`.
        prompts: token ids, each at least one.
        max_new_tokens: of each prompt.
        temperature: 0 = the most probable token, ties to the lowest id.
        top_k: sample from the so many most probable tokens.
        top_p: sample from the most probable tokens that together reach this probability.
        seed: of sampling. A token's random number depends on the seed, the prompt's index and the token's position.
        stop: token ids that end a request; None = the model's.
        capacity: tokens that the caches hold of each request; None = the next power of two. The same capacity, number
            of prompts and chunk compile nothing anew.
        chunk: rows of a prefill step, filled with the prompts one after the other.
        steps_per_read: decode steps between two looks at whether all requests have ended.

    Raises:
        TypeError, ValueError: an argument, or a prompt that is empty, too long, or has ids outside of the vocabulary.
    """
    how = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    _checks.check_count(_OP, max_new_tokens=max_new_tokens, chunk=chunk, steps_per_read=steps_per_read)
    longest = _check_prompts(prompts, model.config) + max_new_tokens
    capacity = 1 << (longest - 1).bit_length() if capacity is None else capacity
    _checks.check_count(_OP, capacity=capacity)
    if longest > capacity:
        raise ValueError(
            f"{_OP}: capacity must hold the longest prompt and its {max_new_tokens} new tokens, {longest} in all, got "
            f"{capacity}"
        )
    if longest > model.config.max_positions:
        raise ValueError(
            f"{_OP}: prompt and new tokens must stay within the model's {model.config.max_positions} positions, got "
            f"{longest}"
        )
    stops = jnp.asarray(sorted(model.config.stops if stop is None else stop), jnp.int32)
    runner = Runner(model, len(prompts), capacity, how=how, seed=seed, stops=stops)
    state = runner.prefill(prompts, max_new_tokens, chunk)
    for done in range(1, max_new_tokens, steps_per_read):
        if bool(state.ended.all()):  # the only look at the device
            break
        for _ in range(min(steps_per_read, max_new_tokens - done)):
            state = runner.step(state)
    sequences, lengths = np.asarray(state.sequences), np.asarray(state.lengths)
    return [sequences[b, len(p) : lengths[b]].tolist() for b, p in enumerate(prompts)]


class Runner:
    """A model, its caches and the two compiled steps."""

    def __init__(
        self, model: Any, requests: int, capacity: int, *, how: Sampling, seed: int = 0, stops: Int32[Array, " S"]
    ):
        """Allocate the caches."""
        cache, self.tables = model.make_cache(requests, capacity)
        model_def, weights = nnx.split(model)
        cache_def, pages = nnx.split(cache)
        # plain lists: a state of thousands of variables takes longer to flatten than a step
        self.weights, weights_def = jax.tree.flatten(weights)
        self.pages, pages_def = jax.tree.flatten(pages)
        self.definition = _definition(model_def, weights_def, cache_def, pages_def, how)
        self.capacity, self.stops, self.key = capacity, stops, jax.random.key(seed)

    def prefill(self, prompts: Sequence[Sequence[int]], new: int, chunk: int) -> State:
        """Put the prompts into the caches and choose each one's first new token."""
        B = len(prompts)
        sequences = np.zeros((B, self.capacity), np.int32)
        for b, prompt in enumerate(prompts):
            sequences[b, : len(prompt)] = prompt
        count = np.array([len(p) for p in prompts], np.int32)
        state = State(jnp.asarray(sequences), jnp.asarray(count), jnp.asarray(count + new), jnp.zeros(B, bool))
        for step in _chunks(sequences, count, chunk):
            self.pages, state = _prefill(
                self.definition, self.weights, self.pages, self.tables, state, self.key, self.stops, *step
            )
        return state

    def step(self, state: State) -> State:
        """One more token of every request that has not ended; nothing waits for the device, `state` is used up."""
        self.pages, state = _decode(self.definition, self.weights, self.pages, self.tables, state, self.key, self.stops)
        return state


@dataclass(frozen=True, eq=False)
class _Definition:
    """The static half of a step, compared by identity: comparing graphs would take longer than a step."""

    model: Any
    weights: Any
    cache: Any
    pages: Any
    how: Sampling

    def modules(self, weights: list[Array], pages: list[Array]) -> tuple[Any, Any]:
        """Model and caches."""
        return tuple(
            nnx.merge(graph, jax.tree.unflatten(tree, leaves))
            for graph, tree, leaves in ((self.model, self.weights, weights), (self.cache, self.pages, pages))
        )


_definition = functools.lru_cache(maxsize=32)(_Definition)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(2, 4))
def _prefill(definition, weights, pages, tables, state, key, stops, tokens, lengths, start, last):
    """One chunk; requests whose prompt ends in it (`last`) get their first new token."""
    model, caches = definition.modules(weights, pages)
    batch = model.make_batch(tables, lengths, start, tokens=tokens.shape[0])
    logits = model(tokens, caches, batch, rows=jnp.maximum(start[1:] - 1, 0))
    state = _append(state, sample(logits, key, state.lengths, definition.how), last, stops)
    return jax.tree.leaves(nnx.state(caches)), state


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(2, 4))
def _decode(definition, weights, pages, tables, state, key, stops):
    """The newest token of every request goes through the model, the next one joins it."""
    model, caches = definition.modules(weights, pages)
    B = state.lengths.shape[0]
    tokens = jnp.take_along_axis(state.sequences, state.lengths[:, None] - 1, 1)[:, 0]
    lengths = jnp.where(state.ended, 0, state.lengths)
    batch = model.make_batch(tables, lengths, jnp.arange(B + 1, dtype=jnp.int32), tokens=B)
    logits = model(tokens, caches, batch)
    state = _append(state, sample(logits, key, state.lengths, definition.how), ~state.ended, stops)
    return jax.tree.leaves(nnx.state(caches)), state


def _append(state: State, chosen, where, stops) -> State:
    """`chosen` behind the sequences of the requests `where`."""
    B, capacity = state.sequences.shape
    column = jnp.where(where, state.lengths, capacity)  # out of range: dropped
    sequences = state.sequences.at[jnp.arange(B), column].set(chosen, mode="drop")
    lengths = jnp.where(where, state.lengths + 1, state.lengths)
    ended = where & ((chosen[:, None] == stops).any(-1) | (lengths >= state.limits))
    return State(sequences, lengths, state.limits, state.ended | ended)


def _chunks(sequences: np.ndarray, count: np.ndarray, chunk: int):
    """Packed `tokens [chunk]`, `lengths [B]`, `query_start [B+1]` and which prompts end, of every prefill step."""
    done = np.zeros_like(count)
    while (done < count).any():
        left, take = chunk, np.zeros_like(count)
        for b in range(len(count)):
            take[b] = min(left, count[b] - done[b])
            left -= take[b]
        tokens = np.zeros(chunk, np.int32)
        start = np.concatenate([[0], np.cumsum(take)]).astype(np.int32)
        for b in range(len(count)):
            tokens[start[b] : start[b + 1]] = sequences[b, done[b] : done[b] + take[b]]
        done = done + take
        yield tokens, done, start, (done == count) & (take > 0)


def _check_prompts(prompts: Sequence[Sequence[int]], config: Config) -> int:
    """Length of the longest prompt."""
    if not len(prompts):
        raise ValueError(f"{_OP}: at least one prompt is required, got none")
    for b, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"{_OP}: a prompt must have at least one token, prompts[{b}] has none")
        bad = next((t for t in prompt if not 0 <= t < config.vocab_size), None)
        if bad is not None:
            raise ValueError(f"{_OP}: token ids must be 0 to {config.vocab_size - 1}, prompts[{b}] has {bad}")
    return max(map(len, prompts))
