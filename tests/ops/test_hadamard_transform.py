"""What the rotation promises as an op."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import hadamard_transform


def test_by_hand():
    assert hadamard_transform(jnp.array([[1.0, 2, 3, 4]])).tolist() == [[5, -1, -2, 0]]
    root = float(np.float32(2**-0.5))
    np.testing.assert_array_max_ulp(
        np.asarray(hadamard_transform(jnp.array([[1.0, 2, 3, 4]]), group=2)), np.float32([[3, -1, 7, -1]]) * root, 1
    )


def test_a_bfloat16_result_is_rounded_once(rng):
    x = jnp.asarray(rng.integers(-8, 8, (8, 16)), jnp.bfloat16)
    exact = np.asarray(hadamard_transform(x.astype(jnp.float32)))
    np.testing.assert_array_equal(hadamard_transform(x), exact.astype(jnp.bfloat16))


WRONG = {
    "power": ({"x": jnp.ones((2, 48))}, "a Hadamard rotation needs a power of two, got a group of 48"),
    "divides": (
        {"x": jnp.ones((2, 48)), "group": 32},
        "the group must divide the last dimension, got groups of 32 and 48 numbers",
    ),
    "rank": ({"x": jnp.ones(4)}, "x must have 2 dimensions [N M], got shape (4,)"),
}


@pytest.mark.parametrize(("args", "message"), WRONG.values(), ids=WRONG)
def test_wrong_calls(args, message):
    with pytest.raises(ValueError, match=f"^hadamard_transform: {re.escape(message)}$"):
        hadamard_transform(**args)
