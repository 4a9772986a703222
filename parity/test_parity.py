"""Every capture against our reference and kernels, one test per output and edge of the triangle."""

import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxattn import registry
from jaxattn.registry import MECHANISMS
from parity import cases, tolerances, triangle
from parity.captures import Capture
from parity.triangle import Result

_SUITES = ("parity", "tests", "scripts", "jaxattn", "pallas_kernels")
_LITERAL = re.compile(
    r"\b(?:atol|rtol|abs_tol|rel_tol)\s*=\s*[\d.]"
    r"|\bassert_(?:allclose|almost_equal|array_almost_equal)\w*\([^)]*,\s*\d+(?:\.\d*)?e-\d+"
    r"|\bpytest\.approx\([^)]*\b(?:abs|rel)\s*=\s*[\d.]"
    r"|\babs\([^<>\n]*\)\S*\s*<=?\s*\d+(?:\.\d*)?e-\d+"
    r"|\.max\(\)\s*<=?\s*\d+(?:\.\d*)?e-\d+"
)


@pytest.fixture(scope="session")
def compare(loaded, backend) -> Callable[[str, str], dict[tuple[str, str], Result]]:
    """`compare(mechanism, case)` -> (output, comparison) -> result; every case is computed once."""
    captures = {c.name: c for c in loaded}

    @functools.cache
    def results(mechanism: str, case: str):
        found = triangle.compare(registry.find(mechanism), captures[case], backend)
        return {(r.output, r.comparison): r for r in found}

    return results


def test_triangle(edge: tuple[str, str, str, str] | str, request):
    if isinstance(edge, str):
        pytest.fail(edge, pytrace=False)
    mechanism, case, output, comparison = edge
    result = request.getfixturevalue("compare")(mechanism, case)[output, comparison]
    if result.status == "fail":
        note = f"\nnote: {result.note}" if result.note else ""
        pytest.fail(f"{result.reason}{note}\nrepeat: {result.repro}", pytrace=False)
    if result.status != "pass":
        pytest.skip(f"{result.status}: {result.reason}")


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda m: m.name)
def test_a_mechanism_with_captures_has_an_adapter_with_known_rules(mechanism):
    if not mechanism.captures:
        pytest.skip("the mechanism names no captures")
    for output in cases.find(mechanism.name).outputs.values():
        tolerances.find(output.rule)
        tolerances.find(output.contract)


def test_an_adapter_is_asked_for_by_name():
    with pytest.raises(ValueError, match=r"merge_states has captures but no adapter; write parity/cases/merge_states"):
        cases.find("merge_states")


def test_a_result_of_a_broken_case_is_a_failure(loaded):
    mechanism, capture = triangle.pair(MECHANISMS, loaded)[0]
    broken = Capture(
        family=capture.family,
        case=capture.case,
        params={},
        inputs=capture.inputs,
        outputs=capture.outputs,
        provenance=capture.provenance,
        path=capture.path,
    )
    results = triangle.compare(mechanism, broken, "reference")
    assert {r.status for r in results} == {"fail"}
    assert results[0].reason == "the comparison raised KeyError: 'scale'"
    assert len(results) == 3 * len(capture.outputs)


def test_without_a_kernel_nothing_is_a_pass(loaded):
    mechanism, capture = triangle.pair(MECHANISMS, loaded)[0]
    by_edge = {r.comparison: r for r in triangle.compare(mechanism, capture, "reference")}
    assert by_edge["capture_vs_reference"].status == "pass"
    for comparison in ("reference_vs_kernel", "capture_vs_kernel"):
        assert by_edge[comparison].status == "not_run"
        assert by_edge[comparison].reason == "backend 'reference' runs no kernel"


def test_an_unknown_backend_is_named():
    with pytest.raises(ValueError, match=r"backend must be one of auto, reference, interpret, gpu, got 'tpu'"):
        triangle.run(MECHANISMS, [], "tpu")


@pytest.mark.parametrize(
    ("a", "b", "c", "sentence"),
    [
        ("pass", "pass", "pass", "capture, reference and kernel agree"),
        ("pass", "not_run", "not_run", "capture and reference agree; the kernel did not run"),
        ("skipped", "skipped", "skipped", "nothing was compared"),
        ("pass", "fail", "fail", "capture and reference agree: the kernel is wrong"),
        ("pass", "fail", "pass", "capture and reference agree: the kernel is wrong, within the capture's own error"),
        ("pass", "pass", "fail", "the kernel keeps the contract but lies further from the truth"),
        ("fail", "pass", "fail", "capture and reference disagree and the kernel follows the reference"),
        ("fail", "skipped", "skipped", "capture and reference disagree and no kernel ran"),
        ("fail", "fail", "pass", "the kernel agrees with the capture, the reference with neither"),
        ("fail", "fail", "fail", "all three disagree"),
    ],
)
def test_blame(a, b, c, sentence):
    results = [_result(comparison, status) for comparison, status in zip(triangle.COMPARISONS, (a, b, c), strict=True)]
    assert triangle.blame(results).startswith(sentence)


def _result(comparison: str, status: str) -> Result:
    return Result(
        mechanism="m",
        capture="c",
        case="f/c",
        output="o",
        comparison=comparison,
        backend="reference",
        kernel=None,
        status=status,
        reason="",
        metrics={},
        allowed={},
        headroom=None,
        worst=[],
        slices={},
        repro="",
    )


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("np.testing.assert_allclose(a, b, rtol=1e-3)", True),
        ("np.testing.assert_allclose(a, b, 1e-3)", True),
        ("assert abs(a - b) < 1e-6", True),
        ("assert np.abs(a - b).max() <= 2e-3", True),
        ("assert x == pytest.approx(y, rel=0.1)", True),
        ("np.testing.assert_allclose(a, b, rtol=rule.factor)", False),
        ("np.testing.assert_array_equal(a, b)", False),
        ("if abs(x) < limit:", False),
    ],
)
def test_literal_tolerances_are_recognised(line, found):
    assert bool(_LITERAL.search(line)) == found


def test_no_literal_tolerance_outside_the_table():
    root = Path(triangle.ROOT)
    own = {root / "parity" / "tolerances.py", Path(__file__)}
    lines = [
        f"{path.relative_to(root)}:{number}: {line.strip()}"
        for suite in _SUITES
        for path in sorted((root / suite).rglob("*.py"))
        if path not in own
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if _LITERAL.search(line)
    ]
    assert not lines, "tolerances belong in parity/tolerances.py:\n" + "\n".join(lines)
