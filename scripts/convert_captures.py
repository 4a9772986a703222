"""Rewrite capture files of older formats in the present one, in place.

python scripts/convert_captures.py FILE...

What was captured stays as it is; provenance gains `converted`, the older format and the sha256 of the older file. A
file that fails a check, or that nothing vouches for, is left alone. Exit code: 0 all files have the present format now,
1 not all.
"""

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from parity import captures
from parity.captures import CaptureError, CaseData


def convert(path: Path) -> int:
    """Rewrite one file; returns the format that it had.

    Raises:
        CaptureError: a check fails, or the file is of format 1 and not a known one.
    """
    found = captures.read(path)
    provenance: dict[str, Any] = dict(found[0].provenance)
    number, verified = provenance.pop("format"), provenance.pop("verified")
    if number == captures.FORMAT:
        return number
    if not verified:
        raise CaptureError(f"{path}: format 1 without hashes, and not a known file: capture it anew")
    cases = {c.case: CaseData(dict(c.params), dict(c.inputs), dict(c.outputs)) for c in found}
    if number == 1:
        producer = provenance["producer"]
        known = {"versions": {producer: provenance[producer]}, "commit": "not recorded", "command": "not recorded"}
        provenance = known | provenance
        for data in cases.values():
            data.params.setdefault("kernel", "not recorded")
    provenance["converted"] = {"format": number, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    captures.write(path, found[0].family, cases, provenance)
    return number


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    summary, _, rest = (__doc__ or "").partition("\n")
    how = {"description": summary, "epilog": rest, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(prog="convert_captures.py", **how)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    code = 0
    for path in parser.parse_args(argv).files:
        try:
            number = convert(path)
        except CaptureError as e:
            print(f"convert_captures: {e}", file=sys.stderr)
            code = 1
        else:
            said = "has" if number == captures.FORMAT else f"was format {number}, has"
            print(f"{path}: {said} format {captures.FORMAT}, {path.stat().st_size / 1024:.0f} KiB")
    return code


if __name__ == "__main__":
    sys.exit(main())
