"""vLLM's capture of a gathered V4 cache in the terms of `jaxattn.latent_cache_gather`."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from parity.cases import Adapter, Arrays, Output

if TYPE_CHECKING:
    from parity.captures import Capture


def arguments(capture: "Capture") -> dict[str, Any]:
    """One request in pages 0 and 1 of the captured cache, all of whose slots are gathered."""
    cache, page = capture.outputs["cache"], int(capture.params["page"])
    rows = capture.outputs["gathered"].shape[1]
    return {
        "cache": jnp.asarray(cache),
        "page_table": jnp.arange(rows // page, dtype=jnp.int32)[None],
        "lengths": jnp.full(1, rows, jnp.int32),
        "rows": rows,
        "page": page,
    }


def expected(capture: "Capture") -> Arrays:
    """The gathered rows."""
    return {"values": capture.outputs["gathered"]}


def convention(capture: "Capture", outputs: Arrays) -> Arrays:
    """VLLM's zero bytes stand for 0 * 2^-127, like ours."""
    del capture
    return {name: np.asarray(x) for name, x in outputs.items()}


ADAPTER = Adapter(
    arguments=arguments,
    expected=expected,
    convention=convention,
    outputs={"values": Output(axes=("request", "row", "dim"), slice_rank=0, rule="exact", contract="exact")},
)
