"""DeepGEMM's and Triton's FP8 block products in the terms of `jaxattn.grouped_projection`: groups with equal inputs."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from parity.cases import Adapter, Arrays, Output

if TYPE_CHECKING:
    from parity.captures import Capture


def _groups(capture: "Capture") -> int:
    """Two where the blocks of output features can be halved."""
    return 1 + (capture.inputs["w_scale"].shape[0] % 2 == 0)


def arguments(capture: "Capture") -> dict[str, Any]:
    """Each group has the inputs of all, and its share of the output features."""
    x, groups = capture.inputs, _groups(capture)
    args = {name: np.stack([x[source]] * groups, 1) for name, source in (("x", "x_q"), ("x_scale", "x_scale"))}
    for name, source in (("weight", "w_q"), ("weight_scale", "w_scale")):
        args[name] = x[source].reshape(groups, -1, x[source].shape[1])
    return {name: jnp.asarray(a) for name, a in args.items()}


def expected(capture: "Capture") -> Arrays:
    """The captured columns by group."""
    o = capture.outputs["o"]
    return {"y": o.reshape(len(o), _groups(capture), -1)}


ADAPTER = Adapter(
    arguments=arguments,
    expected=expected,
    outputs={"y": Output(axes=("token", "group", "dim"), slice_rank=2, rule="default", contract="contract")},
)
