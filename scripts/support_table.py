"""Write which implementation runs which shapes, and why not the others, into README.md and docs/<stem>.md.

The answers come from each record's `support` rows through `explain(on_target=True)`: what a machine with a supported
GPU would do, asked from shapes alone.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxattn import MECHANISMS, explain
from jaxattn._mechanism import Mechanism

ROOT = Path(__file__).resolve().parents[1]
BEGIN = "<!-- support table: written by scripts/support_table.py -->"
END = "<!-- end of support table -->"


def table(mechanism: Mechanism) -> str:
    """Markdown table: one line per support row, one column per implementation, reasons in the cells."""
    if not mechanism.support:
        raise ValueError(f"{mechanism.name} has no support rows; add shapes to its record")
    explanations = [(label, explain(mechanism, on_target=True, **args)) for label, args in mechanism.support]
    columns = list(explanations[0][1].reasons)
    lines = [f"| {mechanism.name} | {' | '.join(columns)} |", "| --- " * (len(columns) + 1) + "|"]
    for label, explanation in explanations:
        cells = [explanation.reasons[name] or "yes" for name in columns]
        lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in (label, *cells))} |")
    return "\n".join(lines)


def folded(mechanism: Mechanism) -> str:
    """The same table behind one line that counts its rows."""
    rows = [explain(mechanism, on_target=True, **args).reasons for _, args in mechanism.support]
    counts = [f"{name} {sum(reasons[name] is None for reasons in rows)}" for name in rows[0]]
    summary = f"{mechanism.name}: of {len(rows)} rows {', '.join(counts)}"
    return f"<details><summary>{summary}</summary>\n\n{table(mechanism)}\n\n</details>"


def insert(text: str, tables: str, page: str) -> str:
    """`text` with what stands between the two markers replaced.

    Raises:
        ValueError: the markers are not there exactly once, in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{page} must hold these two lines once, in this order:\n{BEGIN}\n{END}")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{rest.split(END)[1]}"


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a page is out of date")
    check = parser.parse_args(arguments).check
    pages = {"README.md": "\n\n".join(map(folded, MECHANISMS))} | {m.docs: table(m) for m in MECHANISMS}
    stale = []
    for page, tables in pages.items():
        path = root / page
        old = path.read_text("utf-8")
        new = insert(old, tables, page)
        if old != new:
            stale.append(page)
            if not check:
                path.write_text(new, "utf-8")
    if stale:
        print(("out of date, run scripts/support_table.py: " if check else "written: ") + ", ".join(stale))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
