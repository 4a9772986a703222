"""What the first half of hyper-connections promises: stochastic matrices, gates, the fused update, one stream."""

import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import mhc_post, mhc_pre
from jaxattn.ops.mhc_pre import make_inputs
from pallas_kernels import _aot, _mosaic
from pallas_kernels.mhc_pre import Config, default_config, split_weights

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
            (args, Config(rows=64, splits=4, stages=2, apart=True)),
            (weights | {"residual": updated}, Config(rows=128, splits=1, stages=3)),
            (weights | {"residual": updated}, Config(rows=64, splits=4, stages=2)),
        ):
            x, post, comb, *streams = mhc_pre(**given, implementation="mosaic", config=config)
            assert all((np.asarray(new) == np.asarray(updated)).all() for new in streams)
            for ours, theirs in ((post, expected[1]), (comb, expected[2])):
                assert np.abs(np.asarray(ours) - np.asarray(theirs)).max() <= 64 * np.finfo(np.float32).eps
            differ = np.asarray(x, np.float32) != np.asarray(expected[0], np.float32)
            assert 100 * differ.sum() < differ.size


ONCE = {
    # tokens, M, update first, multiprocessors: the last tile is cut, the updated ones go round the slots
    "two-clusters-of-two": (69, 512, False, 4, {"stages": 2, "clusters": 2}),
    "updated": (53, 512, True, 2, {"stages": 2}),
    "clusters-of-one": (53, 256, True, 2, {"stages": 3, "clusters": 2}),
}


@pytest.mark.parametrize(("N", "M", "fused", "multiprocessors", "how"), ONCE.values(), ids=ONCE)
def test_streams_may_be_read_once(N, M, fused, multiprocessors, how, rng, monkeypatch):
    monkeypatch.setattr(_mosaic, "num_sms", lambda: multiprocessors)
    args = make_inputs(rng, N, M, fused=fused)
    weights = {name: args[name] for name in ("fn", "scale", "base")}
    with _mosaic.interpret():
        x, post, comb, *streams = mhc_pre(**args, implementation="mosaic", config=Config(once=True, **how))
        updated = args["residual"]
        if fused:
            updated = mhc_post(*(args[n] for n in ("residual", "y", "post", "comb")), implementation="mosaic")
    for new in streams:
        np.testing.assert_array_equal(new, updated)
    expected = mhc_pre(updated, **weights, implementation="reference")
    for ours, theirs in ((post, expected[1]), (comb, expected[2])):
        assert np.abs(np.asarray(ours) - np.asarray(theirs)).max() <= 64 * np.finfo(np.float32).eps
    differ = np.asarray(x, np.float32) != np.asarray(expected[0], np.float32)
    assert 100 * differ.sum() < differ.size


def test_a_token_read_once_is_not_its_neighbours(rng, monkeypatch):
    """NaN stays with its token, and no tokens are no error."""
    monkeypatch.setattr(_mosaic, "num_sms", lambda: 1)
    args, config = make_inputs(rng, 3, 256), Config(once=True)
    poisoned = args | {"residual": args["residual"].at[1, 2, 7].set(jnp.nan)}
    with _mosaic.interpret():
        clean, dirty = (mhc_pre(**a, implementation="mosaic", config=config) for a in (args, poisoned))
        none = mhc_pre(**args | {"residual": args["residual"][:0]}, implementation="mosaic", config=config)
    for a, b in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[::2], np.asarray(b)[::2])
        assert np.isnan(np.asarray(b[1], np.float32)).all()
    assert [a.shape for a in none] == [(0, 256), (0, 4), (0, 4, 4)]


def build(name):
    """For the compiler: `mhc_pre` that reads streams once."""
    fused = name == "fused"
    args = make_inputs(np.random.default_rng(0), 16, 4096, fused=fused)
    args = {
        n: jax.ShapeDtypeStruct((4096 if x.shape[0] == 16 else x.shape[0], *x.shape[1:]), x.dtype)
        for n, x in args.items()
    }
    config = Config(once=True, stages=5 - fused)
    return lambda args: mhc_pre(**args, implementation="mosaic", config=config), (args,)


@pytest.mark.aot
@pytest.mark.skipif(_mosaic.find_ptxas() is None, reason="lacks ptxas")
def test_reading_once_compiles_without_spills(monkeypatch):
    """Registers hold weights, so there are few to spare, and fewest beside an update."""
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), str(Path(__file__).parent)]))
    for record in _aot.compile_report("test_mhc_pre:build", ["plain", "fused"]):
        assert record.error is None, record.name
        assert (len(record.kernels), record.spill_bytes) == (2, 0), record.name


@pytest.mark.parametrize("fused", [False, True])
def test_many_tokens_are_read_once(fused):
    """Few tokens and other widths take two passes."""

    def default(N, M):
        y = jax.ShapeDtypeStruct((N, M), jnp.bfloat16) if fused else None
        return default_config(residual=jax.ShapeDtypeStruct((N, 4, M), jnp.bfloat16), y=y)

    for N, M in ((896, 4096), (4096, 4096)):
        assert default(N, M) == Config(once=True, stages=4 if fused else 5)
    for N, M in ((895, 4096), (4096, 7168), (4096, 2048)):
        assert not default(N, M).once


def test_what_cannot_be_read_once(rng, monkeypatch):
    for wrong in ({"clusters": 2}, {"clusters": 0, "once": True}):
        with pytest.raises(ValueError, match=r"^clusters must be at least 1 and needs once=True, got [02]$"):
            Config(**wrong)
    cases = (
        (768, False, 2, r"once=True needs M to be one of 256, 512, 1024, 2048, 4096, got 768; take once=False"),
        (512, False, 6, r"once=True needs 2 to 5 stages, got 6"),
        (512, True, 5, r"once=True needs 2 to 4 stages where streams are updated first, got 5"),
        (4096, False, 2, r"once=True needs M / 256 multiprocessors, got M=4096 and 15; take once=False"),
    )
    monkeypatch.setattr(_mosaic, "num_sms", lambda: 15)
    for M, fused, stages, message in cases:
        args, config = make_inputs(rng, 2, M, fused=fused), Config(once=True, stages=stages)
        with _mosaic.interpret(), pytest.raises(ValueError, match=rf"^mhc_pre: {message}\b"):
            mhc_pre(**args, implementation="mosaic", config=config)


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
