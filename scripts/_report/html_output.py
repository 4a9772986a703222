"""The drill-down page of one output: the verdict triangle, and for each comparison what was measured and where."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from scripts._report import schema, svg
from scripts._report.markup import Markup, el, join
from scripts._report.schema import DASH, EDGE_NAMES, LABELS, Output, Report, Result, percent

_STATISTICS = {
    "max": "largest",
    "mean": "mean",
    "rms": "RMS",
    "p99": "p99",
    "slice": "worst slice",
}


def drill_down(report: Report, output: Output, number: int, before: bool, after: bool) -> Markup:
    """The page of one output, reached as `#output-<number>`.

    Args:
        report: the whole report, for provenance.
        output: what the page is about.
        number: position among the outputs.
        before: whether there is a page before this one.
        after: whether there is one after it.
    """
    nav = el(
        "nav",
        el("a", "Previous", href=f"#output-{number - 1}", rel="prev") if before else None,
        el("a", "Next", href=f"#output-{number + 1}", rel="next") if after else None,
        aria_label="Outputs",
    )
    crumbs = el("div", el("a", "← All results", href="#results-title"), nav, cls="crumbs")
    failing_first = sorted(output.edges, key=lambda c: output.edges[c]["status"] != "fail")
    return el(
        "article",
        crumbs,
        el("p", el("span", output.mechanism), el("span", output.capture), cls="eyebrow"),
        el("h1", output.label, id=f"title-{number}"),
        _module(report, output) if "model" in report else _verdict(report, output, f"output-{number}"),
        [_edge(c, output.edges[c], f"output-{number}.{c}") for c in failing_first],
        id=f"output-{number}",
        tabindex=-1,
        aria_labelledby=f"title-{number}",
        cls=f"output {'fails' if output.status == 'fail' else ''}".strip(),
    )


def facts(values: Mapping[str, Any]) -> Markup:
    """A description list of provenance values; nested objects are flattened."""
    rows = []
    for k, v in values.items():
        if isinstance(v, Mapping):
            v = ", ".join(f"{a} {b}" for a, b in v.items())
        if v in (None, ""):
            continue
        rows += [el("dt", k.replace("_", " ")), el("dd", "yes" if v is True else "no" if v is False else str(v))]
    return el("dl", rows, cls="facts")


def figure(value: Any) -> str:
    """A number in at most four significant digits; strings as they are, None as a dash."""
    if value is None:
        return DASH
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.3e}"
    return f"{value:.4g}"


def _verdict(report: Report, output: Output, link: str) -> Markup:
    theirs = report["provenance"]["captures"].get(output.capture, {})
    ours = report["provenance"]["ours"]
    kernel = next((r.get("kernel") for r in output.edges.values() if r.get("kernel")), None)
    backend = next(iter(output.edges.values()))["backend"]
    versions = theirs.get("versions") or theirs
    producer = theirs.get("producer", "")
    what = {
        "capture": f"{producer} {versions.get(producer) or ''}".strip(),
        "reference": f"jax {ours.get('jax', '')}".strip(),
        "kernel": f"{kernel}, {backend}" if kernel else "did not run",
    }
    notes = {
        c: percent(share) if share is not None else "" for c, r in output.edges.items() for share in (schema.used(r),)
    }
    said = el("p", output.said, style="font-size:1.08rem;text-wrap:pretty")
    params = dict(report["cases"].get(output.case, {}))
    sides = facts(
        {
            "capture": _side(theirs, ("device", "driver", "date")),
            "captured kernel": params.pop("kernel", "unknown"),
            "parameters": ", ".join(f"{k} {figure(v)}" for k, v in params.items() if isinstance(v, int | float | str)),
            "this side": _side(ours, ("device", "git", "date")),
        }
    )
    word = el("p", svg.chip(output.status, pill=True), f"  {_blame(output)}" if output.blamed else None)
    return el(
        "div",
        svg.triangle(output.statuses, output.blamed, notes, what, link),
        el("div", word, said, sides),
        cls="card verdict",
    )


def _module(report: Report, output: Output) -> Markup:
    """The verdict on a module of a bisection; there is no triangle."""
    params = report["cases"].get(output.case, {})
    word = el("p", svg.chip(output.status, pill=True), f"  {params.get('ours', '')}")
    sides = facts(
        {
            "golden module": output.case.partition("/")[2] or "the whole model",
            "its class": params.get("kernel", "unknown"),
            "parameters": ", ".join(f"{k} {v}" for k, v in (params.get("parameters") or {}).items()),
        }
    )
    return el("div", el("div", word, el("p", output.said)), sides, cls="card verdict")


def _blame(output: Output) -> str:
    return f"blamed: {' and '.join(output.blamed)}"


def _side(values: Mapping[str, Any], fields: Sequence[str]) -> str:
    return " · ".join(str(values[f]) for f in fields if values.get(f)) or "unknown"


def _edge(comparison: str, r: Result, id_: str) -> Markup:
    peer, subject = schema.sides(comparison)
    ran = [r["backend"] if "kernel" in comparison else None, r.get("kernel"), _time(r)]
    head = el(
        "header",
        el("h2", EDGE_NAMES[comparison]),
        svg.chip(r["status"], pill=True),
        el("span", " · ".join(x for x in ran if x), cls="soft small"),
    )
    tone = "callout fail" if r["status"] == "fail" else "callout"
    parts: list[Markup | None] = [head, el("p", r["reason"], cls=tone) if r["reason"] else None]
    if r["metrics"]:
        parts += [
            el("div", el("div", _allowed(r)), el("div", _ulps(r)), cls="pair"),
            _heatmaps(r, subject, peer),
            el("div", el("div", _worst(r, subject, peer)), el("div", _metrics(r)), cls="pair part"),
        ]
    if r["repro"]:
        copy = el("button", "Copy", type="button", cls="tool", data_copy=True, hidden=True)
        parts.append(el("div", el("code", r["repro"], tabindex=0), copy, cls="repro"))
    return el(
        "section", parts, id=id_, cls="card edge-card", aria_label=f"{EDGE_NAMES[comparison]}: {LABELS[r['status']]}"
    )


def _time(r: Result) -> str | None:
    return f"{r['time_us']:,.1f} µs" if r["time_us"] is not None else None


def _table(heads: Sequence[tuple[str, str]], rows: Sequence[Markup], cls: str = "") -> Markup:
    head = el("tr", [el("th", label, scope="col", cls=kind or None) for label, kind in heads])
    return el("div", el("table", el("thead", head), el("tbody", rows), cls="compact"), cls=f"scroll bare {cls}".strip())


def _allowed(r: Result) -> Markup:
    """Every check: measured, allowed, a bar of the share, and the factor that would have passed."""
    title = el("h4", "Measured error against what is allowed")
    if not r["allowed"]:
        said = "Compared bit by bit: nothing but equality is allowed."
        if "error" in r["metrics"]:
            said = "The failure is not a matter of size: no allowance applies."
        return join(title, el("p", said, cls="soft small"))
    sides: dict[str, list[Markup]] = {}
    for name, check in r["allowed"].items():
        side, _, statistic = name.partition(".")
        share = _share(schema.number(check["measured"]), schema.number(check["allowed"]))
        status = "fail" if share is None or share > 1 else "pass"
        sides.setdefault(side, []).append(
            el(
                "tr",
                el("th", _STATISTICS.get(statistic, statistic), scope="row"),
                el("td", figure(check["measured"]), cls="num"),
                el("td", figure(check["allowed"]), cls="num"),
                el("td", el("div", svg.bar(share, status), el("span", percent(share), cls="num small"), cls="used")),
                el("td", _factor(check), cls="num soft"),
            )
        )
    heads = ("Check", "Measured", "Allowed", "Share of allowed", "Factor needed")
    kinds = (None, "num", "num", None, "num")
    head = el("tr", [el("th", h, scope="col", cls=k) for h, k in zip(heads, kinds, strict=True)])
    bodies = []
    for side, rows in sides.items():
        against = "golden tensor" if side in ("ours", "self-noise") else "float64 truth"
        label = el("th", f"{side} against the {against}", colspan=len(heads), scope="rowgroup")
        bodies.append(el("tbody", el("tr", label, cls="group"), rows))
    table = el("table", el("thead", head), bodies, cls="compact")
    return join(title, el("div", table, cls="scroll bare"))


def _share(measured: float | None, allowed: float | None) -> float | None:
    if measured is None or allowed is None:
        return None
    return measured / allowed if allowed else math.inf if measured else 0.0


def _factor(check: Mapping[str, Any]) -> str:
    needed, factor = schema.number(check.get("needed")), schema.number(check.get("factor"))
    if needed is None or factor is None:
        return DASH
    return f"{needed:.3g} of {factor:g}" if math.isfinite(needed) else "no factor"


def _ulps(r: Result) -> Markup | None:
    counts = r["metrics"].get("ulp")
    if not counts:
        return None
    signs = {"<=4": "3 to 4", "<=16": "5 to 16", "more": "more"}
    title = el("h4", f"Units in the last place apart{_of_dtype(r)}")
    return join(title, svg.histogram({signs.get(k, k): n for k, n in counts.items()}))


def _of_dtype(r: Result) -> str:
    return f", {r['metrics']['dtype']}" if r["metrics"].get("dtype") else ""


def _heatmaps(r: Result, subject: str, peer: str) -> Markup | None:
    """Error against the truth by slice, both sides on one scale."""
    table = r["slices"]
    if not table.get("axes") or not table.get("subject"):
        return None
    grids = {}
    for side, name in ((subject, "subject"), (peer, "peer")):
        grids[side], axes, block = _grid(table[name], table["axes"], table["block"])
    finite = [v for g in grids.values() for row in g for v in row if math.isfinite(v)]
    top = max(finite, default=0.0)
    maps, beyond = [], False
    for side, values in grids.items():
        check = r["allowed"].get(f"{side}.slice") if "truth" in table["unit"] else None
        over = schema.number(check["allowed"]) if check else None
        beyond |= over is not None and any(not v <= over for row in values for v in row)
        maps.append(
            el(
                "div",
                el("h4", f"Error of the {side}, by {' and '.join(table['axes'])}"),
                svg.heatmap(values, top, over, axes, block),
            )
        )
    return el("div", el("div", maps, cls="maps"), svg.scale(top, table["unit"], beyond), cls="part heats")


def _grid(values: Any, axes: Sequence[str], block: Sequence[int]) -> tuple[list[list[float]], list[str], list[int]]:
    """A slice table as rows and columns, the longer axis across; axes after the second are reduced to their worst."""

    def worst(x):
        if isinstance(x, list):
            return max(map(worst, x), key=lambda v: math.inf if math.isnan(v) else v)
        value = schema.number(x)
        return math.nan if value is None else value

    if len(axes) == 1:
        return [[worst(v) for v in values]], ["", axes[0]], [1, block[0]]
    rows = [[worst(v) for v in row] for row in values]
    if len(rows) <= len(rows[0]):
        return rows, list(axes[:2]), list(block[:2])
    return [list(column) for column in zip(*rows, strict=True)], [axes[1], axes[0]], [block[1], block[0]]


def _worst(r: Result, subject: str, peer: str) -> Markup | None:
    title = el("h4", "Where both sides differ most")
    if not r["worst"]:
        return join(title, el("p", "They differ nowhere.", cls="soft small"))
    axes = r["slices"].get("axes") or []
    rows = []
    for w in r["worst"]:
        named = [*axes, *("" for _ in w["index"][len(axes) :])]
        place = ", ".join(f"{a} {i}".strip() for a, i in zip(named, w["index"], strict=True))
        got, expected = schema.number(w["got"]), schema.number(w["expected"])
        gap = None if got is None or expected is None else got - expected
        rows.append(
            el(
                "tr",
                el("th", place, scope="row"),
                *(el("td", _exact(w.get(k)), cls="num mono") for k in ("got", "expected", "truth")),
                el("td", figure(gap if gap is None or math.isfinite(gap) else str(gap)), cls="num mono"),
            )
        )
    heads = (("Place", ""), (subject, "num"), (peer, "num"), ("Truth", "num"), ("Difference", "num"))
    return join(title, _table(heads, rows))


def _exact(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else figure(value)


def _metrics(r: Result) -> Markup:
    """The remaining numbers: how the two sides differ, whatever the truth."""
    m = r["metrics"]
    rows = []
    for name, label in (("abs", "absolute"), ("rel", "relative")):
        if isinstance(m.get(name), Mapping):
            rows += [(f"{label}, {k}", v) for k, v in m[name].items()]
    labels = {
        "rms": "RMS difference",
        "rel_rms": "relative RMS",
        "rms_ratio": "ratio of the RMS errors",
        "sqnr_db": "SQNR, dB",
        "cosine_distance": "cosine distance",
        "similarity_distance": "similarity distance",
    }
    rows += [(label, m[k]) for k, label in labels.items() if k in m]
    bias = m.get("bias", {})
    rows += [("mean signed difference", bias.get("mean")), ("share below, of unequal", bias.get("fraction_below"))]
    rows += [("unequal elements", m.get("mismatches")), ("elements", m.get("elements"))]
    rows += [(f"{kind} in one side only", n) for kind, n in m.get("masks", {}).items()]
    head, tail = rows[:2], rows[2:]
    return join(
        el("h4", "All metrics of the difference"),
        _facts(head + [x for x in tail if x[0] in _SHOWN]),
        el(
            "details",
            el("summary", "the rest"),
            _facts([x for x in tail if x[0] not in _SHOWN]),
            style="margin-top:.5rem",
        ),
    )


_SHOWN = ("absolute, p99", "relative, p99", "RMS difference", "ratio of the RMS errors", "SQNR, dB")
_SHOWN += ("similarity distance", "mean signed difference", "share below, of unequal", "unequal elements", "elements")


def _facts(rows: Sequence[tuple[str, Any]]) -> Markup:
    return el("dl", [join(el("dt", k), el("dd", figure(v), cls="num")) for k, v in rows], cls="facts")
