"""What weight-only products promise: the product with the dequantized weight, in every format."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import weight_only_matmul
from jaxattn.ops.weight_only_matmul import MECHANISM, make_inputs
from jaxattn.quant import weights
from parity.twins import weight_only_matmul as twin

SMOKE = [c for c in MECHANISM.cases if "smoke" in c.tags]


@pytest.mark.parametrize("case", SMOKE, ids=lambda c: c.name)
def test_the_identity_reads_the_weight(case, rng):
    """x = 1 picks out W, in the dtype of x: no rounding but the weight's."""
    args = case.make(rng)
    M = args["x"].shape[1]
    args["x"] = jnp.eye(M, dtype=args["x"].dtype)
    found = jax.jit(lambda x: weight_only_matmul(**(args | {"x": x})))(args["x"])
    host = {n: np.asarray(v) if hasattr(v, "shape") else v for n, v in args.items()}
    np.testing.assert_array_equal(np.asarray(found).astype(np.float64), twin.weight(host, False))


@pytest.mark.parametrize("format", weights.FORMATS)
def test_every_format_is_near_the_weight_it_was_made_of(format, rng):
    args = make_inputs(rng, 8, 128, 64, format, dtype="float32", group=64)
    again = make_inputs(np.random.default_rng(5), 8, 128, 64, format, dtype="float32", group=64)
    draw = np.random.default_rng(5)
    draw.standard_normal((8, 128))
    W = draw.standard_normal((128, 64)) * 0.05
    x = np.asarray(args["x"], np.float64)
    got = np.asarray(weight_only_matmul(**(again | {"x": args["x"]})), np.float64)
    lost = np.linalg.norm(got - x @ W) / np.linalg.norm(x @ W)
    assert lost < (2.0**-4 if format in ("int8", "fp8", "mxfp8") else 2.0**-2)


def test_every_format_has_a_case():
    assert {c.make(np.random.default_rng(0))["format"] for c in SMOKE} == set(weights.FORMATS)


GPTQ = {
    "w": jnp.zeros((16, 64), jnp.int32),
    "scales": jnp.ones((2, 64)),
    "zeros": jnp.zeros((2, 8), jnp.int32),
    "format": "gptq",
}
WRONG = {
    "format": ({"format": "gguf"}, ValueError, f"format must be one of {', '.join(weights.FORMATS)}, got 'gguf'"),
    "bits": ({"bits": 5}, ValueError, "bits of gptq must be one of (2, 3, 4, 8), got 5"),
    "zeros": ({"zeros": None}, ValueError, "format 'gptq' needs zeros; pass it"),
    "global": ({"global_scale": 1.0}, ValueError, "format 'gptq' knows no global_scale; leave it out"),
    "dtype": (
        {"scales": jnp.ones((2, 64), jnp.float16)},
        TypeError,
        "scales must have dtype float32, got float16",
    ),
    "w-dtype": ({"w": jnp.zeros((16, 64), jnp.uint8)}, TypeError, "w must have dtype int32, got uint8"),
    "w": (
        {"w": jnp.zeros((8, 64), jnp.int32)},
        ValueError,
        "w of format 'gptq' must be (16, 64) for 128 input features, got (8, 64)",
    ),
    "qzeros": (
        {"zeros": jnp.zeros((2, 64), jnp.int32)},
        ValueError,
        "zeros of format 'gptq' must be (2, 8) for 128 input features, got (2, 64)",
    ),
    "groups": (
        {"scales": jnp.ones((3, 64)), "zeros": jnp.zeros((3, 8), jnp.int32)},
        ValueError,
        "the groups of scales must divide the 128 input features, got 3",
    ),
    "list": ({"w": [[1]]}, TypeError, "w must be an array, got list"),
}


@pytest.mark.parametrize(("changes", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_calls(changes, error, message):
    with pytest.raises(error, match=f"^weight_only_matmul: {re.escape(message)}$"):
        weight_only_matmul(jnp.ones((2, 128)), **(GPTQ | changes))
