"""What quantization to INT8 promises as an op; formats and edges are tested in tests/quant."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import quantize_int8
from jaxattn.ops.quantize_int8 import MECHANISM
from jaxattn.quant import int8


@pytest.mark.parametrize("case", [c for c in MECHANISM.cases if "smoke" in c.tags], ids=lambda c: c.name)
def test_the_op_is_the_format_eager_and_compiled(case, rng):
    args = case.make(rng)
    x = args.pop("x")
    wanted = [a for a in int8.quantize(x, **args) if a is not None]
    for found in (quantize_int8(x, **args), jax.jit(lambda x: quantize_int8(x, **args))(x)):
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(a, b)


def test_zero_points_by_hand():
    """Range -1..4.1: step 0.02, and -1 becomes -128."""
    x = jnp.array([[-1.0, 0.0, 4.1]])
    q, scale, azp = quantize_int8(x, symmetric=False)
    assert (q.tolist(), azp.tolist()) == ([[-128, -78, 127]], [[-78]])
    np.testing.assert_array_max_ulp(np.asarray(scale), np.float32([[0.02]]), 1)
    q, _, azp = quantize_int8(jnp.array([[1.0, -100, 100]]), granularity="tensor", scale=0.5, azp=3)
    assert (q.tolist(), int(azp)) == ([[5, -128, 127]], 3)


WRONG = {
    "no-scale": (
        {"granularity": "tensor"},
        ValueError,
        "int8 codes with one scale for the tensor need a static one, and only those, got granularity='tensor' without "
        "scale",
    ),
    "azp-dtype": (
        {"granularity": "tensor", "scale": 1.0, "azp": jnp.float32(3)},
        TypeError,
        "azp must have dtype int32, got float32",
    ),
    "rule": ({"rule": "numpy"}, ValueError, "rule must be one of cuda, triton, got 'numpy'"),
}


@pytest.mark.parametrize(("changes", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_calls(changes, error, message):
    with pytest.raises(error, match=f"^quantize_int8: {re.escape(message)}$"):
        quantize_int8(jnp.ones((2, 3)), **changes)
