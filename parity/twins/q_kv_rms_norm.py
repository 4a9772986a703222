"""RMSNorm of two latents in numpy, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import numpy as np

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    no_weight: bool = False
    """The weight is 1."""
    joint: bool = False
    """Both share the mean of squares of q."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """`q` and `kv` from the op's arguments as numpy arrays."""
    work, out = np.float64 if wide else np.float32, {}
    for name in ("q", "kv"):
        x, w = args[name].astype(work), args[f"{name}_weight"].astype(work)
        squares = (args["q"].astype(work) if on.joint else x) ** 2
        y = x / np.sqrt(squares.mean(1, keepdims=True) + work(args.get("eps", 1e-6)))
        y = y if on.no_weight else y * w
        out[name] = y if wide else y.astype(args[name].dtype)
    return out
