"""What may be wrong with RMSNorm and its quantized forms: the twin with a switch thrown."""

from parity.faults._plant import fault
from parity.mutations import Faults
from parity.twins.rms_norm_quant import Switches, run

_WHAT = {
    "norm-1-percent": ("the norm is 1 % too large", Switches(gain=1.01)),
    "layer-norm": ("the mean is subtracted", Switches(centred=True)),
    "weight-ignored": ("the weight is not used", Switches(no_weight=True)),
    "residual-not-normalised": ("the residual is not part of what is normalised", Switches(late_residual=True)),
    "wrong-residual": ("x is returned as the residual", Switches(residual_is_x=True)),
    "tensor-scale": ("all rows share the largest scale", Switches(tensor_scale=True)),
    "cut-off": ("codes are cut off instead of rounded", Switches(cut=True)),
}

FAULTS = Faults(twin=run, faults=tuple(fault(name, what, run, on) for name, (what, on) in _WHAT.items()))
