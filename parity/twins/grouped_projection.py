"""Grouped projections in numpy: one product of codes a group, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.twins import scaled_matmul

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    one_group: bool = False
    """Every group multiplies the first one's inputs."""
    one_scale: bool = False
    """Every group's weight has the first one's scales."""
    product: scaled_matmul.Switches = scaled_matmul.NONE
    """Of each group's product."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """`y` from the op's arguments as numpy arrays."""
    parts = []
    for g in range(len(args["weight"])):
        mine = 0 if on.one_group else g
        given = {"a": args["x"][:, mine], "a_scale": args["x_scale"][:, mine], "b": args["weight"][g]}
        given |= {"b_scale": args["weight_scale"][0 if on.one_scale else g], "block": 128}
        given["out_dtype"] = args.get("dtype", "bfloat16")
        parts.append(scaled_matmul.run(given, wide, on.product)["o"])
    return {"y": np.stack(parts, 1)}
