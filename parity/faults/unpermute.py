"""What may be wrong with the sum over experts: the twin with a switch thrown."""

import numpy as np

from parity.faults._plant import fault
from parity.mutations import Faults
from parity.twins.unpermute import Switches, run


def _all_there(args) -> bool:
    """A swapped weight of a pair without row would be NaN, which proves nothing about the judge."""
    return args.get("weights") is not None and bool(np.isfinite(args["weights"]).all())


FAULTS = Faults(
    twin=run,
    faults=(
        fault("weights-ignored", "all rows weigh the same", run, Switches(no_weights=True)),
        fault("weights-swapped", "slots exchange their weights", run, Switches(swapped=True), _all_there),
        fault("slot-dropped", "the last slot is left out", run, Switches(drop_last=True)),
        fault("output-1-percent", "the result is 1 % too large", run, Switches(gain=1.01)),
    ),
)
