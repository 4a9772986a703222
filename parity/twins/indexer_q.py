"""Indexer queries in numpy, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.twins import _codes
from parity.twins.rope import turn

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    unrounded: bool = False
    """Rotated numbers are not rounded."""
    unfolded: bool = False
    """Weights lack the scales of the codes."""
    per_token: bool = False
    """All heads of a token share a scale."""
    power: str = "ceil"
    """How scales become powers of two."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """`q` and `weights` from the op's arguments as numpy arrays; format fp8 only."""
    work = np.float64 if wide else np.float32
    table, x = args["cos_sin"].astype(work), args["q"].astype(work)
    rows, Dr = table[np.clip(args["positions"], 0, len(table) - 1)][:, None], table.shape[1]
    part = slice(0, Dr) if args.get("first") else slice(x.shape[2] - Dr, None)
    x[..., part] = turn(x[..., part], rows, bool(args.get("interleaved", True)))
    x = x if wide or on.unrounded else x.astype(args["q"].dtype).astype(work)
    top = np.abs(x).max((1, 2) if on.per_token else 2, keepdims=True)
    s = _codes.power_of_two(np.maximum(top, work(args.get("floor", 1e-4))) / work(448), on.power)
    first, second = args.get("scales") or (x.shape[2] ** -0.5, x.shape[1] ** -0.5)
    w = args["weights"].astype(work) * (1 if on.unfolded else s[..., 0])
    return {"q": _codes.float8(x / s, "float8_e4m3fn"), "weights": w * work(first) * work(second)}
