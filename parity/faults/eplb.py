"""What may be wrong with load balancing: the twin with a switch thrown."""

from parity.faults._plant import fault
from parity.mutations import Faults
from parity.twins.eplb import Switches, run

_WHAT = {
    "lightest-first": ("packing starts with the lightest item", Switches(lightest_first=True)),
    "whole-load": ("replicas are packed as if each had the whole load", Switches(whole_load=True)),
    "one-expert-gets-all": ("the heaviest expert gets every replica", Switches(by_load=True)),
    "groups-split": ("groups may be split among nodes", Switches(no_groups=True)),
    "dealt-in-turn": ("items are dealt out in turn", Switches(round_robin=True)),
}

FAULTS = Faults(twin=run, faults=tuple(fault(name, what, run, on) for name, (what, on) in _WHAT.items()))
