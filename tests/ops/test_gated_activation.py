import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import gated_activation

EPS = float(jnp.finfo(jnp.float32).eps)


def silu(x):
    return x / (1 + math.exp(-x))


def close(x, expected):
    np.testing.assert_array_max_ulp(np.asarray(x), np.asarray(expected, np.float32), 4)


def test_halves_and_pairs():
    x = jnp.asarray([[1.0, 2.0, 3.0, 4.0]])
    close(gated_activation(x), [[silu(1) * 3, silu(2) * 4]])
    close(gated_activation(x, kind="swigluoai"), [[3 / (1 + math.exp(-1.702)), 15 / (1 + math.exp(-1.702 * 3))]])


def test_the_clamp_has_no_lower_end_for_the_gate():
    x = jnp.asarray([[50.0, -50.0, 50.0, -50.0]])
    close(gated_activation(x, limit=10.0), [[silu(10) * 10, silu(-50) * -10]])
    far = gated_activation(jnp.asarray([[-1e4, 2.0]]), limit=10.0)
    assert not far.any()
    assert np.isfinite(np.asarray(far)).all()


def test_silu_is_rounded_before_the_product_and_swigluoai_at_the_end():
    x = jnp.asarray([[1.25, 1.25]], jnp.bfloat16)
    once = np.float32(silu(1.25)) * np.float32(1.25)
    rounded = np.float32(jnp.bfloat16(silu(1.25))) * np.float32(1.25)
    assert jnp.bfloat16(once) != jnp.bfloat16(rounded)
    assert gated_activation(x)[0, 0] == jnp.bfloat16(rounded)
    assert gated_activation(x, kind="swigluoai", alpha=1.0)[0, 0] == jnp.bfloat16(
        np.float32(silu(1.25)) * np.float32(2.25)
    )


def test_swigluoai_with_all_options_is_the_clamped_silu_of_v4():
    x = jnp.asarray([[3.0, -2.0, 0.5, 30.0]])
    pairs = x.reshape(2, 2).T.reshape(1, 4)
    a = gated_activation(x, limit=10.0, alpha=1.3, beta=0.5)
    b = gated_activation(pairs, kind="swigluoai", limit=10.0, alpha=1.3, beta=0.5)
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": jnp.zeros((2, 5))}, ValueError, "the last dimension holds gates and values and must be even, got 5"),
        ({"kind": "gelu"}, ValueError, "the activation must be one of silu, swigluoai, got 'gelu'"),
        ({"limit": 0.0}, ValueError, "limit must be positive and finite or None, got 0.0"),
        ({"x": jnp.zeros((2, 4), jnp.int32)}, TypeError, "x must have dtype bfloat16 or float16 or float32 or float64"),
    ],
)
def test_messages(changes, error, message):
    with pytest.raises(error, match=message):
        gated_activation(**({"x": jnp.zeros((2, 4))} | changes))
