"""vLLM's captures of latent decoding in the terms of `jaxattn.mla`."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from parity.cases import Adapter, Explained, Output
from parity.mutations import on_host
from parity.twins import mla as twin

if TYPE_CHECKING:
    from parity.captures import Capture


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments, one query a request; what is not read becomes NaN and 2^31 - 1."""
    x, page = capture.inputs, int(capture.params["page"])
    cache, table = np.array(x["kv_cache"][:, :, 0]), x["block_table"].astype(np.int32)
    read = np.zeros(cache.shape[:2], bool)
    for b, n in enumerate(x["seq_lens"].tolist()):
        where = np.arange(n)
        read[table[b, where // page], where % page] = True
        table[b, -(-n // page) :] = 2**31 - 1
    cache[~read] = np.nan
    return {
        "q": jnp.asarray(x["q"]),
        "cache": jnp.asarray(cache),
        "page_table": jnp.asarray(table),
        "lengths": jnp.asarray(x["seq_lens"]),
        "query_start": jnp.arange(len(x["q"]) + 1, dtype=jnp.int32),
        "scale": float(capture.params["scale"]),
        "value_dim": capture.outputs["o"].shape[2],
        "return_lse": True,
    }


def explain(capture: "Capture", args: dict[str, Any]) -> Explained:
    """Scores of 576 products pass through the tensor cores' sums, which cut off."""
    del capture
    host = on_host(args)
    rounded, wide = twin.run(host, False, twin.Switches(tensor_core=True)), twin.run(host, True)
    return Explained(
        note="tensor cores add 16 products at a time and cut the sum off: https://arxiv.org/abs/2403.00232",
        rounded={"lse": rounded["lse"]},
        wide={"lse": wide["lse"]},
    )


ADAPTER = Adapter(
    arguments=arguments,
    explain=explain,
    outputs={
        "o": Output(axes=("token", "head", "dim"), slice_rank=2, rule="default", contract="contract"),
        "lse": Output(axes=("token", "head"), slice_rank=2, rule="lse", contract="contract_lse_latent"),
    },
)
