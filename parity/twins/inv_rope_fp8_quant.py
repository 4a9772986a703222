"""The quantized attention output of V4 in numpy, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.twins import _codes, _latent
from parity.twins.rope import turn

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    forwards: bool = False
    """The rotation is applied once more instead of undone."""
    rounded: bool = False
    """The rotated numbers are rounded to bfloat16."""
    power: str = "ceil"
    """How scales become powers of two."""
    floor: float = 1e-10
    """Of amax."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """`q` and `scale` from the op's arguments as numpy arrays."""
    work = np.float64 if wide else np.float32
    table, y = args["cos_sin"].astype(work), args["o"].astype(work)
    rows, Dr = table[np.clip(args["positions"], 0, len(table) - 1)], table.shape[1]
    y[..., -Dr:] = turn(y[..., -Dr:], rows[:, None], True, not on.forwards)
    if on.rounded:
        y = y.astype(_latent.BF16).astype(work)
    y = y.reshape(len(y), args["groups"], -1, 128)
    s = np.maximum(np.abs(y).max(3, keepdims=True, initial=0), work(on.floor)) / work(448)
    s = _codes.power_of_two(s, on.power)
    return {"q": _codes.float8(y / s, "float8_e4m3fn").reshape(*y.shape[:2], -1), "scale": s[..., 0]}
