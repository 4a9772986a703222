"""The combination of N partial attention results in numpy, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import numpy as np

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    other_base: bool = False
    """Base 2 for e and e for 2."""
    keep: float | None = None
    """The log-sum-exp (+inf or NaN) that does not count as empty."""
    leak: bool = False
    """An empty rank is multiplied with zero instead of left out."""
    even: bool = False
    """All ranks weigh the same."""
    first_rank: int = 0
    """Ranks before this one are forgotten in the sum."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """`o` [B, H, D], `lse` [B, H] and, with `return_corrected`, `corrected` [N, B, H, D].

    Args:
        args: of `jaxattn.combine_partials`, as numpy arrays.
        wide: compute in float64 throughout, else in float32.
        on: departures.
    """
    dtype, work = (np.float64, np.float64) if wide else (args["o"].dtype, np.float32)
    natural = (args.get("base", "e") == "e") != on.other_base
    exp, log = (np.exp, np.log) if natural else (np.exp2, np.log2)
    lse, o = args["lse"].astype(work), args["o"].astype(work)
    empty = ~np.isfinite(lse)
    if on.keep is not None:
        empty &= ~(np.isnan(lse) if np.isnan(on.keep) else lse == on.keep)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        lse = np.where(empty, -np.inf, lse).astype(work)
        top = lse.max(0)
        top[np.isneginf(top)] = 0
        total = log(exp(lse - top).sum(0)) + top
        factor = np.where(np.isneginf(lse), 0, exp(lse - total)).astype(work)
        if on.even:
            factor[:] = 1 / len(factor)
        corrected = o * factor[..., None]
    if not on.leak:
        corrected = np.where(factor[..., None] == 0, 0, corrected)
    out = {"o": corrected[on.first_rank :].sum(0).astype(dtype), "lse": total.astype(work)}
    return out | ({"corrected": corrected.astype(dtype)} if args.get("return_corrected") else {})
