"""What `silu(gate) * up` promises: two roundings, the clamp, the ends of the exponential."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import silu_mul_quant
from jaxattn.ops.silu_mul_quant import MECHANISM

BF16 = jnp.bfloat16


def test_the_silu_is_rounded_before_the_product(rng):
    x = jnp.asarray(rng.standard_normal((16, 512)), BF16)
    gate, up = np.split(np.asarray(x).astype(np.float64), 2, 1)
    silu = gate / (1 + np.exp(-gate))
    twice = (silu.astype(np.float32).astype(BF16).astype(np.float32) * up.astype(np.float32)).astype(BF16)
    once = (silu * up).astype(np.float32).astype(BF16)
    np.testing.assert_array_equal(jax.jit(silu_mul_quant)(x), twice)
    assert (once != twice).sum() > 100


def test_gates_have_no_lower_bound():
    x = jnp.array([[-30.0, 30, 20, 1, 1, -20, 20, 5]])
    gates = silu_mul_quant(x, limit=10.0)[0].tolist()
    silu10 = float(silu_mul_quant(jnp.array([[10.0, 1]]))[0, 0])
    assert gates[0] == float(silu_mul_quant(jnp.array([[-30.0, 1]]))[0, 0]) < 0
    assert gates[1:3] == [np.float32(silu10) * np.float32(-10), np.float32(silu10) * np.float32(10)]


def test_gates_far_out_give_zero_and_themselves():
    x = jnp.array([[-1e4, 1e4, 0, -0.0, 1, 1, 1, 1]])
    assert silu_mul_quant(x).tolist() == [[0, 1e4, 0, 0]]


@pytest.mark.parametrize("case", [c for c in MECHANISM.cases if "smoke" in c.tags], ids=lambda c: c.name)
def test_compiled_is_eager_to_the_bit(case, rng):
    args = case.make(rng)
    x = args.pop("x")
    eager, compiled = silu_mul_quant(x, **args), jax.jit(lambda x: silu_mul_quant(x, **args))(x)
    for a, b in zip(jax.tree.leaves(eager), jax.tree.leaves(compiled), strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


WRONG = {
    "odd": ({"x": jnp.ones((2, 7))}, "x must hold gates and as many ups, got an odd last dimension of 7"),
    "limit": ({"limit": -1.0}, "limit must be positive and finite or None, got -1.0"),
    "mode": ({"mode": "row"}, "mode must be one of none, static, token, group, got 'row'"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_wrong_calls(changes, message):
    args = {"x": jnp.ones((2, 8))} | changes
    with pytest.raises(ValueError, match=f"^silu_mul_quant: {re.escape(message)}$"):
        silu_mul_quant(**args)
