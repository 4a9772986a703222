"""vLLM's captures of MXFP8 and NVFP4 quantizers in the terms of `jaxattn.quantize_mx`."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxattn.quant import mx, nvfp4
from jaxattn.quant import primitives as p
from parity.cases import Adapter, Arrays, Output

if TYPE_CHECKING:
    from parity.captures import Capture

_MX = jax.jit(mx.dequantize, static_argnames="dtype")
_NVFP4 = jax.jit(lambda q: p.from_e2m1(nvfp4.unpack(q)))


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments; groups of 16 are NVFP4."""
    args: dict[str, Any] = {"x": jnp.asarray(capture.inputs["x"])}
    if _is_nvfp4(capture):
        return args | {"format": "nvfp4", "global_scale": jnp.asarray(capture.inputs["global_scale"])}
    return args | {"format": "mxfp8"}


def _is_nvfp4(capture: "Capture") -> bool:
    return int(capture.params["group"]) == nvfp4.GROUP


def convention(capture: "Capture", outputs: Arrays) -> Arrays:
    """NVFP4 codes and scales as the float32 numbers they stand for; MXFP8 with its dequantized numbers in bfloat16.

    vLLM's emulation of NVFP4 multiplies magnitudes with `torch.sign(x)`, which is +0 for a number that is -0; one that
    becomes zero only by rounding keeps its sign there too. Float64 codes, those of the truth, are rounded to the format
    before they are dequantized.
    """
    if _is_nvfp4(capture):
        values = np.asarray(_NVFP4(jnp.asarray(outputs["q"])))
        unsigned = np.where(capture.inputs["x"] == 0, np.abs(values), values)
        return {"q": unsigned, "scale": outputs["scale"].astype(np.float32)}
    codes = outputs["q"].astype(ml_dtypes.float8_e4m3fn)
    back = _MX(jnp.asarray(codes), jnp.asarray(outputs["scale"]), dtype="bfloat16")
    return outputs | {"dequant": np.asarray(back)}


_BLOCKS = Output(axes=("row", "block"), slice_rank=0, rule="exact", contract="exact")
_CODES = Output(axes=("row", "column"), slice_rank=1, rule="exact", contract="exact")

ADAPTER = Adapter(
    arguments=arguments,
    convention=convention,
    outputs={
        "q": _CODES,
        "scale": _BLOCKS,
        "global_scale": Output(axes=(), slice_rank=0, rule="exact", contract="exact"),
        "dequant": _CODES,
    },
)
