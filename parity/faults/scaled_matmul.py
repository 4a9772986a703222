"""What may be wrong with products of codes: the twin with a switch thrown."""

from parity.faults._plant import fault
from parity.mutations import Faults
from parity.twins.scaled_matmul import Switches, run

_WHAT = {
    "bias-ignored": ("the bias is left out", Switches(no_bias=True)),
    "azp-ignored": ("zero points are not subtracted", Switches(azp_sign=0)),
    "azp-added": ("zero points are added", Switches(azp_sign=-1)),
    "row-scale": ("the first row's scale is used for all rows", Switches(one_row_scale=True)),
    "column-scale": ("the first output feature's scale is used for all", Switches(one_column_scale=True)),
    "last-input-dropped": ("the last input feature is left out", Switches(drop_last=True)),
    "block-scales-shifted": ("blocks use their neighbour's scale", Switches(swap_scales=True)),
    "output-1-percent": ("the result is 1 % too large", Switches(gain=1.01)),
}

FAULTS = Faults(twin=run, faults=tuple(fault(name, what, run, on) for name, (what, on) in _WHAT.items()))
