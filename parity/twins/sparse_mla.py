"""Sparse attention over listed rows in numpy, token by token, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.twins import _latent, _sums, _tensor_core

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    ignore_counts: bool = False
    """Entries behind a list's length count."""
    no_sink: bool = False
    """Sinks are ignored."""
    sink_in_lse: bool = False
    """The log-sum-exp holds the sink."""
    first_only: bool = False
    """The second cache is ignored."""
    unscaled: bool = False
    """V4's codes are not scaled."""
    scale: float = 1.0
    """Factor of the softmax scale."""
    tensor_core: bool = False
    """Scores are summed as the hardware does."""
    base2: bool = False
    """The log-sum-exp is in base 2."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """`o` and, with `return_lse`, `lse` and `max_logits` from the op's arguments as numpy arrays."""
    work = np.float64 if wide else np.float32
    q, sinks = args["q"], args.get("sinks")
    N, H, D = q.shape
    Dv = args.get("value_dim") or min(D, 512)
    factor = (args.get("scale") or D**-0.5) * on.scale
    sources = [(_rows(args["cache"], args, args.get("page"), on), args["indices"], args.get("counts"))]
    if args.get("extra_cache") is not None and not on.first_only:
        page = args.get("extra_page") or args.get("page")
        sources.append((_rows(args["extra_cache"], args, page, on), args["extra_indices"], args.get("extra_counts")))
    o = np.zeros((N, H, Dv), work)
    lse, top = np.full((N, H), -np.inf, work), np.full((N, H), -np.inf, work)
    for n in range(N):
        keys = np.concatenate([_listed(rows, lists[n], c, n, on) for rows, lists, c in sources]).astype(work)
        if not len(keys):
            continue
        if on.tensor_core:
            s = _tensor_core.scores(q[n], keys, **_tensor_core.BF16).astype(work) * work(factor)
        else:
            s = _sums.product(q[n].astype(work), keys.T) * work(factor)
        m = s.max(1)
        sink = np.full(H, -np.inf) if sinks is None or on.no_sink else sinks.astype(work)
        with np.errstate(over="ignore"):
            e = np.exp(s - m[:, None])
            total = e.sum(1)
            whole = total + np.exp((sink - m).astype(work))
            p = e if wide else e.astype(q.dtype).astype(work)
            o[n] = np.where(np.isinf(whole)[:, None], 0, _sums.product(p, keys[:, :Dv]) / whole[:, None])
        lse[n], top[n] = np.log(whole if on.sink_in_lse else total) + m, m
    lse = lse / np.log(work(2)) if on.base2 else lse
    out = {"o": o if wide else o.astype(q.dtype)}
    return out | ({"lse": lse.astype(work), "max_logits": top} if args.get("return_lse") else {})


def _rows(cache: np.ndarray, args: Args, page: int | None, on: Switches) -> np.ndarray:
    format = args.get("format", "plain")
    if format == "plain":
        return cache
    if format == "fp8_ds_mla":
        return _latent.ds_mla_values(cache)
    if on.unscaled:
        cache = cache.copy()
        cache[:, page * _latent.ROW : page * (_latent.ROW + _latent.SCALES)] = 127
    return _latent.v4_values(cache, page)


def _listed(rows: np.ndarray, entries: np.ndarray, counts: np.ndarray | None, n: int, on: Switches) -> np.ndarray:
    last = len(entries) if counts is None or on.ignore_counts else counts[n]
    return rows[[i for i in entries[:last].tolist() if 0 <= i < len(rows)]]
