"""What may be wrong with products of rows in groups: the twin with a switch thrown."""

from parity.faults._plant import fault
from parity.mutations import Faults
from parity.twins import scaled_matmul as product
from parity.twins.grouped_matmul import Switches, run

_PRODUCT = {
    "row-scale": ("the first row's scale is used for all rows of a group", product.Switches(one_row_scale=True)),
    "last-input-dropped": ("the last input feature is left out", product.Switches(drop_last=True)),
    "block-scales-shifted": ("blocks use their neighbour's scale", product.Switches(swap_scales=True)),
    "output-1-percent": ("the result is 1 % too large", product.Switches(gain=1.01)),
}
_WHAT = {
    "one-weight": ("every group multiplies the first one's weight", Switches(one_weight=True)),
    "one-scale": ("every group's weight has the first one's scales", Switches(one_scale=True)),
    "a-row-late": ("groups begin and end a row late", Switches(late=1)),
    "empty-groups-skipped": ("groups behind an empty one have their neighbour's weight", Switches(skip_empty=True)),
    "rest-multiplied": ("rows of no group are multiplied, too", Switches(rest=True)),
    **{name: (what, Switches(product=on)) for name, (what, on) in _PRODUCT.items()},
}

FAULTS = Faults(twin=run, faults=tuple(fault(name, what, run, on) for name, (what, on) in _WHAT.items()))
"""The twin, and it with each fault."""
