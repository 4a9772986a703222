"""vLLM's captures of `fused_experts` in the terms of `jaxattn.experts`."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.quant import mx
from parity.cases import Adapter, Arrays, Explained, Output
from parity.twins import experts as twin

if TYPE_CHECKING:
    from parity.captures import Capture

_VALUES_OF = jax.jit(mx.dequantize, static_argnames="dtype")
_NAMES = {"w1": "w13", "w1_scale": "w13_scale", "topk_weights": "weights", "topk_ids": "ids"}
_FORMATS = {"bf16": "none", "int8_channel": "int8", "int4_w4a16": "wna16", "mxfp4_w4a16": "mxfp4"}


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments under our names."""
    mode = capture.params["mode"]
    return {_NAMES.get(name, name): jnp.asarray(x) for name, x in capture.inputs.items()} | {
        "format": _FORMATS.get(mode, mode)
    }


def expected(capture: "Capture") -> Arrays:
    """The captured output, and what vLLM made of MXFP4 weights."""
    names = {"w1_dequant": "w13_values", "w2_dequant": "w2_values"}
    return {names.get(name, name): x for name, x in capture.outputs.items()}


def convention(capture: "Capture", outputs: Arrays) -> Arrays:
    """Our output, and what our format makes of the same MXFP4 weights."""
    if "w1_dequant" not in capture.outputs:
        return outputs
    x = {name: jnp.asarray(a) for name, a in capture.inputs.items()}
    return outputs | {
        f"{ours}_values": np.asarray(_VALUES_OF(x[name], x[f"{name}_scale"], dtype="bfloat16"))
        for name, ours in (("w1", "w13"), ("w2", "w2"))
    }


def explain(capture: "Capture", args: dict[str, Any]) -> Explained | None:
    """With few tokens wna16 weights go through a kernel that accumulates in bfloat16."""
    if args["format"] != "wna16":
        return None
    host = {name: np.asarray(a) if hasattr(a, "shape") else a for name, a in args.items()}
    note = (
        "few tokens take a kernel that adds four products at a time in bfloat16: "
        "https://github.com/vllm-project/vllm/blob/main/csrc/moe/moe_wna16.cu"
    )
    return Explained(note=note, rounded=twin.run(host, False, twin.Switches(chains=True)), wide=twin.run(host, True))


_VALUES = Output(axes=("expert", "output", "input"), slice_rank=1, rule="exact", contract="exact")

ADAPTER = Adapter(
    arguments=arguments,
    expected=expected,
    convention=convention,
    explain=explain,
    outputs={
        "o": Output(axes=("token", "dim"), slice_rank=1, rule="default", contract="contract"),
        "w13_values": _VALUES,
        "w2_values": _VALUES,
    },
)
