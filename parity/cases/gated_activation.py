"""vLLM's captures of activations in the terms of `jaxattn.gated_activation`."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from parity.cases import Adapter, Output

if TYPE_CHECKING:
    from parity.captures import Capture


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments; alpha belongs to gpt-oss."""
    options = {name: float(x) for name, x in capture.params.items() if name in ("alpha", "limit")}
    return {"x": jnp.asarray(capture.inputs["x"]), "kind": "swigluoai" if "alpha" in options else "silu"} | options


ADAPTER = Adapter(
    arguments=arguments,
    outputs={"o": Output(axes=("row", "dim"), slice_rank=1, rule="default", contract="contract")},
)
