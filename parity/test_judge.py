"""The judge on hand-made arrays: what one number misses, and what a verdict says."""

import json

import ml_dtypes
import numpy as np
import pytest

from jaxattn.ops import mla
from parity import metrics, tolerances
from parity.judge import Yardstick, judge
from parity.mutations import on_host
from parity.twins import mla as twin

DEFAULT, EXACT, LSE, CONTRACT, CODES = (tolerances.RULES[n] for n in ("default", "exact", "lse", "contract", "codes"))
AXES = ("token", "head", "dim")


@pytest.fixture
def truth():
    return np.random.default_rng(0).standard_normal((256, 16, 64))


def bf16(x):
    return x.astype(ml_dtypes.bfloat16)


def verdict(rule, truth, subject, peer, **kwargs):
    return judge(
        rule, truth=truth, subject=subject, peer=peer, names=("kernel", "capture"), axes=AXES, slice_rank=2, **kwargs
    )


@pytest.mark.parametrize("rule", [DEFAULT, CONTRACT], ids=lambda r: r.name)
def test_a_port_with_one_rounding_passes(rule, truth):
    noisy = truth + 1e-3 * np.random.default_rng(1).standard_normal(truth.shape) * np.abs(truth)
    v = verdict(rule, truth, bf16(noisy), bf16(truth))
    assert v.passed and 0 < v.headroom < 1, v.reason


def test_a_lucky_peer_without_any_error_leaves_room_for_one_rounding():
    exact = np.ones((4, 2, 64))
    once = np.nextafter(bf16(exact), bf16(2 * exact))
    once[:, :, ::2] = bf16(exact)[:, :, ::2]
    off_by_one = verdict(DEFAULT, exact, once, bf16(exact))
    assert not off_by_one.passed  # an ulp everywhere is two roundings, not one
    half = exact * (1 + float(ml_dtypes.finfo(ml_dtypes.bfloat16).eps) / 4)
    assert verdict(DEFAULT, half, bf16(half), bf16(half)).passed


@pytest.mark.parametrize("rule", [DEFAULT, CONTRACT], ids=lambda r: r.name)
def test_one_zero_row_of_4096_fails_and_is_named(rule, truth):
    wrong = bf16(truth)
    wrong[17, 3] = 0
    v = verdict(rule, truth, wrong, bf16(truth))
    assert metrics.difference(wrong, bf16(truth))["similarity_distance"] < 1e-3  # what DeepSeek's test accepts
    assert not v.passed
    assert "kernel: relative RMS error of the worst slice 1 against the truth" in v.reason
    assert "worst slice (token 17, head 3), largest at (token 17, head 3, dim " in v.reason
    assert v.allowed["kernel.slice"]["needed"] > 100


@pytest.mark.parametrize("rule", [DEFAULT, CONTRACT], ids=lambda r: r.name)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_a_1_percent_scale_error_fails_although_its_correlation_is_perfect(rule, dtype, truth):
    wrong = (1.01 * truth).astype(dtype)
    assert np.corrcoef(wrong.astype(float).ravel(), truth.ravel())[0, 1] > 1 - 1e-5
    assert not verdict(rule, truth, wrong, truth.astype(dtype)).passed


def test_a_single_wrong_element_fails(truth):
    wrong = bf16(truth)
    wrong[200, 5, 9] += 1
    v = verdict(DEFAULT, truth, wrong, bf16(truth))
    assert not v.passed and v.worst[0]["index"] == [200, 5, 9]
    assert v.worst[0]["got"] - v.worst[0]["expected"] > 0.5


def test_one_wrong_head_fails_where_each_of_its_rows_would_pass(truth):
    peer, subject = bf16(truth), bf16(truth).copy()
    peer[0, 0] = bf16(1.03 * truth[0, 0])  # one bad row of the peer widens what a single row may do
    subject[:, 7] = bf16(1.02 * truth[:, 7])
    v = verdict(DEFAULT, truth, subject, peer, yardstick=Yardstick("itself", peer, truth))
    assert not v.passed and "head 7" in v.reason


def test_a_capture_that_contradicts_the_reference_fails_instead_of_widening(truth):
    capture, port = bf16(1.01 * truth), bf16(truth)
    yardstick = Yardstick("reference", port, truth)
    v = verdict(DEFAULT, truth, port, capture, yardstick=yardstick)
    assert not v.passed and v.reason.startswith("capture: ")
    assert "2 x reference's" in v.reason
    assert verdict(CONTRACT, truth, port, capture).passed  # one-sided: this is why captures are judged by two


def test_known_foreign_roundings_replace_the_reference_as_yardstick(truth):
    rounded = np.round(truth * 64) / 64
    coarse = Yardstick("its known roundings", rounded, truth)
    assert not verdict(DEFAULT, truth, bf16(truth), bf16(rounded)).passed
    assert verdict(DEFAULT, truth, bf16(truth), bf16(rounded), yardstick=coarse).passed


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["kernel", "capture"])
def test_one_non_finite_element_fails_on_either_side(bad, side, truth):
    sides = {"kernel": bf16(truth), "capture": bf16(truth)}
    sides[side][3, 1, 17] = bad
    v = verdict(DEFAULT, truth, sides["kernel"], sides["capture"])
    kind = "nan" if np.isnan(bad) else "inf" if bad > 0 else "-inf"
    assert v.reason.startswith(f"{side}: {kind} disagrees with the truth in 1 element")
    assert f"(token 3, head 1, dim 17): got {kind}" in v.reason
    json.dumps([v.metrics, v.allowed, v.worst, v.slices], allow_nan=False)


def test_equal_infinities_are_equal():
    lse = np.array([[1.0, -np.inf], [2.0, 3.0]])
    v = judge(
        LSE,
        truth=lse,
        subject=lse.astype(np.float32),
        peer=lse.astype(np.float32),
        axes=("token", "head"),
        slice_rank=2,
    )
    assert v.passed, v.reason


def test_zero_rows_must_be_zero():
    truth = np.ones((3, 2, 64))
    truth[1] = 0
    wrong = bf16(truth)
    wrong[1, 1, 5] = 1e-30
    v = verdict(DEFAULT, truth, wrong, bf16(truth))
    assert v.reason == "kernel: the truth is zero throughout (token 1, head 1), the output is not (1 such slices)"


@pytest.mark.parametrize("error", [1e-4, -1e-4, 1e-5])
def test_lse_is_judged_absolutely(error):
    truth = np.random.default_rng(0).uniform(0, 8, (64, 8))
    right = truth.astype(np.float32)
    v = judge(LSE, truth=truth, subject=right + np.float32(error), peer=right, axes=AXES[:2], slice_rank=2)
    assert not v.passed
    base_2 = (truth / np.log(2)).astype(np.float32)
    assert not judge(LSE, truth=truth, subject=base_2, peer=right, axes=AXES[:2], slice_rank=2).passed


def test_exact_compares_bits():
    codes = np.arange(12, dtype=np.int8).reshape(3, 4)
    assert judge(EXACT, truth=codes, subject=codes, peer=codes.copy()).passed
    wrong = codes.copy()
    wrong[1, 2] = -1
    v = judge(EXACT, truth=codes, subject=wrong, peer=codes, axes=("row", "byte"))
    assert v.reason == "1 of 12 elements differ in their bits, first at (row 1, byte 2): subject -1, peer 6"
    zero = np.zeros(2, np.float32)
    assert not judge(EXACT, truth=zero, subject=-zero, peer=zero).passed


@pytest.fixture
def unrounded():
    return np.random.default_rng(3).standard_normal((64, 128)) * 100


def e4m3(x):
    return np.clip(x, -448, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)


def codes_verdict(unrounded, subject, peer):
    return judge(
        CODES, truth=unrounded, subject=subject, peer=peer, names=("kernel", "reference"), axes=("row", "column")
    )


@pytest.mark.parametrize("gain", [1.01, 0.99, 1 + 1e-4])
def test_codes_of_numbers_that_are_all_a_little_too_large_fail(gain, unrounded):
    v = codes_verdict(unrounded, e4m3(gain * unrounded), e4m3(unrounded))
    assert not v.passed
    assert "kernel: largest error that explains a code" in v.reason and "would pass at factor no factor" in v.reason
    assert codes_verdict(unrounded, e4m3(unrounded * (1 + 2**-22)), e4m3(unrounded)).passed


def test_codes_after_the_same_16_bit_rounding_pass_and_others_do_not(unrounded):
    alike = e4m3(bf16(unrounded).astype(np.float64))
    assert codes_verdict(unrounded, alike, alike).passed
    v = codes_verdict(unrounded, e4m3(unrounded * 1.006), alike)
    assert not v.passed and v.reason.startswith("kernel: mean error that explains a code")


def test_a_code_may_be_one_step_off_at_a_border_only():
    truth = np.array([[17.0, 16.9, -17.0 * (1 + 2**-22), 500.0, 0.0]])  # 17 lies between the codes 16 and 18
    right, other = e4m3(truth), e4m3(np.array([[18.0, 16.0, -16.0, 448.0, 0.0]]))
    assert codes_verdict(truth, other, right).passed
    for at, code in ((0, 20), (1, 18), (3, 416), (4, 2.0**-9)):
        wrong = right.copy()
        wrong[0, at] = code
        assert not codes_verdict(truth, wrong, right).passed, (at, code)


def test_codes_of_zero_keep_their_sign_and_integers_have_none():
    truth = np.array([[-1e-9, 1e-9]])
    right = e4m3(truth)
    assert codes_verdict(truth, right, right).passed
    v = codes_verdict(truth, np.abs(right), right)
    assert (
        v.reason == "kernel: zero has the wrong sign in 1 elements, first at (row 0, column 0): got 0.0, truth -1e-09"
    )
    whole = np.array([[0, 0]], np.int8)
    assert codes_verdict(truth, whole, whole).passed
    half = np.array([[2.5, 200.0]])
    assert codes_verdict(half, np.array([[3, 127]], np.int8), np.array([[2, 127]], np.int8)).passed
    assert not codes_verdict(half, np.array([[4, 127]], np.int8), np.array([[2, 127]], np.int8)).passed


def bytes_verdict(subject, peer, rule="contract_codes"):
    rule, axes = tolerances.find(rule), ("page", "byte")
    return judge(rule, truth=np.zeros(peer.shape), subject=subject, peer=peer, names=("kernel", "reference"), axes=axes)


def entries(x, gain=1.0):
    """Entries of 448 e4m3 codes and 64 bfloat16 numbers, as bytes."""
    codes, rotated = (gain * x[:, part] for part in (slice(448), slice(448, None)))
    return np.concatenate([e4m3(codes).view(np.uint8), bf16(rotated).view(np.uint8)], 1)


def test_packed_bytes_behind_float32_arithmetic_may_differ_by_a_step_here_and_there():
    rng = np.random.default_rng(4)
    x = 50 * rng.standard_normal((1024, 512))
    right = entries(x)
    close = entries(x * (1 + tolerances.CHAIN * rng.uniform(-1, 1, x.shape)))
    v = bytes_verdict(close, right)
    assert (close != right).any() and v.passed and 0 < v.headroom < 1, v.reason
    assert not bytes_verdict(close, right, "exact").passed
    for gain in (1.01, 1 + 1e-4, 1 - 1e-4):
        assert not bytes_verdict(entries(x, gain), right).passed, gain


@pytest.mark.parametrize(("was", "now"), [(35, 37), (0, 128), (100, 108), (100, 0)])
def test_a_packed_byte_that_is_more_than_a_step_off_fails(was, now):
    right = np.full((8, 64), was, np.uint8)
    wrong = right.copy()
    wrong[2, 5] = now
    v = bytes_verdict(wrong, right)
    assert v.reason == (
        "1 of 512 elements differ in their bits, 1 by more than a step, first at (page 2, byte 5): "
        f"kernel {now}, reference {was}"
    )


def test_a_step_in_either_half_of_a_byte_or_with_a_carry_passes_once_but_not_everywhere():
    right = np.array([[0x34, 0x34, 0xFF, 0x3F]] * 16384, np.uint8)
    other = right.copy()
    other[7] = (0x35, 0x24, 0x00, 0x40)
    assert bytes_verdict(other, right).passed
    other[:, 0] = 0x35
    v = bytes_verdict(other, right)
    assert v.reason.startswith("16387 of 65536 elements differ in their bits, 10 may differ by a step, first at (")
    few = bytes_verdict(other[:8], right[:8])  # far less than one is expected
    assert not few.passed and "0 may differ by a step" in few.reason


def test_codes_behind_fp8_sums_may_be_neighbours_and_faults_show():
    """Halves that are off by 2^-11.3 of their RMS; NaN is next to nothing."""
    rng = np.random.default_rng(5)
    halves, noise = rng.standard_normal((2, 64, 256)), 2**-11.3 * rng.standard_normal((2, 64, 256))

    def codes(h, gain=1.0):
        gate, up = bf16(h).astype(np.float64)
        return e4m3(gain * 64 * gate / (1 + np.exp(-gate)) * up)

    right = codes(halves)
    v = bytes_verdict(codes(halves + noise), right, "contract_fp8_codes")
    assert v.passed and v.headroom > 0, v.reason
    for wrong in (codes(halves, 1.01), codes(halves * 1.01), codes(halves[::-1])):
        assert not bytes_verdict(wrong, right, "contract_fp8_codes").passed
    top = np.full((8, 64), 448, right.dtype)
    nan = top.copy()
    nan[0, 0] = np.nan
    assert "1 by more than a step" in bytes_verdict(nan, top, "contract_fp8_codes").reason


@pytest.mark.parametrize("expected", [1.0, 2.9, 23.0, 2000.0])
def test_counts_exceed_what_is_allowed_one_time_in_ten_thousand(expected):
    counts = np.random.default_rng(6).poisson(expected, 400_000)
    bound = tolerances.most(expected)
    per_ten_thousand = 10_000 * (counts > bound).mean(), 10_000 * (counts >= bound).mean()
    assert round(per_ten_thousand[0]) <= 1 <= round(per_ten_thousand[1])
    assert tolerances.most(0.99) == 0


def test_shapes_dtypes_and_emptiness_are_failures(truth):
    x = bf16(truth)
    assert verdict(DEFAULT, truth, x[:1], x).reason == "kernel has shape (1, 16, 64), the truth (256, 16, 64)"
    assert verdict(DEFAULT, truth, x.astype(np.float32), x).reason == "kernel has dtype float32, capture bfloat16"
    assert not verdict(DEFAULT, truth[:0], x[:0], x[:0]).passed


def test_needed_is_the_factor_that_would_pass(truth):
    wrong = bf16(1.01 * truth)
    v = verdict(DEFAULT, truth, wrong, bf16(truth))
    needed = max(c["needed"] for name, c in v.allowed.items() if name.startswith("kernel"))
    for factor, passes in ((needed * 1.001, True), (needed * 0.999, False)):
        checks = tuple(type(c)(**{**vars(c), "factor": factor}) for c in DEFAULT.checks)
        rule = tolerances.Rule(**{**vars(DEFAULT), "checks": checks, "two_sided": False})
        assert verdict(rule, truth, wrong, bf16(truth)).passed == passes


def close(x: float, y: float) -> bool:
    """Equal up to the order of a few float64 operations."""
    return abs(x - y) <= tolerances.FLOAT64 * max(1, abs(y))


def test_metrics_of_a_hand_made_pair():
    expected = np.array([1, -2, 4, 0], np.float32)
    got = np.array([1, -2.5, 4, 0], np.float32)
    m = metrics.difference(got, expected)
    assert (m["mismatches"], m["elements"], m["finite"]) == (1, 4, 4)
    assert m["abs"]["max"] == 0.5 and m["rel"]["max"] == 0.25 and m["rms"] == 0.25
    assert close(m["sqnr_db"], 10 * np.log10(21 / 0.25))
    assert m["bias"] == {"mean": -0.125, "fraction_below": 1.0}
    assert close(m["cosine_distance"], 1 - 22 / np.sqrt(21 * 23.25))
    assert close(m["similarity_distance"], 1 - 44 / 44.25)
    assert m["ulp"] == {"0": 3, "1": 0, "2": 0, "<=4": 0, "<=16": 0, "more": 1}


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32, np.float64, ml_dtypes.float8_e4m3fn])
def test_ulp_steps_count_representable_numbers(dtype):
    zero, one = np.zeros(1, dtype), np.ones(1, dtype)
    up = np.nextafter(one, 2 * one)
    assert metrics.ulp_distance(up, one) == 1
    assert metrics.ulp_distance(-one, -up) == 1
    assert metrics.ulp_distance(-zero, zero) == 0
    tiny = np.nextafter(zero, one)
    assert metrics.ulp_distance(tiny, -tiny) == 2
    assert metrics.ulp(one, dtype) == float(ml_dtypes.finfo(dtype).eps)
    assert metrics.ulp(zero, dtype) == float(tiny[0])


def test_ulp_histogram_has_every_bin():
    one = np.ones(6, np.float32)
    steps = np.array([0, 1, 2, 4, 16, 17])
    got = (one.view(np.int32) + steps.astype(np.int32)).view(np.float32)
    assert list(metrics.ulp_histogram(got, one).values()) == [1] * 6


def test_the_expected_rounding_is_that_of_uniform_errors(truth):
    x = truth.ravel()[None]
    measured = metrics.error(bf16(x), x, ("row", "dim"), 1)
    predicted = metrics.rounding(x, ml_dtypes.bfloat16, 1)
    scatter = 4 / np.sqrt(x.size)  # of an average over independent samples
    for name in ("rms", "mean", "slice"):
        assert abs(getattr(measured, name) / predicted[name] - 1) <= scatter
    assert measured.max <= predicted["max"] and measured.p99 <= predicted["p99"]


def test_heat_maps_are_bounded_and_keep_the_worst(truth):
    wide = np.ones((1000, 3, 8))
    wrong = bf16(wide)
    wrong[777, 2] = 2
    table = metrics.slice_table(wrong, bf16(wide), wide, AXES, 2, relative=True)
    assert table["shape"] == [1000, 3] and table["block"] == [16, 1] and len(table["subject"]) == 63
    assert table["subject"][777 // 16][2] == 1 and np.max(table["peer"]) == 0


def test_every_rule_says_where_it_comes_from():
    for rule in tolerances.RULES.values():
        assert rule.bitwise != bool(rule.checks)
        assert len(rule.derivation.split()) > 10 and rule.date and rule.margin
    with pytest.raises(ValueError, match=r"unknown tolerance rule 'tight'; known: default, exact, lse"):
        tolerances.find("tight")


def test_latent_scores_summed_as_tensor_cores_do_need_the_rule_of_their_length():
    """576 products cut off every 16; a scale that is wrong in the sixth digit is not covered by it."""
    case = next(c for c in mla.MECHANISM.cases if c.name == "B3-H16-lse")
    args = on_host(mla.MECHANISM.prepare(**case.make(np.random.default_rng(0))))
    truth, peer = twin.run(args, True)["lse"], twin.run(args, False)["lse"]
    cut = twin.run(args, False, twin.Switches(tensor_core=True))["lse"]
    wrong = twin.run(args, False, twin.Switches(scale=1 + 1e-5))["lse"]

    def passes(name, subject):
        rule = tolerances.find(name)
        return judge(rule, truth=truth, subject=subject, peer=peer, axes=AXES[:2], slice_rank=2).passed

    assert passes("contract_lse_latent", cut) and not passes("contract_lse", cut)
    assert not passes("contract_lse_latent", wrong)
