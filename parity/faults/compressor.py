"""What may be wrong with the compressor: the twin with a switch thrown."""

import numpy as np

from parity.faults._plant import fault
from parity.mutations import Args, Faults
from parity.twins.compressor import Switches, run


def _exact(args: Args) -> bool:
    """A plain 16-bit cache rounds as much as the fault does."""
    return args.get("format") != "plain" or args["cache"].dtype == np.float32


_WHAT = {
    "ape-forgotten": ("scores lack their position's part", Switches(no_ape=True)),
    "halves-exchanged": ("older and newer rows have each other's columns", Switches(halves=True)),
    "first-window": ("rows before position 0 count", Switches(first_window=True)),
    "rope-at-the-end": ("the rotation belongs to the window's last position", Switches(rope_at_end=True)),
    "weight-forgotten": ("the norm has no weight", Switches(no_norm_weight=True)),
    "rounded-before-rotation": ("V4's rotated part is rounded twice", Switches(rounded_first=True)),
    "power-below": ("scales are rounded down to a power of two", Switches(power="floor")),
}

FAULTS = Faults(
    twin=run,
    faults=tuple(
        fault(name, what, run, on, *([_exact] if on.rounded_first else [])) for name, (what, on) in _WHAT.items()
    ),
)
