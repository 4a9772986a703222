import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import permute, unpermute
from jaxattn.ops.permute import make_inputs


def test_by_hand():
    x, ids = jnp.asarray([[1.0], [2.0], [3.0]]), jnp.asarray([[2, 0], [2, 3], [0, 2]], jnp.int32)
    permuted, offsets, positions = permute(x, ids, num_experts=4)
    assert permuted[:, 0].tolist() == [1, 3, 1, 2, 3, 2]
    assert offsets.tolist() == [0, 2, 2, 5, 6]
    assert positions.tolist() == [[2, 0], [3, 5], [1, 4]]


def test_pairs_of_other_ranks_leave_rows_of_zeros_that_are_not_read():
    x, ids = jnp.asarray([[1.0], [np.nan]]), jnp.asarray([[0, 1], [2, -1]], jnp.int32)
    permuted, offsets, positions = permute(x, ids, num_experts=1, expert_map=jnp.asarray([-1, 0, -1], jnp.int32))
    assert permuted[:, 0].tolist() == [1, 0, 0, 0]
    assert offsets.tolist() == [0, 1]
    assert positions.tolist() == [[-1, 0], [-1, -1]]
    assert unpermute(permuted.at[1:].set(np.nan), positions)[:, 0].tolist() == [1, 0]


@pytest.mark.parametrize(("T", "A", "E"), [(0, 2, 8), (1, 1, 1), (7, 3, 4), (64, 8, 128)])
def test_there_and_back_is_the_sum_over_slots(T, A, E, rng):
    args = make_inputs(rng, T, A, E, 16, dtype="float32")
    permuted, offsets, positions = permute(**args)
    assert offsets[-1] == T * A
    assert sorted(positions.reshape(-1).tolist()) == list(range(T * A))
    np.testing.assert_array_equal(unpermute(permuted, positions), sum([args["x"]] * A, jnp.zeros((T, 16))))
    counts = np.bincount(np.asarray(args["topk_ids"]).reshape(-1), minlength=E)
    np.testing.assert_array_equal(np.diff(offsets), counts)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"topk_ids": jnp.zeros((3, 2), jnp.int32)}, ValueError, r"topk_ids must be \[T A\] with T=2 \(from x\)"),
        ({"topk_ids": jnp.zeros((2, 2))}, TypeError, "topk_ids must have dtype int32, got float32"),
        ({"expert_map": jnp.zeros(3)}, TypeError, "expert_map must have dtype int32, got float32"),
    ],
)
def test_messages(changes, error, message):
    args = {"x": jnp.zeros((2, 4)), "topk_ids": jnp.zeros((2, 1), jnp.int32), "num_experts": 2}
    with pytest.raises(error, match=message):
        permute(**(args | changes))
