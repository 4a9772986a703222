"""What may be wrong with routing: the twin with a switch thrown."""

from parity.faults._plant import fault
from parity.mutations import Faults
from parity.twins.router import Switches, run

_WHAT = {
    "bias-in-weights": ("the bias goes into the weights", Switches(biased_weights=True)),
    "bias-ignored": ("the bias does not select", Switches(no_bias=True)),
    "raw-logits": ("logits are returned as weights", Switches(raw=True)),
    "not-renormalized": ("weights are not divided by their sum", Switches(no_sum=True)),
    "factor-forgotten": ("the factor is left out", Switches(no_scaling=True)),
    "group-maximum": ("a group's score is its best choice although there is a bias", Switches(group_max=True)),
    "groups-ignored": ("all groups are open", Switches(no_groups=True)),
    "scores-in-bf16": ("scores are rounded to bfloat16", Switches(rounded=True)),
    "slot-repeated": ("the last slot repeats another", Switches(last_slot=True)),
    "next-token": ("the table is asked for the next token", Switches(next_token=True)),
    "no-square-root": ("softplus without the square root", Switches(no_root=True)),
}

FAULTS = Faults(twin=run, faults=tuple(fault(name, what, run, on) for name, (what, on) in _WHAT.items()))
