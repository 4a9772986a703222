"""vLLM's capture of `moe_align_block_size` in the terms of `jaxattn.align_block_size`."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from parity.cases import Adapter, Arrays, Output

if TYPE_CHECKING:
    from parity.captures import Capture


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments."""
    sizes = {name: int(capture.params[name]) for name in ("block_size", "num_experts")}
    return {"topk_ids": jnp.asarray(capture.inputs["topk_ids"])} | sizes


def expected(capture: "Capture") -> Arrays:
    """The captured outputs under our names."""
    names = {"sorted_token_ids": "sorted_ids", "expert_ids": "expert_ids", "num_tokens_post_padded": "padded"}
    return {names[name]: x for name, x in capture.outputs.items()}


def convention(capture: "Capture", outputs: Arrays) -> Arrays:
    """Our outputs as far as they are in use; the capture holds no more."""
    rows = capture.outputs["sorted_token_ids"].size
    blocks = rows // int(capture.params["block_size"])
    return outputs | {"sorted_ids": outputs["sorted_ids"][:rows], "expert_ids": outputs["expert_ids"][:blocks]}


def _exact(*axes: str) -> Output:
    return Output(axes=axes, slice_rank=0, rule="exact", contract="exact")


ADAPTER = Adapter(
    arguments=arguments,
    expected=expected,
    convention=convention,
    outputs={"sorted_ids": _exact("row"), "expert_ids": _exact("block"), "padded": _exact("count")},
)
