"""What may be wrong with rotary embeddings: the twin with a switch thrown."""

import ml_dtypes
import numpy as np

from parity.faults._plant import fault
from parity.mutations import Faults
from parity.twins.rope import Switches, run

_WHAT = {
    "other-pairs": ("neighbours and halves are exchanged", Switches(other_pairs=True)),
    "other-part": ("the rotary part is taken from the other end", Switches(other_part=True)),
    "backwards": ("sin has the wrong sign", Switches(backwards=True)),
}
_ROUNDED = fault(
    "products-rounded",
    "products are rounded to bfloat16",
    run,
    Switches(inner=ml_dtypes.bfloat16),
    lambda args: args["x"].dtype == np.float32,
)

FAULTS = Faults(twin=run, faults=(*(fault(name, what, run, on) for name, (what, on) in _WHAT.items()), _ROUNDED))
