"""Gathered latent caches in numpy, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from parity.twins import _latent

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    no_scale: bool = False
    """Codes are not scaled."""
    shift: int = 0
    """How far slots are off."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """`values` from the op's arguments as numpy arrays."""
    cache, format, page = args["cache"], args.get("format", "v4"), args.get("page")
    if format == "v4":
        cache = cache.copy()
        if on.no_scale:
            cache[:, page * _latent.ROW : page * (_latent.ROW + _latent.SCALES)] = 127
        values = _latent.v4_values(cache, page)
    elif format == "fp8_ds_mla":
        page, values = cache.shape[1], _latent.ds_mla_values(cache)
    else:
        page, values = cache.shape[1], cache.reshape(-1, cache.shape[2])
    dtype = cache.dtype if format == "plain" else np.dtype(ml_dtypes.bfloat16)
    gathered = args["lengths"] if args.get("gathered") is None else args["gathered"]
    out = np.zeros((len(gathered), args["rows"], values.shape[1]), np.float64)
    for b, (n, c) in enumerate(zip(args["lengths"].tolist(), gathered.tolist(), strict=True)):
        for i in range(min(c, args["rows"])):
            t = n - c + i
            slot = int(args["page_table"][b, t // page]) * page + t % page + on.shift
            out[b, i] = values[slot % len(values)]
    return {"values": out if wide and format == "plain" else out.astype(np.float32).astype(dtype)}
