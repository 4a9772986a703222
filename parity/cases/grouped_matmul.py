"""DeepGEMM's and Triton's FP8 block products in the terms of `jaxattn.grouped_matmul`: groups with equal weights."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from parity.cases import Adapter, Arrays, Output

if TYPE_CHECKING:
    from parity.captures import Capture

_NAMES = {"a": "x_q", "a_scale": "x_scale", "b": "w_q", "b_scale": "w_scale"}


def arguments(capture: "Capture") -> dict[str, Any]:
    """Rows in four groups, the second one empty; three have the captured weight, the empty one has none."""
    args = {name: np.asarray(capture.inputs[source]) for name, source in _NAMES.items()}
    for name in ("b", "b_scale"):
        args[name] = np.stack([args[name], np.full_like(args[name], np.nan), args[name], args[name]])
    N = len(args["a"])
    args["offsets"] = np.asarray([0, N // 3, N // 3, N // 2, N], np.int32)
    return {name: jnp.asarray(x) for name, x in args.items()}


def expected(capture: "Capture") -> Arrays:
    """The captured product."""
    return {"o": capture.outputs["o"]}


ADAPTER = Adapter(
    arguments=arguments,
    expected=expected,
    outputs={"o": Output(axes=("row", "column"), slice_rank=1, rule="default", contract="contract")},
)
