"""The parity triangle: capture, reference and kernel of one case, each judged through the float64 truth.

    capture (vLLM, torch)  -- A --  reference  -- B --  kernel,      and C: capture -- kernel

A = `capture_vs_reference`, B = `reference_vs_kernel`, C = `capture_vs_kernel`; A and B say which side to blame.
"""

import dataclasses
import datetime
import fnmatch
import functools
import os
import platform
import shlex
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jaxlib.version
import ml_dtypes
import numpy as np

from jaxattn import registry
from jaxattn._mechanism import Mechanism
from pallas_kernels import _mosaic
from parity import captures, cases, execution, few, judge, sharing, tolerances

if TYPE_CHECKING:
    from parity.captures import Capture

SCHEMA = 1
"""Version of the report's layout; raise it when a key changes its meaning."""
COMPARISONS = ("capture_vs_reference", "reference_vs_kernel", "capture_vs_kernel")
BACKENDS = ("auto", "reference", "interpret", "gpu")
STATUSES: tuple[str, ...] = ("pass", "fail", "skipped", "not_run")
ROOT = Path(__file__).resolve().parent.parent

type Progress = Callable[[int, int, str], None]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One verdict: an output of a case, one edge of the triangle."""

    mechanism: str
    capture: str
    """`directory/file` that the case was read from."""
    case: str
    """`family/case`."""
    output: str
    comparison: str
    """One of `COMPARISONS`."""
    backend: str
    """`reference`, `interpret` or `gpu`, never `auto`."""
    kernel: str | None
    """Name of the kernel that ran, None where none did."""
    status: str
    """`pass`, `fail`, `skipped` (the kernel does not support the case) or `not_run` (nobody asked it to)."""
    reason: str
    """One sentence: where, how much against what is allowed, what would have passed."""
    metrics: dict[str, Any]
    """`metrics.difference` of the two sides, plus `error`: side -> its statistics against the truth."""
    allowed: dict[str, dict[str, Any]]
    """Check -> {measured, allowed, factor, needed}; the name says whose error: `kernel.rms`."""
    headroom: float | None
    """Largest measured / allowed; above 1 fails."""
    worst: list[dict[str, Any]]
    """Up to ten {index, got, expected, truth}."""
    slices: dict[str, Any]
    """Error per slice (token, head) for a heat map; see `metrics.slice_table`."""
    repro: str
    """One shell line that repeats this comparison."""
    note: str = ""
    """Conventions and foreign roundings that explain a difference, with links; they never widen a tolerance."""
    time_us: float | None = None
    """Of the compiled kernel, None when interpreted."""
    roofline: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The result as the report stores it."""
        return asdict(self)


def run(
    mechanisms: Iterable[Mechanism],
    captures: Iterable["Capture"],
    backend: str = "auto",
    progress: Progress | None = None,
    jobs: int = 1,
    full: bool = True,
) -> list[Result]:
    """Judge every capture that belongs to one of the mechanisms, cheap cases first.

    Args:
        mechanisms: records; each answers for the captures that its `captures` patterns match.
        captures: as loaded; those that belong to no mechanism are left out.
        backend: `gpu` (compiled), `interpret` (simulated on the CPU), `reference` (kernels do not run), or `auto`,
            which is `gpu` where an sm_90a GPU is usable, else `interpret`.
        progress: called as `progress(done, total, case)` before each case and once at the end.
        jobs: processes that share the cases (most of the time goes into compiling); for mechanisms of the registry
            only. With several, the times of kernels on a GPU are taken while others run.
        full: interpret the kernels on every case, not on one each, see `parity.few`; compiled ones always run.

    Returns:
        Three results per output of each case. An exception in a case becomes a failed result.

    Raises:
        ValueError: unknown backend.
    """
    backend = resolve(backend)
    pairs = sorted(pair(mechanisms, captures), key=lambda p: few.size(p[1]))
    results: list[Result] = []
    left_out = few.left_out(pairs) if backend == "interpret" and not full else [""] * len(pairs)
    with sharing.workers(min(jobs, len(pairs))) as pool:
        waiting = [
            pool.submit(_elsewhere, m.name, c.path, c.case, backend, why).result
            if pool
            else functools.partial(compare, m, c, backend, why)
            for (m, c), why in zip(pairs, left_out, strict=True)
        ]
        for i, ((_, capture), done) in enumerate(zip(pairs, waiting, strict=True)):
            if progress is not None:
                progress(i, len(pairs), capture.name)
            results += done()
    if progress is not None:
        progress(len(pairs), len(pairs), "")
    return results


def _elsewhere(mechanism: str, path: Path, case: str, backend: str, left_out: str) -> list[Result]:
    capture = next(c for c in captures.read(path) if c.case == case)
    return compare(registry.find(mechanism), capture, backend, left_out)


def resolve(backend: str) -> str:
    """The backend that `auto` means here; other names are checked and returned.

    Raises:
        ValueError: unknown backend.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend != "auto":
        return backend
    return "interpret" if _mosaic.why_not_here() else "gpu"


def pair(mechanisms: Iterable[Mechanism], captures: Iterable["Capture"]) -> list[tuple[Mechanism, "Capture"]]:
    """Every mechanism with every capture that it answers for."""
    captures = list(captures)
    return [(m, c) for m in mechanisms for c in captures if any(fnmatch.fnmatchcase(c.name, p) for p in m.captures)]


def compare(mechanism: Mechanism, capture: "Capture", backend: str, left_out: str = "") -> list[Result]:
    """The triangle of one case: three results per captured output; exceptions become failed results.

    `left_out` says why the kernel does not run here; "" = it does.
    """
    outputs = capture.outputs
    try:
        adapter = cases.find(mechanism.name)
        outputs = expected = adapter.expected(capture)
        unknown = sorted(set(expected) - set(adapter.outputs))
        if unknown:
            raise ValueError(f"{capture.name} holds outputs that the adapter does not know: {', '.join(unknown)}")
        args = adapter.arguments(capture)
        truth = adapter.convention(capture, execution.reference(mechanism, args, wide=True))
        same = adapter.convention(capture, execution.reference(mechanism, args))
        explained = adapter.explain(capture, args)
    except Exception as e:
        return [
            _failed(mechanism, capture, backend, output, comparison, e)
            for output in outputs
            for comparison in COMPARISONS
        ]
    if left_out:
        kernel = execution.Outcome(None, "not_run", left_out)
    else:
        kernel = execution.run_kernel(mechanism, args, backend)
    if kernel.outputs is not None:
        kernel = dataclasses.replace(kernel, outputs=adapter.convention(capture, kernel.outputs))
    results = []
    for name in expected:
        sides = {"capture": expected[name], "reference": same[name]}
        if kernel.outputs is not None:
            sides["kernel"] = kernel.outputs[name]
        for comparison in COMPARISONS:
            base = _base(mechanism, capture, backend, name, comparison)
            if "kernel" in comparison and kernel.outputs is None:
                results.append(_without_verdict(base, kernel.status, kernel.reason, kernel.name))
                continue
            try:
                verdict = edge(adapter.outputs[name], comparison, truth[name], sides, yardstick(explained, name))
            except Exception as e:
                results.append(_failed(mechanism, capture, backend, name, comparison, e))
                continue
            ran = "kernel" in comparison
            results.append(
                Result(
                    **base,
                    kernel=kernel.name if ran else None,
                    status=verdict.status,
                    reason=verdict.reason,
                    metrics=verdict.metrics,
                    note=_note(adapter.outputs[name], explained, name, comparison),
                    allowed=verdict.allowed,
                    headroom=verdict.headroom,
                    worst=verdict.worst,
                    slices=verdict.slices,
                    time_us=kernel.time_us if ran else None,
                )
            )
    return results


def _note(output: cases.Output, explained: cases.Explained | None, name: str, comparison: str) -> str:
    foreign = explained.note if explained is not None and name in explained.rounded and "capture" in comparison else ""
    return "; ".join(filter(None, (output.note, foreign)))


def edge(
    output: cases.Output,
    comparison: str,
    truth: np.ndarray,
    sides: dict[str, np.ndarray],
    yardstick: judge.Yardstick | None = None,
    details: bool = True,
) -> judge.Verdict:
    """Judge one edge of the triangle.

    Args:
        output: layout and rules.
        comparison: one of `COMPARISONS`.
        truth: float64 output.
        sides: "capture", "reference" and, for the edges that need it, "kernel".
        yardstick: the capture's known roundings; None = the reference.
        details: as for `judge.judge`.
    """
    peer, _, subject = comparison.partition("_vs_")
    rule = tolerances.find(output.contract if comparison == "reference_vs_kernel" else output.rule)
    return judge.judge(
        rule,
        truth=truth,
        subject=sides[subject],
        peer=sides[peer],
        names=(subject, peer),
        yardstick=yardstick or judge.Yardstick("reference", sides["reference"], truth),
        axes=output.axes,
        slice_rank=output.slice_rank,
        details=details,
    )


def yardstick(explained: cases.Explained | None, output: str) -> judge.Yardstick | None:
    """What the capture's error of one output is held against, if its roundings are explained."""
    if explained is None or output not in explained.rounded:
        return None
    return judge.Yardstick("its known roundings", explained.rounded[output], explained.wide[output])


# ---------------------------------------------------------------- results without a judge
def _base(mechanism: Mechanism, capture: "Capture", backend: str, output: str, comparison: str) -> dict[str, Any]:
    return {
        "mechanism": mechanism.name,
        "capture": source(capture),
        "case": capture.name,
        "output": output,
        "comparison": comparison,
        "backend": backend,
        "repro": repro(capture, output, comparison, backend),
    }


def _without_verdict(base: dict[str, Any], status: str, reason: str, kernel: str | None) -> Result:
    return Result(
        **base, kernel=kernel, status=status, reason=reason, metrics={}, allowed={}, headroom=None, worst=[], slices={}
    )


def _failed(mechanism, capture, backend, output, comparison, error: Exception) -> Result:
    base = _base(mechanism, capture, backend, output, comparison)
    return _without_verdict(base, "fail", execution.message("the comparison raised", error), None)


def source(capture: "Capture") -> str:
    """`directory/file` of a capture."""
    return f"{capture.path.parent.name}/{capture.path.name}"


def label(capture: "Capture", output: str, comparison: str) -> str:
    """Name of a comparison in the test suite."""
    return f"{capture.path.parent.name}:{capture.name}:{output}:{comparison}"


def repro(capture: "Capture", output: str, comparison: str, backend: str) -> str:
    """One shell line, run from the repository's root, that repeats a comparison."""
    node = f"parity/test_parity.py::test_triangle[{label(capture, output, comparison)}]"
    line = ["python", "-m", "pytest", node, "--backend", backend]
    directory = capture.path.resolve().parent
    if directory != ROOT / "parity" / "data":
        line.append(
            f"--captures={os.path.relpath(directory, ROOT)}"
        )  # in two words pytest would look for its root there
    return shlex.join(line)


# ---------------------------------------------------------------- the whole report
def summary(results: Iterable[Result]) -> dict[str, int]:
    """How many results have each status."""
    counts: dict[str, int] = dict.fromkeys(STATUSES, 0)
    for r in results:
        counts[r.status] += 1
    return counts


def provenance(backend: str) -> dict[str, Any]:
    """What our side of the comparison is: versions, device, commit and the flags that change numbers."""
    device = jax.devices()[0]
    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "numpy": np.__version__,
        "ml_dtypes": ml_dtypes.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": device.device_kind,
        "device_platform": device.platform,
        "runtime": " ".join(str(getattr(device.client, "platform_version", "")).split()),
        "backend": resolve(backend),
        "matmul_precision": jax.config.jax_default_matmul_precision or "default; references ask for highest",
        "x64": bool(jax.config.jax_enable_x64),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "git": _git("describe", "--always", "--dirty", "--abbrev=12"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _git(*command: str) -> str | None:
    try:
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def report(results: Sequence[Result], captures: Iterable["Capture"], backend: str) -> dict[str, Any]:
    """The report as it is written to `report.json`."""
    used = {(r.capture, r.case) for r in results}
    return {
        "schema": SCHEMA,
        "provenance": {
            "ours": provenance(backend),
            "captures": {source(c): c.provenance for c in captures if (source(c), c.name) in used},
        },
        "summary": summary(results),
        "results": [r.to_json() for r in results],
    }


def group(results: Iterable[Result]) -> dict[tuple[str, str, str, str], list[Result]]:
    """Results by (mechanism, capture, case, output): the edges of one triangle each."""
    groups: dict[tuple[str, str, str, str], list[Result]] = {}
    for r in results:
        groups.setdefault((r.mechanism, r.capture, r.case, r.output), []).append(r)
    return groups


def blame(results: Iterable[Result]) -> str:
    """Which side is wrong, in one sentence, from the edges of one output's triangle."""
    edges = {r.comparison: r for r in results}
    a, b, c = (edges[name].status if name in edges else "not_run" for name in COMPARISONS)
    if "fail" not in (a, b, c):
        if a == b == c == "pass":
            return "capture, reference and kernel agree"
        return "capture and reference agree; the kernel did not run" if a == "pass" else "nothing was compared"
    if a == "fail":
        if b == "fail" and (c == "pass" or _shared(edges["capture_vs_kernel"])):
            return "the kernel agrees with the capture, the reference with neither: the reference is wrong"
        if b == "fail":
            return "all three disagree: repair the reference first, because the kernel is judged through it"
        follows = "and the kernel follows the reference" if b == "pass" else "and no kernel ran"
        follows = "but the kernel is within the allowance of both" if b == c == "pass" else follows
        return f"capture and reference disagree {follows}: suspect the reference, then the capture"
    if b == "fail":
        more = "" if c == "fail" else ", within the capture's own error but outside the tighter contract"
        return f"capture and reference agree: the kernel is wrong{more}"
    return "the kernel keeps the contract but lies further from the truth than the capture allows"


def _shared(result: Result) -> bool:
    """True if both sides of a comparison lie much closer to each other than to the truth."""
    errors = [e["rms"] for e in result.metrics.get("error", {}).values()]
    numbers = [result.metrics.get("rms"), *errors]
    if len(errors) != 2 or not all(isinstance(x, float) for x in numbers):
        return False
    return result.metrics["rms"] < tolerances.SHARED_ERROR * min(errors)
