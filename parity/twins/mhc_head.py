"""The end of hyper-connections in numpy, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import numpy as np

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    mean: bool = False
    """Streams are averaged, whatever the gates."""
    norm_per_stream: bool = False
    """Each stream is normed by itself."""
    no_base: bool = False
    """The bases are left out."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """`h` from the op's arguments as numpy arrays."""
    work = np.float64 if wide else np.float32
    R, fn = args["residual"].astype(np.float64), args["fn"].astype(np.float64)
    (N, C, M), base = R.shape, args["base"] * (0 if on.no_base else 1)
    axes = (2,) if on.norm_per_stream else (1, 2)
    normed = R / np.sqrt((R**2).mean(axes, keepdims=True) + args.get("rms_eps", 1e-6))
    u = (normed.reshape(N, C * M) @ fn.T).astype(work)
    gates = 1 / (1 + np.exp(-(u * work(args["scale"]) + base.astype(work)))) + work(args.get("eps", 1e-6))
    gates = np.full_like(gates, 1 / C) if on.mean else gates
    h = (gates[..., None] * R.astype(work)).sum(1)
    return {"h": h if wide else h.astype(args["residual"].dtype)}
