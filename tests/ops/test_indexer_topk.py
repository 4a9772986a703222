"""What the indexer's choice promises: the exact set, the lowest of equals, rising order, nothing outside the range."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import indexer, indexer_topk
from jaxattn.ops.indexer_topk import make_inputs
from pallas_kernels import _mosaic
from pallas_kernels.indexer_topk import Config, Counted

KERNELS = ("reference", "mosaic")


def choose(*args, implementation="reference", **options):
    if implementation == "reference" or _mosaic.why_not_here() is None:
        return np.asarray(indexer_topk(*args, implementation=implementation, **options))
    with _mosaic.interpret():
        return np.asarray(indexer_topk(*args, implementation=implementation, **options))


BY_HAND = {
    "rising": ([0.0, 3.0, 1.0, 4.0], [1, 3]),
    "lowest-of-equals": ([1.0, 2.0, 1.0, 1.0], [0, 1]),
    "zeros-are-equal": ([-0.0, 0.0, -0.0, -1.0], [0, 1]),
    "denormals-are-not": ([0.0, 1e-40, -1e-40, 2e-40], [1, 3]),
    "infinite-before-none": ([-np.inf], [0, -1]),
    "nan-is-minus-infinity": ([np.nan, -np.inf, -3e38], [0, 2]),
    "infinity": ([np.inf, 3e38, np.inf, np.inf], [0, 2]),
}


@pytest.mark.parametrize("config", [None, Counted(), Config()])
def test_by_hand(config):
    logits = np.full((len(BY_HAND), 4), np.nan, np.float32)
    for line, (numbers, _) in zip(logits, BY_HAND.values(), strict=True):
        line[: len(numbers)] = numbers
    ends = jnp.array([len(numbers) for numbers, _ in BY_HAND.values()], jnp.int32)
    options = {} if config is None else {"implementation": "mosaic", "config": config}
    found = choose(jnp.asarray(logits), 0 * ends, ends, topk=2, **options)
    assert dict(zip(BY_HAND, found.tolist(), strict=True)) == {name: best for name, (_, best) in BY_HAND.items()}


@pytest.mark.parametrize("implementation", KERNELS)
def test_ranges_at_the_edges(implementation):
    """Empty, reversed, behind the end, one entry; numbers count from the start."""
    logits = jnp.asarray(np.tile(np.arange(9, dtype=np.float32), (5, 1)))
    starts, ends = (jnp.array(x, jnp.int32) for x in ([3, 5, 7, 2, 0], [3, 4, 2000, 3, 9]))
    found = choose(logits, starts, ends, topk=3, implementation=implementation)
    assert found.tolist() == [[-1, -1, -1], [-1, -1, -1], [0, 1, -1], [0, -1, -1], [6, 7, 8]]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda x: x, id="ordinary"),
        pytest.param(lambda x: x * 1e-30 + 1e-30, id="tiny"),
        pytest.param(lambda x: x * 1e30, id="huge"),
        pytest.param(lambda x: x * 1e-3 - 100, id="close-together"),
        pytest.param(lambda x: np.round(x), id="few-different"),
        pytest.param(lambda x: 0 * x - 2, id="all-equal"),
    ],
)
def test_counts_find_what_lies_anywhere(change, rng):
    """Numbers of which many share an interval of the first round, more than find their ranks among each other."""
    args = make_inputs(rng, 3, 1501, topk=300)
    args["starts"], args["ends"] = jnp.array([0, 3, 700], jnp.int32), jnp.array([1501, 1500, 1100], jnp.int32)
    args["logits"] = jnp.asarray(change(rng.standard_normal((3, 1501)).astype(np.float32)), jnp.float32)
    found = choose(**args, implementation="mosaic", config=Counted(bins=1024))
    np.testing.assert_array_equal(found, choose(**args))


@pytest.mark.parametrize("kind", ["normal", "edges"])
def test_rows_that_are_cut_give_the_same(kind, rng):
    args = make_inputs(rng, 2, 9000, topk=70, kind=kind)
    whole = choose(**args)
    cut = choose(**args, implementation="mosaic", config=Config(entries=4096))
    np.testing.assert_array_equal(cut, whole)


def test_many_candidates_are_cut_again(rng):
    """Three parts leave 3 x 2048 candidates, more than a part."""
    args = make_inputs(rng, 1, 12288, topk=2048, kind="ties")
    args["starts"], args["ends"] = jnp.array([100], jnp.int32), jnp.array([11000], jnp.int32)
    args["logits"] = jnp.nan_to_num(args["logits"])
    np.testing.assert_array_equal(choose(**args, implementation="mosaic", config=Config(entries=4096)), choose(**args))


def test_the_indexer_chooses_the_same_set(rng):
    q, k = (jnp.asarray(rng.integers(-2, 3, s), jnp.float32) for s in ((4, 2, 8), (50, 8)))
    starts, ends = jnp.array([0, 3, 7, 50], jnp.int32), jnp.array([50, 20, 9, 50], jnp.int32)
    best, logits = indexer(q, jnp.ones((4, 2)), k, jnp.ones(50), starts, ends, topk=10, return_logits=True)
    found = choose(logits, starts, ends, topk=10)
    np.testing.assert_array_equal(np.sort(found, 1), np.sort(np.asarray(best), 1))


def test_wrong_calls():
    x, zero = jnp.ones((2, 5)), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match=r"^indexer_topk: topk must be at least 1, got 0$"):
        indexer_topk(x, zero, zero, topk=0)
    with pytest.raises(TypeError, match=r"^indexer_topk: logits must have dtype float32 or float64, got bfloat16"):
        indexer_topk(x.astype(jnp.bfloat16), zero, zero, topk=1)
    with pytest.raises(ValueError, match=r"^entries must be 4096 or 8192, got 100$"):
        Config(entries=100)
    with pytest.raises(ValueError, match=r"^threads must be 128, 256, 512 or 1024, got 64$"):
        Counted(threads=64)
    with _mosaic.interpret(), pytest.raises(ValueError, match=r"marks of at most 524288 entries, got 600000"):
        indexer_topk(jnp.ones((1, 600000)), zero[:1], zero[:1], topk=3, implementation="mosaic", config=Counted())
    with _mosaic.interpret(), pytest.raises(ValueError, match=r"entries=4096 must be at least 2 topk = 6000"):
        args = jnp.ones((1, 9000)), zero[:1], zero[:1]
        indexer_topk(*args, topk=3000, implementation="mosaic", config=Config(entries=4096))
