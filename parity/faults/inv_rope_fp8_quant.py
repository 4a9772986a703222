"""What may be wrong with V4's quantized attention output: the twin with a switch thrown."""

from parity.faults._plant import fault
from parity.mutations import Faults
from parity.twins.inv_rope_fp8_quant import Switches, run

_WHAT = {
    "forwards": ("the rotation is applied once more", Switches(forwards=True)),
    "rounded-between": ("rotated numbers are rounded to bfloat16", Switches(rounded=True)),
    "power-below": ("scales are rounded down to a power of two", Switches(power="floor")),
    "floor-1e-4": ("amax has the floor of caches", Switches(floor=1e-4)),
}

FAULTS = Faults(twin=run, faults=tuple(fault(name, what, run, on) for name, (what, on) in _WHAT.items()))
