"""vLLM's captures of routers in the terms of `jaxattn.router`."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from parity.cases import Adapter, Arrays, Explained, Output
from parity.twins import router as twin

if TYPE_CHECKING:
    from parity.captures import Capture


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments."""
    params = capture.params
    return {
        name: jnp.asarray(x, jnp.int32 if x.dtype == np.int64 else x.dtype) for name, x in capture.inputs.items()
    } | {
        "top_k": int(params["topk"]),
        "scoring": params["scoring"],
        "renormalize": bool(params["renormalize"]),
        "scaling": float(params.get("routed_scaling_factor", 1.0)),
        "num_groups": int(params.get("n_group", 1)),
        "kept_groups": int(params.get("topk_group", 1)),
    }


def expected(capture: "Capture") -> Arrays:
    """The captured weights and ids; by ascending id where vLLM leaves the order open."""
    return convention(capture, dict(capture.outputs))


def convention(capture: "Capture", outputs: Arrays) -> Arrays:
    """Grouped top-k without a bias goes through `torch.topk(sorted=False)`: each row is sorted by id."""
    if "n_group" not in capture.params or "bias" in capture.inputs:
        return outputs
    order = np.argsort(outputs["ids"], -1)
    return {name: np.take_along_axis(x, order, -1) for name, x in outputs.items()}


def explain(capture: "Capture", args: dict[str, Any]) -> Explained | None:
    """Weights times the inverse of a sum; `sqrtsoftplus` by intrinsics; a bias added to a score and subtracted again.

    What vLLM computes with a bias is repeated to the bit but for four of 20 weights, softmax of equal logits entirely.
    """
    if "n_group" in capture.params or args["scoring"] == "sigmoid":
        return None
    host = {name: np.asarray(x) if hasattr(x, "shape") else x for name, x in args.items()}
    softplus, bias = args["scoring"] == "sqrtsoftplus", "bias" in args
    on = twin.Switches(reciprocal=True, plain_log=softplus, worst_log=softplus and not bias, recovered=bias)
    notes = ["weights are multiplied with the inverse of their sum"]
    if softplus:
        notes.append("softplus is __logf(1 + __expf(x)), which loses the low bits of small scores")
    if bias:
        notes.append("scores are what is left of score + bias when the bias is subtracted")
    file = "topk_softplus_sqrt_kernels.cu" if softplus else "topk_softmax_kernels.cu"
    note = f"{'; '.join(notes)}: https://github.com/vllm-project/vllm/blob/main/csrc/libtorch_stable/moe/{file}"
    return Explained(note=note, rounded={"weights": twin.run(host, False, on)["weights"]}, wide=twin.run(host, True))


ADAPTER = Adapter(
    arguments=arguments,
    expected=expected,
    convention=convention,
    explain=explain,
    outputs={
        "weights": Output(axes=("token", "slot"), slice_rank=1, rule="default", contract="contract_weights"),
        "ids": Output(axes=("token", "slot"), slice_rank=1, rule="exact", contract="exact"),
    },
)
