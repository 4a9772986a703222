"""What may be wrong with index lists: the twin with a switch thrown."""

from parity.faults._plant import fault
from parity.mutations import Faults
from parity.twins.sparse_indices import Switches, run

_WHAT = {
    "window-short": ("the window leaves out one position", Switches(window=-1)),
    "window-long": ("the window holds one more position", Switches(window=1)),
    "no-offset": ("every request starts at row 0", Switches(no_offset=True)),
    "window-first": ("the window comes before the entries", Switches(window_first=True)),
    "from-the-start": ("window rows are counted from the request's first token", Switches(from_start=True)),
}

FAULTS = Faults(twin=run, faults=tuple(fault(name, what, run, on) for name, (what, on) in _WHAT.items()))
