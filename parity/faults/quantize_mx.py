"""What may be wrong with quantizers of block formats: the twin with a switch thrown."""

from parity.faults._plant import fault
from parity.mutations import Faults
from parity.twins.quantize_mx import Switches, run

_WHAT = {
    "power-above": ("scales are rounded up", Switches(power="ceil")),
    "power-below": ("scales are rounded down", Switches(power="floor")),
    "nearest-power": ("scales are rounded to the nearest power of two", Switches(power="nearest")),
    "ties-to-zero": ("ties go to the smaller magnitude and -0 is lost", Switches(ties="zero")),
    "ties-to-even": ("ties go to the even code where DeepGEMM's rule was asked for", Switches(ties="even")),
    "nibbles-swapped": ("the even index lies in the high bits", Switches(swap_nibbles=True)),
    "rotation-ignored": ("numbers are not rotated", Switches(ignore_rotation=True)),
    "global-scale-ignored": ("NVFP4's global scale is 1", Switches(ignore_global=True)),
    "unrounded-block-scale": ("codes belong to the unrounded block scale", Switches(exact_block_scale=True)),
}

FAULTS = Faults(twin=run, faults=tuple(fault(name, what, run, on) for name, (what, on) in _WHAT.items()))
