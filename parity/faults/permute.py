"""What may be wrong with the permutation of rows: the twin with a switch thrown."""

from parity.faults._plant import fault
from parity.mutations import Faults
from parity.twins.permute import Switches, run

_WHAT = {
    "unstable": ("within an expert the last pair comes first", Switches(reverse=True)),
    "row-of-the-pair": ("pair i takes row i instead of its token's", Switches(pair_rows=True)),
    "offsets-are-ends": ("offsets say where experts end", Switches(inclusive=True)),
    "map-not-inverted": ("positions say which pair a row holds", Switches(forward=True)),
}

FAULTS = Faults(twin=run, faults=tuple(fault(name, what, run, on) for name, (what, on) in _WHAT.items()))
