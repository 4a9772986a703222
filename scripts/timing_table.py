"""Write the times that `scripts/bench.py` measured into the documentation.

Reads `docs/results/*.jsonl`. Of several lines for one mechanism, case, kernel and peer the newest counts; each table
says where and when its lines were measured. `docs/benchmarks.md` gets all tables, and the speed targets with what was
measured; `docs/<stem>.md` gets that of its mechanism if it has the two lines to put it between.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxattn import MECHANISMS
from jaxattn._mechanism import Mechanism

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts import _tables  # noqa: E402
from scripts._bench import targets  # noqa: E402

OVERVIEW = "docs/benchmarks.md"
BEGIN = "<!-- timing table: written by scripts/timing_table.py -->"
END = "<!-- end of timing table -->"
TARGETS = "<!-- targets: written by scripts/timing_table.py -->", "<!-- end of targets -->"
NEEDED = ("mechanism", "case", "kernel", "us", "peer", "peer_us", "ratio_to_peer", "floor_us", "roofline", "tb_s")
NEEDED += ("tflop_s", "device", "commit", "date", "versions")

type Line = dict[str, Any]


def read(folder: Path) -> list[Line]:
    """The lines of every file, newest of each kind, in the order of their first appearance.

    Raises:
        ValueError: a line is not one of `bench.py`'s.
    """
    newest: dict[tuple, Line] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for number, text in enumerate(file.read_text("utf-8").splitlines(), 1):
            line = json.loads(text)
            if missing := [name for name in NEEDED if name not in line]:
                raise ValueError(f"{file.name}:{number} lacks {', '.join(missing)}; write it with scripts/bench.py")
            key = tuple(line[name] for name in ("mechanism", "case", "kernel", "peer"))
            if key not in newest or newest[key]["date"] < line["date"]:
                newest[key] = line
    return list(newest.values())


def table(lines: Sequence[Line]) -> str:
    """Markdown: one row for each case and kernel, with the fastest peer that ran beside it."""
    rows: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        rows.setdefault((line["case"], line["kernel"]), []).append(line)
    text = [
        "| case | kernel | us | of the ceiling | rate | fastest peer | peer us | ratio |",
        "| --- | --- | --: | --: | --: | --- | --: | --: |",
    ]
    for (case, kernel), found in rows.items():
        latest = max(line["date"] for line in found)
        found = [line for line in found if line["date"] == latest]  # peers of other runs do not compare
        line = min(found, key=lambda x: x["peer_us"] if x["peer_us"] is not None else float("inf"))
        rate = f"{line['tb_s']:.2f} TB/s"
        if line["tflop_s"] > 100 * line["tb_s"]:
            rate = f"{line['tflop_s']:.0f} TFLOP/s"
        peer = ("-", "-", "-")
        if line["peer"] is not None:
            peer = (line["peer"], f"{line['peer_us']:.1f}", f"{line['ratio_to_peer']:.2f}")
        cells = (case, kernel, f"{line['us']:.1f}", f"{line['roofline']:.0%}", rate, *peer)
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join([*text, "", *sorted(set(map(provenance, lines)))])


def provenance(line: Line) -> str:
    """Where and when a line was measured, as a sentence."""
    versions = ", ".join(f"{k} {v}" for k, v in line["versions"].items() if k in ("jax", "torch", "vllm"))
    return f"Measured on {line['device']}, {line['date'][:10]}, commit {str(line['commit'])[:12]}, {versions}."


def pages(lines: Sequence[Line], mechanisms: Iterable[Mechanism]) -> dict[str, str]:
    """Page -> its tables, or what would measure it."""
    of = [(m, [line for line in lines if line["mechanism"] == m.name]) for m in mechanisms]
    found = {m.docs: table(some) if some else unmeasured(m) for m, some in of}
    everything = [f"### {m.name}\n\n{table(some)}" for m, some in of if some]
    return found | {OVERVIEW: "\n\n".join(everything) or "Nothing was measured yet."}


def unmeasured(mechanism: Mechanism) -> str:
    """What stands where a table would."""
    if any("bench" in case.tags for case in mechanism.cases):
        command = f"python scripts/bench.py --mechanism {mechanism.name}"
        return f"No line of `bench.py` is kept in [results](results) yet; `{command}` makes some."
    return "There is no case to time yet."


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a page is out of date")
    check = parser.parse_args(arguments).check
    lines = read(root / "docs/results")
    tables = pages(lines, MECHANISMS)
    asked = {p: text for p, text in tables.items() if p == OVERVIEW or _has_place(root / p)}
    how: dict[str, Any] = {"script": "scripts/timing_table.py", "check": check}
    stale = _tables.refresh(asked, root, BEGIN, END, **how)
    return stale | _tables.refresh({OVERVIEW: targets.table(lines)}, root, *TARGETS, **how)


def _has_place(page: Path) -> bool:
    return page.is_file() and BEGIN in page.read_text("utf-8")


if __name__ == "__main__":
    sys.exit(main())
