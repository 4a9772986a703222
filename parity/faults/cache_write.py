"""What may be wrong with cache writes: the twin with a switch thrown, or changed arguments."""

from collections.abc import Callable

import numpy as np

from parity.mutations import Args, Fault, Faults, Implementation
from parity.twins.cache_write import FP8, Switches, run


def _switched(**switches) -> Implementation:
    return lambda args, wide: run(args, wide, Switches(**switches))


def _with_args(change: Callable[[Args], Args]) -> Implementation:
    return lambda args, wide: run(args | change(args), wide)


def _transposed(args: Args) -> Args:
    """Page and place in the page exchanged."""
    P, page = args["k_pages"].shape[:2]
    slots = args["slots"]
    good = (slots >= 0) & (slots < P * page)
    other = (slots % page) * P + slots // page
    return {"slots": np.where(good, other, slots)}


def _negative(args: Args) -> bool:
    """Some token has no slot, and none has the last, where it would be written and overwritten."""
    P, page = args["k_pages"].shape[:2]
    return bool((args["slots"] < 0).any()) and P * page - 1 not in args["slots"]


def _same_width(args: Args) -> bool:
    return args["key"].shape == args["value"].shape


def _old_bytes(args: Args) -> bool:
    """The cache held something that nobody overwrites; captured caches were zero."""
    return bool((args["k_pages"].astype(np.float32) != 0).any())


def _scaled(args: Args) -> bool:
    return args.get("k_scale") is not None or _per_head(args)


def _per_head(args: Args) -> bool:
    return args.get("k_scale_pages") is not None


def _two_heads(args: Args) -> bool:
    return _per_head(args) and args["key"].shape[1] > 1


def _overflows(args: Args) -> bool:
    """A number leaves the range of float8: only where the scale does not follow the data."""
    if args.get("k_scale") is None or args["k_pages"].dtype != FP8:
        return False
    good = args["slots"] >= 0
    return bool((np.abs(args["key"][good].astype(np.float32)) / args["k_scale"] >= 465).any())


def _fault(name: str, what: str, run: Implementation, applies: Callable[[Args], bool] = lambda args: True) -> Fault:
    return Fault(name=name, what=what, run=run, applies=applies)


FAULTS = Faults(
    twin=run,
    faults=(
        _fault("slot-plus-one", "every slot is one too far", _switched(shift=1)),
        _fault("slot-transposed", "page and place in the page are exchanged", _with_args(_transposed)),
        _fault("skipped-written", "a negative slot counts from the end", _switched(write_skipped=True), _negative),
        _fault("cache-cleared", "slots that no token names become zero", _switched(clear=True), _old_bytes),
        _fault(
            "key-in-value-cache", "keys are written as values", _with_args(lambda a: {"value": a["key"]}), _same_width
        ),
        _fault(
            "heads-shifted",
            "each head's key lands in its neighbour's place",
            _with_args(lambda a: {"key": np.roll(a["key"], 1, axis=1)}),
            lambda a: a["key"].shape[1] > 1,
        ),
        _fault("scale-multiplied", "numbers are multiplied with the scale", _switched(multiply=True), _scaled),
        _fault("truncated", "codes are cut off instead of rounded", _switched(truncate=True), _scaled),
        _fault("overflow-is-nan", "codes beyond +-448 are NaN", _switched(clamp=False), _overflows),
        _fault("scale-per-token", "all heads share a token's largest scale", _switched(per_token=True), _two_heads),
        _fault(
            "scales-swapped",
            "keys are divided by the scale of values",
            _with_args(lambda a: {"k_scale": a["v_scale"], "v_scale": a["k_scale"]}),
            lambda a: a.get("k_scale") is not None,
        ),
    ),
)
