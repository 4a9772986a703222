"""vLLM's capture of combined index lists in the terms of `jaxattn.sparse_indices`."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from parity.cases import Adapter, Arrays, Output

if TYPE_CHECKING:
    from parity.captures import Capture


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments; entries of the choice that are not read become 2^31 - 1."""
    x, params = capture.inputs, capture.params
    topk = np.where(x["topk_indices"] < 0, np.int32(2**31 - 1), x["topk_indices"])
    return {
        "topk": jnp.asarray(topk),
        "query_start": jnp.asarray(x["query_start_loc"]),
        "lengths": jnp.asarray(x["seq_lens"]),
        "gathered": jnp.asarray(x["gather_lens"]),
        "window": int(params["window"]),
        "ratio": int(params["ratio"]),
        "entries": int(params["N"]),
        "stride": int(params["M"]),
    }


def expected(capture: "Capture") -> Arrays:
    """The captured lists and their lengths."""
    return {"indices": capture.outputs["indices"], "counts": capture.outputs["lens"]}


ADAPTER = Adapter(
    arguments=arguments,
    expected=expected,
    outputs={
        "indices": Output(axes=("token", "entry"), slice_rank=0, rule="exact", contract="exact"),
        "counts": Output(axes=("token",), slice_rank=0, rule="exact", contract="exact"),
    },
)
