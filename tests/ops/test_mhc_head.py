"""What the end of hyper-connections promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import _checks, mhc_head
from jaxattn.ops.mhc_head import MECHANISM, make_inputs
from pallas_kernels import _aot, _mosaic
from pallas_kernels.mhc_head import Config


def test_zero_weights_by_hand():
    h = mhc_head(jnp.arange(8.0).reshape(1, 4, 2), jnp.zeros((4, 8)), 1.0, jnp.array([-jnp.inf, 0.0, 0.0, jnp.inf]))
    gates = np.array([0, 0.5, 0.5, 1]) + 1e-6
    expected = (gates[:, None] * np.arange(8).reshape(4, 2)).sum(0)
    assert np.abs(np.asarray(h)[0] - expected).max() <= 16 * np.finfo(np.float32).eps


@pytest.mark.parametrize("case", MECHANISM.cases, ids=lambda c: c.name)
def test_against_float64(case, rng):
    args = case.make(rng)
    h = np.asarray(mhc_head(**args), np.float64)
    with jax.enable_x64(True):
        truth = np.asarray(mhc_head(**_checks.upcast(args)))
    bound = 4 * float(jnp.finfo(args["residual"].dtype).eps) * np.abs(np.asarray(args["residual"], np.float64)).sum(1)
    assert (np.abs(h - truth) <= bound).all()


def test_wrong_calls():
    with pytest.raises(
        ValueError, match=r"mhc_head: fn must be \[C, C M\] with C=4 streams of M=2 numbers, got shape \(4, 9\)"
    ):
        mhc_head(jnp.ones((1, 4, 2)), jnp.ones((4, 9)), 1.0, jnp.ones(4))
    with pytest.raises(ValueError, match=r"mhc_head: scale must be one number, got shape \(2,\)"):
        mhc_head(jnp.ones((1, 4, 2)), jnp.ones((4, 8)), jnp.ones(2), jnp.ones(4))


def test_the_kernel_may_begin_with_the_columns_read_last(rng):
    """Two distances from a split's end, each in two ranges of columns, for every token."""
    args = make_inputs(rng, 3, 4096)
    with _mosaic.interpret():
        h = mhc_head(**args, implementation="mosaic", config=Config(rows=64, splits=8, stages=2))
    a, b = (np.asarray(x, np.float64) for x in (mhc_head(**args), h))
    assert np.isfinite(b).all()
    differ = a != b  # sums of other order, then one rounding
    assert 100 * differ.sum() < differ.size
    assert (np.abs(a - b) <= 2.0**-7 * np.abs(args["residual"].astype(np.float32)).sum(1)).all()


def one_launch(residual, args, config):
    weights = (args[name] for name in ("fn", "scale", "base"))
    return mhc_head(residual, *weights, implementation="mosaic", config=config)


def test_streams_may_be_read_once(rng, monkeypatch):
    """Also under vmap, which launches more clusters."""
    monkeypatch.setattr(_mosaic, "num_sms", lambda: 2)
    args, config = make_inputs(rng, 2 * 35, 512), Config(once=True, stages=2)
    residual = args["residual"].reshape(2, 35, 4, 512)
    with _mosaic.interpret():
        both = np.asarray(jax.vmap(lambda x: one_launch(x, args, config))(residual), np.float32)
    expected = np.asarray(mhc_head(**args), np.float32).reshape(both.shape)
    assert 100 * (both != expected).sum() < both.size


@pytest.mark.aot
@pytest.mark.skipif(_mosaic.find_ptxas() is None, reason="lacks ptxas")
def test_reading_once_is_one_launch():
    args, config = make_inputs(np.random.default_rng(0), 16, 4096), Config(once=True, stages=5)
    program = _aot.compile_h200(lambda args: one_launch(args["residual"], args, config), args)
    assert program.as_text().count('custom_call_target="mosaic_gpu_v2"') == 1
