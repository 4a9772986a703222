"""Every capture against our reference and kernels, one test per output and edge of the triangle."""

import ast
import functools
from collections.abc import Callable, Iterator

import pytest

from jaxattn import registry
from jaxattn.registry import MECHANISMS
from parity import cases, few, tolerances, triangle
from parity.captures import SHIPPED, Capture, load
from parity.triangle import Result

_SUITES = ("parity", "tests", "scripts", "jaxattn", "pallas_kernels")
_SIZES = {"abs", "absolute", "max", "amax", "mean", "norm", "fabs"}


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
    with pytest.raises(ValueError, match=r"no_such_op has captures but no adapter; write parity/cases/no_such_op"):
        cases.find("no_such_op")


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


def test_few_interprets_each_kernel_on_the_first_capture_that_it_supports(monkeypatch):
    loaded = load([SHIPPED])
    ours = [(m, c) for m, c in triangle.pair(MECHANISMS, loaded) if m.name in ("router", "merge_states", "eplb")]
    found = few.left_out(ours)
    kept = [(m.name, c.case) for (m, c), why in zip(ours, found, strict=True) if not why]
    routed = [c.case for m, c in ours if m.name == "router" and "table" not in c.inputs]
    first = next(c.case for m, c in ours if m.name == "merge_states")
    unsupported = {("router", "router_hash_wide")} | {(m.name, c.case) for m, c in ours if m.name == "eplb"}
    assert {("router", routed[0]), ("merge_states", first)} | unsupported == set(kept)
    assert set(found) == {"", few.REASON}
    ran = []
    monkeypatch.setattr(triangle, "compare", lambda m, c, backend, why: ran.append((c.case, bool(why))) or [])
    triangle.run([registry.find("merge_states")], loaded, "interpret", full=False)
    assert [left for _, left in ran] == [False, True]
    ran.clear()
    triangle.run([registry.find("merge_states")], loaded, "interpret")
    assert [left for _, left in ran] == [False, False]


def test_what_is_left_out_is_not_run_and_says_so(loaded):
    mechanism, capture = next((m, c) for m, c in triangle.pair(MECHANISMS, loaded) if m.name == "eplb")
    results = triangle.compare(mechanism, capture, "interpret", few.REASON)
    assert {(r.comparison == "capture_vs_reference", r.status) for r in results} == {(True, "pass"), (False, "not_run")}
    assert {r.reason for r in results if r.status == "not_run"} == {few.REASON}


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


# ---------------------------------------------------------------- tolerances stand in one table
def literal_bounds(module: ast.Module) -> Iterator[int]:
    """Lines that compare a size (abs, max, norm, ...) with a fractional number: tolerances in disguise.

    `tests/test_layout.py` finds those that are passed to a function.
    """
    for node in ast.walk(module):
        if not isinstance(node, ast.Compare) or len(node.ops) > 1 or isinstance(node.ops[0], ast.Eq | ast.NotEq):
            continue
        sides = [node.left, *node.comparators]
        bound = any(isinstance(x, ast.Constant) and isinstance(x.value, float) and 0 < x.value < 1 for x in sides)
        calls = [c.func for side in sides for c in ast.walk(side) if isinstance(c, ast.Call)]
        if bound and any(getattr(f, "attr", getattr(f, "id", "")) in _SIZES for f in calls):
            yield node.lineno


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("assert abs(a - b) < 1e-6", True),
        ("assert np.abs(a - b).max() <= 2e-3", True),
        ("assert 1e-3 > jnp.max(x)", True),
        ("ok = np.linalg.norm(a - b) / np.linalg.norm(b) < 0.01", True),
        ("assert abs(a - b) < rule.factor * eps", False),
        ("assert abs(a - b) < 3", False),
        ("assert seconds < 0.5", False),
    ],
)
def test_tolerances_in_disguise_are_recognised(line, found):
    assert bool(list(literal_bounds(ast.parse(line)))) == found


def test_no_literal_tolerance_outside_the_table():
    paths = [path for suite in _SUITES for path in sorted((triangle.ROOT / suite).rglob("*.py"))]
    lines = [
        f"{path.relative_to(triangle.ROOT)}:{line}"
        for path in paths
        if path.name != "tolerances.py"
        for line in literal_bounds(ast.parse(path.read_text("utf-8")))
    ]
    assert not lines, f"tolerances belong in parity/tolerances.py, not in {', '.join(lines)}"
