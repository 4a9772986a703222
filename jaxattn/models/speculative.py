"""Greedy generation with drafts: a block of multi-token prediction guesses, the model verifies several tokens at once.

A step takes the newest token and `drafts` guesses of every request through the model. Guesses that equal the model's
own greedy choices are kept, with the choice after the last of them: 1 to `drafts + 1` new tokens, those of `generate`
but for roundings that depend on the number of rows. Nothing is rolled back: caches are addressed by position, so what a
wrong guess wrote is written again before it is read.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int32

from jaxattn import _checks
from jaxattn.models.generation import State, _append, _check_prompts, _chunks, _definition
from jaxattn.models.sampling import Sampling

_OP = "generate_with_drafts"


@dataclasses.dataclass(frozen=True)
class Drafted:
    """New tokens of every prompt, and how well the guesses did."""

    tokens: list[list[int]]
    guessed: int
    """Guesses that were verified, of all requests."""
    kept: int
    """Guesses that were right."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftState:
    """A running batch with the next step's guesses `[B, drafts]` and the counts of guesses so far."""

    running: State
    guesses: Int32[Array, "B drafts"]
    guessed: Int32[Array, ""]
    kept: Int32[Array, ""]


def generate_with_drafts(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    drafts: int = 1,
    stop: Iterable[int] | None = None,
    capacity: int | None = None,
    chunk: int = 512,
    steps_per_read: int = 8,
) -> Drafted:
    """Greedy tokens of every prompt, the stop token included.

    Args:
        model: a `DeepseekV4ForCausalLM` with one MTP block.
        prompts: token ids, each at least one.
        max_new_tokens: of each prompt.
        drafts: guesses of a step; beyond the first, the block feeds itself.
        stop: token ids that end a request; None = the model's.
        capacity: tokens that the caches hold of each request; None = the next power of two.
        chunk: rows of a prefill step.
        steps_per_read: steps between two looks at whether all requests have ended.

    Raises:
        TypeError, ValueError: as `generate`; ValueError: a model without exactly one MTP block.
    """
    counts = {"max_new_tokens": max_new_tokens, "drafts": drafts, "chunk": chunk, "steps_per_read": steps_per_read}
    _checks.check_count(_OP, **counts)
    if len(model.mtp) != 1:
        raise ValueError(f"{_OP}: the model must have one block of multi-token prediction, got {len(model.mtp)}")
    longest = _check_prompts(prompts, model.config) + max_new_tokens + drafts
    capacity = 1 << (longest - 1).bit_length() if capacity is None else capacity
    _checks.check_count(_OP, capacity=capacity)
    most = min(capacity, model.config.max_positions)
    if longest > most:
        raise ValueError(
            f"{_OP}: capacity and the model's positions must hold the longest prompt, its new tokens and the drafts, "
            f"{longest} in all, got {most}"
        )
    stops = jnp.asarray(sorted(model.config.stops if stop is None else stop), jnp.int32)
    runner = DraftRunner(model, len(prompts), capacity, drafts=drafts, stops=stops)
    state = runner.prefill(prompts, max_new_tokens, chunk)
    for done in range(1, max_new_tokens, steps_per_read):
        if bool(state.running.ended.all()):  # the only look at the device
            break
        for _ in range(min(steps_per_read, max_new_tokens - done)):
            state = runner.step(state)
    sequences, lengths = np.asarray(state.running.sequences), np.asarray(state.running.lengths)
    tokens = [sequences[b, len(p) : lengths[b]].tolist() for b, p in enumerate(prompts)]
    return Drafted(tokens, int(state.guessed), int(state.kept))


class DraftRunner:
    """A model, its caches and the two compiled steps."""

    def __init__(self, model: Any, requests: int, capacity: int, *, drafts: int, stops: Int32[Array, " S"]):
        """Allocate the caches."""
        cache, self.tables = model.make_cache(requests, capacity)
        model_def, weights = nnx.split(model)
        cache_def, pages = nnx.split(cache)
        self.weights, weights_def = jax.tree.flatten(weights)
        self.pages, pages_def = jax.tree.flatten(pages)
        self.definition = _definition(model_def, weights_def, cache_def, pages_def, Sampling())
        self.capacity, self.drafts, self.stops = capacity, drafts, stops

    def prefill(self, prompts: Sequence[Sequence[int]], new: int, chunk: int) -> DraftState:
        """Put the prompts into the caches, choose each one's first new token and guess the next."""
        B = len(prompts)
        sequences = np.zeros((B, self.capacity), np.int32)
        for b, prompt in enumerate(prompts):
            sequences[b, : len(prompt)] = prompt
        count = np.array([len(p) for p in prompts], np.int32)
        running = State(jnp.asarray(sequences), jnp.asarray(count), jnp.asarray(count + new), jnp.zeros(B, bool))
        state = DraftState(running, jnp.zeros((B, self.drafts), jnp.int32), jnp.int32(0), jnp.int32(0))
        for step in _chunks(sequences, count, chunk):
            self.pages, state = _prefill(
                self.definition, self.weights, self.pages, self.tables, state, self.stops, *step
            )
        return state

    def step(self, state: DraftState) -> DraftState:
        """Verify the guesses and make new ones; nothing waits for the device, `state` is used up."""
        self.pages, state = _step(self.definition, self.weights, self.pages, self.tables, state, self.stops)
        return state


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(2, 4))
def _prefill(definition, weights, pages, tables, state, stops, tokens, lengths, start, last):
    """One chunk; requests whose prompt ends in it (`last`) get their first new token and one guess."""
    model, caches = definition.modules(weights, pages)
    batch = model.make_batch(tables, lengths, start, tokens=tokens.shape[0])
    streams = model.streams(tokens, caches, batch)
    rows = jnp.maximum(start[1:] - 1, 0)
    running = _append(state.running, _best(model.logits(streams[rows])), last, stops)
    own = batch[1]
    following = running.sequences[own.request, jnp.minimum(own.positions + 1, running.sequences.shape[1] - 1)]
    _, logits = model.predict(0, following, streams, caches, batch, rows=rows)
    guesses = state.guesses.at[:, 0].set(jnp.where(last, _best(logits), state.guesses[:, 0]))
    return jax.tree.leaves(nnx.state(caches)), dataclasses.replace(state, running=running, guesses=guesses)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(2, 4))
def _step(definition, weights, pages, tables, state, stops):
    """The newest token and the guesses go through the model; what it confirms joins the sequences."""
    model, caches = definition.modules(weights, pages)
    running, (B, drafts) = state.running, state.guesses.shape
    T = drafts + 1
    live = ~running.ended
    newest = jnp.take_along_axis(running.sequences, running.lengths[:, None] - 1, 1)
    start = jnp.arange(B + 1, dtype=jnp.int32)
    batch = model.make_batch(tables, jnp.where(live, running.lengths + drafts, 0), start * T, tokens=B * T)
    streams = model.streams(jnp.concatenate([newest, state.guesses], 1).reshape(B * T), caches, batch)
    choices = _best(model.logits(streams)).reshape(B, T)
    right = jnp.cumprod(state.guesses == choices[:, :-1], 1).sum(1).astype(jnp.int32)
    for j in range(T):
        running = _append(running, choices[:, j], ~running.ended & (j <= right), stops)

    # the block reads confirmed positions only; the last of them predicts, then feeds itself
    confirmed = (jnp.arange(T) <= right[:, None]).reshape(B * T)
    own = dataclasses.replace(batch[1], positions=jnp.where(confirmed, batch[1].positions, -1))
    row = start[:-1] * T + right
    streams, logits = model.predict(0, choices.reshape(B * T), streams, caches, {1: own}, rows=row)
    guesses, streams = [_best(logits)], streams[row]
    before = state.running.lengths + right  # tokens whose streams are known
    for i in range(1, drafts):
        batch = model.make_batch(tables, jnp.where(live, before + i, 0), start, tokens=B)
        streams, logits = model.predict(0, guesses[-1], streams, caches, batch)
        guesses.append(_best(logits))
    return jax.tree.leaves(nnx.state(caches)), DraftState(
        running,
        jnp.stack(guesses, 1),
        state.guessed + drafts * live.sum(dtype=jnp.int32),
        state.kept + jnp.where(live, right, 0).sum(dtype=jnp.int32),
    )


def _best(logits) -> Int32[Array, " R"]:
    return jnp.argmax(logits, -1).astype(jnp.int32)
