"""What the update of hyper-connected streams promises."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import mhc_post


def test_by_hand():
    residual = jnp.array([[[1.0, 2.0], [10.0, 20.0]]])
    comb = jnp.array([[[1.0, 0.5], [0.0, 2.0]]])  # stream 0 goes to 0 and half to 1, stream 1 twice to 1
    out = mhc_post(residual, jnp.array([[100.0, 200.0]]), jnp.array([[1.0, 0.0]]), comb)
    np.testing.assert_array_equal(out, [[[101, 202], [20.5, 41]]])


def test_identity_keeps_every_bit(rng):
    residual = jnp.asarray(rng.standard_normal((3, 4, 16)), jnp.bfloat16)
    same = mhc_post(residual, residual[:, 0], jnp.zeros((3, 4)), jnp.broadcast_to(jnp.eye(4), (3, 4, 4)))
    np.testing.assert_array_equal(same, residual)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"y": jnp.ones((2, 7))}, ValueError, r"y must be \[N M\] with M=8 \(from residual\), got shape \(2, 7\)"),
        ({"comb": jnp.ones((2, 4, 3))}, ValueError, r"comb must be \[N streams streams\] with streams=4"),
        ({"post": jnp.ones((2, 4), jnp.bfloat16)}, TypeError, "post must have dtype float32, got bfloat16"),
        (
            {"residual": jnp.ones((2, 0, 8)), "post": jnp.ones((2, 0)), "comb": jnp.ones((2, 0, 0))},
            ValueError,
            "one stream",
        ),
    ],
)
def test_wrong_calls(changes, error, message):
    args = {
        "residual": jnp.ones((2, 4, 8)),
        "y": jnp.ones((2, 8)),
        "post": jnp.ones((2, 4)),
        "comb": jnp.ones((2, 4, 4)),
    }
    with pytest.raises(error, match=f"^mhc_post: .*{message}"):
        mhc_post(**args | changes)
