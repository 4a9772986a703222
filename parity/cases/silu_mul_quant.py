"""vLLM's captures of `silu_and_mul_quant` in the terms of `jaxattn.silu_mul_quant`."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from parity.cases import Adapter, Output

if TYPE_CHECKING:
    from parity.captures import Capture


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments."""
    return {name: jnp.asarray(x) for name, x in capture.inputs.items()} | {"mode": "static"}


_EXP = (
    "the exponential is another one: a number within 1e-7 of the border of two roundings may fall on either side; none "
    "does in this capture"
)

ADAPTER = Adapter(
    arguments=arguments,
    outputs={
        "o": Output(axes=("row", "column"), slice_rank=1, rule="exact", contract="contract", note=_EXP),
        "q": Output(axes=("row", "column"), slice_rank=1, rule="exact", contract="codes", note=_EXP),
        "scale": Output(axes=("row", "group"), slice_rank=1, rule="exact", contract="contract", note=_EXP),
    },
)
