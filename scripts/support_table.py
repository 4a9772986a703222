"""Write which implementation runs which shapes, and why not the others, into docs/<stem>.md and, in short, README.md.

The answers come from each record's `support` rows through `explain(on_target=True)`: what a machine with a supported
GPU would do, asked from shapes alone.
"""

import argparse
import fnmatch
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from jaxattn import MECHANISMS, explain
from jaxattn._mechanism import Mechanism

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from parity import captures  # noqa: E402
from scripts import _tables  # noqa: E402

BEGIN = "<!-- support table: written by scripts/support_table.py -->"
END = "<!-- end of support table -->"
UNPROVEN = "not proven on a GPU yet"
"""How `explain` begins where a kernel must be named to run."""
GROUPS = {
    "paged_attention": "Attention and its caches",
    "quantize_fp8": "Quantization",
    "router": "Mixtures of experts",
    "rope": "DeepSeek",
    "turboquant_write": "Caches of 3 and 4 bits",
}
"""First mechanism of each group of the README's table, in the order of the registry."""


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


def counts(mechanism: Mechanism) -> dict[str, tuple[int, int, int]]:
    """Kernel -> support rows that it runs, rows that it runs only where it is named (not proven yet), all rows."""
    rows = [explain(mechanism, on_target=True, **args).reasons for _, args in mechanism.support]
    return {
        name: (
            sum(row[name] is None for row in rows),
            sum(UNPROVEN in (row[name] or "") for row in rows),
            len(rows),
        )
        for name in mechanism.kernels
    }


def overview(mechanisms: Sequence[Mechanism], root: Path = ROOT) -> str:
    """One line per mechanism: its page's title, its Flax module, support rows of each kernel, vLLM's outputs."""
    names = shipped()
    lines = ["| op | what | Flax module | kernel, on an H200 | stored outputs |", "| --- | --- | --- | --- | --- |"]
    for m in mechanisms:
        if m.name in GROUPS:
            lines.append(f"| **{GROUPS[m.name]}** | | | | |")
        title = (root / m.docs).read_text("utf-8").partition("\n")[0].removeprefix("# ")
        module = f"`{m.module.partition(':')[2]}`" if m.module else ""
        kernels = [
            f"{name}: {proven} {f'and {unproven} unproven ' if unproven else ''}of {total} rows"
            for name, (proven, unproven, total) in counts(m).items()
        ]
        stored = "in the repository" if matching(m, names) else "yes" if m.captures else "none"
        cells = (f"[{m.name}]({m.docs})", title, module, ", ".join(kernels) or "none: XLA", stored)
        lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return "\n".join([*tally(mechanisms, names), "", *lines])


def tally(mechanisms: Sequence[Mechanism], names: Sequence[str]) -> list[str]:
    """How many mechanisms there are of each state, as a list of two lines."""
    kernels = [counts(m).values() for m in mechanisms]
    passed = sum(any(proven for proven, _, _ in found) for found in kernels)
    without = sum(not found for found in kernels)
    unproven = len(mechanisms) - passed - without
    stored = sum(bool(m.captures) for m in mechanisms)
    inside = sum(bool(matching(m, names)) for m in mechanisms)
    return [
        f"- {len(mechanisms)} ops: {passed} whose kernel passed on an H200, "
        f"{f'{unproven} with an unproven one only, ' if unproven else ''}{without} left to XLA.",
        f"- {stored} compared with stored outputs, {'all' if inside == stored else inside} of them with some that the "
        "repository holds; "
        f"{len(mechanisms) - stored} against float64, brute force or arrays by hand only.",
    ]


def shipped() -> list[str]:
    """`family/case` of the captures in the repository."""
    return [capture.name for capture in captures.load([captures.SHIPPED])]


def matching(mechanism: Mechanism, names: Iterable[str]) -> int:
    """How many of these captures the mechanism answers for."""
    return sum(any(fnmatch.fnmatchcase(name, pattern) for pattern in mechanism.captures) for name in names)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a page is out of date")
    check = parser.parse_args(arguments).check
    pages = {"README.md": overview(MECHANISMS, root)} | {m.docs: table(m) for m in MECHANISMS}
    return _tables.refresh(pages, root, BEGIN, END, script="scripts/support_table.py", check=check)


if __name__ == "__main__":
    sys.exit(main())
