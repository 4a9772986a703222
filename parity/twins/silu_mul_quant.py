"""`silu(gate) * up` and its quantized forms in numpy, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.twins import _codes

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    swapped: bool = False
    """Ups come first."""
    interleaved: bool = False
    """Gates are the even numbers."""
    sigmoid: bool = False
    """The gate is not multiplied with its sigmoid."""
    no_limit: bool = False
    """Nothing is clamped."""
    low_gate: bool = False
    """Gates are clamped from below as well."""
    gain: float = 1.0
    """Factor of the product."""
    cut: bool = False
    """Codes are cut off instead of rounded."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """The op's outputs from its arguments as numpy arrays; `wide` computes in float64 without roundings."""
    work, x = np.float64 if wide else np.float32, args["x"]

    def rounded(y: np.ndarray) -> np.ndarray:
        return y if wide else y.astype(x.dtype).astype(work)

    gate, up = (x[:, ::2], x[:, 1::2]) if on.interleaved else np.split(x, 2, 1)
    gate, up = (up, gate) if on.swapped else (gate, up)
    gate, up, limit = gate.astype(work), up.astype(work), args.get("limit")
    if limit is not None and not on.no_limit:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        gate = np.maximum(gate, -limit) if on.low_gate else gate
    with np.errstate(over="ignore"):
        sigmoid = 1 / (1 + np.exp(-gate)) if on.sigmoid else gate / (1 + np.exp(-gate))
    y = rounded(rounded(sigmoid) * up * work(on.gain))
    mode = args.get("mode", "none")
    names = {"none": ("o",), "static": ("q",)}.get(mode, ("q", "scale"))
    found = dict(zip(names, _codes.fp8_rows(y, args, cut=on.cut), strict=True))
    return {n: a if wide or n != "o" else a.astype(x.dtype) for n, a in found.items()}
