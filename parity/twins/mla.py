"""Latent attention in numpy, query by query, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.twins import _latent, _sums, _tensor_core

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    scale: float = 1.0
    """Factor of the softmax scale."""
    no_rotary: bool = False
    """Scores lack the rotary part."""
    last_hidden: bool = False
    """A query does not see its own row."""
    value_last: bool = False
    """The value is the last part of a row."""
    tensor_core: bool = False
    """Scores are summed as the hardware does."""
    base2: bool = False
    """The log-sum-exp is in base 2."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """`o` and, with `return_lse`, `lse` from the op's arguments as numpy arrays."""
    work = np.float64 if wide else np.float32
    q, cache, table, start = (args[name] for name in ("q", "cache", "page_table", "query_start"))
    (N, H, D), page, Dv = q.shape, cache.shape[1], args.get("value_dim", 512)
    if args.get("format") == "fp8_ds_mla":
        rows = _latent.ds_mla_values(cache).astype(work)
    else:
        rows = cache.reshape(-1, D).astype(work)
        if args.get("cache_scale") is not None:
            rows = rows * np.asarray(args["cache_scale"]).astype(work)
            rows = rows if wide else rows.astype(q.dtype).astype(work)
    o, lse = np.zeros((N, H, Dv), work), np.full((N, H), -np.inf, work)
    for b, length in enumerate(args["lengths"].tolist()):
        for n in range(start[b], start[b + 1]):
            last = length - int(start[b + 1]) + n + 1 if args.get("causal", True) else length
            where = np.arange(max(last - on.last_hidden, 0))
            if not len(where):
                continue
            k = rows[table[b, where // page] * page + where % page]
            width = Dv if on.no_rotary else D
            if on.tensor_core:
                s = _tensor_core.scores(q[n], k, **_tensor_core.BF16).astype(work) * work(args["scale"])
            else:
                s = _sums.product(q[n, :, :width].astype(work), k[:, :width].T) * work(args["scale"] * on.scale)
            m = s.max(1, keepdims=True)
            e = np.exp(s - m)
            p = e if wide else e.astype(q.dtype).astype(work)
            v = k[:, -Dv:] if on.value_last else k[:, :Dv]
            o[n] = _sums.product(p, v) / e.sum(1, keepdims=True)
            lse[n] = np.log(e.sum(1)) + m[:, 0]
    lse = lse / np.log(work(2)) if on.base2 else lse
    return {"o": o if wide else o.astype(q.dtype)} | ({"lse": lse.astype(work)} if args.get("return_lse") else {})
