"""The update of hyper-connected streams in numpy, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.twins.mhc_pre import mix

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    transposed: bool = False
    """The matrix is read as [destination, source]."""
    no_output: bool = False
    """The layer's output is forgotten."""
    even: bool = False
    """The layer's output enters every stream with the first gate."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """`new_residual` from the op's arguments as numpy arrays."""
    comb = np.swapaxes(args["comb"], 1, 2) if on.transposed else args["comb"]
    post = np.broadcast_to(args["post"][:, :1], args["post"].shape) if on.even else args["post"]
    return {"new_residual": mix(args["residual"], args["y"] * (0 if on.no_output else 1), post, comb, wide)}
