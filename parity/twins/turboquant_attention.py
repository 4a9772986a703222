"""Attention over packed TurboQuant slots in numpy, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.twins import turboquant_write as slots

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    correct: bool = True
    """Levels are divided by their length, where the preset says so."""
    rotate: bool = True
    """Queries are rotated, where keys are."""
    swap: bool = False
    """The two codes of a byte are exchanged."""
    hide_last_key: bool = False
    """The newest visible key is not seen."""
    all_stored: bool = False
    """`stored` is ignored."""
    causal: bool = True
    """A query sees no later key."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """`o` [N, H, D] and, with `return_lse`, `lse` [N, H], from the op's arguments as numpy arrays.

    Args:
        args: of `jaxattn.turboquant_attention`.
        wide: round nothing; else operands to float16 for 16-bit queries, and the result.
        on: departures.
    """
    q, starts, lengths, preset = args["q"], args["query_start"], args["lengths"], args["preset"]
    (N, H, D), page, K = q.shape, args["pages"].shape[1], args["pages"].shape[2]
    half, scale = not wide and q.dtype.itemsize == 2, args.get("scale") or D**-0.5
    stored = args.get("stored") if args.get("stored") is not None and not on.all_stored else lengths
    o, lse = np.zeros((N, H, D)), np.full((N, H), -np.inf)

    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(np.float16).astype(np.float64) if half else x

    for b, length in enumerate(lengths.tolist()):
        rows = np.arange(starts[b], starts[b + 1])
        seen = min(length, int(stored[b]))
        if not rows.size or not seen:
            continue
        used = args["page_table"][b, : -(-seen // page)]
        packed = args["pages"][used].reshape(-1, *args["pages"].shape[2:])[:seen]
        key, value = slots.unpacked(packed, D, preset, correct=on.correct and preset.endswith("nc"), swap=on.swap)
        queries = q[rows].astype(np.float64)
        if preset != "k8v4" and on.rotate:
            queries = slots.rotated(queries)
        s = np.einsum("nkgd,skd->nkgs", queries.reshape(-1, K, H // K, D), key) * scale
        visible = np.arange(seen) <= (length - rows.size + np.arange(rows.size))[:, None] if on.causal else True
        visible = np.broadcast_to(visible, (rows.size, seen)).copy()
        if on.hide_last_key:
            newest = seen - 1 - np.argmax(visible[:, ::-1], axis=1)
            visible[np.arange(rows.size), newest] = False
        s = np.where(visible[:, None, None], s, -np.inf)
        some = visible.any(1)
        top = np.where(some[:, None, None], s.max(-1, initial=-1e300), 0)
        e = np.exp(s - top[..., None])
        total = np.where(some[:, None, None], e.sum(-1), 1)
        o[rows] = (np.einsum("nkgs,skd->nkgd", rounded(e), rounded(value)) / total[..., None]).reshape(-1, H, D)
        lse[rows] = np.where(some[:, None, None], np.log(total) + top, -np.inf).reshape(-1, H)
    out = {"o": o if wide else o.astype(q.dtype)}
    return out | ({"lse": lse if wide else lse.astype(np.float32)} if args.get("return_lse") else {})
