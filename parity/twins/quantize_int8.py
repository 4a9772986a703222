"""INT8 quantizers in numpy, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.twins import _codes

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    rounding: str | None = None
    """"even", "away" or "zero" instead of the path's."""
    wrap: bool = False
    """Codes wrap around instead of saturating."""
    through_zero: bool = False
    """The range of dynamic zero points includes zero."""
    azp_ignored: bool = False
    """Zero points are not added."""
    whole_row: bool = False
    """Groups share the largest scale of their row."""
    scale_127_5: bool = False
    """The symmetric range is 127.5 steps."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """`q`, `scale` and, with zero points, `azp` from the op's arguments as numpy arrays."""
    work = np.float64 if wide else np.float32
    x, granularity = args["x"].astype(work), args.get("granularity", "token")
    steps = work(127.5 if on.scale_127_5 else 127)
    if granularity == "tensor":
        s, azp = np.asarray(args["scale"]).astype(work).reshape(()), args.get("azp")
        if azp is None:
            return {"q": _sat(_round(x / s, "even", on), on), "scale": s}
        azp = np.asarray(azp).reshape(())
        return {"q": _shifted(x * (1 / s), azp, on), "scale": s, "azp": azp}
    if not args.get("symmetric", True):
        return _asymmetric(x, on)
    triton = args.get("rule", "cuda") == "triton"
    if granularity == "token":
        top = np.abs(x).max(1, keepdims=True, initial=0)
        top = np.maximum(top, work(1e-10)) if triton else top
        s = top / steps
        factor = np.divide(steps, top, out=np.zeros_like(top), where=s >= 2.0**-126)
        return {"q": _sat(_round(x * factor, "away" if triton else "even", on), on), "scale": s}
    if granularity == "channel":
        s = np.abs(x).max(1, keepdims=True, initial=0) / steps
        y = np.divide(x, s, out=np.zeros_like(x), where=s >= 2.0**-126)
        return {"q": np.maximum(_sat(_round(y, "even", on), on), -127), "scale": s}
    group = args.get("group", 128)
    parts = _codes.grouped(x, group)
    if granularity == "block":
        parts = np.pad(parts, ((0, -len(x) % group), (0, 0), (0, 0))).reshape(-1, group, *parts.shape[1:])
        top = np.abs(parts).max((1, 3), initial=0)[:, None, :, None]
    else:
        top = np.abs(parts).max(2, keepdims=True, initial=0)
    top = np.broadcast_to(top.max(-2, keepdims=True), top.shape) if on.whole_row else top
    s = np.maximum(top, work(1e-10)) / steps
    q = _sat(_round(parts / s, "even" if granularity == "block" else "zero", on), on)
    if granularity == "block":
        return {"q": q.reshape(-1, q.shape[2] * group)[: len(x), : x.shape[1]], "scale": s[:, 0, :, 0]}
    return {"q": q.reshape(len(x), -1)[:, : x.shape[1]], "scale": s[..., 0]}


def _asymmetric(x: np.ndarray, on: Switches) -> Arrays:
    low, high = x.min(1, keepdims=True), x.max(1, keepdims=True)
    if on.through_zero:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
    s = (high - low) / x.dtype.type(255)
    constant = s < 2.0**-126
    safe = np.where(constant, 1, s).astype(x.dtype)
    azp = np.where(constant, -np.sign(low), np.rint(-128 - low / safe)).astype(np.int32)
    q = np.where(constant, 0, _shifted(x * (1 / safe), azp, on)).astype(np.int8)
    return {"q": q, "scale": np.where(constant, np.where(low == 0, 1, np.abs(low)), s).astype(x.dtype), "azp": azp}


def _shifted(x: np.ndarray, azp: np.ndarray, on: Switches) -> np.ndarray:
    whole = _round(x, "even", on).astype(np.int64)
    return _sat(whole + (0 if on.azp_ignored else azp), on)


def _round(x: np.ndarray, rounding: str, on: Switches) -> np.ndarray:
    rounding = on.rounding or rounding
    if rounding == "even":
        return np.rint(x)
    whole = np.trunc(x)
    return whole if rounding == "zero" else whole + np.sign(x) * (2 * np.abs(x - whole) >= 1)


def _sat(x: np.ndarray, on: Switches) -> np.ndarray:
    return x.astype(np.int64).astype(np.int8) if on.wrap else np.clip(x, -128, 127).astype(np.int8)
