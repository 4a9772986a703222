"""What may be wrong with the indexer's choice: the twin with a switch thrown."""

from parity.faults._plant import fault
from parity.mutations import Faults
from parity.twins.indexer_topk import Switches, run

_WHAT = {
    "smallest": ("the smallest logits are taken", Switches(smallest=True)),
    "absolute": ("entries are counted from 0 instead of the range's start", Switches(absolute=True)),
    "one-short": ("the last entry of each range is never taken", Switches(one_short=True)),
}

FAULTS = Faults(twin=run, faults=tuple(fault(name, what, run, on) for name, (what, on) in _WHAT.items()))
