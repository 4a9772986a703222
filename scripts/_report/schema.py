"""The report as data: built from the judge's results, written and read as strict JSON, grouped for the views."""

import dataclasses
import gzip
import json
import math
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from parity.tolerances import SHARED_ERROR

SCHEMA = "jaxattn-diff-report/1"
STATUSES = ("pass", "fail", "skipped", "not_run")
LABELS = dict(zip(STATUSES, ("pass", "fail", "skipped", "not run"), strict=True))
COMPARISONS = ("capture_vs_reference", "reference_vs_kernel", "capture_vs_kernel")
MODEL_COMPARISONS = ("teacher_forced", "free_running")
"""Of a bisection: our module on golden inputs, and in its own run, both against the golden tensor."""
DASH, TIMES = "\N{EN DASH}", "\N{MULTIPLICATION SIGN}"
EDGE_NAMES = {c: c.replace("_vs_", f" {DASH} ").capitalize() for c in COMPARISONS}
EDGE_NAMES |= {"teacher_forced": "Teacher-forced", "free_running": "Free-running"}
FIELDS = ("mechanism", "capture", "case", "output", "comparison", "backend", "status", "reason", "metrics", "allowed")
FIELDS += ("headroom", "worst", "slices", "repro", "time_us")

_GZIP = b"\x1f\x8b"
_DECIDES = ("fail", "pass", "skipped", "not_run")

type Result = dict[str, Any]
type Report = dict[str, Any]
type Key = tuple[str, str, str, str, str]


class ReportError(ValueError):
    """A report file that cannot be read; the message says which and why."""


def complete(
    base: Mapping[str, Any],
    *,
    sentences: Mapping[tuple[str, str, str, str], str],
    mutations: Mapping[str, Any],
    mechanisms: Iterable[str],
    cases: Mapping[str, Mapping[str, Any]],
    unclaimed: Iterable[str] = (),
    model: Mapping[str, Any] | None = None,
) -> Report:
    """The whole report as JSON values.

    Args:
        base: what `parity.triangle.report` gives: `provenance` (`ours`, `captures`) and `results` with `FIELDS`.
        sentences: (mechanism, capture, case, output) -> which side is wrong.
        mutations: outcome of the judge's mutation suite, see `docs/report.md`.
        mechanisms: every mechanism that was asked for, also those without a result.
        cases: case -> its captured parameters, the kernel that ran among them.
        unclaimed: captured cases that no mechanism answers for.
        model: what a bisection found, see `docs/bisect.md`; its results compare `MODEL_COMPARISONS`.

    Raises:
        ReportError: a result lacks a field or has an unknown status or comparison, or two results have one key.
    """
    rows = [plain(r) for r in base["results"]]
    verdicts = [
        dict(zip(("mechanism", "capture", "case", "output", "sentence"), (*k, text), strict=True))
        for k, text in sentences.items()
    ]
    report = {
        "schema": SCHEMA,
        "provenance": plain(base["provenance"]),
        "cases": plain(cases),
        "summary": {},
        "results": rows,
        "verdicts": verdicts,
        "mutations": plain(mutations),
        "coverage": {"mechanisms": list(mechanisms), "unclaimed": sorted(unclaimed)},
    }
    if model is not None:
        report["model"] = plain(model)
    _check(report, "results")
    report["summary"] = summary(rows)
    return report


def summary(results: Iterable[Result]) -> dict[str, int]:
    """Number of results in each status."""
    counts = Counter(r["status"] for r in results)
    return {s: counts[s] for s in STATUSES}


def exit_code(report: Report) -> int:
    """0 all compared results pass, 1 a failure, a surviving mutant or a failed end-to-end check, 2 nothing compared."""
    counts = report["summary"]
    end_to_end = (report.get("model") or {}).get("end_to_end") or {}
    if counts["fail"] or survivors(report) or any(c["status"] == "fail" for c in end_to_end.get("checks", ())):
        return 1
    return 0 if counts["pass"] else 2


def comparisons(report: Report) -> tuple[str, ...]:
    """The comparisons that an output of this report may have."""
    return MODEL_COMPARISONS if "model" in report else COMPARISONS


def sides(comparison: str) -> tuple[str, str]:
    """Names of the peer and of the subject that is judged."""
    if comparison in MODEL_COMPARISONS:
        return "self-noise", "ours"
    peer, _, subject = comparison.partition("_vs_")
    return peer, subject


def survivors(report: Report) -> list[Result]:
    """Mutants that the judge let pass."""
    return [m for m in report["mutations"].get("mutants", []) if not m["killed"]]


def mutations(mutants: list[Result], untested: Mapping[str, str] | None = None) -> Result:
    """The mutation suite's outcome: planted, killed, rate, each mutant as `parity.mutations` describes it.

    Args:
        mutants: of all mechanisms.
        untested: mechanism -> why no fault was planted in it.
    """
    killed = sum(m["killed"] for m in mutants)
    rate = killed / len(mutants) if mutants else None
    return {
        "planted": len(mutants),
        "killed": killed,
        "rate": rate,
        "untested": dict(untested or {}),
        "mutants": mutants,
    }


def mutant_name(mutant: Result) -> str:
    """`mechanism / fault in place`."""
    return f"{mutant['mechanism']} / {mutant['fault']} in the {mutant['planted']}"


def kills(report: Report) -> tuple[int, int]:
    """Planted faults that the judge caught, and all that it was shown."""
    found = report["mutations"]
    return found.get("killed", 0), found.get("planted", 0)


def untested(report: Report) -> dict[str, str]:
    """Mechanism -> why no fault was planted in it."""
    return report["mutations"].get("untested", {})


def untested_by_reason(report: Report) -> dict[str, list[str]]:
    """Why no fault was planted -> the mechanisms that this is true of."""
    reasons: dict[str, list[str]] = {}
    for name, why in untested(report).items():
        reasons.setdefault(why, []).append(name)
    return reasons


def key(result: Result) -> Key:
    """What identifies a result across reports; the backend is left out so that runs on CPU and GPU can be compared."""
    return tuple(result[f] for f in ("mechanism", "capture", "case", "output", "comparison"))


def write(report: Report, path: Path) -> None:
    """Write strict JSON (no NaN or Infinity literals), replacing the file only when it is complete."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(report, indent=1, allow_nan=False, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read(path: Path) -> Report:
    """The report in a file, which may be packed by gzip.

    Raises:
        ReportError: the file is missing, no JSON, of another schema, or a result lacks a field.
    """
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data.startswith(_GZIP) else data).decode()
        report = json.loads(text, parse_constant=_no_constant)
    except (OSError, EOFError, zlib.error) as e:
        why = getattr(e, "strerror", None) or e
        raise ReportError(f"{path}: a report.json is required, and it cannot be read: {why}") from e
    except ValueError as e:
        raise ReportError(f"{path}: a report.json is required, and this is no strict JSON: {e}") from e
    found = report.get("schema") if isinstance(report, dict) else None
    if found != SCHEMA:
        raise ReportError(f"{path}: schema {SCHEMA!r} is required, found {found!r}; write the report again")
    _check(report, str(path))
    return report


def plain(value: Any) -> Any:
    """JSON values only: numpy scalars and arrays unpacked, tuples as lists, non-finite numbers as "nan", "inf"."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return str(value)


def number(value: Any) -> float | None:
    """A JSON value as a number, `inf` and `nan` strings included; None if it is none."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


@dataclasses.dataclass(frozen=True)
class Output:
    """One output of one case with its comparisons; what a table row and a drill-down page show."""

    mechanism: str
    capture: str
    case: str
    name: str
    edges: dict[str, Result]
    """Comparison -> result, in the order of `COMPARISONS`."""
    sentence: str
    """Which side is wrong."""
    kinds: tuple[str, ...] = COMPARISONS

    @property
    def label(self) -> str:
        """`family/case / output`."""
        return f"{self.case} / {self.name}"

    @property
    def statuses(self) -> dict[str, str]:
        """Comparison -> status; a comparison without a result was not run."""
        return {c: self.edges[c]["status"] if c in self.edges else "not_run" for c in self.kinds}

    @property
    def status(self) -> str:
        """The status that decides: a failure first, then a pass, then skipped, then not run."""
        return next(s for s in _DECIDES if s in self.statuses.values())

    @property
    def tightest(self) -> float | None:
        """Largest measured / allowed, of the failing edges if any fails; None if an edge that decides has no number."""
        deciding = [r for r in self.edges.values() if r["status"] == self.status]
        shares = [used(r) for r in deciding]
        known = [share for share in shares if share is not None]
        return max(known) if known and len(known) == len(shares) else None

    @property
    def said(self) -> str:
        """`sentence` with a capital and a full stop."""
        return f"{self.sentence[:1].upper()}{self.sentence[1:].rstrip('.')}." if self.sentence else ""

    @property
    def blamed(self) -> tuple[str, ...]:
        """Corners of the triangle that the failing edges point at."""
        if self.kinds is MODEL_COMPARISONS:
            return ("ours",) * ("fail" in self.statuses.values())
        a, b, c = (s == "fail" for s in self.statuses.values())
        agree = self.statuses["capture_vs_kernel"] == "pass" or (c and _close(self.edges["capture_vs_kernel"]))
        kernel = (b and not (a and agree)) or (c and not a)
        return ("reference",) * a + ("kernel",) * kernel


def _close(result: Result) -> bool:
    """True if both sides of a comparison lie much closer to each other than to the truth: they share an error."""
    errors = [number(e["rms"]) for e in result["metrics"].get("error", {}).values()]
    apart = number(result["metrics"].get("rms"))
    if apart is None or len(errors) != 2 or None in errors:
        return False
    return apart < SHARED_ERROR * min(e for e in errors if e is not None)


def outputs(report: Report) -> list[Output]:
    """The report's outputs, failures first, then in the order of the results."""
    groups: dict[tuple, dict[str, Result]] = {}
    for r in report["results"]:
        groups.setdefault(key(r)[:4], {})[r["comparison"]] = r
    said = {key({**v, "comparison": ""})[:4]: v["sentence"] for v in report["verdicts"]}
    kinds = comparisons(report)
    found = [
        Output(*k, {c: edges[c] for c in kinds if c in edges}, said.get(k, ""), kinds) for k, edges in groups.items()
    ]
    return sorted(found, key=lambda o: _DECIDES.index(o.status))


def used(result: Result) -> float | None:
    """Largest measured / allowed of a compared result: 1 is the limit, inf where none is; None if not measured."""
    if result["status"] not in ("pass", "fail"):
        return None
    if result["headroom"] is None and result["allowed"]:
        return math.inf
    return number(result["headroom"])


def percent(share: float | None) -> str:
    """A share for people: 42 %, 0.3 %, 12 times; never 100 % for more than that."""
    if share is None:
        return DASH
    if not math.isfinite(share):
        return "∞"
    if share >= 10:
        return f"{share:,.0f}{TIMES}"
    value = 100 * share
    if 100 < value < 100.5:
        return "> 100 %"
    return f"{value:.0f} %" if value >= 9.95 or value == 0 else f"{value:.1f} %" if value >= 0.1 else "< 0.1 %"


def coverage(report: Report) -> list[dict[str, Any]]:
    """One line per mechanism: cases, outputs, dtypes and results by status."""
    lines = []
    for name in dict.fromkeys([*report["coverage"]["mechanisms"], *(r["mechanism"] for r in report["results"])]):
        rows = [r for r in report["results"] if r["mechanism"] == name]
        dtypes = sorted({str(r["metrics"]["dtype"]) for r in rows if r["metrics"].get("dtype")})
        lines.append(
            {
                "mechanism": name,
                "cases": len({(r["capture"], r["case"]) for r in rows}),
                "outputs": len({key(r)[:4] for r in rows}),
                "dtypes": dtypes,
                **summary(rows),
            }
        )
    return lines


def _check(report: Report, where: str) -> None:
    rows = report.get("results")
    for field, kind in (
        ("results", list),
        ("verdicts", list),
        ("mutations", dict),
        ("coverage", dict),
        ("cases", dict),
    ):
        if not isinstance(report.get(field), kind):
            raise ReportError(f"{where}: {field!r} must be a {kind.__name__}, found {type(report.get(field)).__name__}")
    seen = set()
    for i, r in enumerate(rows):
        missing = [f for f in FIELDS if f not in r]
        if missing:
            raise ReportError(f"{where}: result {i} must have {', '.join(FIELDS)}; it lacks {', '.join(missing)}")
        for field, known in (("status", STATUSES), ("comparison", comparisons(report))):
            if r[field] not in known:
                raise ReportError(f"{where}: result {i}: {field} must be one of {', '.join(known)}, found {r[field]!r}")
        if key(r) in seen:
            raise ReportError(f"{where}: result {i} repeats {' / '.join(map(str, key(r)))}; results must be unique")
        seen.add(key(r))


def _no_constant(name: str) -> None:
    raise ValueError(f"the literal {name}")
