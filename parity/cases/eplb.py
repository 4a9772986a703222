"""vLLM's capture of `rebalance_experts` in the terms of `jaxattn.eplb`."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from parity.cases import Adapter, Arrays, Output

if TYPE_CHECKING:
    from parity.captures import Capture


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments."""
    names = {"num_replicas", "num_groups", "num_nodes", "num_ranks"}
    return {"load": jnp.asarray(capture.inputs["load"])} | {name: int(capture.params[name]) for name in names}


def expected(capture: "Capture") -> Arrays:
    """The captured placement in our convention."""
    return convention(capture, {n: x.astype(np.int32) for n, x in capture.outputs.items()})


def convention(capture: "Capture", outputs: Arrays) -> Arrays:
    """Layers without equal loads as they are, and the load of every slot's expert in all layers.

    Among equal loads vLLM's order is that of an unstable sort, and only the loads can be compared.
    """
    load, placed = capture.inputs["load"], outputs["physical_to_logical"]
    untied = [len(set(row.tolist())) == len(row) for row in load]
    return {
        "physical_to_logical": placed[untied],
        "slot_load": np.take_along_axis(load, placed.astype(np.int64), 1),
    }


_SLOTS = Output(axes=("layer", "slot"), slice_rank=1, rule="exact", contract="exact")

ADAPTER = Adapter(
    arguments=arguments,
    expected=expected,
    convention=convention,
    outputs={"physical_to_logical": _SLOTS, "slot_load": _SLOTS},
)
