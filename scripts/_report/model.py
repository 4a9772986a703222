"""What a bisection adds to the report: the finding, the tree of modules coloured by error, end-to-end metrics."""

import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from scripts._report import schema, svg
from scripts._report.html_output import figure
from scripts._report.markup import Markup, el, join
from scripts._report.schema import DASH, EDGE_NAMES, LABELS, MODEL_COMPARISONS, TIMES, Output, Report, percent

SIGNS = {"pass": "✓", "fail": "✕", "skipped": DASH, "not_run": "○"}
_STYLES = {"pass": "green", "fail": "bold red", "skipped": "magenta", "not_run": "dim"}


def level(share: float | None) -> int:
    """Heat 0 to 7 of a share of what is allowed: 4 begins at the limit, each step is a factor of four."""
    if share is None or share <= 0:
        return 0
    return 7 if not math.isfinite(share) else max(0, min(7, 4 + math.floor(math.log(share, 4))))


def headline(report: Report, outputs: list[Output]) -> tuple[str, str | Markup]:
    """Title and lead of the page."""
    found = report["model"]["finding"]
    if found is None:
        failed = [c["name"] for c in _checks(report) if c["status"] == "fail"]
        if failed:
            return f"No module diverges, but {failed[0]} does", "The end-to-end checks below say where."
        return "No module diverges", f"All {report['summary']['pass']} tensors lie within their derived allowance."
    index = next(i for i, o in enumerate(outputs) if [o.case, o.name] == [found["case"], found["output"]])
    return f"{found['ours'] or 'The model'} diverges first", join(
        el("a", f"{found['module'] or 'root'} / {found['output']}", href=f"#output-{index}"), f": {found['reason']}."
    )


def sections(report: Report) -> list[Markup]:
    """The blocks between summary and results."""
    return [_finding(report), _tree(report), _end_to_end(report)]


def _block(title: str, said: str, *children: Any, id_: str) -> Markup:
    heading = el("h2", title, id=f"{id_}-title", tabindex=-1)
    return el("section", el("header", heading, el("p", said)), *children, cls="block", aria_labelledby=f"{id_}-title")


def _finding(report: Report) -> Markup:
    model = report["model"]
    parts: list[Markup | None] = []
    for name, text in (("finding", "First module whose own error is too large"), ("free", "First in the free run")):
        found = model[name]
        said = join(el("b", f"{text}: "), _said(found)) if found else join(el("b", f"{text}: "), "none")
        parts.append(el("p", said, cls=f"callout {'fail' if found else 'pass'}", style="margin-bottom:.7rem"))
        if found:
            copy = el("button", "Copy", type="button", cls="tool", data_copy=True, hidden=True)
            parts.append(el("div", el("code", found["repro"], tabindex=0), copy, cls="repro"))
    for side, names in model["unmatched"].items():
        if names:
            said = f"Without a counterpart, {side}: {len(names)}"
            parts.append(el("details", el("summary", said), el("p", ", ".join(names), cls="small soft")))
    said = "Local errors are those on golden inputs; in the free run they add up."
    return _block("Finding", said, el("div", parts, cls="card"), id_="finding")


def _said(found: Mapping[str, Any]) -> str:
    ours = f"{found['ours'] or 'the whole model'} (golden {found['module'] or 'root'})"
    return f"{ours}, {found['output']}: {found['reason']}"


def _tree(report: Report) -> Markup:
    heads = ("Module", "Golden module", *(EDGE_NAMES[c] for c in MODEL_COMPARISONS))
    rows = []
    for node in report["model"]["tree"]:
        name = el("span", node["name"], style=f"padding-left:{1.3 * node['depth']:.1f}em")
        cells = [el("td", _cell(node[c]), cls=_shade(node[c]), data_label=EDGE_NAMES[c]) for c in MODEL_COMPARISONS]
        golden = el("td", node["path"] or "root", el("span", node["kernel"], cls="where"))
        rows.append(el("tr", el("th", name, scope="row", title=node["ours"]), golden, cells))
    head = el("tr", [el("th", h, scope="col") for h in heads])
    table = el("table", el("thead", head), el("tbody", rows), cls="compact tree")
    said = "Relative RMS error of each module, the worst tensor counts; colour by share of what is allowed."
    return _block("Model", said, el("div", table, cls="scroll stack"), id_="model")


def _shade(side: Mapping[str, Any]) -> str:
    if side["status"] not in ("pass", "fail"):
        return "none-compared"
    return f"h{level(schema.number(side['share']))}{' over' if side['status'] == 'fail' else ''}"


def _cell(side: Mapping[str, Any]) -> Markup:
    if side["status"] not in ("pass", "fail"):
        return el("span", DASH, cls="soft")
    error = DASH if side["error"] is None else f"{side['error']:.2g}"
    return join(el("span", svg.glyph(side["status"]), f"{error} ", cls="st"), f" {_share(side)}")


def _checks(report: Report) -> list[dict[str, Any]]:
    return (report["model"]["end_to_end"] or {}).get("checks", [])


def _end_to_end(report: Report) -> Markup:
    found = report["model"]["end_to_end"] or {}
    said = "Logits of the free run against the golden ones; what is allowed follows from the logits' own bound."
    if not found.get("checks"):
        why = found.get("reason", "the names file names no logits")
        return _block("End to end", said, el("p", f"Not compared: {why}.", cls="soft"), id_="logits")
    rows = [
        el(
            "tr",
            el("th", c["name"], el("span", c["text"], cls="where") if c["text"] else None, scope="row"),
            el("td", figure(c["value"]), cls="num", data_label="Value"),
            el("td", figure(c["allowed"]), cls="num", data_label="Allowed"),
            el("td", svg.chip(c["status"]), data_label="Verdict"),
        )
        for c in found["checks"]
    ]
    head = el("tr", [el("th", h, scope="col", cls=k) for h, k in (("Check", None), ("Value", "num"), ("Allowed", "num"),
                                                                  ("Verdict", None))])  # fmt: skip
    table = el("div", el("table", el("thead", head), el("tbody", rows), cls="compact"), cls="scroll stack")
    return _block("End to end", said, table, el("p", divergence(found), style="margin-top:.7rem"), id_="logits")


def divergence(found: Mapping[str, Any]) -> str:
    """The first diverging token in one sentence."""
    first = found["first_divergence"]
    if first is None:
        return f"The best token agrees at all {found['positions']} positions."
    close = "too close to call" if first["margin"] <= first["allowed"] else "not a tie"
    return (
        f"First diverging token: position {first['position']} of sequence {first['batch']}, ours {first['ours']}, "
        f"golden {first['golden']}; its lead over the next is {first['margin']:.3g}, {close}."
    )


# ---------------------------------------------------------------- terminal and Markdown
def _share(side: Mapping[str, Any]) -> str:
    share = schema.number(side["share"])
    if share is None:
        return ""
    return f"{share:.0e}{TIMES}".replace("e+0", "e") if 1e4 <= share < math.inf else percent(share)


def show(report: Report, console: Console) -> None:
    """Print the tree, the finding with its repro line, and the end-to-end metrics."""
    width = max(2 * node["depth"] + len(node["name"]) for node in report["model"]["tree"])
    for node in report["model"]["tree"]:
        line = Text.assemble(("  " * node["depth"] + node["name"]).ljust(width + 2))
        for c in MODEL_COMPARISONS:
            side = node[c]
            error = "" if side["error"] is None else f"{side['error']:.1e}"
            line.append(f"{SIGNS[side['status']]} {error:>8} {_share(side):>8}   ", _STYLES[side["status"]])
        line.append(node["path"] or "root", "dim")
        console.print(line, soft_wrap=True, highlight=False)
    console.print()
    for line in lines(report):
        console.print(Text(line), soft_wrap=True)


def lines(report: Report) -> list[str]:
    """The outcome as text: finding, free run, end-to-end metrics."""
    model, out = report["model"], []
    for name, title in (("finding", "diverges first"), ("free", "first in the free run")):
        found = model[name]
        if found is not None:
            out += [f"{title}: {_said(found)}", f"  {found['repro']}"]
    if model["finding"] is None and model["free"] is None:
        out.append(f"no module diverges; {report['summary']['pass']} tensors compared")
    found = model["end_to_end"] or {}
    if found.get("checks"):
        parts = [
            f"{c['name']} {figure(c['value'])}{'' if c['status'] == 'pass' else ' (fails)'}" for c in found["checks"]
        ]
        out += [f"end to end: {', '.join(parts)}", divergence(found)]
    return out


def markdown(report: Report) -> list[str]:
    """The same as Markdown, with the tree as a table."""
    from scripts._report.text import cell

    out = [
        "",
        *(
            f"- {cell(line.strip())}" if not line.startswith("  ") else f"\n      {line.strip()}\n"
            for line in lines(report)
        ),
    ]
    out += ["", "| Module | Golden module | Teacher-forced | Free-running |", "| --- | --- | --- | --- |"]
    for node in report["model"]["tree"]:
        sides = []
        for c in MODEL_COMPARISONS:
            side = node[c]
            error = "" if side["error"] is None else f" {side['error']:.2g}"
            sides.append(f"{SIGNS[side['status']]} {LABELS[side['status']]}{error}")
        out.append(f"| {cell(node['ours'] or 'model')} | {cell(node['path'] or 'root')} | {' | '.join(sides)} |")
    return [*out, ""]
