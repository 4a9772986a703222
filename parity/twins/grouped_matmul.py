"""Products of rows in groups in numpy: one product a group, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from parity.twins import scaled_matmul

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    one_weight: bool = False
    """Every group multiplies the first weight that rows have."""
    one_scale: bool = False
    """Every group's weight has the scales of that weight."""
    late: int = 0
    """Groups begin and end that many rows late."""
    skip_empty: bool = False
    """Empty groups take no number: those behind them have the weight before theirs."""
    rest: bool = False
    """Rows of no group get the last group's results."""
    product: scaled_matmul.Switches = scaled_matmul.NONE
    """Of each group's product."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """`o` from the op's arguments as numpy arrays."""
    name = args.get("out_dtype", "bfloat16")
    N, offsets = (
        len(args["a"]),
        np.minimum(np.asarray(args["offsets"]) + on.late * (np.asarray(args["offsets"]) > 0), len(args["a"])),
    )
    o = np.zeros((N, args["b"].shape[1]), np.float64 if wide else getattr(ml_dtypes, name, name))
    used = [e for e in range(len(args["b"])) if offsets[e] < offsets[e + 1]]
    for i, e in enumerate(used):
        mine = slice(offsets[e], N if on.rest and e == used[-1] else offsets[e + 1])
        weight = used[0] if on.one_weight else i if on.skip_empty else e
        o[mine] = _product(args, mine, weight, used[0] if on.one_scale else weight, wide, on)
    return {"o": o}


def _product(args: Args, rows: slice, weight: int, scale: int, wide: bool, on: Switches) -> np.ndarray:
    given = {"a": args["a"][rows], "b": args["b"][weight], "out_dtype": args.get("out_dtype", "bfloat16")}
    if args.get("a_scale") is None:
        return scaled_matmul.run(given | {"a_scale": np.ones(1), "b_scale": np.ones(1)}, wide, on.product)["o"]
    given |= {"a_scale": args["a_scale"][rows], "b_scale": args["b_scale"][scale], "block": 128}
    return scaled_matmul.run(given, wide, on.product)["o"]
