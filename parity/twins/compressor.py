"""The compressor in numpy, window by window, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.twins import _latent, quantize_mx
from parity.twins.rope import turn

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    no_ape: bool = False
    """Scores lack their position's part."""
    halves: bool = False
    """The older half of a window has the newer half's columns and the other way round."""
    first_window: bool = False
    """Rows before position 0 count with score 0."""
    rope_at_end: bool = False
    """The rotation belongs to the window's last position."""
    rounded_first: bool = False
    """V4's rotated part is rounded to bfloat16 before the rotation."""
    power: str = "ceil"
    """How scales become powers of two."""
    no_norm_weight: bool = False
    """The norm has no weight."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """`cache` and `state` from the op's arguments as numpy arrays; a plain cache is `entries`. Not with MXFP4."""
    work = np.float64 if wide else np.float32
    ape, table = args["ape"].astype(work), args["state_table"]
    state, weight = args["state"].astype(work), args["weight"].astype(work)
    (ratio, W), D, spage = ape.shape, len(weight), state.shape[1]
    kv, score = args["kv"].astype(work), args["score"].astype(work)
    positions, request = args["positions"].tolist(), args["request"].tolist()
    for t, (p, b) in enumerate(zip(positions, request, strict=True)):
        if p >= 0:
            row = np.concatenate([kv[t], score[t] + (0 if on.no_ape else ape[p % ratio])])
            state[table[b, p // spage], p % spage] = row
    ends, entries = [], []
    for t, (p, b) in enumerate(zip(positions, request, strict=True)):
        if p >= 0 and (p + 1) % ratio == 0 and args["cache_slots"][t] >= 0:
            ends.append(t)
            entries.append(_entry(args, state, weight, p, b, ratio, W, D, on))
    numbers = np.stack(entries) if entries else np.zeros((0, D), work)
    name = "entries" if args.get("format") == "plain" else "cache"
    return {name: _store(args, numbers, args["cache_slots"][ends], wide, on), "state": state}


def _entry(args: Args, state, weight, p: int, b: int, ratio: int, W: int, D: int, on: Switches) -> np.ndarray:
    table, spage, count = args["state_table"], state.shape[1], W // D * ratio
    values, scores = [], []
    for i in range(count):
        q = p - count + 1 + i
        half = int(W > D and (i >= ratio) != on.halves)
        columns = slice(half * D, (half + 1) * D)
        if q < 0 and not on.first_window:
            continue
        row = state[table[b, q // spage], q % spage] if q >= 0 else np.zeros_like(state[0, 0])
        values.append(row[:W][columns])
        scores.append(row[W:][columns])
    v, s = np.stack(values), np.stack(scores)
    e = np.exp(s - s.max(0))
    mixed = (e * v).sum(0) / e.sum(0)
    normed = mixed / np.sqrt((mixed**2).mean() + mixed.dtype.type(args.get("eps", 1e-6)))
    normed = normed if on.no_norm_weight else normed * weight
    Dr = args["cos_sin"].shape[1]
    part = normed[-Dr:].astype(_latent.BF16).astype(normed.dtype) if on.rounded_first else normed[-Dr:]
    row = args["cos_sin"][p if on.rope_at_end else p - ratio + 1]
    return np.concatenate([normed[:-Dr], turn(part, row, True)])


def _store(args: Args, numbers: np.ndarray, slots: np.ndarray, wide: bool, on: Switches) -> np.ndarray:
    cache, format = args["cache"], args.get("format", "v4")
    if format == "plain":
        out = cache.astype(np.float64) if wide else cache.copy()
        out.reshape(-1, cache.shape[2])[slots] = numbers.astype(out.dtype)
        return out
    if format == "v4":
        rows, scales = _latent.v4(numbers[:, :448], numbers[:, 448:], power=on.power)
    elif format == "indexer_mxfp4":
        coded = quantize_mx.run({"x": _latent.bf16(numbers)}, False, quantize_mx.Switches(power=on.power))
        rows, scales = coded["q"], coded["scale"]
    else:
        rows, scales = _latent.indexer(numbers, power=on.power)
    return _latent.put(cache, slots, rows, scales, args["page"])
