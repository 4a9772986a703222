"""What the first half of hyper-connections promises: stochastic matrices, gates, the fused update, one stream."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import mhc_post, mhc_pre
from jaxattn.ops.mhc_pre import make_inputs
from pallas_kernels import _mosaic
from pallas_kernels.mhc_pre import Config, split_weights

EPS = 1e-6


@pytest.mark.parametrize("spread", [1.0, 30.0], ids=["mild", "extreme"])
def test_columns_sum_to_one_and_rows_nearly(spread, rng):
    args = make_inputs(rng, 40, 64, dtype="float32", spread=spread)
    x, post, comb = (np.asarray(y, np.float64) for y in mhc_pre(**args))
    assert np.isfinite(x).all()
    assert (comb >= 0).all() and (post >= 0).all() and (post <= 2).all()
    # a column that sums to c leaves the last step as c / (c + eps)
    assert np.abs(comb.sum(1) - 1).max() <= 2 * EPS
    if spread == 1.0:  # rows follow as steps are added
        rows = [np.abs(np.asarray(mhc_pre(**args, iters=n)[2], np.float64).sum(2) - 1).max() for n in (1, 5, 20, 200)]
        assert rows == sorted(rows, reverse=True)
        assert rows[-1] <= 8 * EPS


def test_uniform_logits_by_hand():
    """Zero weights and bases: every gate is a half, the matrix is uniform."""
    residual = jnp.arange(8.0).reshape(1, 4, 2)
    x, post, comb = mhc_pre(residual, jnp.zeros((24, 8)), jnp.ones(3), jnp.zeros(24))
    half = np.float32(0.5) + np.float32(EPS)
    np.testing.assert_array_equal(post, np.ones((1, 4), np.float32))
    assert np.abs(np.asarray(x)[0] - half * np.array([12, 16])).max() <= 32 * np.finfo(np.float32).eps
    assert np.abs(np.asarray(comb) - 0.25).max() <= 2 * EPS


def test_the_matrix_leads_from_source_to_destination():
    """A logit that favours 0 -> 3 shows in comb[0, 3]."""
    base = np.zeros(24, np.float32)
    base[8 + 3] = 10
    _, _, comb = mhc_pre(jnp.ones((1, 4, 8)), jnp.zeros((24, 32)), jnp.ones(3), jnp.asarray(base))
    assert np.unravel_index(np.argmax(comb[0]), (4, 4)) == (0, 3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_fused_update_is_post_then_pre_to_the_bit(dtype, rng):
    args = make_inputs(rng, 5, 64, dtype=dtype, fused=True)
    streams = mhc_post(args["residual"], args["y"], args["post"], args["comb"])
    *fused, updated = mhc_pre(**args)
    np.testing.assert_array_equal(updated, streams)
    weights = {name: args[name] for name in ("fn", "scale", "base")}
    for a, b in zip(fused, mhc_pre(streams, **weights), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_norm_does_not_change_with_the_size_of_the_streams(rng):
    args = make_inputs(rng, 3, 64, dtype="float32", rms_eps=1e-30)
    big = mhc_pre(**args | {"residual": args["residual"] * 1024})
    small = mhc_pre(**args)
    for a, b in zip(big[1:], small[1:], strict=True):
        np.testing.assert_array_equal(a, b)


WRONG = {
    "fn": ({"fn": jnp.ones((24, 33))}, "need fn [(2+C)C, C M] = [24, 32] and scale [3], got fn [24, 33] and scale [3]"),
    "scale": ({"scale": jnp.ones(2)}, "need fn [(2+C)C, C M] = [24, 32] and scale [3], got fn [24, 32] and scale [2]"),
    "y-alone": (
        {"y": jnp.ones((2, 8))},
        "y, post and comb belong together: give all three to update the streams first",
    ),
    "iters": ({"iters": 0}, "iters must be at least 1, got 0"),
    "eps": ({"eps": 0.0}, "eps must be positive and finite or None, got 0.0"),
    "base": ({"base": jnp.ones(23)}, "base must be [O] with O=24 (from fn), got shape (23,)"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_wrong_calls(changes, message):
    args = {"residual": jnp.ones((2, 4, 8)), "fn": jnp.ones((24, 32)), "scale": jnp.ones(3), "base": jnp.ones(24)}
    with pytest.raises(ValueError, match=rf"^mhc_pre: .*{re.escape(message)}"):
        mhc_pre(**args | changes)


def test_wrong_types():
    weights = {"fn": jnp.ones((24, 32)), "scale": jnp.ones(3), "base": jnp.ones(24)}
    with pytest.raises(TypeError, match="mhc_pre: fn must have dtype float32, got bfloat16"):
        mhc_pre(jnp.ones((2, 4, 8)), **weights | {"fn": jnp.ones((24, 32), jnp.bfloat16)})


def test_three_bfloat16_numbers_are_a_float32(rng):
    fn = rng.standard_normal((8, 256)).astype(np.float32) * np.exp2(rng.integers(-60, 60, (8, 256))).astype(np.float32)
    with _mosaic.interpret():
        parts = np.asarray(split_weights(jnp.asarray(fn)), np.float64)
    np.testing.assert_array_equal(parts[:8] + parts[8:16] + parts[16:], fn)


def test_the_kernel_shares_its_columns_in_any_way(rng):
    """With and without an update first, tiles, splits and stages only change the order of sums."""
    args = make_inputs(rng, 3, 256, fused=True)
    weights = {name: args[name] for name in ("fn", "scale", "base")}
    with _mosaic.interpret():
        updated = mhc_post(*(args[n] for n in ("residual", "y", "post", "comb")), implementation="mosaic")
        expected = mhc_pre(updated, **weights)
        for given, config in (
            (args, Config(rows=64, splits=2, stages=2)),
            (args, Config(rows=64, splits=1, stages=2)),
            (weights | {"residual": updated}, Config(rows=128, splits=1, stages=3)),
            (weights | {"residual": updated}, Config(rows=64, splits=4, stages=2)),
        ):
            x, post, comb, *streams = mhc_pre(**given, implementation="mosaic", config=config)
            assert all((np.asarray(new) == np.asarray(updated)).all() for new in streams)
            for ours, theirs in ((post, expected[1]), (comb, expected[2])):
                assert np.abs(np.asarray(ours) - np.asarray(theirs)).max() <= 64 * np.finfo(np.float32).eps
            differ = np.asarray(x, np.float32) != np.asarray(expected[0], np.float32)
            assert 100 * differ.sum() < differ.size


def test_wrong_configurations(rng):
    with pytest.raises(ValueError, match=r"^splits must be 1, 2, 4, 8 or 16, got 3$"):
        Config(splits=3)
    with pytest.raises(ValueError, match=r"^stages must be at least 2, got 1$"):
        Config(stages=1)
    with (
        _mosaic.interpret(),
        pytest.raises(ValueError, match=r"^mhc_pre: splits=16, stages=4 are not legal for 4 streams of 256"),
    ):
        mhc_pre(**make_inputs(rng, 2, 256), implementation="mosaic", config=Config(splits=16))
    updated = (
        r"^mhc_pre: splits=2, stages=2 are not legal for 4 streams of 256 that are updated first, with rows=128; "
        r"take rows=64, stages=2, at most 2 splits\b"
    )
    with _mosaic.interpret(), pytest.raises(ValueError, match=updated):
        args = make_inputs(rng, 2, 256, fused=True)
        mhc_pre(**args, implementation="mosaic", config=Config(splits=2, stages=2))
