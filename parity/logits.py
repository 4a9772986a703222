"""End-to-end metrics of two models' logits: agreement of tokens, KL divergence, log-probabilities, first divergence.

What is allowed follows from the logits' own bound d at a position (`tolerances.local`: the factor times the largest
self-noise, and one rounding): a log-probability moves by 2 d at most (a logit by d, the log-sum-exp by d); the KL
divergence is at most d^2 / 2 (Hoeffding's lemma for a change within -d..d); the best token changes only where the best
two logits are within 2 d of each other, and the best five only where the fifth and the sixth are.
"""

from typing import Any

import ml_dtypes
import numpy as np

from parity import metrics, tolerances
from parity.self_noise import coarser

TOP = 5


def bound(ours: np.ndarray, golden: np.ndarray, moved: np.ndarray, terms: int) -> np.ndarray:
    """How far a logit may be off at each position, float64 `[...]` for logits `[..., V]`."""
    dtype = coarser(golden.dtype, ours.dtype)
    rule = tolerances.local(terms, float(ml_dtypes.finfo(dtype).eps), ours.shape[-1])
    factor = next(c.factor for c in rule.checks if c.statistic == "max")
    largest = np.abs(np.where(np.isfinite(golden), golden, 0).astype(np.float64)).max(-1)
    return factor * moved.max(-1) + metrics.ulp(largest, dtype)


def compare(
    ours: np.ndarray, golden: np.ndarray, allowed: np.ndarray, tokens: np.ndarray | None = None
) -> dict[str, Any]:
    """Every metric with the place of its worst value and what is allowed.

    Args:
        ours: logits `[..., T, V]` of any floating dtype.
        golden: the same of the other model.
        allowed: `bound` of each position `[..., T]`.
        tokens: the input `[..., T]`; the log-probability of each token given those before it is compared.

    Returns:
        positions, vocabulary; `checks`: list of {name, value, allowed, status, text}, and `first_divergence`, None
        or {position, batch, ours, golden, margin, allowed}; `kl`: the largest divergence at each position.

    Raises:
        ValueError: the shapes are no logits of one batch, or a side holds NaN.
    """
    if ours.shape != golden.shape or ours.ndim < 2 or ours.shape[-1] <= TOP:
        raise ValueError(
            f"logits must be [..., T, V] of one shape with V > {TOP}, got ours {ours.shape}, golden {golden.shape}"
        )
    T, V = ours.shape[-2:]
    a, b = (np.asarray(x, np.float64).reshape(-1, T, V) for x in (ours, golden))
    if np.isnan(a).any() or np.isnan(b).any():
        raise ValueError("logits must be numbers, and a side holds NaN")
    d = np.broadcast_to(allowed, ours.shape[:-1]).reshape(-1, T)
    order = np.argsort(-b, -1, kind="stable")
    best, mine = order[..., 0], np.argsort(-a, -1, kind="stable")[..., :TOP]
    ranked = np.take_along_axis(b, order[..., : TOP + 1], -1)
    same = mine[..., 0] == best
    close = ranked[..., 0] - ranked[..., 1] <= 2 * d
    overlap = (mine[..., :, None] == order[..., None, :TOP]).any(-1).mean(-1)
    fifth = ranked[..., TOP - 1] - ranked[..., TOP] <= 2 * d
    p, q = log_softmax(b), log_softmax(a)
    with np.errstate(invalid="ignore"):
        kl = np.maximum(np.where(np.isfinite(p), np.exp(p) * (p - q), 0).sum(-1), 0)
    limit = np.square(d) / 2 + V * 2.0**-52
    checks = [
        _agreement("top-1 agreement", same, 1 - (~same & close).mean(), same | close),
        _agreement("top-5 overlap", overlap, 1 - ((1 - overlap) * fifth).mean(), (overlap == 1) | fifth),
        _bounded("KL mean", float(kl.mean()), float(limit.mean())),
        _bounded("KL max", float(kl.max()), float(limit.reshape(-1)[kl.argmax()]), _place(kl)),
    ]
    if tokens is not None and T > 1:
        nxt = np.asarray(tokens).reshape(-1, T)[:, 1:, None].astype(np.int64)
        apart = np.abs(np.take_along_axis(q[:, :-1], nxt, -1) - np.take_along_axis(p[:, :-1], nxt, -1))[..., 0]
        share = apart / (2 * d[:, :-1])
        worst = np.unravel_index(share.argmax(), share.shape)
        checks += [
            _bounded("logprob, largest difference", float(apart[worst]), float(2 * d[:, :-1][worst]), _place(share)),
            _bounded("logprob, mean difference", float(apart.mean()), float(2 * d[:, :-1].mean())),
        ]
    where = np.argwhere(~same)
    first = None
    if len(where):
        at = tuple(min(where.tolist(), key=lambda i: (i[1], i[0])))
        first = {
            "position": int(at[1]), "batch": int(at[0]), "ours": int(mine[at][0]), "golden": int(best[at]),
            "margin": float(ranked[at][0] - ranked[at][1]), "allowed": float(2 * d[at]),
        }  # fmt: skip
    return {
        "positions": int(same.size),
        "vocabulary": V,
        "checks": checks,
        "first_divergence": first,
        "kl": kl.max(0).tolist(),
    }


def first_divergence(ours: np.ndarray, golden: np.ndarray) -> int | None:
    """Position of the first generated token that differs, None if the common length agrees."""
    n = min(len(ours), len(golden))
    differ = np.flatnonzero(np.asarray(ours[:n]) != np.asarray(golden[:n]))
    return int(differ[0]) if differ.size else None


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Logarithms of the probabilities over the last axis, float64."""
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def _agreement(name: str, values: np.ndarray, allowed: float, fine: np.ndarray) -> dict[str, Any]:
    """A share of positions; `allowed` is what it may be when only positions that are too close to call differ."""
    bad = np.argwhere(~fine)
    text = f"{len(bad)} of {fine.size} positions differ beyond the bound, first at {_at(bad[0])}" if len(bad) else ""
    status = "fail" if len(bad) else "pass"
    return {"name": name, "value": float(values.mean()), "allowed": float(allowed), "status": status, "text": text}


def _bounded(name: str, value: float, allowed: float, text: str = "") -> dict[str, Any]:
    status = "pass" if value <= allowed else "fail"
    return {"name": name, "value": metrics.number(value), "allowed": allowed, "status": status, "text": text}


def _place(x: np.ndarray) -> str:
    return f"largest at {_at(np.unravel_index(int(x.argmax()), x.shape))}"


def _at(index: Any) -> str:
    batch, position = map(int, index)
    return f"position {position}" + (f" of sequence {batch}" if batch else "")
