"""Gated activations in numpy, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import numpy as np

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    swap: bool = False
    """Gate and value are exchanged."""
    other_layout: bool = False
    """Halves are taken for pairs and pairs for halves."""
    no_clamp: bool = False
    """The limit is ignored."""
    lower: bool = False
    """The gate is clamped from below as well."""
    no_alpha: bool = False
    """alpha is 1."""
    no_beta: bool = False
    """Nothing is added to the value."""
    gain: float = 1.0
    """Factor of the result."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """`o` from the op's arguments as numpy arrays."""
    work = np.float64 if wide else np.float32
    x, kind, limit = args["x"].astype(work), args.get("kind", "silu"), args.get("limit")
    oai = kind == "swigluoai"
    half = x.shape[1] // 2
    gate, up = (x[:, ::2], x[:, 1::2]) if oai != on.other_layout else (x[:, :half], x[:, half:])
    gate, up = (up, gate) if on.swap else (gate, up)
    if limit is not None and not on.no_clamp:
        gate, up = np.clip(gate, -limit if on.lower else -np.inf, limit), np.clip(up, -limit, limit)
    alpha = work(args.get("alpha") or (1.702 if oai else 1.0))
    beta = work((1.0 if oai else 0.0) if args.get("beta") is None else args["beta"])
    with np.errstate(over="ignore"):
        gate = gate / (1 + np.exp(-gate * (work(1) if on.no_alpha else alpha)))
    if not oai and not wide:
        gate = gate.astype(args["x"].dtype).astype(work)
    o = gate * (up if on.no_beta or not beta else up + beta) * work(on.gain)
    return {"o": o.astype(work if wide else args["x"].dtype)}
