"""Drawings of the report as inline SVG: status glyphs, bars, histograms, heatmaps, the verdict triangle."""

import math
from collections.abc import Sequence

from scripts._report.markup import Markup, el, join
from scripts._report.schema import COMPARISONS, LABELS, percent

NODES = {"capture": (275, 42), "reference": (100, 252), "kernel": (450, 252)}
EDGES = dict(zip(COMPARISONS, (("capture", "reference"), ("reference", "kernel"), ("capture", "kernel")), strict=True))
_GLYPHS = {
    "pass": "M3.5 8.5 6.7 11.7 12.5 4.8",
    "fail": "M4.2 4.2 11.8 11.8M11.8 4.2 4.2 11.8",
    "skipped": "M5 8H11",
    "not_run": "",
}
LEVELS = 8


def glyph(status: str, **place: float) -> Markup:
    """The status sign: a check, a cross, a dash or an empty ring, so that colour is never the only difference."""
    ring = el(
        "circle", cx=8, cy=8, r=6.9, fill="none", stroke="currentColor", stroke_width=1.3,
        stroke_dasharray="2 2.3" if status == "not_run" else None,
    )  # fmt: skip
    mark = el(
        "path", d=_GLYPHS[status], fill="none", stroke="currentColor", stroke_width=2.1,
        stroke_linecap="round", stroke_linejoin="round",
    )  # fmt: skip
    return el(
        "svg", None if status in ("pass", "fail") else ring, mark, viewBox="0 0 16 16", aria_hidden="true", **place
    )


def chip(status: str, pill: bool = False) -> Markup:
    """Glyph and word of a status."""
    return el("span", glyph(status), LABELS[status], cls=f"st {status}{' pill' if pill else ''}")


def bar(share: float | None, status: str, limit: float = 1.0) -> Markup:
    """Measured / allowed as a bar with the limit at four fifths; beyond it the bar fills up."""
    edge = 80.0
    width = 0.0 if share is None else min(share / limit * edge if limit else 0.0, 100.0)
    return el(
        "svg",
        el("rect", cls="track", x=0, y=1, width=100, height=6, rx=1),
        el("rect", cls="fill", x=0, y=1, width=max(width, 0.6) if share else 0, height=6, rx=1),
        el("line", cls="limit", x1=edge, x2=edge, y1=0, y2=8, vector_effect="non-scaling-stroke"),
        cls=f"bar {status}", viewBox="0 0 100 8", preserveAspectRatio="none", aria_hidden="true",
    )  # fmt: skip


def histogram(counts: dict[str, int]) -> Markup:
    """Bars of counts by bucket: bucket, bar, share and count."""
    total = sum(counts.values()) or 1
    top = max(counts.values(), default=0) or 1
    rows = []
    for bucket, n in counts.items():
        drawing = el(
            "svg",
            el("rect", cls="fill", x=0, y=0, width=max(100 * n / top, 0.5) if n else 0, height=8, rx=0.6),
            cls="bar", viewBox="0 0 100 8", preserveAspectRatio="none", aria_hidden="true",
        )  # fmt: skip
        rows += [el("span", bucket), drawing, el("span", f"{percent(n / total)}  ({n:,})", cls="num soft")]
    return el("div", *rows, cls="hist")


def heatmap(values: Sequence[Sequence[float]], top: float, over: float | None, axes: Sequence[str], block) -> Markup:
    """Cells coloured by value in eight levels up to `top`; cells beyond `over` are outlined.

    One path per level keeps a map of 4096 cells small; `data-cells` holds the values for the readout of `page.js`,
    two base-36 digits each, in shares of `top`.

    Args:
        values: rows of numbers; infinities and NaN are drawn as the last level.
        top: value of the last level, shared by maps that are to be compared.
        over: what the values are allowed to reach, None if nothing is said.
        axes: names of the vertical and the horizontal axis.
        block: how many rows and columns of the output one cell stands for.
    """
    n, m = len(values), len(values[0])
    cell = min(22.0, max(6.0, 470 / m))
    high = min(cell, max(5.0, 300 / n)) if n > 1 else 22.0
    left, upper, gap = 30, 30, 1.0 if min(cell, high) > 8 else 0.5
    levels: dict[str, list[str]] = {}
    digits = []
    for i, row in enumerate(values):
        for j, v in enumerate(row):
            share = 1.0 if not math.isfinite(v) else min(v / top, 1.0) if top else 0.0
            place = (
                f"M{left + j * cell:.4g} {upper + i * high:.4g}h{cell - gap:.3g}v{high - gap:.3g}h-{cell - gap:.3g}z"
            )
            levels.setdefault(f"k{min(int(LEVELS * share), LEVELS - 1)}", []).append(place)
            if over is not None and not v <= over:
                levels.setdefault("over", []).append(place)
            digits.append(_base36(round(share * 1295)))
    paths = [el("path", cls=name, d="".join(places)) for name, places in sorted(levels.items(), reverse=True)]
    paths.sort(key=lambda path: 'class="over"' in path)
    ticks = [el("text", j * block[1], x=left + j * cell, y=upper - 5, font_size=10) for j in _ticks(m, cell, 34)]
    ticks += [
        el(
            "text",
            i * block[0],
            x=left - 5,
            y=upper + i * high + min(high, 12) / 2 + 4,
            font_size=10,
            text_anchor="end",
        )
        for i in (_ticks(n, high, 16) if n > 1 else ())
    ]
    names = [el("text", axes[1], x=left, y=11, font_size=11.5)]
    if n > 1:
        names = [el("text", f"{axes[0]} \u2193   {axes[1]} \u2192", x=left, y=11, font_size=11.5)]
    width, height = left + max(m * cell, 150) + 2, upper + n * high + 2
    return el(
        "svg", names, ticks, paths, cls="heat", viewBox=f"0 0 {width:.0f} {height:.0f}",
        role="img", aria_label=f"error by {axes[0]} and {axes[1]}, {n} by {m} cells, scale ends at {top:.3g}",
        style=f"max-width:{width:.0f}px",
        data_cells="".join(digits), data_grid=f"{left} {upper} {cell:.4g} {high:.4g} {m} {n}", data_top=f"{top:.6g}",
        data_axes=" ".join(axes), data_block=" ".join(map(str, block)),
    )  # fmt: skip


def _ticks(count: int, size: float, apart: float) -> range:
    step = next(s for s in (1, 2, 4, 5, 8, 10, 16, 20, 32, 64) if s * size >= apart or s == 64)
    return range(0, count, step)


def _base36(n: int) -> str:
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    return digits[n // 36] + digits[n % 36]


def scale(top: float, unit: str, beyond: bool) -> Markup:
    """Legend of the heatmap's levels; `beyond` explains the outlines too."""
    steps = [el("rect", cls=f"k{k}", x=k * 20, y=0, width=19.4, height=10) for k in range(LEVELS)]
    drawing = el("svg", steps, viewBox="0 0 160 10", preserveAspectRatio="none", aria_hidden="true")
    outline = el("span", "outlined: beyond the allowance", cls="beyond") if beyond else None
    return el("div", "0", drawing, f"{top:.3g}", el("span", unit), outline, el("output", cls="readout"), cls="legend")


def triangle(
    statuses: dict[str, str], blamed: Sequence[str], notes: dict[str, str], what: dict[str, str], link: str
) -> Markup:
    """Capture, reference and kernel with one line per comparison, the blamed corners highlighted.

    Args:
        statuses: comparison -> status.
        blamed: names of the corners that the verdict blames.
        notes: comparison -> short text beside the status, such as the used share.
        what: corner -> what it is, such as the producer.
        link: the status beside a line leads to `#<link>.<comparison>`.
    """
    parts, chips = [], []
    for comparison, (a, b) in EDGES.items():
        (x1, y1), (x2, y2) = NODES[a], NODES[b]
        status = statuses[comparison]
        x, y = (x1 + x2) / 2, (y1 + y2) / 2
        word = join(LABELS[status], f" · {notes[comparison]}" if notes.get(comparison) else "")
        wide = 48 + 7.6 * len(word)
        parts.append(el("g", el("line", x1=x1, y1=y1, x2=x2, y2=y2), cls=f"edge {status}"))
        chips.append(
            el(
                "a",
                el("rect", cls="chip", x=x - wide / 2, y=y - 14, width=wide, height=28, rx=14),
                glyph(status, x=x - wide / 2 + 10, y=y - 8, width=16, height=16),
                el("text", word, x=x - wide / 2 + 32, y=y + 5),
                cls=f"edge {status}",
                href=f"#{link}.{comparison}",
            )
        )
    for name, (x, y) in NODES.items():
        guilty = name in blamed
        parts.append(
            el(
                "g",
                el("rect", x=x - 88, y=y - 27, width=176, height=54, rx=10),
                el("text", name, x=x, y=y - 3, text_anchor="middle", cls="name"),
                el("text", what.get(name, ""), x=x, y=y + 15, text_anchor="middle", cls="what"),
                el("text", "blamed", x=x, y=y + 44, text_anchor="middle", cls="tagged") if guilty else None,
                cls=f"node{' blamed' if guilty else ''}",
            )
        )
    said = "; ".join(f"{c.replace('_', ' ')}: {LABELS[s]}" for c, s in statuses.items())
    label = f"Verdict triangle. {said}. Blamed: {', '.join(blamed) or 'none'}."
    return el("svg", parts, chips, cls="triangle", viewBox="0 0 550 306", role="group", aria_label=label)


def mini(statuses: dict[str, str]) -> Markup:
    """The triangle in the size of a table cell."""
    corners = {"capture": (17, 3), "reference": (3, 19), "kernel": (31, 19)}
    lines = []
    for comparison, (a, b) in EDGES.items():
        (x1, y1), (x2, y2) = corners[a], corners[b]
        lines.append(el("g", el("line", x1=x1, y1=y1, x2=x2, y2=y2), cls=statuses[comparison]))
    dots = [el("circle", cx=x, cy=y, r=2.4) for x, y in corners.values()]
    return el("svg", lines, dots, cls="mini", viewBox="0 0 34 22", aria_hidden="true")
