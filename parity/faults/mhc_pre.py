"""What may be wrong with the first half of hyper-connections: the twin with a switch thrown."""

from parity.faults._plant import fault
from parity.mutations import Args, Faults
from parity.twins.mhc_pre import Switches, run


def _mild(args: Args) -> bool:
    """Logits that do not saturate, and several streams."""
    return args["residual"].shape[1] > 1 and abs(args["base"]).max() < 4


_WHAT = {
    "one-step": ("Sinkhorn stops after the first step", Switches(once=True)),
    "matrix-transposed": ("the matrix is [destination, source]", Switches(transposed=True)),
    "gates-to-1": ("output gates end at 1", Switches(single_gate=True)),
    "norm-per-stream": ("each stream is normed by itself", Switches(norm_per_stream=True)),
    "gates-exchanged": ("rows of pre and post are exchanged", Switches(gates_exchanged=True)),
}

FAULTS = Faults(twin=run, faults=tuple(fault(name, what, run, on, _mild) for name, (what, on) in _WHAT.items()))
