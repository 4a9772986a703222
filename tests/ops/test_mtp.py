"""What the input of multi-token prediction promises: masked embeddings, norms per stream, roundings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import _checks, mtp
from jaxattn.ops.mtp import MECHANISM, make_inputs


@pytest.mark.parametrize("case", MECHANISM.cases, ids=lambda c: c.name)
def test_against_float64(case, rng):
    args = case.make(rng)
    y = np.asarray(mtp(**args), np.float64)
    with jax.enable_x64(True):
        truth = np.asarray(mtp(**_checks.upcast(args)))
    assert np.isfinite(y).all()
    bound = 8 * float(jnp.finfo(args["hidden"].dtype).eps) * np.abs(truth).max()
    assert np.abs(y - truth).max() <= bound


def test_at_position_0_the_embedding_does_not_matter(rng):
    args = make_inputs(rng, 3, 32)
    args["positions"] = jnp.array([0, 0, 5])
    other = args | {"embedding": args["embedding"].at[:2].set(7)}
    np.testing.assert_array_equal(mtp(**args), mtp(**other))
    zeros = args | {"positions": jnp.array([1, 1, 5]), "embedding": args["embedding"].at[:2].set(0)}
    np.testing.assert_array_equal(mtp(**args), mtp(**zeros))


def test_streams_are_normed_by_themselves(rng):
    args = make_inputs(rng, 2, 32, dtype="float32")
    scaled = args | {"hidden": args["hidden"].at[:, 1].multiply(1024)}
    a, b = (np.asarray(mtp(**x, eps=1e-30)) for x in (args, scaled))
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"e_proj": jnp.ones((4, 5))}, ValueError, r"e_proj must be \[M M\] with M=4"),
        ({"h_proj": jnp.ones((4, 4), jnp.bfloat16)}, TypeError, "h_proj must have dtype float32, got bfloat16"),
        ({"positions": jnp.ones(2)}, TypeError, "positions must have dtype int32 or int64, got float32"),
        ({"eps": -1.0}, ValueError, "eps must be positive and finite or None, got -1.0"),
    ],
)
def test_wrong_calls(changes, error, message):
    args = {"embedding": jnp.ones((2, 4)), "hidden": jnp.ones((2, 3, 4)), "positions": jnp.arange(2)}
    args |= {"e_weight": jnp.ones(4), "h_weight": jnp.ones(4), "e_proj": jnp.ones((4, 4)), "h_proj": jnp.ones((4, 4))}
    with pytest.raises(error, match=f"^mtp: {message}"):
        mtp(**args | changes)
