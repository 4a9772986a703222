"""The indexer's choice in numpy, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import numpy as np

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    smallest: bool = False
    """The smallest logits are taken."""
    absolute: bool = False
    """Entries are counted from 0."""
    one_short: bool = False
    """The last entry of each range is never taken."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """`chosen` from the op's arguments as numpy arrays."""
    del wide
    logits, topk = args["logits"].astype(np.float64), args["topk"]
    out = np.full((len(logits), topk), -1, np.int32)
    for n, (start, end) in enumerate(zip(args["starts"].tolist(), args["ends"].tolist(), strict=True)):
        row = logits[n, start : end - on.one_short if end > start else start]
        row = np.where(np.isnan(row), -np.inf, row)
        best = np.sort(np.argsort(row if on.smallest else -row, kind="stable")[:topk])
        out[n, : len(best)] = best + (start if on.absolute else 0)
    return {"chosen": out}
