"""Weighted sums of rows in numpy, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import numpy as np

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    no_weights: bool = False
    """All rows weigh the same."""
    swapped: bool = False
    """Slots exchange their weights."""
    drop_last: bool = False
    """The last slot is left out."""
    gain: float = 1.0
    """Factor of the result."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """`o` from the op's arguments as numpy arrays."""
    y, positions, weights = args["y"], args["positions"], args.get("weights")
    work = np.float64 if wide else np.float32
    weights = np.ones(positions.shape, work) if weights is None or on.no_weights else weights.astype(work)
    weights = weights[:, ::-1] if on.swapped else weights
    o = np.zeros((len(positions), y.shape[1]), work)
    for a in range(positions.shape[1] - on.drop_last):
        row = y[np.maximum(positions[:, a], 0)].astype(work)
        part = np.where(positions[:, a, None] >= 0, row * weights[:, a, None], 0)
        o = o + part
    return {"o": (o * work(on.gain)).astype(work if wide else y.dtype)}
