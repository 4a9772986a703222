"""The merge of two partial attention results in numpy, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]
FP8, FP8_MAX = ml_dtypes.float8_e4m3fn, 448.0


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    base: float = np.e
    """What the log-sum-exps are taken to the power of."""
    plus_infinity: bool = True
    """+inf means empty, like -inf."""
    leak: bool = False
    """An empty side is multiplied with zero instead of left out."""
    round_weights: Any = None
    """Dtype to which the two weights are rounded."""
    even: bool = False
    """Both sides weigh the same."""
    clamp: bool = True
    """float8 codes saturate."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """`o` [T, H, D] and, unless `return_lse` is false, `lse` [T, H], from the op's arguments as numpy arrays.

    Args:
        args: of `jaxattn.merge_states`.
        wide: compute in float64 throughout, else in float32.
        on: departures.
    """
    dtype, work = (np.float64, np.float64) if wide else (args["prefix_o"].dtype, np.float32)
    sides = [(args[f"{side}_o"].astype(work), args[f"{side}_lse"].astype(work)) for side in ("prefix", "suffix")]
    empty = [np.isinf(lse) if on.plus_infinity else np.isneginf(lse) for _, lse in sides]
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        logs = [np.where(gone, -np.inf, lse).astype(work) for (_, lse), gone in zip(sides, empty, strict=True)]
        top = np.maximum(*logs)
        top[np.isneginf(top)] = 0
        weights = [np.power(work(on.base), x - top) if on.base != np.e else np.exp(x - top) for x in logs]
        total = weights[0] + weights[1]
        shares = [np.full_like(w, 0.5) if on.even else w / total for w in weights]
        if on.round_weights is not None:
            shares = [w.astype(on.round_weights).astype(work) for w in shares]
        parts = [
            np.where((gone & ~np.bool_(on.leak))[..., None], 0, o * share[..., None])
            for (o, _), gone, share in zip(sides, empty, shares, strict=True)
        ]
        o = parts[0] + parts[1]
        lse = np.log(total) / np.log(work(on.base)) + top if on.base != np.e else np.log(total) + top
    if not on.leak:
        o[empty[0] & empty[1]] = 0
    if args.get("out_scale") is not None:
        o = o * (work(1) / np.asarray(args["out_scale"]).astype(work).reshape(()))
        o = np.clip(o, -FP8_MAX, FP8_MAX) if on.clamp else o
        dtype = dtype if wide else FP8
    return {"o": o.astype(dtype)} | ({"lse": lse.astype(work)} if args.get("return_lse", True) else {})
