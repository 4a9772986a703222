"""vLLM's capture of indexer logits and their best entries in the terms of `jaxattn.indexer`."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from parity.cases import Adapter, Arrays, Explained, Output
from parity.mutations import on_host
from parity.twins import indexer as twin

if TYPE_CHECKING:
    from parity.captures import Capture


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments, of the same names."""
    x = capture.inputs
    names = ("q", "weights", "k", "k_scale", "starts", "ends")
    return {name: jnp.asarray(x[name]) for name in names} | {"topk": int(capture.params["topk"]), "return_logits": True}


def expected(capture: "Capture") -> Arrays:
    """Logits, and the chosen entries in ascending order, because vLLM's order is undefined."""
    return {"indices": np.sort(capture.outputs["topk_indices"], 1), "logits": capture.outputs["logits"]}


def convention(capture: "Capture", outputs: Arrays) -> Arrays:
    """Our chosen entries in ascending order."""
    del capture
    return outputs | {"indices": np.sort(outputs["indices"], 1)}


def explain(capture: "Capture", args: dict[str, Any]) -> Explained:
    """DeepGEMM's products accumulate inside the FP8 tensor cores."""
    del capture
    host = on_host(args)
    return Explained(
        note="sums of 32 products keep 13 bits below the largest: https://github.com/deepseek-ai/DeepGEMM, and section "
        "3.3.2 of https://arxiv.org/abs/2412.19437",
        rounded={"logits": twin.run(host, False, twin.Switches(tensor_core=True))["logits"]},
        wide={"logits": twin.run(host, True)["logits"]},
    )


ADAPTER = Adapter(
    arguments=arguments,
    expected=expected,
    convention=convention,
    explain=explain,
    outputs={
        "indices": Output(axes=("token", "place"), slice_rank=0, rule="exact", contract="exact"),
        "logits": Output(axes=("token", "entry"), slice_rank=0, rule="default", contract="contract_fp8_sums"),
    },
)
