"""What may be wrong with FP8 quantizers: the twin with a switch thrown."""

from parity.faults._plant import fault
from parity.mutations import Faults
from parity.twins.quantize_fp8 import Switches, run

_WHAT = {
    "cut-off": ("codes are cut off instead of rounded", Switches(cut=True)),
    "overflow-is-nan": ("codes beyond the range are NaN", Switches(clamp=False)),
    "double-rounding": ("quotients pass through bfloat16", Switches(through_bfloat16=True)),
    "reciprocal-of-448": ("scales are amax * (1 / 448)", Switches(reciprocal=True)),
    "bound-ignored": ("the upper bound of amax is not used", Switches(ignore_bound=True)),
    "nearest-power": ("scales are rounded to the nearest power of two", Switches(power="nearest")),
    "power-below": ("scales are rounded down to a power of two", Switches(power="floor")),
    "floor-1e-4": ("amax of a group has the floor of DeepGEMM's weights", Switches(floor=1e-4)),
    "no-scale-floor": ("the floor is on amax alone", Switches(scale_floor=False)),
    "row-scale": ("groups share the largest scale of their row", Switches(whole_row=True)),
}

FAULTS = Faults(twin=run, faults=tuple(fault(name, what, run, on) for name, (what, on) in _WHAT.items()))
