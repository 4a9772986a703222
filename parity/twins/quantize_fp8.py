"""FP8 quantizers in numpy, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.twins import _codes

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    cut: bool = False
    """Codes are cut off instead of rounded."""
    clamp: bool = True
    """Codes saturate."""
    through_bfloat16: bool = False
    """Quotients are rounded to bfloat16 before they become codes."""
    reciprocal: bool = False
    """Scales are amax times the reciprocal of 448."""
    ignore_bound: bool = False
    """The upper bound of amax is not used."""
    power: str = "ceil"
    """How scales become powers of two."""
    floor: float | None = None
    """Floor of amax of groups and blocks, instead of the path's."""
    scale_floor: bool = True
    """CUDA's groups have a floor on the scale as well."""
    whole_row: bool = False
    """Groups share the largest scale of their row."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """`q` and `scale` from the op's arguments as numpy arrays; `wide` computes in float64 without rounding codes."""
    work = np.float64 if wide else np.float32
    x, kind = args["x"].astype(work), args.get("dtype", "float8_e4m3fn")
    limit, granularity = work(_codes.LIMITS[kind]), args.get("granularity", "token")

    def codes(y: np.ndarray) -> np.ndarray:
        y = y.astype(np.dtype("bfloat16")).astype(work) if on.through_bfloat16 else y
        return _codes.float8(y, kind, clamp=on.clamp, cut=on.cut)

    def scaled(top: np.ndarray) -> np.ndarray:
        return top * work(1 / limit) if on.reciprocal else top / limit

    if granularity == "tensor":
        given = args.get("scale")
        s = scaled(np.abs(x).max(initial=0)) if given is None else np.asarray(given).astype(work).reshape(())
        return {"q": codes(x * _codes.inverse(s)), "scale": s}
    if granularity in ("token", "channel"):
        top, bound = np.abs(x).max(1, keepdims=True, initial=0), args.get("upper_bound")
        if bound is not None and not on.ignore_bound:
            top = np.minimum(top, np.asarray(bound).astype(work).reshape(()))
        s = np.maximum(scaled(top), work(_codes.TOKEN_FLOOR) / limit)
        return {"q": codes(x / s), "scale": s}
    group, rule = args.get("group", 128), args.get("rule", "cuda")
    rule = "deep_gemm" if granularity == "block" else rule
    parts = _codes.grouped(x, group)
    if granularity == "block":
        rows = -len(x) % group
        parts = np.pad(parts, ((0, rows), (0, 0), (0, 0))).reshape(-1, group, *parts.shape[1:])
        top = np.abs(parts).max((1, 3), initial=0)[:, None, :, None]
    else:
        top = np.abs(parts).max(2, keepdims=True, initial=0)
    if on.whole_row:
        top = np.broadcast_to(top.max(-2, keepdims=True), top.shape)
    floor = on.floor if on.floor is not None else 1e-4 if rule == "deep_gemm" else 1e-10
    top = np.maximum(top, work(floor))
    s = top * work(1 / limit) if rule == "triton" else scaled(top)
    if args.get("ue8m0"):
        s = np.maximum(s, work(1e-10)) if rule == "cuda" and on.scale_floor else s
        s = _codes.power_of_two(s, on.power)
    q = codes(parts * _codes.inverse(s) if rule == "deep_gemm" else parts / s)
    if granularity == "block":
        return {
            "q": q.reshape(-1, *q.shape[2:]).reshape(-1, q[0, 0].size)[: len(x), : x.shape[1]],
            "scale": s[:, 0, :, 0],
        }
    return {"q": q.reshape(len(x), -1)[:, : x.shape[1]], "scale": s[..., 0]}
