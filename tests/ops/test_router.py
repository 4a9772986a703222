import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import gate_logits, router
from jaxattn.ops.router import make_inputs
from pallas_kernels import _mosaic
from pallas_kernels import router as mosaic
from parity import tolerances
from tests import routings

EPS = float(jnp.finfo(jnp.float32).eps)


def row(*logits):
    return jnp.asarray([logits], jnp.float32)


def test_bc51_weights_of_both_orders_of_softmax_and_top_k():
    logits = row(2.0, 1.0, 0.0, -1.0)
    for renormalize, expected in ((False, (0.6439, 0.2369)), (True, (0.7311, 0.2689))):
        weights, ids = router(logits, top_k=2, renormalize=renormalize)
        assert ids.tolist() == [[0, 1]]
        assert tuple(round(float(w), 4) for w in weights[0]) == expected


def test_bc47_close_scores_keep_their_order():
    logits = jnp.zeros((1, 384)).at[0, 0].set(0.5).at[0, 299].set(0.50005)
    assert router(logits, top_k=1)[1].tolist() == [[299]]


def test_bc53_logits_and_scores_are_float32():
    x = jnp.ones((1, 64), jnp.bfloat16)
    w = jnp.zeros((2, 64), jnp.bfloat16).at[:, 0].set(1.0).at[1, 1].set(2.0**-9)
    logits = gate_logits(x, w)
    assert logits.dtype == jnp.float32
    assert logits.tolist() == [[1.0, 1.0 + 2.0**-9]]
    assert router(logits, top_k=1)[1].tolist() == [[1]]
    assert router(logits.astype(jnp.bfloat16).astype(jnp.float32), top_k=1)[1].tolist() == [[0]]


@pytest.mark.parametrize("scoring", ["sigmoid", "sqrtsoftplus"])
def test_bc49_underflowed_scores_give_weights_of_zero(scoring, rng):
    args = make_inputs(rng, 3, 16, bias=0.0, top_k=4, scoring=scoring)
    ordinary = router(**args)
    args["logits"] = args["logits"].at[1].set(-1e4 if scoring == "sigmoid" else -300.0)
    weights, ids = router(**args)
    assert not weights[1].any()
    assert ids[1].tolist() == np.argsort(-np.asarray(args["bias"]), kind="stable")[:4].tolist()
    for kept in (0, 2):
        np.testing.assert_array_equal(weights[kept], ordinary[0][kept])


def test_bc29_zeroing_the_bias_changes_the_experts_not_the_scores(rng):
    args = make_inputs(rng, 6, 64, bias=0.0, top_k=6, scoring="sqrtsoftplus", renormalize=False)
    with_bias = router(**args)
    without = router(**(args | {"bias": jnp.zeros(64)}))
    assert (with_bias[1] != without[1]).any()
    scores = router(**(args | {"bias": None, "top_k": 64}))
    for weights, ids in (with_bias, without):
        for t in range(6):
            found = dict(zip(scores[1][t].tolist(), scores[0][t].tolist(), strict=True))
            assert [found[i] for i in ids[t].tolist()] == weights[t].tolist()


@pytest.mark.parametrize("implementation", ["reference", "mosaic"])
@pytest.mark.parametrize(("scoring", "low"), [("softmax", 0.0), ("sigmoid", -120.0), ("sqrtsoftplus", -240.0)])
@pytest.mark.parametrize("groups", [{}, {"num_groups": 8, "kept_groups": 6}])
def test_scores_that_underflow_keep_the_order_of_their_logits(implementation, scoring, low, groups):
    with _mosaic.interpret() if implementation == "mosaic" else contextlib.nullcontext():
        logits = low + jnp.zeros((3, 32)).at[:, 5].set(110.0).at[:, 21].set(7.0).at[:, 9].set(2.0).at[:, 30].set(3.0)
        logits = logits.at[2, 17].set(-jnp.inf)
        weights, ids = router(logits, top_k=4, scoring=scoring, implementation=implementation, **groups)
    assert ids.tolist() == [[5, 21, 30, 9]] * 3
    assert jnp.isfinite(weights).all()


@pytest.mark.parametrize("groups", [{}, {"num_groups": 4, "kept_groups": 2}])
def test_ties_go_to_the_lowest_id(groups):
    assert router(jnp.zeros((2, 16)), top_k=5, **groups)[1].tolist() == [[0, 1, 2, 3, 4]] * 2
    signed = jnp.zeros((1, 16)).at[0, ::2].set(-0.0)
    assert router(signed, top_k=3, scoring="sigmoid", **groups)[1].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_a_bad_logit_spoils_no_other(scoring, bad):
    logits = row(1.0, 2.0, 3.0, 0.5).at[0, 2].set(bad)
    weights, ids = router(logits, top_k=4, scoring=scoring)
    assert sorted(ids[0].tolist()) == [0, 1, 2, 3]
    assert np.isfinite(np.asarray(weights)).all()
    assert ids[0, 0 if bad == np.inf else -1] == 2
    everything = router(jnp.full((1, 8), bad), top_k=3, scoring=scoring)
    assert everything[1].tolist() == [[0, 1, 2]]
    assert np.isfinite(np.asarray(everything[0])).all()


def test_a_masked_group_is_never_chosen():
    """Not even where an open group holds nothing but biases of minus infinity."""
    bias = jnp.asarray([-np.inf] * 4 + [0.0] * 4 + [-np.inf] * 8, jnp.float32)
    _, ids = router(jnp.zeros((1, 16)), top_k=6, scoring="sigmoid", bias=bias, num_groups=4, kept_groups=2)
    assert ids[0].tolist() == [4, 5, 6, 7, 0, 1]


def test_as_many_groups_are_kept_if_few_hold_a_finite_bias():
    bias = jnp.full(32, -jnp.inf).at[4:8].set(0.0)
    args = {"logits": jnp.zeros((1, 32)), "scoring": "sigmoid", "bias": bias, "top_k": 10}
    weights, ids = kernel(**args, num_groups=8, kept_groups=3)
    assert ids[0].tolist() == [4, 5, 6, 7, 0, 1, 2, 3, 8, 9]
    np.testing.assert_array_equal(weights, np.full_like(weights, 0.1))


def test_a_group_counts_by_its_two_best_with_a_bias_and_by_its_best_without():
    logits = row(3.0, -9.0, 2.0, 2.0)
    options = {"top_k": 1, "scoring": "sigmoid", "num_groups": 2, "kept_groups": 1}
    assert router(logits, **options)[1].tolist() == [[0]]
    assert router(logits, bias=jnp.zeros(4), **options)[1].tolist() == [[2]]


def test_one_group_is_no_group(rng):
    args = make_inputs(rng, 7, 32, bias=0.0, top_k=4, scoring="sigmoid")
    for a, b in zip(router(**args), router(**args, num_groups=4, kept_groups=4), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_table_routes_by_token(rng):
    args = make_inputs(rng, 9, 32, vocab=5, top_k=3, scoring="sqrtsoftplus", scaling=1.5)
    weights, ids = router(**args)
    np.testing.assert_array_equal(ids, np.asarray(args["table"])[np.asarray(args["tokens"])])
    np.testing.assert_array_max_ulp(np.asarray(weights).sum(-1), np.full(9, 1.5, np.float32), 4)


def test_weights_match_the_formula_far_below_where_vllm_rounds_to_zero():
    weights, _ = router(row(-20.0, -60.0), top_k=2, scoring="sqrtsoftplus", renormalize=False)
    expected = np.exp(np.float64([-10, -30]))
    assert (np.abs(np.asarray(weights[0], np.float64) - expected) <= 4 * EPS * expected).all()


@pytest.mark.parametrize("E", routings.EXPERTS)
@pytest.mark.parametrize("T", routings.TOKENS)
def test_ids_are_distinct_and_those_of_a_sort(E, T, rng):
    most = min(E, 8)
    args = make_inputs(rng, T, E, bias=0.0, scoring="sqrtsoftplus", renormalize=False)
    weights, ids = (np.asarray(x) for x in router(**args, top_k=most))
    assert weights.shape == ids.shape == (T, most)
    scores = np.sqrt(np.log1p(np.exp(np.asarray(args["logits"], np.float64))))
    choice = scores + np.asarray(args["bias"])
    assert (np.diff(np.sort(ids)) > 0).all(), "an expert twice"
    found = np.take_along_axis(choice, ids, 1)
    assert (np.diff(found) <= EPS).all(), "not from the best down"
    assert (np.abs(found - -np.sort(-choice)[:, :most]) <= EPS).all(), "not the best"
    assert (np.abs(weights - np.take_along_axis(scores, ids, 1)) <= 8 * EPS).all()
    for k in range(1, most):
        fewer = router(**args, top_k=k)
        np.testing.assert_array_equal(fewer[1], ids[:, :k])
        np.testing.assert_array_equal(fewer[0], weights[:, :k])


@pytest.mark.parametrize(("T", "k", "E"), routings.SIZES)
def test_renormalized_weights_are_shares(T, k, E, rng):
    args = make_inputs(rng, T, E, scoring="sigmoid", top_k=k)
    weights, ids = (np.asarray(x, np.float64) for x in router(**args, scaling=2.5))
    scores = np.take_along_axis(1 / (1 + np.exp(-np.asarray(args["logits"], np.float64))), ids.astype(int), 1)
    assert (np.abs(weights - 2.5 * scores / scores.sum(-1, keepdims=True)) <= 16 * EPS).all()


def kernel(**args):
    """The op by its kernel: on the GPU if there is one, else interpreted."""
    with _mosaic.interpret() if _mosaic.why_not_here() else contextlib.nullcontext():
        return tuple(np.asarray(x) for x in jax.jit(lambda: router(**args, implementation="mosaic"))())


@pytest.mark.parametrize("E", [32, 64, 160, 256, 384, 512])
def test_the_kernel_chooses_as_the_reference(E, rng):
    for options in ({"top_k": 8}, {"top_k": 6, "bias": 0.0, "num_groups": 8, "kept_groups": 4, "scoring": "sigmoid"}):
        args = make_inputs(rng, 9, E, **(options | {"top_k": min(options["top_k"], E // 4)}))
        (weights, ids), expected = kernel(**args), router(**args, implementation="reference")
        np.testing.assert_array_equal(ids, expected[1])
        np.testing.assert_array_max_ulp(weights, np.asarray(expected[0]), 8)


@pytest.mark.parametrize(
    ("E", "options"),
    [
        (32, {"top_k": 8}),
        (40, {"top_k": 12, "scoring": "sigmoid", "bias": 0.0}),
        (160, {"top_k": 6, "num_groups": 8, "kept_groups": 3}),
        (256, {"top_k": 8, "scoring": "sigmoid", "bias": 0.0, "num_groups": 8, "kept_groups": 4}),
        (256, {"top_k": 6, "scoring": "sigmoid", "bias": 0.0}),
    ],
)
def test_ties_and_runs_of_one_lane_are_chosen_as_the_reference_does(E, options, rng):
    """Rows of ties, of runs that one lane holds, and of few different numbers, among which many are best of a lane.

    Logits are apart enough that scores which differ do so however they are rounded.
    """
    args = make_inputs(rng, 7, E, **options)
    rows = np.round(np.array(args["logits"]) * 8) / 8
    rows[1], rows[2], rows[3], rows[4] = np.round(rows[1]), 0, np.sort(rows[3]), np.sort(rows[4])[::-1]
    rows[5, : 2 * options["top_k"]] = 8
    args["logits"] = jnp.asarray(rows)
    if "bias" in args:
        args["bias"] = jnp.zeros(E).at[E // 2 + 1].set(jnp.inf).at[3].set(jnp.nan)
    (weights, ids), expected = kernel(**args), router(**args, implementation="reference")
    np.testing.assert_array_equal(ids, expected[1])
    np.testing.assert_array_max_ulp(weights, np.asarray(expected[0]), 8)


def test_softmax_weights_of_the_kernel_keep_the_sum_over_all_experts(rng):
    """Not renormalized (DeepSeek-V2): the first weight is 1 / sum."""
    args = make_inputs(rng, 16, 160, top_k=6, renormalize=False)
    weights, ids = kernel(**args)
    np.testing.assert_array_equal(ids, router(**args, implementation="reference")[1])
    x = np.asarray(args["logits"], np.float64)
    truth = 1 / np.exp(x - x.max(1, keepdims=True)).sum(1)
    assert np.abs(weights[:, 0] / truth - 1).max() <= 2 * EPS


def test_the_sum_over_all_experts_is_rounded_once(rng):
    e = np.exp(-rng.exponential(1.0, (512, 8, 64))).astype(np.float32)
    e[:, 0, 0] = 1
    truth = e.astype(np.float64).sum((1, 2))
    unit = np.spacing(truth.astype(np.float32))
    off = [np.abs(np.asarray(sum_(jnp.asarray(e))) - truth) / unit for sum_ in (mosaic._total, mosaic._sum)]
    assert off[0].max() <= tolerances.ROUNDED_ONCE < off[1].max(), "a plain sum would do"


def test_the_kernel_keeps_the_edges(rng):
    logits = jnp.asarray(rng.standard_normal((5, 32)), jnp.float32)
    logits = logits.at[0].set(0.0).at[1, 3].set(jnp.nan).at[2, 7].set(jnp.inf).at[3].set(-300.0).at[4].set(jnp.nan)
    for scoring in ("softmax", "sigmoid", "sqrtsoftplus"):
        for bias in (None, jnp.asarray(rng.standard_normal(32), jnp.float32).at[5].set(-jnp.inf)):
            args = {"logits": logits, "top_k": 8, "scoring": scoring, "bias": bias}
            got, expected = kernel(**args), router(**args, implementation="reference")
            np.testing.assert_array_equal(got[1], expected[1])
            assert np.isfinite(got[0]).all()
            assert np.abs(got[0] - np.asarray(expected[0])).max() <= 8 * EPS * np.abs(np.asarray(expected[0])).max()


def test_new_routings_do_not_recompile(rng):
    count = 0

    @jax.jit
    def call(logits):
        nonlocal count
        count += 1
        return router(logits, top_k=4)

    for _ in range(3):
        call(jnp.asarray(rng.standard_normal((5, 16)), jnp.float32))
    assert count == 1


def test_the_gate_adds_its_bias_in_float32():
    x, w = jnp.ones((1, 4), jnp.bfloat16), jnp.ones((2, 4), jnp.bfloat16)
    assert gate_logits(x, w, jnp.asarray([2.0**-12, 0.0])).tolist() == [[4 + 2.0**-12, 4.0]]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"logits": jnp.zeros((2, 8), jnp.bfloat16)},
            TypeError,
            "logits must have dtype float32 or float64, got bfloat16; compute them with gate_logits",
        ),
        ({"bias": jnp.zeros(7)}, ValueError, r"bias must be \[E\] with E=8 \(from logits\), got shape \(7,\)"),
        ({"bias": jnp.zeros(8, jnp.bfloat16)}, TypeError, "bias must have dtype float32, got bfloat16"),
        ({"top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
        ({"top_k": 9}, ValueError, "top_k must be at most the 8 experts of the kept groups, got top_k=9"),
        (
            {"num_groups": 4, "kept_groups": 1, "top_k": 3},
            ValueError,
            "top_k must be at most the 2 experts of the kept groups, got top_k=3",
        ),
        ({"num_groups": 3}, ValueError, "num_groups must divide the number of experts, got num_groups=3 and E=8"),
        ({"kept_groups": 2}, ValueError, "kept_groups must be at most num_groups, got kept_groups=2 and num_groups=1"),
        ({"scoring": "relu"}, ValueError, "scoring must be one of softmax, sigmoid, sqrtsoftplus, got 'relu'"),
        ({"scaling": 0.0}, ValueError, "scaling must be positive and finite or None, got 0.0"),
        ({"tokens": jnp.zeros(2, jnp.int32)}, ValueError, "table and tokens belong together; give both or neither"),
        (
            {"tokens": jnp.zeros(2, jnp.int32), "table": jnp.zeros((5, 3), jnp.int32)},
            ValueError,
            "table must have top_k=2 columns, got 3",
        ),
        (
            {"tokens": jnp.zeros(2, jnp.int32), "table": jnp.zeros((5, 2), jnp.int32), "bias": jnp.zeros(8)},
            ValueError,
            "a table chooses the experts; leave bias and num_groups out",
        ),
    ],
)
def test_messages(changes, error, message):
    with pytest.raises(error, match=message):
        router(**({"logits": jnp.zeros((2, 8)), "top_k": 2} | changes))
