"""vLLM's and DeepGEMM's captures of products of codes in the terms of `jaxattn.scaled_matmul`."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from parity.cases import Adapter, Arrays, Output

if TYPE_CHECKING:
    from parity.captures import Capture

_NAMES = {"x_q": "a", "w_q": "b", "x_scale": "a_scale", "w_scale": "b_scale"}
_BLOCK = 128


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments; block captures name their operands x and w."""
    args: dict[str, Any] = {_NAMES.get(name, name): jnp.asarray(x) for name, x in capture.inputs.items()}
    return args | ({"block": _BLOCK} if "x_q" in capture.inputs else {})


def expected(capture: "Capture") -> Arrays:
    """The captured output; that of INT8 codes goes by a name of its own, because it has one right answer."""
    return _named(capture, capture.outputs)


def convention(capture: "Capture", outputs: Arrays) -> Arrays:
    """Our output under the same name."""
    return _named(capture, outputs)


def _named(capture: "Capture", outputs: Arrays) -> Arrays:
    exact = "a" in capture.inputs and capture.inputs["a"].dtype == np.int8
    return {"o_int8" if exact else "o": outputs["o"]}


ADAPTER = Adapter(
    arguments=arguments,
    expected=expected,
    convention=convention,
    outputs={
        "o": Output(axes=("row", "column"), slice_rank=1, rule="default", contract="contract"),
        "o_int8": Output(
            axes=("row", "column"),
            slice_rank=1,
            rule="exact",
            contract="exact",
            note="int32 sums are exact, and (acc * b_scale) * a_scale has one right rounding",
        ),
    },
)
