"""What may be wrong with writes into latent caches: the twin with a switch thrown."""

from parity.faults._plant import fault
from parity.mutations import Faults
from parity.twins.latent_cache_write import Switches, run

_WHAT = {
    "power-below": ("scales of V4 and keys are rounded down to a power of two", Switches(power="floor")),
    "nearest-power": ("scales of V4 and keys are rounded to the nearest power of two", Switches(power="nearest")),
    "floor-1e-10": ("V4's rows have the floor of activations", Switches(floor=1e-10)),
    "v3-power-of-two": ("V3.2's scales are powers of two", Switches(power_in_ds_mla=True)),
    "multiplied": ("float8 numbers are multiplied with the scale", Switches(multiply=True)),
    "nibbles-swapped": ("the even of two 4-bit codes lies in the high bits", Switches(swapped=True)),
    "next-slot": ("every row lands in the next slot", Switches(shift=1)),
    "skipped-written": ("a negative slot counts from the end", Switches(write_skipped=True)),
}

FAULTS = Faults(twin=run, faults=tuple(fault(name, what, run, on) for name, (what, on) in _WHAT.items()))
