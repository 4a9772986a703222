"""Index lists of sparse prefill attention as loops, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import numpy as np

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    window: int = 0
    """Positions added to the window."""
    no_offset: bool = False
    """The request's rows start at 0."""
    window_first: bool = False
    """The window stands before the compressed entries."""
    from_start: bool = False
    """Window rows are counted from the request's first token."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """`indices` and `counts` from the op's arguments as numpy arrays."""
    del wide
    topk, start = args["topk"], args["query_start"]
    N, chosen = topk.shape
    width = -(-(chosen + args["window"]) // 128) * 128
    indices, counts = np.full((N, width), -1, np.int32), np.zeros(N, np.int32)
    for b, length in enumerate(args["lengths"].tolist()):
        offset = 0 if on.no_offset else b * args["stride"]
        for row in range(start[b], start[b + 1]):
            p = length - int(start[b + 1]) + row
            n = min((p + 1) // args["ratio"], chosen)
            base = offset + args["entries"] - (0 if on.from_start else length - int(args["gathered"][b]))
            first = max(p - args["window"] - on.window + 1, 0)
            seen = [base + q for q in range(first, p + 1)]
            picked = [offset + e if e >= 0 else -1 for e in topk[row, :n].tolist()]
            out = (seen + picked if on.window_first else picked + seen)[:width]
            indices[row, : len(out)] = np.array(out, np.int64).astype(np.int32)
            counts[row] = len(out)
    return {"indices": indices, "counts": counts}
