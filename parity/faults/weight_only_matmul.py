"""What may be wrong with weight-only products: the twin with a switch thrown."""

from parity.faults._plant import fault
from parity.mutations import Faults
from parity.twins.weight_only_matmul import Switches, run

_WHAT = {
    "zero-plus-one": ("zero points are one too large", Switches(zero_shift=1)),
    "zero-minus-one": ("zero points are one too small", Switches(zero_shift=-1)),
    "group-shifted": ("every group uses its neighbour's scale", Switches(group_shift=1)),
    "neighbours-swapped": ("even and odd features are exchanged", Switches(swap_neighbours=True)),
    "act-order-ignored": ("g_idx is not used", Switches(ignore_order=True)),
    "last-input-dropped": ("the last input feature is left out", Switches(drop_last=True)),
    "high-bits-first": ("codes are taken from the high end of a word", Switches(high_first=True)),
    "weight-1-percent": ("the weight is 1 % too large", Switches(gain=1.01)),
}

FAULTS = Faults(twin=run, faults=tuple(fault(name, what, run, on) for name, (what, on) in _WHAT.items()))
