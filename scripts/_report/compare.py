"""What got worse between two reports."""

import math
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from scripts._report import schema
from scripts._report.schema import EDGE_NAMES, LABELS, Key, Report, Result, percent
from scripts._report.text import cell

STEP = 0.05
"""Growth of measured / allowed that counts as worse: five hundredths of the allowance. Captures and inputs are fixed,
so on one backend any growth comes from a change of code or versions; the step hides another order of summation."""


@dataclass(frozen=True)
class Change:
    """One result that is not what it was."""

    kind: str
    """`worse`, `better` or `other`."""
    name: str
    text: str


@dataclass(frozen=True)
class Difference:
    """All changes from an old to a new report."""

    changes: tuple[Change, ...]
    common: int
    """Results that both reports hold."""

    def of(self, kind: str) -> list[Change]:
        """The changes of one kind."""
        return [c for c in self.changes if c.kind == kind]

    @property
    def exit_code(self) -> int:
        """0 nothing got worse, 1 something did, 2 the reports have no result in common."""
        return 1 if self.of("worse") else 0 if self.common else 2


def compare(old: Report, new: Report, step: float = STEP) -> Difference:
    """Compare two reports result by result.

    Worse: a pass that is none any more, a new failure, a result that vanished although it had been compared, a share
    of the allowance that grew by more than `step`, a mutant that survives now.

    Args:
        old: the earlier report.
        new: the later one.
        step: growth of measured / allowed that is tolerated.
    """
    before, after = ({schema.key(r): r for r in report["results"]} for report in (old, new))
    changes = [c for k in before | after for c in (_change(k, before.get(k), after.get(k), step),) if c]
    changes += _mutants(old, new)
    order = {"worse": 0, "better": 1, "other": 2}
    return Difference(tuple(sorted(changes, key=lambda c: order[c.kind])), len(before.keys() & after.keys()))


def markdown(difference: Difference, old: str, new: str) -> str:
    """The changes as Markdown; `old` and `new` are the reports' names."""
    lines = [f"# What changed from {cell(old)} to {cell(new)}", "", headline(difference)]
    for kind, title in (("worse", "Worse"), ("better", "Better"), ("other", "Otherwise different")):
        found = difference.of(kind)
        if found:
            lines += ["", f"## {title}", "", *(f"- **{cell(c.name)}**: {cell(c.text)}" for c in found)]
    return "\n".join(lines) + "\n"


def headline(difference: Difference) -> str:
    """The outcome in one sentence."""
    counts = [f"{len(difference.of(k))} {k}" for k in ("worse", "better")]
    other = len(difference.of("other"))
    if not difference.common:
        counts.append("no result in common")
    return f"{', '.join(counts)}, {other} otherwise different, {difference.common} results in both."


def _mutants(old: Report, new: Report) -> list[Change]:
    """Planted faults that are caught in only one of the reports, or planted in only one."""
    was, now = (
        {schema.mutant_name(m): m["killed"] for m in report["mutations"].get("mutants", [])} for report in (old, new)
    )
    words = {True: "caught", False: "missed", None: "not planted"}
    changes = []
    for name in was | now:
        a, b = was.get(name), now.get(name)
        if a is not b:
            kind = "worse" if b is False or a else "better" if b else "other"
            changes.append(Change(kind, f"mutation suite / {name}", f"{words[a]} → {words[b]}"))
    return changes


def _change(key: Key, old: Result | None, new: Result | None, step: float) -> Change | None:
    mechanism, capture, case, output, comparison = key
    name = f"{mechanism} / {case} / {output} / {EDGE_NAMES[comparison]} ({capture})"
    if old is None and new is not None:
        kind = "worse" if new["status"] == "fail" else "other"
        return Change(kind, name, f"new: {_said(new)}")
    if old is not None and new is None:
        lost = old["status"] in ("pass", "fail")
        return Change("worse" if lost else "other", name, f"vanished, was {LABELS[old['status']]}")
    assert old is not None and new is not None
    note = "" if old["backend"] == new["backend"] else f" (backend {old['backend']} → {new['backend']})"
    a, b = schema.used(old), schema.used(new)
    shares = f", {percent(a)} → {percent(b)} of allowed" if a is not None and b is not None else ""
    if old["status"] != new["status"]:
        worse = old["status"] == "pass" or new["status"] == "fail"
        kind = "worse" if worse else "better" if new["status"] == "pass" else "other"
        why = f": {new['reason']}" if new["status"] != "pass" else ""
        return Change(kind, name, f"{LABELS[old['status']]} → {LABELS[new['status']]}{shares}{note}{why}")
    if a is None or b is None or a == b or abs(b - a) <= step:
        return None
    return Change("worse" if b > a or math.isnan(b) else "better", name, f"{shares.removeprefix(', ')}{note}")


def _said(result: Result) -> str:
    share = schema.used(result)
    return LABELS[result["status"]] + (f", {percent(share)} of allowed" if share is not None else "")


def show(difference: Difference, console: Console) -> None:
    """Print the changes, worst first."""
    signs = {"worse": ("▼", "bold red"), "better": ("▲", "green"), "other": ("•", "dim")}
    for change in difference.changes:
        sign, style = signs[change.kind]
        console.print(Text.assemble((f"{sign} ", style), (change.name, "bold"), f"\n  {change.text}"))
    console.print(Text(headline(difference)))
