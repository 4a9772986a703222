"""V4's fused norm, rotation and insertion in numpy, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.twins import latent_cache_write
from parity.twins.rope import turn

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    norm_over_heads: bool = False
    """All heads of a token share one norm."""
    backwards: bool = False
    """Both rotations go the other way."""
    kv_unrotated: bool = False
    """kv is stored as it came."""
    skip_q: bool = False
    """A token without a slot gets no q."""
    padding_copies: bool = False
    """Heads beyond H repeat the first."""
    power: str = "ceil"
    """How scales become powers of two."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """`q` and `cache` (`pages` if it is plain) from the op's arguments as numpy arrays."""
    work = np.float64 if wide else np.float32
    table = args["cos_sin"].astype(work)
    rows, Dr = table[np.clip(args["positions"], 0, len(table) - 1)], table.shape[1]
    q = args["q"].astype(work)
    squares = (q**2).mean((1, 2) if on.norm_over_heads else 2, keepdims=True)
    q = q / np.sqrt(squares + work(args.get("eps", 1e-6)))
    q[..., -Dr:] = turn(q[..., -Dr:], rows[:, None], True, on.backwards)
    if on.skip_q:
        q[args["slots"] < 0] = 0
    H, heads = q.shape[1], args.get("heads") or q.shape[1]
    more = np.repeat(q[:, :1], heads - H, 1) if on.padding_copies else np.zeros((len(q), heads - H, q.shape[2]))
    q = np.concatenate([q, more.astype(work)], 1)
    kv = args["kv"]
    part = turn(kv[:, -Dr:].astype(work), rows, True, on.backwards)
    part = kv[:, -Dr:] if on.kv_unrotated else part.astype(np.float64 if wide else kv.dtype)
    write = {"latent": kv[:, :-Dr].astype(part.dtype), "rotary": part, "cache": args["cache"], "slots": args["slots"]}
    write |= {"format": args.get("format", "v4"), "page": args.get("page")}
    cache = latent_cache_write.run(write, wide, latent_cache_write.Switches(power=on.power))["cache"]
    name = "pages" if args.get("format") == "plain" else "cache"
    return {"q": q if wide else q.astype(args["q"].dtype), name: cache}
