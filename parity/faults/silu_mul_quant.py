"""What may be wrong with `silu(gate) * up`: the twin with a switch thrown."""

from parity.faults._plant import fault
from parity.mutations import Faults
from parity.twins.silu_mul_quant import Switches, run

_WHAT = {
    "halves-swapped": ("ups come first", Switches(swapped=True)),
    "interleaved": ("gates are the even numbers", Switches(interleaved=True)),
    "sigmoid": ("the gate is not multiplied with its sigmoid", Switches(sigmoid=True)),
    "limit-ignored": ("nothing is clamped", Switches(no_limit=True)),
    "gate-clamped-below": ("gates are clamped from below", Switches(low_gate=True)),
    "output-1-percent": ("the product is 1 % too large", Switches(gain=1.01)),
    "cut-off": ("codes are cut off instead of rounded", Switches(cut=True)),
}

FAULTS = Faults(twin=run, faults=tuple(fault(name, what, run, on) for name, (what, on) in _WHAT.items()))
