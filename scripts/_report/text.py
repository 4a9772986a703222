"""The report as a terminal table and as Markdown."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from scripts._report import model, schema
from scripts._report.schema import DASH, EDGE_NAMES, LABELS, STATUSES, TIMES, Output, Report, percent

SIGNS = {"pass": "✓", "fail": "✕", "skipped": DASH, "not_run": "○"}
_STYLES = {"pass": "green", "fail": "bold red", "skipped": "magenta", "not_run": "dim"}
_BAR = 8


def show(report: Report, console: Console) -> None:
    """Print the table of outputs, the failures with reason and repro line, what was not compared, and the totals."""
    if "model" in report:
        model.show(report, console)
        return
    outputs = schema.outputs(report)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("case / output", overflow="fold", ratio=1)
    for comparison in schema.COMPARISONS:
        table.add_column(EDGE_NAMES[comparison].lower().replace(f" {DASH} ", f" {DASH}\n"), no_wrap=True)
    table.add_column("tightest,\nof allowed", no_wrap=True)
    for name in dict.fromkeys(o.mechanism for o in outputs):
        table.add_row(Text(name, "bold"))
        for o in outputs:
            if o.mechanism == name:
                table.add_row(Text(f"  {o.label}"), *(_status(s) for s in o.statuses.values()), _meter(o))
    if outputs:
        console.print(table)
    for o in outputs:
        for line in _failures(o):
            console.print(line, soft_wrap=True)
    console.print()
    for line in _gaps(report):
        console.print(Text(line, "dim"), soft_wrap=True)
    console.print(Text(judge_line(report)), soft_wrap=True)
    console.print(Text.assemble(*_total(report)))


def judge_line(report: Report) -> str:
    """The mutation suite's kill rate in one line."""
    killed, planted = schema.kills(report)
    missed = ", ".join(map(schema.mutant_name, schema.survivors(report)))
    untested = "; ".join(f"{', '.join(names)} ({why})" for why, names in schema.untested_by_reason(report).items())
    parts = [f"caught {killed} of {planted} planted faults" if planted else "not tested"]
    parts += [f"missed {missed}"] * bool(missed) + [f"no fault planted in {untested}"] * bool(untested)
    return f"judge: {'; '.join(parts)}"


def markdown(report: Report) -> str:
    """The report as GitHub-flavoured Markdown."""
    counts, ours = report["summary"], report["provenance"]["ours"]
    names = [EDGE_NAMES[c] for c in schema.comparisons(report)]
    lines = [
        "# Numeric diff report",
        "",
        ", ".join(f"**{counts[s]}** {LABELS[s]}" for s in STATUSES)
        + ("." if "model" in report else f"; {judge_line(report)}."),
        "",
        *(model.markdown(report) if "model" in report else ()),
        " · ".join(f"{k} {cell(ours[k])}" for k in ("git", "jax", "device", "backend", "date") if ours.get(k)),
        "",
        *_table(
            ("Case / output", *names, "Tightest, of allowed", "Verdict"),
            (
                (f"{o.mechanism}: {o.label}", *(_word(s) for s in o.statuses.values()), percent(o.tightest), o.sentence)
                for o in schema.outputs(report)
            ),
        ),
    ]
    failures = [r for r in report["results"] if r["status"] == "fail"]
    if failures:
        lines += ["", "## Failures"]
    for r in failures:
        name = " / ".join((r["mechanism"], r["case"], r["output"], EDGE_NAMES[r["comparison"]]))
        lines += ["", f"**{cell(name)}**: {cell(r['reason'])}", "", f"    {' '.join(r['repro'].split())}"]
    skipped = _reasons(report)
    if skipped:
        lines += [
            "",
            "## Not compared",
            "",
            *(f"- {n} {TIMES} {LABELS[s]}: {cell(why)}" for (s, why), n in skipped.items()),
        ]
    heads = ("Mechanism", "Cases", "Outputs", "Dtypes", *(LABELS[s].capitalize() for s in STATUSES))
    rows = (
        (c["mechanism"], c["cases"], c["outputs"], ", ".join(c["dtypes"]) or DASH, *(c[s] for s in STATUSES))
        for c in schema.coverage(report)
    )
    lines += ["", "## Coverage", "", *_table(heads, rows)]
    return "\n".join(lines) + "\n"


def cell(value: object) -> str:
    """Untrusted text inside Markdown: one line, no table break, no markup."""
    text = " ".join(str(value).split())
    for sign in "\\`*_[]<>|":
        text = text.replace(sign, "\\" + sign)
    return text


def _table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    heads = list(heads)
    body = ["| " + " | ".join(cell(v) for v in row) + " |" for row in rows]
    return ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads), *body]


def _word(status: str) -> str:
    return f"{SIGNS[status]} {LABELS[status]}"


def _status(status: str) -> Text:
    return Text(_word(status), _STYLES[status])


def _meter(o: Output) -> Text:
    if o.tightest is None:
        return Text(DASH, "dim")
    filled = min(_BAR, round(o.tightest * _BAR))
    style = "red" if o.status == "fail" else "green"
    return Text.assemble(("━" * filled, style), ("╌" * (_BAR - filled), "dim"), f" {percent(o.tightest)}")


def _failures(o: Output) -> list[Text]:
    failed = [r for r in o.edges.values() if r["status"] == "fail"]
    if not failed:
        return []
    lines = [Text.assemble("\n", ("✕ ", "bold red"), (o.label, "bold"), f": {o.sentence}")]
    for r in failed:
        edge = EDGE_NAMES[r["comparison"]].lower()
        lines.append(Text.assemble(f"  {edge}: {r['reason']}\n  ", (r["repro"], "cyan")))
    return lines


def _reasons(report: Report) -> dict[tuple[str, str], int]:
    counts: dict[tuple[str, str], int] = {}
    for r in report["results"]:
        if r["status"] in ("skipped", "not_run"):
            k = (r["status"], r["reason"])
            counts[k] = counts.get(k, 0) + 1
    return counts


def _gaps(report: Report) -> list[str]:
    lines = [f"{SIGNS[s]} {n} {LABELS[s]}: {why}" for (s, why), n in _reasons(report).items()]
    empty = [c["mechanism"] for c in schema.coverage(report) if not c["outputs"]]
    if empty:
        lines.append(f"{SIGNS['not_run']} no capture was loaded of {', '.join(empty)}")
    unclaimed = len(report["coverage"]["unclaimed"])
    if unclaimed:
        lines.append(f"{SIGNS['not_run']} captured, but of no selected mechanism and not compared: {unclaimed}")
    return lines


def _total(report: Report) -> list:
    counts = report["summary"]
    parts: list = []
    for s in STATUSES:
        parts += [(f"{counts[s]} {LABELS[s]}", _STYLES[s] if counts[s] else "dim"), "  "]
    return parts
