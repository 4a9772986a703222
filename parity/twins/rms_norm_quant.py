"""RMSNorm with its quantized forms in numpy, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.twins import _codes

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    gain: float = 1.0
    """Factor of the norm."""
    centred: bool = False
    """The mean is subtracted first, as LayerNorm does."""
    no_weight: bool = False
    """The weight is not used."""
    late_residual: bool = False
    """The residual is stored but not normalised."""
    residual_is_x: bool = False
    """The residual that is returned is `x`."""
    tensor_scale: bool = False
    """All rows share the largest scale."""
    cut: bool = False
    """Codes are cut off instead of rounded."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """The op's outputs from its arguments as numpy arrays; sums are float64 in either case."""
    work, x = np.float64 if wide else np.float32, args["x"]

    def rounded(y: np.ndarray) -> np.ndarray:
        return y if wide else y.astype(x.dtype).astype(work)

    mode, z, residual = args.get("mode", "none"), x.astype(work), args.get("residual")
    once, stored = mode in ("none", "static"), None
    if residual is not None:
        total = z + residual.astype(work)
        stored = rounded(total)
        z = z if on.late_residual else stored if once else total
        stored = x.astype(work) if on.residual_is_x else stored
    z = z - z.mean(1, keepdims=True) if on.centred else z
    mean = np.square(z.astype(np.float64)).mean(1, keepdims=True)
    y = z * (on.gain / np.sqrt(mean + args.get("eps", 1e-6))).astype(work)
    y = y if once else rounded(y)
    y = rounded(y * (1 if on.no_weight else args["weight"].astype(work)))
    out = _codes.fp8_rows(y, args, cut=on.cut)
    if on.tensor_scale and len(out) > 1:
        s = np.broadcast_to(out[1].max(), out[1].shape)
        width = 1 if mode == "token" else args.get("group", 128)
        whole = np.repeat(s, y.shape[1] if mode == "token" else width, 1)[:, : y.shape[1]]
        out = _codes.float8(y / whole, "float8_e4m3fn"), s
    names = {"none": ("o",), "static": ("q",)}.get(mode, ("q", "scale"))
    found = dict(zip(names, out, strict=True)) | ({} if stored is None else {"residual": stored})
    return {n: a if wide or n in ("q", "scale") else a.astype(x.dtype) for n, a in found.items()}
