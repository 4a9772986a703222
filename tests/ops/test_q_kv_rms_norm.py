"""What the norm of both latents promises."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import q_kv_rms_norm, rms_norm_quant
from pallas_kernels import _mosaic
from pallas_kernels.q_kv_rms_norm import Config
from parity import tolerances


def test_both_are_the_plain_norm_to_the_bit(rng):
    q, kv = (jnp.asarray(rng.standard_normal((4, n)), jnp.bfloat16) for n in (96, 64))
    both = q_kv_rms_norm(q, kv, q[0], kv[0])
    for x, y in zip((q, kv), both, strict=True):
        np.testing.assert_array_equal(y, rms_norm_quant(x, x[0]))


def test_rows_of_zeros_stay_zero():
    zeros = jnp.zeros((1, 8))
    for y in q_kv_rms_norm(zeros, zeros, jnp.ones(8), jnp.ones(8)):
        assert (y == 0).all()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"kv": jnp.ones((3, 4))}, ValueError, r"kv must be \[N R\] with N=2 \(from q\), got shape \(3, 4\)"),
        ({"q_weight": jnp.ones(9)}, ValueError, r"q_weight must be \[Rq\] with Rq=8 \(from q\), got shape \(9,\)"),
        (
            {"kv": jnp.ones((2, 4), jnp.bfloat16)},
            TypeError,
            "kv must have dtype float32, got bfloat16; cast one of them",
        ),
        ({"eps": 0}, ValueError, "eps must be positive and finite or None, got 0"),
    ],
)
def test_wrong_calls(changes, error, message):
    args = {"q": jnp.ones((2, 8)), "kv": jnp.ones((2, 4)), "q_weight": jnp.ones(8), "kv_weight": jnp.ones(4)}
    with pytest.raises(error, match=f"^q_kv_rms_norm: {message}$"):
        q_kv_rms_norm(**args | changes)


def test_the_kernel_norms_long_rows_as_lines(rng):
    """5120 numbers in pieces of 512, 640 in two that overlap."""
    q, kv, wq, wk = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((3, 5120), (3, 640), 5120, 640))
    with _mosaic.interpret():
        ours = q_kv_rms_norm(q, kv, wq, wk, implementation="mosaic")
    for a, b in zip(ours, q_kv_rms_norm(q, kv, wq, wk), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerances.CHAIN, atol=0)


def test_wrong_configurations():
    args = jnp.ones((4, 1024)), jnp.ones((4, 512)), jnp.ones(1024), jnp.ones(512)
    with _mosaic.interpret(), pytest.raises(ValueError, match=r"rows=3 must be a multiple of 4, the smallest tile"):
        q_kv_rms_norm(*args, implementation="mosaic", config=Config(rows=3))
