"""Generated tables in documentation pages: each stands between two marker lines and is written or checked whole."""

from collections.abc import Mapping
from pathlib import Path


def insert(text: str, new: str, page: str, begin: str, end: str) -> str:
    """`text` with what stands between the two markers replaced.

    Raises:
        ValueError: the markers are not there exactly once, in order.
    """
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"{page} must hold these two lines once, in this order:\n{begin}\n{end}")
    before, rest = text.split(begin)
    return f"{before}{begin}\n\n{new}\n\n{end}{rest.split(end)[1]}"


def refresh(pages: Mapping[str, str], root: Path, begin: str, end: str, *, script: str, check: bool) -> int:
    """Write the tables of `pages` (path -> table), or only say which are out of date; returns the exit code."""
    stale = []
    for page, tables in pages.items():
        path = root / page
        old = path.read_text("utf-8")
        new = insert(old, tables, page, begin, end)
        if old != new:
            stale.append(page)
            if not check:
                path.write_text(new, "utf-8")
    if stale:
        print((f"out of date, run {script}: " if check else "written: ") + ", ".join(stale))
    return 1 if check and stale else 0
