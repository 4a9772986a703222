"""Indexer logits and their best entries in numpy, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.twins import _tensor_core

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    tensor_core: bool = False
    """32 products and the sum so far are cut off 13 bits below the largest of them."""
    no_relu: bool = False
    """Negative scores count."""
    no_scale: bool = False
    """Keys are not scaled."""
    last_too_many: int = 0
    """Entries added behind the last."""
    smallest: bool = False
    """The worst entries are chosen."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """`indices` and `logits` from the op's arguments as numpy arrays."""
    work = np.float64 if wide else np.float32
    q, k, w = (args[name].astype(work) for name in ("q", "k", "weights"))
    scale, starts, S = args["k_scale"].astype(work), args["starts"], len(k)
    ends = np.minimum(args["ends"] + on.last_too_many, S)
    entry = np.arange(S)
    visible = (entry >= starts[:, None]) & (entry < ends[:, None])
    keys = np.nan_to_num(k)
    if on.tensor_core:
        scores = _tensor_core.scores(q, keys, **_tensor_core.FP8)
    else:
        scores = np.einsum("nhd,sd->nhs", q, keys)
    scores = scores if on.no_relu else np.maximum(scores, 0)
    logits = np.einsum("nh,nhs->ns", w, scores.astype(work)) * (1 if on.no_scale else np.nan_to_num(scale))
    logits = np.where(visible, logits, -np.inf).astype(work)
    if args["topk"] is None:
        return {"logits": logits}
    indices = np.full((len(q), args["topk"]), -1, np.int32)
    for n, row in enumerate(logits):
        order = [int(e) for e in np.argsort(row if on.smallest else -row, kind="stable") if visible[n, e]]
        order = order[: args["topk"]] if args.get("order") != "rising" else sorted(order[: args["topk"]])
        indices[n, : len(order)] = np.array(order, np.int32) - starts[n]
    return {"indices": indices, "logits": logits} if args.get("return_logits") else {"indices": indices}
