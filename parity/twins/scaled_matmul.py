"""Products of codes in numpy, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    no_bias: bool = False
    """The bias is left out."""
    azp_sign: int = 1
    """Factor of the zero points."""
    one_row_scale: bool = False
    """The first row's scale is used for all rows."""
    one_column_scale: bool = False
    """The first output feature's scale is used for all."""
    drop_last: bool = False
    """The last input feature is left out."""
    swap_scales: bool = False
    """Neighbouring blocks of input features exchange their scales."""
    gain: float = 1.0
    """Factor of the result."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """`o` from the op's arguments as numpy arrays; sums are float64, INT8 results are rounded as the op says."""
    a, b = (np.array(args[name]).astype(np.float64) for name in ("a", "b"))
    if args.get("azp") is not None:
        a = a - on.azp_sign * args["azp"].reshape(-1, 1)
    if on.drop_last:
        a[:, -1] = 0
    sa, sb, block = args["a_scale"], args["b_scale"], args.get("block")
    sa, sb = (sa, sb) if block else (sa.reshape(-1, 1), sb.reshape(1, -1))
    sa = np.broadcast_to(sa[:1], sa.shape) if on.one_row_scale else sa
    if on.one_column_scale:
        sb = np.broadcast_to(sb[:1] if block else sb[:, :1], sb.shape)
    if block:
        if on.swap_scales:
            sa = np.roll(sa, 1, 1)
        o = np.zeros((len(a), len(b)))
        for kb in range(sa.shape[1]):
            part = slice(kb * block, (kb + 1) * block)
            rows = np.repeat(sb[:, kb].astype(np.float64), block)[: len(b)]
            o += (a[:, part] @ b[:, part].T) * sa[:, kb, None].astype(np.float64) * rows
    elif wide or args["a"].dtype != np.int8:
        o = (a @ b.T) * sb.astype(np.float64) * sa.astype(np.float64)
    else:
        o = ((a @ b.T).astype(np.float32) * sb * sa).astype(np.float64)
    if args.get("bias") is not None and not on.no_bias:
        o = o + args["bias"].astype(np.float64)
    o = o * on.gain
    return {"o": o if wide else o.astype(np.float32).astype(getattr(ml_dtypes, _dtype(args), _dtype(args)))}


def _dtype(args: Args) -> str:
    return args.get("out_dtype", "bfloat16")
