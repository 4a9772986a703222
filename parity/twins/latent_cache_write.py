"""Writes into latent caches in numpy, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.twins import _codes, _latent, quantize_mx

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    power: str = "ceil"
    """How scales of V4 and of indexer keys in FP8 become powers of two."""
    floor: float = 1e-4
    """Of amax in V4's rows."""
    power_in_ds_mla: bool = False
    """V3.2's scales are powers of two."""
    multiply: bool = False
    """float8 numbers are multiplied with the scale."""
    swapped: bool = False
    """The even of two 4-bit codes lies in the high bits."""
    shift: int = 0
    """How far every slot is off."""
    write_skipped: bool = False
    """A negative slot counts from the end."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """`cache` from the op's arguments as numpy arrays."""
    cache, format, page = args["cache"], args.get("format", "plain"), args.get("page")
    size = cache.shape[1] if page is None else page
    slots = args["slots"].astype(np.int64)
    total = len(cache) * size
    slots = np.where((slots < 0) & (slots >= -total), slots + total, slots) if on.write_skipped else slots
    named = (slots >= 0) & (slots < total)
    where = (slots[named] + on.shift) % total
    latent, rotary = args["latent"][named], args["rotary"][named]
    if format == "v4":
        rows, scales = _latent.v4(latent, rotary, power=on.power, floor=on.floor)
        return {"cache": _latent.put(cache, where, rows, scales, size)}
    if format in ("indexer_fp8", "indexer_mxfp4"):
        key = np.concatenate([latent, rotary], 1)
        if format == "indexer_fp8":
            rows, scales = _latent.indexer(key, power=on.power)
        else:
            how = quantize_mx.Switches(power=on.power, swap_nibbles=on.swapped)
            coded = quantize_mx.run({"x": _latent.bf16(key)}, False, how)
            rows, scales = coded["q"], coded["scale"]
        return {"cache": _latent.put(cache, where, rows, scales, size)}
    if format == "fp8_ds_mla":
        rows = _latent.ds_mla(latent, rotary, power=on.power_in_ds_mla)
    else:
        rows = np.concatenate([latent, rotary], 1)
        if format == "fp8":
            x = rows.astype(np.float64 if wide else np.float32)
            s = np.asarray(1 if args.get("scale") is None else args["scale"]).astype(x.dtype).reshape(())
            rows = _codes.float8(x * s if on.multiply else x / s, "float8_e4m3fn")
    out = cache.astype(rows.dtype) if wide and format in ("plain", "fp8") else cache.copy()
    out.reshape(-1, out.shape[-1])[where] = rows
    return {"cache": out}
