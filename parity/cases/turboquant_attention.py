"""vLLM's captures of its TurboQuant decode kernel in the terms of `jaxattn.turboquant_attention`."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from parity.cases import Adapter, Arrays, Output
from parity.cases.turboquant_write import preset

if TYPE_CHECKING:
    from parity.captures import Capture

_UNUSED_PAGE = 2**31 - 1


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments: the captured cache, whose unread slots become 0xff, and unread table entries 2^31 - 1."""
    x, cache = capture.inputs, capture.outputs["cache"]
    page, table = cache.shape[1], x["block_table"].astype(np.int32)
    pages = np.full_like(cache, 0xFF)
    for b, length in enumerate(x["seq_lens"].tolist()):
        slots = np.arange(length)
        where = table[b, slots // page], slots % page
        pages[where] = cache[where]
        table[b, -(-length // page) :] = _UNUSED_PAGE
    return {
        "q": jnp.asarray(x["q"]),
        "pages": jnp.asarray(pages),
        "page_table": jnp.asarray(table),
        "lengths": jnp.asarray(x["seq_lens"].astype(np.int32)),
        "query_start": jnp.arange(len(x["q"]) + 1, dtype=jnp.int32),
        "preset": preset(capture),
        "scale": float(capture.params["scale"]),
    }


def expected(capture: "Capture") -> Arrays:
    """The captured output."""
    return {"o": capture.outputs["o"]}


ADAPTER = Adapter(
    arguments=arguments,
    expected=expected,
    outputs={
        "o": Output(axes=("token", "head", "dim"), slice_rank=2, rule="default", contract="contract"),
        "lse": Output(axes=("token", "head"), slice_rank=2, rule="lse", contract="contract_lse"),
    },
)
