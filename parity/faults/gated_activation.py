"""What may be wrong with a gated activation: the twin with a switch thrown."""

from parity.faults._plant import fault
from parity.mutations import Faults
from parity.twins.gated_activation import Switches, run

_WHAT = {
    "gate-and-up-swapped": ("gate and value are exchanged", Switches(swap=True)),
    "other-layout": ("halves are taken for pairs and pairs for halves", Switches(other_layout=True)),
    "not-clamped": ("the limit is ignored", Switches(no_clamp=True)),
    "alpha-ignored": ("alpha is 1", Switches(no_alpha=True)),
    "beta-ignored": ("nothing is added to the value", Switches(no_beta=True)),
    "output-1-percent": ("the result is 1 % too large", Switches(gain=1.01)),
}


def _float32(args) -> bool:
    """silu(-10) is -4.5e-4, which 16 bits hide beside numbers of size 80."""
    return args["x"].dtype.name == "float32"


FAULTS = Faults(
    twin=run,
    faults=(
        *(fault(name, what, run, on) for name, (what, on) in _WHAT.items()),
        fault("gate-clamped-below", "the gate is clamped from below as well", run, Switches(lower=True), _float32),
    ),
)
