"""vLLM's capture of the indexer's best entries in the terms of `jaxattn.indexer_topk`, from the captured logits."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from parity.cases import Adapter, Arrays, Output

if TYPE_CHECKING:
    from parity.captures import Capture


def arguments(capture: "Capture") -> dict[str, Any]:
    """The captured logits, NaN outside of each token's range."""
    x, logits = capture.inputs, np.array(capture.outputs["logits"])
    entry = np.arange(logits.shape[1])
    logits[(entry < x["starts"][:, None]) | (entry >= x["ends"][:, None])] = np.nan
    ranges = {name: jnp.asarray(x[name]) for name in ("starts", "ends")}
    return {"logits": jnp.asarray(logits)} | ranges | {"topk": int(capture.params["topk"])}


def expected(capture: "Capture") -> Arrays:
    """The chosen entries in rising order, because vLLM's order is undefined, -1 at the end."""
    found = capture.outputs["topk_indices"]
    most = np.iinfo(found.dtype).max
    found = np.sort(np.where(found < 0, most, found), 1)
    return {"chosen": np.where(found == most, -1, found)}


ADAPTER = Adapter(
    arguments=arguments,
    expected=expected,
    outputs={"chosen": Output(axes=("token", "place"), slice_rank=0, rule="exact", contract="exact")},
)
