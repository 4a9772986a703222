"""What quantization to FP8 promises as an op; formats and edges are tested in tests/quant."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import explain, quantize_fp8
from jaxattn.ops.quantize_fp8 import MECHANISM
from jaxattn.quant import fp8


def same_bits(a, b):
    np.testing.assert_array_equal(
        np.atleast_1d(np.asarray(a)).view(np.uint8), np.atleast_1d(np.asarray(b)).view(np.uint8)
    )


@pytest.mark.parametrize("case", [c for c in MECHANISM.cases if "smoke" in c.tags], ids=lambda c: c.name)
def test_the_op_is_the_format_eager_and_compiled(case, rng):
    args = case.make(rng)
    x = args.pop("x")
    wanted = fp8.quantize(x, **args)
    for found in (quantize_fp8(x, **args), jax.jit(lambda x: quantize_fp8(x, **args))(x)):
        for a, b in zip(found, wanted, strict=True):
            same_bits(a, b)


def test_rows_by_hand():
    x = jnp.array([[448.0, -1, 0.3, 0], [0, -0.0, 0, 0], [896, 2, -1000, 1e-9]])
    q, scale = quantize_fp8(x, upper_bound=896)
    assert scale.tolist() == [[1], [np.float32(1 / (448 * 512))], [2]]
    assert q.astype(jnp.float32).tolist() == [[448, -1, 0.3125, 0], [0, 0, 0, 0], [448, 1, -448, 0]]


def test_float64_keeps_its_codes_unrounded():
    with jax.enable_x64(True):
        q, scale = quantize_fp8(jnp.array([[448.0, 0.3]], jnp.float64))
        assert (q.dtype, scale.dtype) == (jnp.float64, jnp.float64)
        assert q.tolist() == [[448, 0.3]]


WRONG = {
    "rank": ({"x": jnp.ones(3)}, ValueError, "x must have 2 dimensions [N M], got shape (3,)"),
    "dtype": (
        {"x": jnp.ones((2, 3), jnp.int8)},
        TypeError,
        "x must have dtype bfloat16 or float16 or float32 or float64, got int8",
    ),
    "static": (
        {"scale": 1.0},
        ValueError,
        "a static scale belongs to granularity 'tensor', got 'token'; leave one of them out",
    ),
    "scale": (
        {"granularity": "tensor", "scale": jnp.ones(3)},
        ValueError,
        "scale must be one number, got shape (3,)",
    ),
    "group": ({"group": 12.5}, TypeError, "group is compiled in and must be a Python integer, got float"),
    "codes": ({"dtype": "int8"}, ValueError, "the dtype of the codes must be float8_e4m3fn or float8_e5m2, got 'int8'"),
}


@pytest.mark.parametrize(("changes", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_calls(changes, error, message):
    args = {"x": jnp.ones((2, 3))} | changes
    with pytest.raises(error, match=f"^quantize_fp8: {re.escape(message)}$"):
        quantize_fp8(**args)


def test_explain_answers_from_shapes():
    assert explain("quantize_fp8", x=jax.ShapeDtypeStruct((4, 128), jnp.bfloat16)).chosen == "reference"
