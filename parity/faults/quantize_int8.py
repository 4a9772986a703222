"""What may be wrong with INT8 quantizers: the twin with a switch thrown."""

from parity.faults._plant import fault
from parity.mutations import Faults
from parity.twins.quantize_int8 import Switches, run

_WHAT = {
    "half-away": ("halves go away from zero", Switches(rounding="away")),
    "half-even": ("halves go to the even integer on Triton's paths", Switches(rounding="even")),
    "cut-off": ("codes are cut off", Switches(rounding="zero")),
    "wrapped": ("codes wrap around instead of saturating", Switches(wrap=True)),
    "range-with-zero": ("zero is forced into the range of a row", Switches(through_zero=True)),
    "azp-ignored": ("zero points are not added", Switches(azp_ignored=True)),
    "row-scale": ("groups share the largest scale of their row", Switches(whole_row=True)),
    "127.5-steps": ("the range has 127.5 steps", Switches(scale_127_5=True)),
}

FAULTS = Faults(twin=run, faults=tuple(fault(name, what, run, on) for name, (what, on) in _WHAT.items()))
