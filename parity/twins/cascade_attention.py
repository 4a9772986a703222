"""Cascade attention in numpy: partial results of paged attention's twin, merged, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.twins import paged_attention

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    sink_twice: bool = False
    """The sink joins the prefix, too."""
    no_sink_weight: bool = False
    """The sink is in the suffix's output, but not in its weight."""
    causal_prefix: bool = False
    """Prefixes are attended to with a causal mask."""
    overlap: int = 0
    """So many tokens of the prefix belong to the suffix as well."""
    wrong_base: bool = False
    """Weights are powers of two of natural logarithms."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """`o` and, with `return_lse`, `lse` without the sink, from the op's arguments as numpy arrays.

    Args:
        args: of `jaxattn.cascade_attention`.
        wide: compute in float64 throughout, else in float32 with the op's roundings.
        on: departures.
    """
    q, sinks, work = args["q"], args.get("sinks"), np.float64 if wide else np.float32
    rest = {k: v for k, v in args.items() if k not in ("group_start", "shared", "sinks")} | {"return_lse": True}
    page, B = args["k_pages"].shape[1], len(args["lengths"])
    done, parts = np.zeros(B, np.int64), []
    for starts, ends in zip(args["group_start"], args["shared"], strict=True):
        o, lse = np.zeros(q.shape, work), np.full(q.shape[:2], -np.inf, work)
        for first, last, end in zip(starts[:-1], starts[1:], ends, strict=True):
            rows = slice(int(args["query_start"][first]), int(args["query_start"][last]))
            begin = int(done[first]) if first < last else 0
            end = max(int(end), begin)
            if rows.start < rows.stop and end > begin:
                one = rest | {
                    "q": q[rows],
                    "page_table": args["page_table"][first : first + 1, begin // page :],
                    "lengths": np.array([end - begin]),
                    "query_start": np.array([0, rows.stop - rows.start]),
                    "causal": on.causal_prefix,
                }
                out = paged_attention.run(one | ({"sinks": sinks} if on.sink_twice else {}), wide)
                o[rows], lse[rows] = out["o"].astype(work), out["lse"]
            done[first:last] = end
        parts.append((o, _with(lse, sinks if on.sink_twice else None), lse))
    shift = np.maximum(done - on.overlap, 0) // page
    table = np.stack([np.append(t[n:], t[:n]) for t, n in zip(args["page_table"], shift, strict=True)])
    own = rest | {"sinks": sinks, "causal": True, "page_table": table, "lengths": args["lengths"] - shift * page}
    out = paged_attention.run(own, wide)
    o, lse = out["o"].astype(work), out["lse"]
    parts.append((o, _with(lse, None if on.no_sink_weight else sinks), lse))
    os, weights, plain = (np.stack(x) for x in zip(*parts, strict=True))
    exp = np.exp2 if on.wrong_base else np.exp
    with np.errstate(invalid="ignore"):
        top = weights.max(0)
        top = np.where(np.isfinite(top), top, 0)
        share = exp(weights - top)
        share = share / np.maximum(share.sum(0), np.finfo(work).tiny)
    merged = (np.where(share[..., None] > 0, os, 0) * share[..., None]).sum(0)
    dtype = np.float64 if wide else q.dtype
    return {"o": merged.astype(dtype)} | ({"lse": np.logaddexp.reduce(plain)} if args.get("return_lse") else {})


def _with(lse: np.ndarray, sinks: np.ndarray | None) -> np.ndarray:
    if sinks is None:
        return lse
    return np.minimum(np.logaddexp(lse, sinks.astype(lse.dtype)), np.finfo(np.float32).max)
