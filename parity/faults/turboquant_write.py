"""What may be wrong with packed TurboQuant slots: the twin with a switch thrown."""

import numpy as np

from parity.faults._plant import fault
from parity.mutations import Args, Fault, Faults
from parity.twins.turboquant_write import Switches, run


def _rotated(args: Args) -> bool:
    return args["preset"] != "k8v4"


def _fault(name: str, what: str, applies=lambda args: True, **switches) -> Fault:
    return fault(name, what, run, Switches(**switches), applies)


def _exchanged(args: Args, wide: bool) -> dict[str, np.ndarray]:
    return run(args | {"key": args["value"], "value": args["key"]}, wide)


FAULTS = Faults(
    twin=run,
    faults=(
        _fault("rotation-forgotten", "keys are coded without the rotation", _rotated, rotate=False),
        _fault("norm-forgotten", "keys are coded without division by their norm", _rotated, normalise=False),
        _fault("codes-truncated", "value codes are cut off instead of rounded", truncate=True),
        _fault("nibbles-swapped", "the even of two 4-bit codes lies in the high nibble", swap_nibbles=True),
        _fault("bfloat16-scales", "scale and minimum are rounded to bfloat16 first", bfloat_scales=True),
        _fault("slot-plus-one", "every slot is one too far", shift=1),
        _fault(
            "skipped-written",
            "a negative slot counts from the end",
            lambda args: bool((args["slots"] < 0).any()),
            write_skipped=True,
        ),
        Fault(name="key-as-value", what="keys and values are exchanged", run=_exchanged, applies=lambda args: True),
    ),
)
