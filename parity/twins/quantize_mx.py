"""MXFP8, MXFP4 and NVFP4 quantizers in numpy, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from parity.twins import _codes
from parity.twins.hadamard_transform import butterflies

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]

_GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_TINY = 2.0**-126


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    power: str | None = None
    """"ceil", "floor" or "nearest" instead of the format's rule of the scale."""
    ties: str | None = None
    """"even" or "zero" instead of the argument."""
    swap_nibbles: bool = False
    """The even index lies in the high four bits."""
    ignore_rotation: bool = False
    """Numbers are not rotated."""
    ignore_global: bool = False
    """NVFP4's global scale is 1."""
    exact_block_scale: bool = False
    """NVFP4 quantizes with the block scale before it is rounded to e4m3."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """`q`, `scale` and, for NVFP4, `global_scale` from the op's arguments as numpy arrays."""
    work = np.float64 if wide else np.float32
    x, format = args["x"].astype(work), args.get("format", "mxfp4")
    if args.get("rotation") and not on.ignore_rotation:
        x = butterflies(x, args["rotation"])
        x = x if wide else x.astype(args["x"].dtype).astype(np.float32)
    if format == "nvfp4":
        return _nvfp4(x, args, on)
    parts = _codes.grouped(x, 32)
    top = np.abs(parts).max(2, keepdims=True, initial=0)
    if format == "mxfp8":
        s = _codes.power_of_two(np.maximum(top, work(_TINY)), on.power or "floor")
        return {"q": _codes.float8((parts / s).reshape(x.shape), "float8_e4m3fn"), "scale": _byte(s)}
    if args.get("rule") == "floor":
        s = np.maximum(_codes.power_of_two(np.maximum(top, work(_TINY)), on.power or "floor") / 4, work(_TINY))
    else:
        s = _codes.power_of_two(np.maximum(top, work(args.get("floor", 6 * _TINY))) / 6, on.power or "ceil")
    ties = on.ties or args.get("ties", "even")
    return {"q": _pack(_e2m1(parts / s, ties).reshape(x.shape), on), "scale": _byte(s)}


def _nvfp4(x: np.ndarray, args: Args, on: Switches) -> Arrays:
    work = x.dtype.type
    given = args.get("global_scale")
    top = np.abs(x).max(initial=0)
    g = (work(2688) / top if top else work(1)) if given is None else np.asarray(given).astype(work).reshape(())
    used = work(1) if on.ignore_global else g
    parts = _codes.grouped(x, 16)
    raw = np.clip(used * (np.abs(parts).max(2, keepdims=True, initial=0) * work(1 / 6)), 0, 448)
    s = raw.astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    whole = (raw if on.exact_block_scale else s.astype(work)) * (1 / used)
    inverse = np.divide(1, whole, out=np.zeros_like(whole), where=s.astype(work) > 0)
    q = _pack(_e2m1(parts * inverse, "even").reshape(x.shape), on)
    s = s[..., 0]
    if args.get("swizzled"):
        N, G = s.shape
        s = np.pad(s, ((0, -N % 128), (0, -G % 4)))
        rows, columns = s.shape
        s = np.einsum("abcde->adcbe", s.reshape(-1, 4, 32, columns // 4, 4)).reshape(rows, columns)
    return {"q": q, "scale": s, "global_scale": np.asarray(g)}


def _byte(s: np.ndarray) -> np.ndarray:
    return (np.frexp(s[..., 0].astype(np.float32))[1] + 126).astype(np.uint8)


def _e2m1(x: np.ndarray, ties: str) -> np.ndarray:
    """The nearest grid number by distance; of two equally near the even index, or the smaller magnitude."""
    size = np.minimum(np.abs(x), 6).astype(np.float64)
    distance = np.abs(size[..., None] - _GRID)
    tie = np.arange(8) % 2 if ties == "even" else np.arange(8)
    code = np.lexsort((np.broadcast_to(tie, distance.shape), distance), axis=-1)[..., 0]
    negative = np.signbit(x) & ((code > 0) | (ties == "even"))
    return (code | negative << 3).astype(np.uint8)


def _pack(code: np.ndarray, on: Switches) -> np.ndarray:
    even, odd = code[:, ::2], code[:, 1::2]
    return even << 4 | odd if on.swap_nibbles else even | odd << 4
