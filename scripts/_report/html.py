"""The report as one self-contained HTML page: no network, no script needed to read it."""

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts._report import model, schema, svg
from scripts._report.html_output import drill_down, facts
from scripts._report.markup import Markup, el, join
from scripts._report.schema import DASH, EDGE_NAMES, LABELS, STATUSES, Output, Report, percent

_HERE = Path(__file__).parent


def page(report: Report) -> str:
    """The whole document."""
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    outputs = schema.outputs(report)
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", f"{_verdict_word(report)} {DASH} jaxattn numeric diff report"),
        el("style", Markup((_HERE / "style.css").read_text(encoding="utf-8"))),
    )
    overview = el(
        "div",
        _header(report, outputs),
        _summary(report, outputs),
        model.sections(report) if "model" in report else None,
        _results(report, outputs),
        _mutations(report) if "model" not in report else None,
        _coverage(report),
        _provenance(report),
        el(
            "footer",
            el("span", report["schema"]),
            el("span", "Bars show measured error as a share of what is allowed; the tick marks the limit."),
            el("span", el("kbd", "/"), " filter  ", el("kbd", "←"), " ", el("kbd", "→"), " next output  ",
               el("kbd", "Esc"), " back", cls="keys"),
        ),
        cls="overview",
    )  # fmt: skip
    details = [
        drill_down(report, o, i, outputs[i - 1] if i else None, i + 1 < len(outputs)) for i, o in enumerate(outputs)
    ]
    body = el(
        "body",
        el("a", "Skip to the results", href="#results-title", cls="skip-link"),
        el("main", overview, details),
        el("script", Markup(script)),
    )
    return f"<!doctype html>\n{el('html', head, body, lang='en')}\n"


def _verdict_word(report: Report) -> str:
    return {0: "Pass", 1: "Fail", 2: "Nothing compared"}[schema.exit_code(report)]


def _header(report: Report, outputs: list[Output]) -> Markup:
    counts, ours = report["summary"], report["provenance"]["ours"]
    compared = counts["pass"] + counts["fail"]
    bad = [o for o in outputs if o.status == "fail"]
    survivors = schema.survivors(report)
    if "model" in report and compared:
        title, lead = model.headline(report, outputs)
    elif not compared:
        title, lead = "Nothing was compared", "No result of this run says anything about the port."
    elif bad:
        title = f"{counts['fail']} of {compared} comparisons fail"
        lead = join("First: ", el("a", bad[0].label, href="#output-0"), f". {bad[0].said}")
    elif survivors:
        title = "All comparisons pass, but the judge is not to be trusted"
        lead = f"{len(survivors)} planted faults were not noticed; see the mutation suite."
    else:
        title = f"All {compared} comparisons pass"
        lead = "Every output that was compared lies within its derived allowance, overall and slice by slice."
    rest = counts["skipped"] + counts["not_run"]
    if compared and rest and "model" not in report:
        lead = join(lead, f" {rest} more were not compared and count as neither.")
    facts = [ours.get("device"), f"backend {ours['backend']}" if ours.get("backend") else None, ours.get("git")]
    facts += [f"jax {ours['jax']}" if ours.get("jax") else None, ours.get("date")]
    return el(
        "header",
        el("p", [el("span", f) for f in ("jaxattn numeric diff report", *facts) if f], cls="eyebrow"),
        el("h1", title),
        el("p", lead, cls="lead"),
    )


def _summary(report: Report, outputs: list[Output]) -> Markup:
    counts = report["summary"]
    total = sum(counts.values())
    numbers = [el("div", el("dt", svg.glyph(s), LABELS[s]), el("dd", f"{counts[s]:,}"), cls=s) for s in STATUSES]
    parts = [el("i", cls=s, style=f"flex:{counts[s]}") for s in STATUSES if counts[s]]
    bar = el("div", parts, cls="share", role="img", aria_label=f"{total} results: " + _spoken(counts))
    killed, planted = schema.kills(report)
    judge = el("p", f"{killed} / {planted}" if planted else DASH, cls="big")
    said = "planted faults caught by the judge" if planted else "the judge was not tested in this run"
    return el(
        "div",
        el("div", el("dl", numbers, cls="counts"), bar, cls="card"),
        el("div", judge, el("p", said, cls="soft small"), cls="card"),
        _tightest(outputs),
        cls="summary",
    )


def _tightest(outputs: list[Output]) -> Markup:
    measured = [(o.tightest, i) for i, o in enumerate(outputs) if o.tightest is not None]
    if not measured:
        return el("div", el("p", DASH, cls="big"), el("p", "no error was measured", cls="soft small"), cls="card")
    share, i = max(measured)
    link = el("a", outputs[i].label, href=f"#output-{i}")
    said = el("p", "of the allowance used at the tightest, ", link, cls="soft small")
    return el("div", el("p", percent(share), cls="big"), said, cls="card")


def _spoken(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{counts[s]} {LABELS[s]}" for s in STATUSES)


def _block(title: str, said: str | Markup, *children: Any, id_: str) -> Markup:
    heading = el("h2", title, id=f"{id_}-title", tabindex=-1)
    return el("section", el("header", heading, el("p", said)), *children, cls="block", aria_labelledby=f"{id_}-title")


# ---------------------------------------------------------------- results
def _columns(report: Report) -> tuple[tuple[str, str, str], ...]:
    return (
        ("verdict", "Verdict", "number"),
        ("name", "Module and output" if "model" in report else "Case and output", "text"),
        *((f"e{i}", EDGE_NAMES[c], "number") for i, c in enumerate(schema.comparisons(report))),
        ("used", "Tightest, share of allowed", "number"),
    )


def _results(report: Report, outputs: list[Output]) -> Markup:
    names = sorted({o.mechanism for o in outputs})
    options = [el("option", "All mechanisms", value=""), *(el("option", n, value=n) for n in names)]
    buttons = [el("button", svg.chip(s), type="button", data_status=s, aria_pressed="false", cls=s) for s in STATUSES]
    filters = el(
        "div",
        el("input", id="search", type="search", placeholder="Filter by name, dtype or reason", aria_label="Filter"),
        el("select", options, id="mechanism", aria_label="Mechanism"),
        buttons,
        el("output", f"{len(outputs)} outputs", id="count", aria_live="polite"),
        cls="filters", hidden=True, role="group", aria_label="Filter the results",
    )  # fmt: skip
    heads = [
        el("th", el("button", label, type="button"), scope="col", aria_sort="none", data_key=k, data_kind=kind)
        for k, label, kind in _columns(report)
    ]
    body = [_row(o, i) for i, o in enumerate(outputs)]
    body.append(el("tr", el("td", "No output matches.", colspan=len(heads)), cls="none", hidden=bool(outputs)))
    table = el("table", el("thead", el("tr", heads)), el("tbody", body), id="results")
    said = "One row per output: three comparisons, each judged through the float64 truth."
    if "model" in report:
        said = "One row per tensor that left a module or, inside one, reached another; in the order of the golden run."
    return _block("Results", said, filters, el("div", table, cls="scroll stack"), id_="results")


def _row(o: Output, i: int) -> Markup:
    statuses = o.statuses
    text = " ".join([o.mechanism, o.capture, o.case, o.name, *(str(r["reason"]) for r in o.edges.values())])
    text += " " + " ".join({str(r["metrics"].get("dtype", "")) for r in o.edges.values()})
    said = o.said if o.blamed else f"{o.mechanism} · {o.capture}"
    order = {"fail": 0, "not_run": 1, "skipped": 2, "pass": 3}
    cells = [
        el("td", el("span", _sign(o), el("span", LABELS[o.status], cls=f"st {o.status}"), cls="brief")),
        el("td", el("a", o.label, href=f"#output-{i}"), el("span", said, cls="where")),
        *(el("td", svg.chip(s), data_label=EDGE_NAMES[c]) for c, s in statuses.items()),
        el("td", _used(o), data_label="Of allowed"),
    ]  # fmt: skip
    data = {f"data_e{k}": order[s] for k, s in enumerate(statuses.values())}
    tightest = -1.0 if o.tightest is None else min(o.tightest, 1e300)
    return el(
        "tr", cells, cls="row", data_verdict=order[o.status], data_name=f"{o.label} {o.mechanism}", **data,
        data_used=f"{tightest:.6g}", data_mechanism=o.mechanism, data_text=text.lower(),
        data_statuses=" ".join(dict.fromkeys(statuses.values())),
    )  # fmt: skip


def _sign(o: Output) -> Markup:
    return (
        svg.mini(o.statuses) if o.kinds == schema.COMPARISONS else el("span", svg.glyph(o.status), cls=f"st {o.status}")
    )


def _used(o: Output) -> Markup:
    if o.tightest is None:
        return el("span", "no allowance applies" if o.status == "fail" else "nothing measured", cls="soft small")
    return el("div", svg.bar(o.tightest, o.status), el("span", percent(o.tightest), cls="num small"), cls="used")


# ---------------------------------------------------------------- judge, coverage, provenance
def _mutations(report: Report) -> Markup:
    mutants = report["mutations"].get("mutants", [])
    killed, planted = schema.kills(report)
    title, said = (
        "Is the judge to be trusted?",
        "Known faults, planted in outputs that pass, to see whether the rules catch them.",
    )
    gaps = [
        el("p", svg.chip("not_run"), f"  {', '.join(names)}: {why}", cls="soft small")
        for why, names in schema.untested_by_reason(report).items()
    ]
    if not mutants:
        body = el("div", el("p", svg.chip("not_run"), "  No fault was planted.", cls="soft"), gaps, cls="card judge")
        return _block(title, said, body, id_="judge")
    places = list(dict.fromkeys(m["planted"] for m in mutants))
    faults: dict[tuple[str, str], dict[str, Any]] = {}
    for m in mutants:
        faults.setdefault((m["mechanism"], m["fault"]), {})[m["planted"]] = m
    heads = ["Fault", *(_PLACES.get(p, p) for p in places)]
    rows = []
    for (mechanism, fault), found in faults.items():
        what = next(iter(found.values()))["what"]
        name = el("th", what or fault, el("span", f"{mechanism} · {fault}", cls="where"), scope="row")
        rows.append(el("tr", name, [el("td", _caught(found.get(p)), data_label=_PLACES.get(p, p)) for p in places]))
    head = el("tr", [el("th", h, scope="col") for h in heads])
    table = el("div", el("table", el("thead", head), el("tbody", rows), cls="compact"), cls="scroll stack")
    survived = schema.survivors(report)
    warn = (
        el("p", "Missed: ", ", ".join(map(schema.mutant_name, survived)), ".", cls="callout fail") if survived else None
    )
    lead = el(
        "p", el("b", f"Kill rate {percent(killed / planted)}"), f": {killed} of {planted} planted faults were caught."
    )
    unfold = el(
        "details", el("summary", "Every fault, and in how many cases it was caught"), table, open=bool(survived)
    )
    return _block(title, said, el("div", lead, warn, gaps, unfold, cls="card judge"), id_="judge")


_PLACES = {
    "reference": "In the reference",
    "kernel": "In the kernel",
    "contract": "In the kernel, float32 cases",
}


def _caught(mutant: Mapping[str, Any] | None) -> Markup:
    if mutant is None:
        return el("span", DASH, cls="soft")
    status = "pass" if mutant["killed"] else "fail"
    word = f"{mutant['caught']} of {mutant['applicable']}"
    return el("span", svg.glyph(status), word, cls=f"st {status}", title=mutant["example"] or None)


def _coverage(report: Report) -> Markup:
    heads = ("Mechanism", "Cases", "Outputs", "Dtypes", *(LABELS[s].capitalize() for s in STATUSES))
    rows = []
    for line in schema.coverage(report):
        name = line["mechanism"]
        state = None if line["pass"] or line["fail"] else svg.chip("skipped" if line["skipped"] else "not_run")
        rows.append(
            el(
                "tr",
                el("th", name, " ", state, scope="row"),
                el("td", line["cases"], cls="num", data_label="Cases"),
                el("td", line["outputs"], cls="num", data_label="Outputs"),
                el("td", ", ".join(line["dtypes"]) or DASH, data_label="Dtypes", cls="small"),
                *(el("td", _count(line[s], s), cls="num", data_label=LABELS[s].capitalize()) for s in STATUSES),
            )
        )
    numeric = {"Cases", "Outputs", *(LABELS[s].capitalize() for s in STATUSES)}
    head = el("tr", [el("th", h, scope="col", cls="num" if h in numeric else None) for h in heads])
    table = el("table", el("thead", head), el("tbody", rows))
    unclaimed = report["coverage"]["unclaimed"]
    more = None
    if unclaimed:
        more = el(
            "details",
            el("summary", f"Captured, but of no selected mechanism and not compared: {len(unclaimed)}"),
            el("p", ", ".join(unclaimed), cls="small soft"),
            style="margin-top:.8rem",
        )
    said = "Results by mechanism. Skipped and not run are gaps, never passes."
    return _block("Coverage", said, el("div", table, cls="scroll stack"), more, id_="coverage")


def _count(n: int, status: str) -> Markup:
    return el("span", f"{n}", cls=f"st {status}") if n else el("span", "0", cls="soft")


def _provenance(report: Report) -> Markup:
    found = report["provenance"]
    cards = [el("div", el("h4", "This side"), facts(found["ours"]), cls="card")]
    cards += [
        el("div", el("h4", f"Capture {name}"), facts(side), cls="card")
        for name, side in found.get("captures", {}).items()
    ]
    said = "What was compared with what."
    return _block("Provenance", said, el("div", cards, cls="grid", style="align-items:start"), id_="provenance")
