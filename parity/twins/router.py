"""Routing in numpy, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from parity import tolerances

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    plain_log: bool = False
    """softplus as `log(1 + exp(x))`, both through base 2 as the intrinsics `__logf` and `__expf` of CUDA are."""
    worst_log: bool = False
    """The logarithm of `plain_log` is off by all that the special function unit may be, up and down in turn."""
    reciprocal: bool = False
    """Numbers are multiplied with the inverse of their sum instead of divided by it."""
    recovered: bool = False
    """Scores are what is left of the choices when the bias is subtracted again."""
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
    scoring = args.get("scoring", "softmax")
    scores = _scores(logits, scoring, on)
    if on.rounded:
        scores = scores.astype(ml_dtypes.bfloat16).astype(dtype)
    bias = args.get("bias")
    biased = scores if bias is None else scores + bias.astype(dtype)
    choice = scores if on.no_bias else biased
    if bias is None:  # what underflows in float32 keeps its order
        rest = logits - logits.max(-1, keepdims=True) if scoring == "softmax" else logits
        choice = np.where(scores < np.finfo(dtype).tiny, rest, choice)
    if on.recovered and bias is not None:
        scores = biased - bias.astype(dtype)
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
    scaling = dtype(1 if on.no_scaling else args.get("scaling", 1.0))
    if args.get("renormalize", True) and not on.no_sum:
        total = weights.sum(-1, keepdims=True, dtype=dtype)
        total = np.where(total > 0, total, dtype(1))
        if on.reciprocal:
            scaling = scaling / total
        else:
            weights = weights / total
    weights = weights * scaling
    return {"weights": weights.astype(dtype), "ids": ids.astype(np.int32)}


def _scores(x, scoring, on):
    one = x.dtype.type(1)
    with np.errstate(over="ignore"):
        if scoring == "softmax":
            e = np.exp(x - x.max(-1, keepdims=True))
            if on.reciprocal:
                return e * (one / _lanes(e))
            return e / e.sum(-1, keepdims=True, dtype=np.float64).astype(x.dtype)
        if scoring == "sigmoid":
            return one / (one + np.exp(-x))
        soft = _base_two(np.minimum(x, 20), on.worst_log) if on.plain_log else np.log1p(np.exp(np.minimum(x, 20)))
        soft = np.where(x > 20, x, soft).astype(x.dtype)
        return soft if on.no_root else np.sqrt(soft)


def _lanes(e):
    """Sums as vLLM's kernel adds them: four neighbours in turn in each lane, then halves of the lanes."""
    total = sum(e[:, i::4] for i in range(4))
    while total.shape[1] % 2 == 0:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total.sum(-1, keepdims=True, dtype=e.dtype)


def _base_two(x, worst):
    """`__logf(1 + __expf(x))`: the argument of the one and the result of the other are rounded products."""
    kind = x.dtype.type
    small = np.exp2((x * kind(np.log2(np.e))).astype(np.float64)).astype(kind)
    found = np.log2((kind(1) + small).astype(np.float64))
    if worst:
        found += tolerances.SPECIAL * np.maximum(found, 1) * (1 - 2 * (np.arange(x.shape[-1]) % 2))
        found = np.maximum(found, 0)
    return found.astype(kind) * kind(np.log(2))
