import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import align_block_size
from jaxattn.ops.align_block_size import capacity, make_inputs
from parity.twins import align_block_size as twin
from tests import routings


def ids(*rows):
    return jnp.asarray(rows, jnp.int32)


def call(x, block_size, num_experts, **options):
    out = align_block_size(x, block_size=block_size, num_experts=num_experts, **options)
    return [np.asarray(a).tolist() for a in out]


def test_by_hand():
    rows, experts, padded = call(ids((2, 0), (2, 3), (0, 2)), 2, 4)
    assert rows[: padded[0]] == [1, 4, 0, 2, 5, 6, 3, 6]
    assert experts[: padded[0] // 2] == [0, 2, 2, 3]
    assert padded == [8]
    assert set(rows[8:]) <= {6}
    assert set(experts[4:]) <= {-1}


def test_no_tokens():
    rows, experts, padded = call(jnp.zeros((0, 2), jnp.int32), 16, 8)
    assert padded == [0]
    assert rows == experts == []


@pytest.mark.parametrize("expert", [0, 7])
def test_all_tokens_on_one_expert(expert):
    rows, experts, padded = call(jnp.full((33, 1), expert, jnp.int32), 16, 8)
    assert padded == [48]
    assert rows[:33] == list(range(33))
    assert rows[33:48] == [33] * 15
    assert experts[:3] == [expert] * 3


def test_foreign_and_masked_pairs_take_no_block():
    mapped = jnp.asarray([-1, 0, -1, 1], jnp.int32)
    rows, experts, padded = call(ids((0, 1), (3, -1), (2, 99)), 4, 2, expert_map=mapped)
    assert rows[:8] == [1, 6, 6, 6, 2, 6, 6, 6]
    assert experts[:2] == [0, 1]
    assert padded == [8]
    assert call(ids((-1, -1)), 4, 2)[2] == [0]


@pytest.mark.parametrize(("T", "k", "E"), routings.SIZES)
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_every_pair_once_in_a_block_of_its_expert(T, k, E, block_size, rng):
    args = make_inputs(rng, T, k, E, block_size)
    out = align_block_size(**args)
    host = {name: np.asarray(x) if name == "topk_ids" else x for name, x in args.items()}
    for name, x in twin.run(host, False).items():
        np.testing.assert_array_equal(out[("sorted_ids", "expert_ids", "padded").index(name)], x)
    assert out[2][0] <= out[0].size == capacity(T * k, block_size, E)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"topk_ids": jnp.zeros(3, jnp.int32)},
            ValueError,
            r"topk_ids must have 2 dimensions \[T A\], got shape \(3,\)",
        ),
        ({"topk_ids": jnp.zeros((3, 2))}, TypeError, "topk_ids must have dtype int32, got float32"),
        ({"block_size": 0}, ValueError, "block_size must be at least 1, got 0"),
        ({"num_experts": 2.0}, TypeError, "num_experts is compiled in and must be a Python integer, got float"),
    ],
)
def test_messages(changes, error, message):
    with pytest.raises(error, match=message):
        align_block_size(**({"topk_ids": ids((0, 1)), "block_size": 8, "num_experts": 2} | changes))
