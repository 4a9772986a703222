import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import moe_sum, unpermute
from jaxattn.ops.unpermute import make_inputs
from pallas_kernels.unpermute import Config


def test_by_hand():
    y = jnp.asarray([[1.0], [10.0], [100.0]])
    o = unpermute(y, jnp.asarray([[2, 0], [1, -1]], jnp.int32), jnp.asarray([[0.5, 3.0], [2.0, np.nan]]))
    assert o[:, 0].tolist() == [53, 20]


def test_a_row_without_pairs_is_not_read():
    y = jnp.asarray([[np.nan], [1.0]])
    assert unpermute(y, jnp.asarray([[1, -1]], jnp.int32)).tolist() == [[1.0]]


def test_the_sum_is_float32_in_the_order_of_slots_and_rounds_once():
    y = jnp.asarray([[[256.0], [1.0], [1.0]]], jnp.bfloat16)  # 257 is no bfloat16
    assert moe_sum(y).tolist() == [[258.0]]
    big = jnp.asarray([[[2.0**24], [1.0], [-(2.0**24)]]])
    assert moe_sum(big).tolist() == [[0.0]]


def test_no_rows_at_all():
    o = unpermute(jnp.zeros((0, 4)), jnp.full((2, 3), -1, jnp.int32))
    assert o.shape == (2, 4)
    assert not o.any()


@pytest.mark.optimized
@pytest.mark.usefixtures("interpret")
@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_kernel_adds_in_the_same_order_and_rounds_as_often(pieces, weighted, rng):
    args = make_inputs(rng, 5, 3, 2048, dtype="float32", gone=0.3, weighted=weighted)
    o = unpermute(**args, implementation="mosaic", config=Config(pieces=pieces))
    y, positions, weights = (np.asarray(args.get(name, 1)) for name in ("y", "positions", "weights"))
    wanted = np.zeros_like(o)
    for a in range(3):
        row = y[positions[:, a]] * weights[:, a, None] if weighted else y[positions[:, a]]
        wanted = wanted + np.where(positions[:, a, None] >= 0, row, np.float32(0))
    np.testing.assert_array_equal(o, wanted)


def test_configurations_that_cannot_be():
    with pytest.raises(ValueError, match="pieces must be 1, 2, 4 or 8, got 3"):
        Config(pieces=3)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"positions": jnp.zeros((2, 2))}, TypeError, "positions must have dtype int32, got float32"),
        ({"weights": jnp.zeros((2, 3))}, ValueError, r"weights must be \[T A\] with A=2 \(from positions\)"),
        ({"weights": jnp.zeros((2, 2), jnp.bfloat16)}, TypeError, "weights must have dtype float32, got bfloat16"),
        ({"y": jnp.zeros((4, 3), jnp.int32)}, TypeError, "y must have dtype bfloat16 or float16 or float32 or float64"),
    ],
)
def test_messages(changes, error, message):
    with pytest.raises(error, match=message):
        unpermute(**({"y": jnp.zeros((4, 3)), "positions": jnp.zeros((2, 2), jnp.int32)} | changes))
