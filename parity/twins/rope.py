"""Rotary embedding in numpy with complex numbers, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import numpy as np

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    other_pairs: bool = False
    """Neighbours instead of halves, and the other way round."""
    other_part: bool = False
    """The rotary part is taken from the other end."""
    backwards: bool = False
    """The other direction."""
    shift: int = 0
    """How far positions are off."""
    inner: Any = None
    """Dtype to which products are rounded."""


NONE = Switches()


def turn(x: np.ndarray, table: np.ndarray, interleaved: bool, inverse: bool = False, inner: Any = None) -> np.ndarray:
    """`x` [..., Dr] rotated by `table` [..., Dr], in the dtype of `x`."""
    cos, sin = (t.astype(x.dtype) for t in np.split(table, 2, -1))
    sin = -sin if inverse else sin
    pairs = x.reshape(*x.shape[:-1], -1, 2) if interleaved else np.stack(np.split(x, 2, -1), -1)
    a, b = pairs[..., 0], pairs[..., 1]

    def cast(y: np.ndarray) -> np.ndarray:
        return y if inner is None else y.astype(inner).astype(x.dtype)

    out = np.stack([cast(a * cos) - cast(b * sin), cast(b * cos) + cast(a * sin)], -1)
    return out.reshape(x.shape) if interleaved else np.concatenate([out[..., 0], out[..., 1]], -1)


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """`o` from the op's arguments as numpy arrays."""
    work = np.float64 if wide else np.float32
    x, table = args["x"], args["cos_sin"].astype(work)
    rows = table[np.clip(args["positions"] + on.shift, 0, len(table) - 1)][:, None]
    Dr, first = table.shape[1], bool(args.get("first", False)) != on.other_part
    part = slice(0, Dr) if first else slice(x.shape[-1] - Dr, None)
    out = x.astype(work)
    interleaved = bool(args.get("interleaved", True)) != on.other_pairs
    out[..., part] = turn(out[..., part], rows, interleaved, bool(args.get("inverse", False)) != on.backwards, on.inner)
    return {"o": out if wide else out.astype(x.dtype)}
