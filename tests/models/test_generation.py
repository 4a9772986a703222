"""Generation with a model of one attention layer: chunks, ragged batches, stops, sampling, no recompilation."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxattn.models import Sampling, generate, generation
from jaxattn.models.generation import Runner
from jaxattn.models.sampling import sample
from jaxattn.nn import PagedAttention, PagedBatch, PagedKVCache

VOCAB, PAGE = 23, 4


@dataclass(frozen=True)
class Config:
    vocab_size: int = VOCAB
    max_positions: int = 64
    stops: tuple[int, ...] = ()


class Toy(nnx.Module):
    """Embedding, one layer of attention, head; positions enter through the embedding."""

    def __init__(self):
        rngs = nnx.Rngs(3)
        self.config = Config()
        self.embed = nnx.Param(2 * jax.random.normal(rngs.params(), (VOCAB, 16)))
        self.place = nnx.Param(jax.random.normal(rngs.params(), (64, 16)))
        self.attn = PagedAttention(16, 2, 1, 8, window=9, dtype="float32", rngs=rngs)
        self.head = nnx.Param(jax.random.normal(rngs.params(), (16, VOCAB)))

    def make_cache(self, requests, capacity):
        pages = -(-capacity // PAGE)
        cache = PagedKVCache(requests * pages, PAGE, 1, 8, "float32")
        for pool in (cache.k, cache.v):
            pool[...] = jnp.full_like(pool[...], jnp.nan)
        return cache, jnp.arange(requests * pages, dtype=jnp.int32)[::-1].reshape(requests, pages)

    def make_batch(self, tables, lengths, query_start, *, tokens):
        return PagedBatch.from_lengths(tables, lengths, query_start, tokens=tokens, page=PAGE)

    def __call__(self, tokens, cache, batch, *, rows=None):
        x = self.embed[...][tokens] + self.place[...][batch.positions]
        x = x + self.attn(x, cache, batch)
        return (x if rows is None else x[rows]) @ self.head[...]


PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [11, 12, 13, 14, 15], [2, 2]]
SHAPES = {"capacity": 32, "chunk": 8}
"""The same in most tests, so that they share compiled programs."""


@nnx.jit
def logits_of(model, tokens, n):
    cache, tables = model.make_cache(1, 64)
    batch = model.make_batch(tables, n[None], jnp.stack([0, n]), tokens=len(tokens))
    return model(tokens, cache, batch)


def plain(model, prompt, new):
    """Greedy tokens by running everything anew for each of them."""
    tokens = list(prompt)
    for _ in range(new):
        padded = jnp.array(tokens + [0] * (24 - len(tokens)), jnp.int32)
        tokens.append(int(logits_of(model, padded, jnp.int32(len(tokens)))[len(tokens) - 1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("chunk", [3, 8, 64])
def test_greedy_tokens_are_those_of_the_model_without_a_cache(chunk):
    model = Toy()
    found = generate(model, PROMPTS, max_new_tokens=6, steps_per_read=2, **SHAPES | {"chunk": chunk})
    assert found == [plain(model, prompt, 6) for prompt in PROMPTS]
    assert len({tuple(f) for f in found}) > 1


def test_a_ragged_batch_is_its_requests_alone():
    model = Toy()
    together = generate(model, PROMPTS, max_new_tokens=9, **SHAPES)
    assert together == [generate(model, [prompt], max_new_tokens=9, **SHAPES)[0] for prompt in PROMPTS]


def test_other_lengths_compile_nothing():
    model = Toy()
    generate(model, PROMPTS, max_new_tokens=5, **SHAPES)
    before = generation._prefill._cache_size(), generation._decode._cache_size()
    generate(model, [[5] * 20, [1, 2], [9], [8] * 7], max_new_tokens=11, seed=4, **SHAPES)
    assert (generation._prefill._cache_size(), generation._decode._cache_size()) == before


def test_the_step_reads_and_sends_nothing():
    runner = Runner(Toy(), 2, 16, how=Sampling(temperature=1.0, top_p=0.5), stops=jnp.zeros(0, jnp.int32))
    state = runner.prefill([[1, 2], [3]], 8, 4)
    with jax.transfer_guard("disallow"):
        for _ in range(4):
            state = runner.step(state)
    assert state.lengths.tolist() == [7, 6]


def test_requests_end_at_their_own_stop():
    model = Toy()
    free = generate(model, PROMPTS, max_new_tokens=12, **SHAPES)
    stop = free[0][2]
    ended = generate(model, PROMPTS, max_new_tokens=12, stop=[stop], steps_per_read=1, **SHAPES)
    assert ended == [f[: f.index(stop) + 1] if stop in f else f for f in free]
    assert len(ended[0]) <= 3 < max(map(len, ended))


def test_sampling_keeps_to_the_kept_tokens(rng):
    logits = jnp.asarray(np.log([[0.4, 0.3, 0.2, 0.1]] * 4096), jnp.float32)
    key, place = jax.random.key(0), jnp.zeros(4096, jnp.int32)

    def shares(**how):
        return np.bincount(sample(logits, key, place, Sampling(temperature=1.0, **how)), minlength=4) / 4096

    four_sigma = 4 * 0.5 / 64
    for how, wanted in (
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.65}, [4 / 7, 3 / 7, 0, 0]),  # 0.4 alone does not reach it
        ({"top_p": 0.75}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"top_k": 3, "top_p": 0.4}, [1, 0, 0, 0]),  # 0.4 of 0.9 reaches it
        ({"top_p": 1.0}, [0.4, 0.3, 0.2, 0.1]),
    ):
        found = shares(**how)
        assert np.abs(found - wanted).max() <= four_sigma, how
        assert (found[np.array(wanted) == 0] == 0).all(), how
    cold = sample(logits / 1e-3, key, place, Sampling(temperature=0.1))
    assert (cold == 0).all()


def test_sampling_ties_and_nan():
    logits = jnp.array([[1.0, 3.0, 3.0, jnp.nan], [jnp.nan, -jnp.inf, 0.0, 0.0]])
    assert sample(logits, jax.random.key(0), jnp.zeros(2, jnp.int32), Sampling()).tolist() == [1, 2]
    how = Sampling(temperature=1.0, top_k=1)
    assert sample(logits, jax.random.key(0), jnp.zeros(2, jnp.int32), how).tolist() == [1, 2]


def test_seeds_decide_sampling():
    model = Toy()
    how = SHAPES | {"max_new_tokens": 12, "temperature": 1.5, "top_k": 12}
    first = generate(model, PROMPTS, seed=1, **how)
    assert first == generate(model, PROMPTS, seed=1, steps_per_read=5, **how | {"chunk": 3})
    assert first != generate(model, PROMPTS, seed=2, **how)
    same = generate(model, [[4], [4], [7], [2]], seed=1, **how)
    assert same[0] != same[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": []}, "generate: at least one prompt is required, got none"),
        ({"prompts": [[1], []]}, r"generate: a prompt must have at least one token, prompts\[1\] has none"),
        ({"prompts": [[1, 23]]}, r"generate: token ids must be 0 to 22, prompts\[0\] has 23"),
        ({"max_new_tokens": 0}, "generate: max_new_tokens must be at least 1, got 0"),
        ({"capacity": 8}, "generate: capacity must hold the longest prompt and its 5 new tokens, 9 in all, got 8"),
        (
            {"max_new_tokens": 70},
            "generate: prompt and new tokens must stay within the model's 64 positions, got 74",
        ),
        ({"top_k": 3}, "Sampling: top_k and top_p need a temperature above 0, got 0.0"),
        ({"temperature": 1.0, "top_p": 1.5}, "Sampling: top_p must be at most 1, got 1.5"),
        ({"temperature": -1.0}, "Sampling: temperature must be positive and finite or None, got -1.0"),
    ],
)
def test_messages(changes, message):
    with pytest.raises(ValueError, match=message):
        generate(Toy(), **({"prompts": [[1, 2, 3, 4]], "max_new_tokens": 5} | changes))
