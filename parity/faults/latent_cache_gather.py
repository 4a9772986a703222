"""What may be wrong with gathered latent caches: the twin with a switch thrown."""

from parity.faults._plant import fault
from parity.mutations import Faults
from parity.twins.latent_cache_gather import Switches, run

_WHAT = {
    "codes-unscaled": ("codes are not scaled", Switches(no_scale=True)),
    "next-slot": ("every row comes from the next slot", Switches(shift=1)),
}

FAULTS = Faults(twin=run, faults=tuple(fault(name, what, run, on) for name, (what, on) in _WHAT.items()))
