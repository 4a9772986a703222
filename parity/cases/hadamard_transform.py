"""vLLM's capture of `hadacore_transform` in the terms of `jaxattn.hadamard_transform`."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from parity.cases import Adapter, Explained, Output
from parity.twins import hadamard_transform as twin

if TYPE_CHECKING:
    from parity.captures import Capture


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments."""
    return {"x": jnp.asarray(capture.inputs["x"])}


def explain(capture: "Capture", args: dict[str, Any]) -> Explained:
    """Two tensor-core products with a 16-bit result between them."""
    del args
    x = capture.inputs["x"]
    return Explained(
        note="hadacore multiplies with H_16 / 4 and H_8 / sqrt(8) in turn and rounds the first product, and sqrt(8), "
        "to 16 bits: https://github.com/vllm-project/vllm/tree/main/csrc/quantization/hadamard/hadacore",
        rounded={"o": twin.hadacore(x)},
        wide=twin.run({"x": x}, True),
    )


ADAPTER = Adapter(
    arguments=arguments,
    explain=explain,
    outputs={"o": Output(axes=("row", "column"), slice_rank=1, rule="default", contract="contract")},
)
