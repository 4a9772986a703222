import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import permute, unpermute
from jaxattn.ops.permute import make_inputs
from parity import tolerances
from tests import routings


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


@pytest.mark.parametrize(("T", "A", "E"), routings.SIZES)
def test_there_and_back_is_the_sum_over_slots(T, A, E, rng):
    args = make_inputs(rng, T, A, E, 4, dtype="float32")
    permuted, offsets, positions = permute(**args)
    ids, flat = np.asarray(args["topk_ids"]), np.asarray(positions).reshape(-1)
    assert offsets[-1] == T * A
    assert sorted(flat.tolist()) == list(range(T * A))
    np.testing.assert_array_equal(flat[np.argsort(ids.reshape(-1), kind="stable")], np.arange(T * A))
    np.testing.assert_array_equal(np.asarray(permuted)[positions], np.repeat(np.asarray(args["x"])[:, None], A, 1))
    np.testing.assert_array_equal(unpermute(permuted, positions), sum([args["x"]] * A, jnp.zeros((T, 4))))
    np.testing.assert_array_equal(np.diff(offsets), np.bincount(ids.reshape(-1), minlength=E))


@pytest.mark.parametrize(("T", "A", "E"), routings.SIZES)
def test_ranks_have_their_own_pairs_and_together_all(T, A, E, rng):
    """Expert parallelism over the ranks that divide the experts, placed at random, -1 for those of others."""
    args = make_inputs(rng, T, A, E, 4, dtype="float32")
    ranks = 4 if E % 4 == 0 else 1
    owner, whole = rng.permutation(np.arange(E) % ranks), permute(**args)
    ids, total = np.asarray(args["topk_ids"]), jnp.zeros((T, 4))
    for rank in range(ranks):
        mine = np.flatnonzero(owner == rank)
        local = np.full(E, -1, np.int32)
        local[mine] = np.arange(len(mine))
        own = args | {"num_experts": len(mine), "expert_map": jnp.asarray(local)}
        permuted, offsets, positions = permute(**own)
        np.testing.assert_array_equal(np.asarray(positions) >= 0, owner[ids] == rank)
        np.testing.assert_array_equal(np.diff(offsets), np.diff(whole[1])[mine])
        total = total + unpermute(permuted, positions)
    np.testing.assert_allclose(total, A * args["x"], rtol=tolerances.SAME_SUMS, atol=0)


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
