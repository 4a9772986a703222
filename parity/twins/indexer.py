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
    one_scale: bool = False
    """MXFP4: the scale of the first 32 numbers of a key serves all of them."""
    swapped: bool = False
    """MXFP4: the even number of a byte lies in its high bits, in keys alone."""
    queries_unscaled: bool = False
    """MXFP4: queries are not scaled."""
    last_too_many: int = 0
    """Entries added behind the last."""
    smallest: bool = False
    """The worst entries are chosen."""


NONE = Switches()


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def mxfp4(codes: np.ndarray, scales: np.ndarray, swapped: bool = False) -> np.ndarray:
    """float64 numbers [..., D] of bytes [..., D / 2] and [..., D / 32]; 255 is NaN."""
    halves = [codes & 15, codes >> 4]
    nibbles = np.stack(halves[::-1] if swapped else halves, -1).reshape(*codes.shape[:-1], -1)
    values = np.where(nibbles & 8, -1, 1) * _E2M1[nibbles & 7]
    power = np.where(scales == 255, np.nan, np.exp2(scales.astype(np.float64) - 127))
    return values * np.repeat(power, 32, -1)


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """`indices` and `logits` from the op's arguments as numpy arrays."""
    work = np.float64 if wide else np.float32
    w, starts, S = args["weights"].astype(work), args["starts"], len(args["k"])
    if args.get("q_scale") is not None:
        q_scale, k_scale = args["q_scale"], args["k_scale"]
        k_scale = k_scale[:, :1].repeat(k_scale.shape[1], 1) if on.one_scale else k_scale
        k_scale = np.where(k_scale < 255, 127, 255) if on.no_scale else k_scale
        q = mxfp4(args["q"], np.full_like(q_scale, 127) if on.queries_unscaled else q_scale).astype(work)
        k, scale = mxfp4(args["k"], k_scale, on.swapped).astype(work), np.ones(S, work)
    else:
        q, k, scale = (args[name].astype(work) for name in ("q", "k", "k_scale"))
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
