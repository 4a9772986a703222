"""vLLM's captures of RMSNorm kernels in the terms of `jaxattn.rms_norm_quant`."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from parity.cases import Adapter, Output

if TYPE_CHECKING:
    from parity.captures import Capture


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments; the outputs and parameters say which kernel ran."""
    x, params = capture.inputs, capture.params
    args: dict[str, Any] = {name: jnp.asarray(a) for name, a in x.items()} | {"eps": float(params["eps"])}
    if "q" not in capture.outputs:
        return args
    if "scale" in x:
        return args | {"mode": "static"}
    return args | ({"mode": "group", "group": int(params["group"])} if "group" in params else {"mode": "token"})


_SUMS = (
    "the mean of squares is a float32 sum in another order: a number within 1e-7 of the border of two roundings may "
    "fall on either side; none does in these captures"
)

ADAPTER = Adapter(
    arguments=arguments,
    outputs={
        "o": Output(axes=("row", "column"), slice_rank=1, rule="exact", contract="contract", note=_SUMS),
        "q": Output(axes=("row", "column"), slice_rank=1, rule="exact", contract="codes", note=_SUMS),
        "scale": Output(axes=("row", "group"), slice_rank=1, rule="exact", contract="contract", note=_SUMS),
        "residual": Output(axes=("row", "column"), slice_rank=1, rule="exact", contract="exact"),
    },
)
