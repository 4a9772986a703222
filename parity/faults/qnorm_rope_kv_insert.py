"""What may be wrong with V4's fused norm, rotation and insertion: the twin with a switch thrown."""

from parity.faults._plant import fault
from parity.mutations import Faults
from parity.twins.qnorm_rope_kv_insert import Switches, run

_WHAT = {
    "norm-over-heads": ("all heads of a token share one norm", Switches(norm_over_heads=True)),
    "backwards": ("both rotations go the other way", Switches(backwards=True)),
    "kv-unrotated": ("kv is stored as it came", Switches(kv_unrotated=True)),
    "q-skipped": ("a token without a slot gets no q", Switches(skip_q=True)),
    "padding-copies": ("heads beyond H repeat the first", Switches(padding_copies=True)),
    "power-below": ("scales are rounded down to a power of two", Switches(power="floor")),
}

FAULTS = Faults(twin=run, faults=tuple(fault(name, what, run, on) for name, (what, on) in _WHAT.items()))
