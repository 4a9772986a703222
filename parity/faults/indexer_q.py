"""What may be wrong with indexer queries: the twin with a switch thrown."""

from parity.faults._plant import fault
from parity.mutations import Args, Faults
from parity.twins.indexer_q import Switches, run


def _fp8(args: Args) -> bool:
    return args.get("format", "fp8") == "fp8"


_WHAT = {
    "unrounded": ("rotated numbers are not rounded", Switches(unrounded=True)),
    "scale-not-folded": ("weights lack the scales of the codes", Switches(unfolded=True)),
    "scale-per-token": ("all heads of a token share a scale", Switches(per_token=True)),
    "power-below": ("scales are rounded down to a power of two", Switches(power="floor")),
}

FAULTS = Faults(twin=run, faults=tuple(fault(name, what, run, on, _fp8) for name, (what, on) in _WHAT.items()))
