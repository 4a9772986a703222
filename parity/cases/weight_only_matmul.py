"""vLLM's captures of GPTQ, AWQ and Marlin kernels in the terms of `jaxattn.weight_only_matmul`."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.quant import awq, marlin
from parity.cases import Adapter, Arrays, Explained, Output
from parity.twins import weight_only_matmul as twin

if TYPE_CHECKING:
    from parity.captures import Capture

_AWQ, _MARLIN = jax.jit(awq.dequantize), jax.jit(marlin.dequantize)
_TO_MARLIN = jax.jit(marlin.quantize, static_argnums=1)


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments."""
    x, params = capture.inputs, capture.params
    if "marlin_qweight" in x:
        given: dict[str, Any] = {"w": x["marlin_qweight"], "scales": x["marlin_scales"]}
        options = {"format": "marlin"}
    else:
        given = {"w": x["qweight"], "scales": x["scales"], "zeros": x["qzeros"]}
        options = {"format": "awq"}
    if "g_idx" in x:
        given["g_idx"] = x["g_idx"]
        options = {"format": "gptq_v2" if params["v2"] else "gptq", "bits": int(params["bits"])}
    return {name: jnp.asarray(a) for name, a in (given | {"x": x["x"]}).items()} | options


def expected(capture: "Capture") -> Arrays:
    """The captured outputs; beside Marlin's product what its quantizer made of the weight: codes, scales and values."""
    out, x = dict(capture.outputs), capture.inputs
    if "marlin_qweight" in x:
        out |= {"w": x["w_dequant"], "qweight": x["marlin_qweight"], "scales": x["marlin_scales"]}
    return out


def convention(capture: "Capture", outputs: Arrays) -> Arrays:
    """Our product, and what our formats make of the same weight."""
    x = capture.inputs
    if "marlin_qweight" in x:
        made = _TO_MARLIN(jnp.asarray(x["w"]), int(capture.params["group"]))
        w = _MARLIN(jnp.asarray(x["marlin_qweight"]), jnp.asarray(x["marlin_scales"]))
        own = {"w": w, "qweight": made[0], "scales": made[1]}
    elif "w" in capture.outputs:
        own = {"w": _AWQ(*(jnp.asarray(x[name]) for name in ("qweight", "qzeros", "scales")))}
    else:
        own = {}
    return outputs | {name: np.asarray(a) for name, a in own.items()}


def explain(capture: "Capture", args: dict[str, Any]) -> Explained | None:
    """Products and partial sums in float16."""
    host = {name: np.asarray(a) if hasattr(a, "shape") else a for name, a in args.items()}
    if "g_idx" in capture.inputs:
        note = (
            "without ExLlama the kernel multiplies and accumulates in float16: "
            "https://github.com/vllm-project/vllm/blob/main/csrc/quantization/gptq/q_gemm.cu (gemm_half_q_half_alt)"
        )
        rounded = twin.gptq_in_float16(host)
    elif host["format"] == "awq":
        note = (
            "eight partial sums over the input features are rounded to float16 before they are added: "
            "https://github.com/vllm-project/vllm/blob/main/csrc/quantization/awq/gemm_kernels.cu"
        )
        rounded = twin.awq_split(host)
    else:
        return None
    return Explained(note=note, rounded={"o": rounded}, wide=twin.run(host, True))


_EXACT = Output(axes=("input", "output"), slice_rank=1, rule="exact", contract="exact")

ADAPTER = Adapter(
    arguments=arguments,
    explain=explain,
    expected=expected,
    convention=convention,
    outputs={
        "o": Output(axes=("row", "column"), slice_rank=1, rule="default", contract="contract"),
        "w": _EXACT,
        "qweight": Output(axes=("tile", "word"), slice_rank=1, rule="exact", contract="exact"),
        "scales": Output(axes=("group", "output"), slice_rank=1, rule="exact", contract="exact"),
    },
)
