"""vLLM's cascade (two FlashAttention 3 calls and a merge) in the terms of `jaxattn.cascade_attention`."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from parity.cases import Adapter, Arrays, Output
from parity.cases.paged_attention import poisoned

if TYPE_CHECKING:
    from parity.captures import Capture


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments: one level, one group of all requests, `common_prefix_len` tokens."""
    x, params = capture.inputs, capture.params
    k, v, table = poisoned(x["k"], x["v"], x["block_table"], x["seq_lens"], x["cu_seqlens_q"], None)
    args: dict[str, Any] = {
        "q": x["q"],
        "k_pages": k,
        "v_pages": v,
        "page_table": table,
        "lengths": x["seq_lens"].astype(np.int32),
        "query_start": x["cu_seqlens_q"].astype(np.int32),
        "group_start": np.array([[0, len(table)]], np.int32),
        "shared": np.array([[params["common_prefix_len"]]], np.int32),
    }
    args |= {name: x[name] for name in ("sinks",) if name in x}
    return {name: jnp.asarray(a) for name, a in args.items()} | {
        "scale": float(params["scale"]),
        "softcap": params.get("softcap") or None,
    }


def expected(capture: "Capture") -> Arrays:
    """The merged output; what the captures hold of the two parts is not an output of the op."""
    return {"o": capture.outputs["o"]}


ADAPTER = Adapter(
    arguments=arguments,
    expected=expected,
    outputs={
        "o": Output(axes=("token", "head", "dim"), slice_rank=2, rule="default", contract="contract"),
        "lse": Output(axes=("token", "head"), slice_rank=2, rule="lse", contract="contract_lse"),
    },
)
