"""What may be wrong with the end of hyper-connections: the twin with a switch thrown."""

from parity.faults._plant import fault
from parity.mutations import Faults
from parity.twins.mhc_head import Switches, run

_WHAT = {
    "plain-mean": ("streams are averaged, whatever the gates", Switches(mean=True)),
    "norm-per-stream": ("each stream is normed by itself", Switches(norm_per_stream=True)),
    "no-base": ("the bases are left out", Switches(no_base=True)),
}

FAULTS = Faults(twin=run, faults=tuple(fault(name, what, run, on) for name, (what, on) in _WHAT.items()))
