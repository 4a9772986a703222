"""What indexer queries promise: folded scales, both formats, the rotary part's place, edges."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import indexer_q, rope_table
from jaxattn.ops.indexer_q import make_inputs
from jaxattn.quant import mx
from pallas_kernels import _mosaic
from pallas_kernels.indexer_q import Config

TABLE = rope_table(64, 16)


def test_scale_times_code_is_the_number(rng):
    q = jnp.asarray(rng.integers(-15, 16, (2, 3, 128)) / 8, jnp.bfloat16)
    codes, weights = indexer_q(q, jnp.ones((2, 3)), jnp.zeros(2, jnp.int32), TABLE, scales=(1.0, 1.0))
    np.testing.assert_array_equal(codes.astype(jnp.float32) * weights[..., None], q.astype(jnp.float32))


def test_a_head_of_zeros_has_the_floor():
    q = jnp.zeros((1, 1, 128), jnp.bfloat16)
    for floor, exponent in ((1e-4, -22), (1e-10, -42)):  # BC35
        _, weights = indexer_q(q, jnp.ones((1, 1)), jnp.array([3]), TABLE, scales=(1.0, 1.0), floor=floor)
        assert float(weights[0, 0]) == 2.0**exponent


def test_the_default_scales():
    q = jnp.full((1, 64, 128), 448.0)
    _, weights = indexer_q(q, jnp.ones((1, 64)), jnp.array([0]), TABLE)
    assert float(weights[0, 0]) == np.float32(128**-0.5) * np.float32(64**-0.5)


def test_mxfp4_carries_its_scales_apart(rng):
    args = make_inputs(rng, 3, 4, format="mxfp4", dtype="float32")
    args["positions"] = 0 * args["positions"]
    args["cos_sin"] = TABLE
    codes, weights, scale = indexer_q(**args)
    wanted = mx.quantize(args["q"], "mxfp4")
    np.testing.assert_array_equal(codes, wanted[0])
    np.testing.assert_array_equal(scale, wanted[1])
    assert float(weights[0, 0]) == np.asarray(args["weights"])[0, 0] * np.float32(128**-0.5) * np.float32(0.5)


WRONG = {
    "format": ({"format": "int8"}, "format must be one of fp8, mxfp4, got 'int8'"),
    "scales": ({"scales": (1.0,)}, "scales must be two numbers, of the scores and of the heads, got (1.0,)"),
    "floor": ({"floor": -1.0}, "floor must be positive and finite or None, got -1.0"),
    "weights": ({"weights": jnp.ones((2, 4))}, "weights must be [N H] with H=3 (from q), got shape (2, 4)"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_wrong_calls(changes, message):
    args = {"q": jnp.ones((2, 3, 128)), "weights": jnp.ones((2, 3)), "positions": jnp.arange(2), "cos_sin": TABLE}
    with pytest.raises(ValueError, match=f"^indexer_q: {re.escape(message)}$"):
        indexer_q(**args | changes)


def test_the_kernel_turns_tiles_of_a_token_as_it_turns_rows(rng):
    """Halves in front, as V3.2 has them; five heads share no tile with a token."""
    args = make_inputs(rng, 2, 16, first=True, interleaved=False)
    few = args | {name: args[name][:, :5] for name in ("q", "weights")} | {"scales": (0.5, 0.25)}
    with _mosaic.interpret():
        codes, weights = indexer_q(**args | {"scales": (0.5, 0.25)}, implementation="mosaic")
        some, theirs = indexer_q(**few, implementation="mosaic")
    np.testing.assert_array_equal(some, codes[:, :5])
    np.testing.assert_array_equal(theirs, weights[:, :5])


def test_wrong_configurations(rng):
    args = make_inputs(rng, 2, 16)
    with (
        _mosaic.interpret(),
        pytest.raises(ValueError, match=r"^indexer_q: rows=3 must be a multiple of 8, the smallest"),
    ):
        indexer_q(**args, implementation="mosaic", config=Config(rows=3))
