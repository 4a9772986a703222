"""Routing in numpy, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    plain_log: bool = False
    """softplus as `log(1 + exp(x))`."""
    biased_weights: bool = False
    """The bias goes into the weights."""
    no_bias: bool = False
    """The bias does not select."""
    raw: bool = False
    """Logits are returned as weights."""
    no_sum: bool = False
    """Weights are not divided by their sum."""
    no_scaling: bool = False
    """The factor is left out."""
    group_max: bool = False
    """A group's score is its best choice although there is a bias."""
    no_groups: bool = False
    """All groups are open."""
    rounded: bool = False
    """Scores are rounded to bfloat16."""
    last_slot: bool = False
    """The last slot repeats the one before it."""
    next_token: bool = False
    """The table is asked for the next token's id."""
    no_root: bool = False
    """The square root is left out."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """`weights` and `ids` from the op's arguments as numpy arrays."""
    dtype = np.float64 if wide else np.float32
    logits = args["logits"].astype(dtype)
    scores = _scores(logits, args.get("scoring", "softmax"), on)
    if on.rounded:
        scores = scores.astype(ml_dtypes.bfloat16).astype(dtype)
    bias = args.get("bias")
    biased = scores if bias is None else scores + bias.astype(dtype)
    choice = scores if on.no_bias else biased
    k = args["top_k"]
    if args.get("table") is not None:
        ids = args["table"][np.roll(args["tokens"], -1) if on.next_token else args["tokens"]]
    else:
        groups = args.get("num_groups", 1)
        if groups > 1 and not on.no_groups:
            parts = choice.reshape(len(choice), groups, -1)
            top = np.sort(parts, -1)[..., ::-1]
            best = top[..., 0] if bias is None or on.group_max else top[..., 0] + top[..., 1]
            kept = np.argsort(-best, axis=-1, kind="stable")[:, : args["kept_groups"]]
            open_ = np.zeros(best.shape, bool)
            np.put_along_axis(open_, kept, True, -1)
            choice = np.where(open_[..., None], parts, -np.inf).reshape(choice.shape)
        ids = np.argsort(-choice, axis=-1, kind="stable")[:, :k]
    if on.last_slot:
        ids = ids.copy()
        ids[:, -1] = ids[:, -2] if k > 1 else (ids[:, -1] + 1) % scores.shape[1]
    source = logits if on.raw else biased if on.biased_weights else scores
    weights = np.take_along_axis(source, ids, -1)
    if args.get("renormalize", True) and not on.no_sum:
        total = weights.sum(-1, keepdims=True, dtype=dtype)
        weights = weights / np.where(total > 0, total, dtype(1))
    weights = weights * dtype(1 if on.no_scaling else args.get("scaling", 1.0))
    return {"weights": weights.astype(dtype), "ids": ids.astype(np.int32)}


def _scores(x, scoring, on):
    one = x.dtype.type(1)
    with np.errstate(over="ignore"):
        if scoring == "softmax":
            e = np.exp(x - x.max(-1, keepdims=True))
            return e / e.sum(-1, keepdims=True)
        if scoring == "sigmoid":
            return one / (one + np.exp(-x))
        small = np.exp(np.minimum(x, 20))
        soft = np.where(x > 20, x, np.log(one + small) if on.plain_log else np.log1p(small)).astype(x.dtype)
        return soft if on.no_root else np.sqrt(soft)
