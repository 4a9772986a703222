"""Calibrating quantizers beat rounding to nearest where it counts: in the output."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import weight_only_matmul
from jaxattn.quant import calibrate, gptq, marlin

N, M, F, GROUP = 256, 128, 64, 32


@pytest.fixture
def layer(rng):
    """A weight, and correlated activations with a few large features, for fitting and, another draw, for judging."""
    mix = rng.standard_normal((M, M)) / M**0.5 + np.eye(M)
    size = np.where(rng.random(M) < 0.05, 12.0, 1.0)
    fit, judge = (jnp.asarray(rng.standard_normal((N, M)) @ mix * size, jnp.float32) for _ in range(2))
    return jnp.asarray(rng.standard_normal((M, F)) * 0.05, jnp.float32), fit, judge


def error(x, w, back):
    x, w, back = (np.asarray(a, np.float64) for a in (x, w, back))
    return float(np.linalg.norm(x @ (back - w)) / np.linalg.norm(x @ w))


@pytest.mark.parametrize(
    ("bits", "symmetric", "act_order"),
    [
        (bits, symmetric, act_order)
        for bits in (2, 3, 4, 8)
        for symmetric in (True, False)
        for act_order in (True, False)
        if bits > 2 or act_order  # in three steps a late correction runs out of range, unless large features come first
    ],
)
def test_gptq_beats_rounding_to_nearest(layer, bits, symmetric, act_order):
    w, fit, judge = layer
    options = {"bits": bits, "group": GROUP, "symmetric": symmetric}
    plain = error(judge, w, calibrate.nearest(w, **options).dequantize())
    found = calibrate.gptq(w, calibrate.hessian(fit), act_order=act_order, **options)
    assert int(found.q.max()) < 2**bits
    assert error(judge, w, found.dequantize()) < plain


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_awq_beats_rounding_to_nearest(layer, bits):
    w, fit, judge = layer
    options = {"bits": bits, "group": GROUP, "symmetric": False}
    plain = calibrate.nearest(w, **options).dequantize()
    found = calibrate.awq(w, fit, **options)
    assert error(fit, w, found.dequantize()) < error(fit, w, plain)
    assert error(judge, w, found.dequantize()) < error(judge, w, plain)
    assert np.ptp(np.asarray(found.factor)) > 0, "some exponent above zero was chosen"


def test_awq_on_even_activations_is_no_worse(rng):
    w = jnp.asarray(rng.standard_normal((M, F)), jnp.float32)
    x = jnp.ones((4, M), jnp.float32)
    plain = calibrate.nearest(w, group=GROUP, symmetric=False).dequantize()
    np.testing.assert_array_equal(calibrate.awq(w, x, group=GROUP).dequantize(), plain)


def test_gptq_without_correlations_is_rounding_to_nearest(rng):
    w = jnp.asarray(rng.standard_normal((M, F)), jnp.float32)
    found, plain = calibrate.gptq(w, jnp.eye(M), group=GROUP), calibrate.nearest(w, group=GROUP)
    for a, b in zip(found, plain, strict=True):
        np.testing.assert_array_equal(a, b)


def test_gptq_sets_features_that_never_occur_to_zero(layer):
    w, fit, _ = layer
    found = calibrate.gptq(w, calibrate.hessian(fit.at[:, 5].set(0)), group=GROUP)
    back = np.asarray(found.dequantize())
    assert np.isfinite(back).all()
    assert (back[5] == 0).all()


def test_act_order_records_the_group_of_every_feature(layer):
    w, fit, _ = layer
    found = calibrate.gptq(w, calibrate.hessian(fit), group=GROUP, act_order=True)
    assert np.bincount(np.asarray(found.g_idx)).tolist() == [GROUP] * (M // GROUP)
    largest = np.argsort(-np.asarray(jnp.diagonal(calibrate.hessian(fit))), kind="stable")[:GROUP]
    assert (np.asarray(found.g_idx)[largest] == 0).all()
    qweight, qzeros = gptq.pack(found.q, found.zero, 4)
    one = jnp.eye(M)
    o = weight_only_matmul(
        one, qweight, found.scale, format="gptq", zeros=qzeros, g_idx=found.g_idx, implementation="reference"
    )
    np.testing.assert_array_equal(o, found.dequantize())


def test_a_calibrated_weight_fits_marlin(layer):
    w, fit, _ = layer
    found = calibrate.gptq(w, calibrate.hessian(fit), group=GROUP)
    packed, scales = marlin.pack(found.q), marlin.permute_scales(found.scale, grouped=True)
    np.testing.assert_array_equal(marlin.dequantize(packed, scales), found.dequantize())


def test_sizes_that_do_not_fit(layer):
    w, fit, _ = layer
    with pytest.raises(ValueError, match=r"the curvature of 128 input features must be \[128, 128\], got \(64, 64\)"):
        calibrate.gptq(w, jnp.eye(64))
    with pytest.raises(ValueError, match=r"codes must have 2 to 8 bits, got 9"):
        calibrate.nearest(w, bits=9, group=GROUP)
    with pytest.raises(ValueError, match=r"the group must divide the 128 input features, got 48"):
        calibrate.gptq(w, jnp.eye(M), group=48)
    with pytest.raises(ValueError, match=r"the activations of 128 input features must be \[N, 128\], got \(256, 64\)"):
        calibrate.awq(w, fit[:, :64])
