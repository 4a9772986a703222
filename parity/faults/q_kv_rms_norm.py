"""What may be wrong with the norm of both latents: the twin with a switch thrown."""

from parity.faults._plant import fault
from parity.mutations import Faults
from parity.twins.q_kv_rms_norm import Switches, run

_WHAT = {
    "weight-forgotten": ("the weight is 1", Switches(no_weight=True)),
    "joint-norm": ("kv is normed like q", Switches(joint=True)),
}

FAULTS = Faults(twin=run, faults=tuple(fault(name, what, run, on) for name, (what, on) in _WHAT.items()))
