"""What may be wrong with the update of hyper-connected streams: the twin with a switch thrown."""

from parity.faults._plant import fault
from parity.mutations import Faults
from parity.twins.mhc_post import Switches, run

_WHAT = {
    "matrix-transposed": ("the matrix is read as [destination, source]", Switches(transposed=True)),
    "output-forgotten": ("the layer's output is left out", Switches(no_output=True)),
    "one-gate": ("every stream has the first one's gate", Switches(even=True)),
}

FAULTS = Faults(twin=run, faults=tuple(fault(name, what, run, on) for name, (what, on) in _WHAT.items()))
