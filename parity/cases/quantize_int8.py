"""vLLM's captures of INT8 quantizers in the terms of `jaxattn.quantize_int8`."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from parity.cases import Adapter, Arrays, Output

if TYPE_CHECKING:
    from parity.captures import Capture


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments, without the rows that are left out."""
    x, params = capture.inputs, capture.params
    args: dict[str, Any] = {"x": jnp.asarray(x["x"][_kept(capture)])}
    if params.get("static"):
        given = {name: jnp.asarray(x[name]) for name in ("scale", "azp") if name in x}
        return args | {"granularity": "tensor"} | given
    return args | {"symmetric": not params.get("azp")}


def _kept(capture: "Capture") -> np.ndarray:
    """All rows, but with dynamic zero points only those that are not constant.

    A constant row has no range: vLLM gives it scale 0 and a zero point that depends on NaN; we give it codes of 0 and a
    scale with which it comes back (`jaxattn.quant.int8`).
    """
    x = capture.inputs["x"].astype(np.float32)
    dynamic = bool(capture.params.get("azp")) and not capture.params.get("static")
    return x.max(1) > x.min(1) if dynamic else np.ones(len(x), bool)


def expected(capture: "Capture") -> Arrays:
    """The captured outputs of the kept rows; numbers for the whole tensor have no dimension here."""
    kept = _kept(capture)
    return {name: x.reshape(()) if x.ndim == 1 else x[kept] for name, x in capture.outputs.items()}


_ROWS = "constant rows of dynamic zero points are left out: vLLM's scale is 0 there and its zero point arbitrary"

ADAPTER = Adapter(
    arguments=arguments,
    expected=expected,
    outputs={
        "q": Output(axes=("row", "column"), slice_rank=1, rule="exact", contract="exact", note=_ROWS),
        "scale": Output(axes=("row", "group"), slice_rank=0, rule="exact", contract="exact", note=_ROWS),
        "azp": Output(axes=("row", "group"), slice_rank=0, rule="exact", contract="exact", note=_ROWS),
    },
)
