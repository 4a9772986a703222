"""vLLM's capture of MegaMoE's input staging in the terms of `jaxattn.megamoe_staged`."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from parity.cases import Adapter, Arrays, Output

if TYPE_CHECKING:
    from parity.captures import Capture

_F = 128
_EXP = "sums in another order and the instruction for 2^x move a code where the number lies at the border of two"


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments; the capture ends before the first product, so the experts are made up."""
    x, ids = capture.inputs["x"], capture.inputs["topk_ids"]
    M, E = x.shape[1], int(ids.max()) + 1
    return {
        "x": jnp.asarray(x),
        "weights": jnp.asarray(capture.inputs["topk_weights"]),
        "ids": jnp.asarray(ids),
        "w13": jnp.full((E, 2 * _F, M // 2), 0x21, jnp.uint8),
        "w13_scale": jnp.full((E, 2 * _F, M // 32), 110, jnp.uint8),
        "w2": jnp.full((E, M, _F // 2), 0x21, jnp.uint8),
        "w2_scale": jnp.full((E, M, _F // 32), 110, jnp.uint8),
    }


def expected(capture: "Capture") -> Arrays:
    """Codes, and the scale bytes that are packed four to a word; ids and weights are copies and not ours to make."""
    words = capture.outputs["x_sf"]
    return {"x8": capture.outputs["x_fp8"], "x_scale": words.view(np.uint8).reshape(len(words), -1)}


def _exact(*axes: str) -> Output:
    return Output(axes=axes, slice_rank=1, rule="exact", contract="exact")


ADAPTER = Adapter(
    arguments=arguments,
    expected=expected,
    outputs={
        "o": Output(axes=("token", "dim"), slice_rank=1, rule="default", contract="contract"),
        "x8": _exact("token", "dim"),
        "x_scale": _exact("token", "group"),
        "a8": Output(
            axes=("token", "slot", "dim"), slice_rank=1, rule="exact", contract="contract_fp8_codes", note=_EXP
        ),
        "a_scale": Output(axes=("token", "slot", "group"), slice_rank=1, rule="exact", contract="exact"),
    },
)
