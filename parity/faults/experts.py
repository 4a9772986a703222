"""What may be wrong with experts: the twin with a switch thrown."""

from parity.faults._plant import fault
from parity.mutations import Args, Faults
from parity.twins.experts import Switches, run


def _unquantized(args: Args) -> bool:
    """Codes of activations cost 1 to 5 %, which hides one."""
    return args.get("format", "none") in ("none", "mxfp4") and args.get("act_group") is None


def _early(args: Args) -> bool:
    return args.get("weight_on") == "activation"


_WHAT = {
    "gate-and-up-swapped": ("up rows are taken for gate rows", Switches(swap_gate=True)),
    "weights-ignored": ("routing weights are ignored", Switches(no_weights=True)),
    "next-expert": ("every pair goes to the next expert", Switches(next_expert=True)),
    "slot-dropped": ("the last slot is left out", Switches(drop_slot=True)),
    "bias-ignored": ("biases are left out", Switches(no_bias=True)),
    "one-scale": ("all groups have the first group's scale", Switches(one_scale=True)),
    "high-nibble-first": ("the high four bits of a byte come first", Switches(high_first=True)),
}

FAULTS = Faults(
    twin=run,
    faults=(
        *(fault(name, what, run, on) for name, (what, on) in _WHAT.items()),
        fault("not-clamped", "the limit is ignored", run, Switches(no_clamp=True)),
        fault("weighted-twice", "weights are applied to the output again", run, Switches(twice=True), _early),
        fault("output-1-percent", "the result is 1 % too large", run, Switches(gain=1.01), _unquantized),
    ),
)
