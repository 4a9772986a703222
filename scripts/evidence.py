"""Write into docs/<stem>.md where the evidence for a mechanism is: definition, tests, captures, how they are judged.

Everything comes from the registry, from the adapters of `parity.cases` and from the captures in the repository.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from jaxattn import MECHANISMS
from jaxattn._mechanism import Mechanism

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from parity import cases  # noqa: E402
from scripts import _tables, support_table  # noqa: E402

BEGIN = "<!-- evidence: written by scripts/evidence.py -->"
END = "<!-- end of evidence -->"


def table(mechanism: Mechanism, shipped: Iterable[str]) -> str:
    """Markdown table of what speaks for one mechanism; `shipped` are the names of the captures in the repository."""
    stem = mechanism.name
    rows = [
        ("defined by", mechanism.source),
        ("tests", f"{_link(f'tests/ops/test_{stem}.py')}, {_link('tests/test_contract.py')}"),
        ("kernels on an H200", _kernels(mechanism)),
        ("captures", _captures(mechanism, shipped)),
    ]
    if mechanism.captures:
        rows.append(("[rules](../parity/tolerances.py), to the capture and to the kernel", _rules(stem)))
    cells = (f"| {name} | {text.replace('|', '&#124;')} |" for name, text in rows)
    return "\n".join(["| what | where |", "| --- | --- |", *cells])


def _kernels(mechanism: Mechanism) -> str:
    """How many support rows run by default, and how many only by name."""
    found = []
    for name, (proven, unproven, total) in support_table.counts(mechanism).items():
        text = f"`{name}`: {proven} of {total} support rows passed and run by default" if proven else ""
        if unproven:
            text = f"{text}, " if text else f"`{name}`: "
            text += f"{unproven} of {total} not run there yet: interpreted and compiled only"
        found.append(text or f"`{name}`: none of {total} support rows")
    return "; ".join(found) or "there is no kernel"


def _captures(mechanism: Mechanism, shipped: Iterable[str]) -> str:
    """Their names, how many of them the repository holds, and who translates them."""
    if not mechanism.captures:
        return "none"
    count = support_table.matching(mechanism, shipped)
    names = ", ".join(f"`{p}`" for p in mechanism.captures)
    where = f"{count} of them in the repository" if count else "none of them in the repository: `--captures DIR`"
    return f"{names}, {where}; read by {_link(f'parity/cases/{mechanism.name}.py')}"


def _rules(stem: str) -> str:
    """Outputs of the adapter by the pair of rules that judges them."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, output in cases.find(stem).outputs.items():
        groups.setdefault((output.rule, output.contract), []).append(f"`{name}`")
    return "; ".join(f"{', '.join(names)}: {rule}, {contract}" for (rule, contract), names in groups.items())


def _link(path: str) -> str:
    return f"[{path}](../{path})"


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a page is out of date")
    check = parser.parse_args(arguments).check
    shipped = support_table.shipped()
    pages = {m.docs: table(m, shipped) for m in MECHANISMS}
    return _tables.refresh(pages, root, BEGIN, END, script="scripts/evidence.py", check=check)


if __name__ == "__main__":
    sys.exit(main())
