import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import routed_scaling, router
from jaxattn.ops.routed_scaling import decoder_factor, default_placement, fused_shared_weight

F = 2.5


def norm(x):
    return x / np.sqrt(np.mean(np.square(x), -1, keepdims=True))


def decoder(rng_seed, placement, factor, dtype):
    """Two MoE layers behind a dense one, with RMSNorm in front of every part; returns the logits."""
    rng = np.random.default_rng(rng_seed)
    make = lambda *shape: rng.standard_normal(shape)  # noqa: E731
    c = decoder_factor(factor, placement)
    x = make(5, 16).astype(dtype)
    logits_w, gates = make(16, 7), make(16, 8)
    residual = x * dtype(c)
    for layer in range(3):
        residual = residual + (norm(residual) @ make(16, 16)).astype(dtype) * dtype(c)  # attention
        h = norm(residual.astype(np.float64)).astype(dtype)
        if layer == 0:
            residual = residual + (h @ make(16, 16)).astype(dtype) * dtype(c)  # dense
            continue
        scaling = factor if placement == "weights" else 1.0
        weights, ids = router(jnp.asarray(h @ gates, jnp.float32), top_k=2, scoring="sigmoid", scaling=scaling)
        experts = np.einsum("tm,emn->ten", h, make(8, 16, 16))
        routed = np.einsum(
            "tan,ta->tn", np.take_along_axis(experts, np.asarray(ids)[..., None], 1), np.asarray(weights)
        )
        out = routed_scaling(
            jnp.asarray(routed, dtype), jnp.asarray(h @ make(16, 16), dtype), factor=factor, placement=placement
        )
        residual = residual + np.asarray(out)
    return norm(residual.astype(np.float64)) @ logits_w


@pytest.mark.parametrize("placement", ["weights", "shared"])
def test_the_placements_give_the_same_logits(placement):
    usual, other = (decoder(3, p, F, np.float32) for p in ("output", placement))
    assert np.abs(usual - other).max() <= 64 * np.finfo(np.float32).eps * np.abs(usual).max()


def test_dividing_the_shared_experts_does_not_overflow_where_scaling_does():
    routed, shared = jnp.full((1, 4), 6000.0, jnp.float16), jnp.full((1, 4), 1000.0, jnp.float16)
    naive = routed_scaling(routed, shared, factor=16.0, placement="output")
    assert np.isinf(np.asarray(naive)).all()
    safe = routed_scaling(routed, shared, factor=16.0, placement="shared")
    assert safe.tolist() == [[float(np.float16(6062.5))] * 4]


def test_defaults_are_those_of_vllm():
    assert default_placement(jnp.float16, shared=True) == "shared"
    assert default_placement(jnp.float16, shared=False) == "output"
    assert default_placement(jnp.bfloat16, shared=True) == "output"


@pytest.mark.parametrize(
    ("placement", "decoder", "weight"), [("weights", 1, 1), ("output", 1, 0.4), ("shared", 0.4, 0.4)]
)
def test_factors_elsewhere(placement, decoder, weight):
    assert decoder_factor(F, placement) == decoder
    assert fused_shared_weight(F, placement) == weight


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"placement": "both"}, ValueError, "placement must be one of weights, output, shared, got 'both'"),
        ({"factor": -1.0}, ValueError, "factor must be positive and finite or None, got -1.0"),
        ({"factor": None}, TypeError, "factor is compiled in and must be a Python number, got None"),
        ({"shared": jnp.zeros((2, 3))}, ValueError, r"shared must be \[T M\] with M=4 \(from routed\)"),
        ({"shared": jnp.zeros((2, 4), jnp.float16)}, TypeError, "shared must have dtype float32, got float16"),
    ],
)
def test_messages(changes, error, message):
    with pytest.raises(error, match=message):
        routed_scaling(**({"routed": jnp.zeros((2, 4)), "factor": F, "placement": "output"} | changes))
