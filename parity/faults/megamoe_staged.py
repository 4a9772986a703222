"""What may be wrong with MegaMoE's stages: the twin with a switch thrown."""

from parity.faults._plant import fault
from parity.mutations import Faults
from parity.twins.megamoe_staged import Switches, run

_WHAT = {
    "scale-floor": ("scales are rounded down to powers of two", Switches(how="floor")),
    "scale-nearest": ("scales are rounded to the nearest power of two", Switches(how="nearest")),
    "group-128": ("128 numbers share a scale", Switches(group=128)),
    "floor-1e-10": ("the floor is that of the FP8 path", Switches(floor=1e-10)),
    "codes-cut": ("codes are cut off instead of rounded", Switches(cut=True)),
}


def _second(args) -> bool:
    """A capture ends before the second quantization; the experts that its adapter makes up are all alike."""
    return args["w13"].min() != args["w13"].max()


FAULTS = Faults(
    twin=run,
    faults=(
        *(fault(name, what, run, on, lambda args: args["w2"].shape[2] % 64 == 0) for name, (what, on) in _WHAT.items()),
        fault("weight-at-the-end", "the weight comes after requantizing", run, Switches(late_weight=True), _second),
        fault("not-clamped", "the limit is ignored", run, Switches(no_clamp=True), _second),
    ),
)
