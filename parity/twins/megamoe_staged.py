"""MegaMoE's stages in numpy, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.twins import _codes, experts

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    how: str = "ceil"
    """How scales are rounded to powers of two."""
    floor: float = 1e-4
    """Under the largest number of a group."""
    group: int = 32
    """Numbers of one scale."""
    late_weight: bool = False
    """The weight comes after the second quantization."""
    cut: bool = False
    """Codes are cut off instead of rounded."""
    no_clamp: bool = False
    """The limit is ignored."""


NONE = Switches()


def stage(x: np.ndarray, on: Switches = NONE) -> tuple[np.ndarray, np.ndarray]:
    """Codes (float64: not rounded) and scale bytes of the last axis."""
    flat = x.reshape(-1, x.shape[-1])
    flat = flat if x.dtype == np.float64 else flat.astype(np.float32)
    parts = _codes.grouped(flat, on.group)
    top = np.maximum(np.abs(parts).max(-1, initial=0), flat.dtype.type(on.floor)) / flat.dtype.type(448)
    s = _codes.power_of_two(top, on.how)
    q = _codes.float8(parts / s[..., None], "float8_e4m3fn", cut=on.cut).reshape(x.shape)
    bytes_ = (np.log2(s.astype(np.float64)) + 127).astype(np.uint8)
    bytes_ = np.repeat(bytes_, on.group // 32, -1)
    return q, bytes_.reshape(*x.shape[:-1], -1)


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """All outputs from the op's arguments as numpy arrays."""
    (T, A), dtype = args["ids"].shape, args["x"].dtype
    work = np.float64 if wide else np.float32
    full = args | {"format": "mxfp4", "act_group": 32, "weight_on": "activation"}
    ids = experts._local(args["ids"], args.get("expert_map"), len(args["w13"]))
    which = ids.reshape(-1)
    weight = np.where(which >= 0, args["weights"].reshape(-1), 0).astype(np.float64)[:, None]
    x8, x_scale = stage(args["x"].astype(work), on)
    factor = np.repeat(2.0 ** (x_scale.astype(np.float64) - 127), 32, -1)
    x = args["x"].astype(np.float64) if wide else x8.astype(np.float64) * factor
    h = _matmul(np.repeat(x, A, 0), full, "w13", which, wide)
    h = h if wide else h.astype(np.float32).astype(dtype).astype(np.float64)
    gate, up = h[:, : h.shape[1] // 2], h[:, h.shape[1] // 2 :]
    if args.get("limit") is not None and not on.no_clamp:
        gate, up = np.minimum(gate, args["limit"]), np.clip(up, -args["limit"], args["limit"])
    with np.errstate(over="ignore"):
        a = gate / (1 + np.exp(-gate)) * up
    a = np.where(which[:, None] >= 0, a if on.late_weight else a * weight, 0).astype(work)
    a8, a_scale = stage(a, on)
    values = a if wide else a8.astype(np.float64) * np.repeat(2.0 ** (a_scale.astype(np.float64) - 127), 32, -1)
    y = _matmul(values.astype(np.float64), full, "w2", which, wide)
    y = y * weight if on.late_weight else y
    y = y if wide else y.astype(np.float32).astype(dtype).astype(np.float64)
    o = np.where(which[:, None] >= 0, y, 0).reshape(T, A, -1).sum(1)
    o = o if wide else o.astype(np.float32).astype(dtype)
    return {
        "o": o,
        "x8": x8,
        "x_scale": x_scale,
        "a8": a8.reshape(T, A, -1),
        "a_scale": a_scale.reshape(T, A, -1),
    }


def _matmul(x, args, name, which, wide):
    return experts._product(x, args | {"act_group": None}, name, which, wide, experts.NONE)
