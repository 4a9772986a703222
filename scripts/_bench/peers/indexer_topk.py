"""vLLM's radix selection, whose order is undefined."""

from typing import Any

import numpy as np

from scripts._bench.peers import Call, Peer, _torch


class Sorted:
    """Rows of a tensor in rising order, -1 last, once somebody looks at them: sorting is not timed."""

    def __init__(self, tensor: Any):
        """Keep the tensor."""
        self._tensor = tensor

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The sorted rows."""
        del copy
        found = _torch.numpy(self._tensor)
        most = np.iinfo(found.dtype).max
        found = np.sort(np.where(found < 0, most, found), 1)
        return np.where(found == most, -1, found).astype(dtype or found.dtype)


def _cuda(args: dict[str, Any]) -> Call:
    import torch
    from vllm import _custom_ops  # noqa: F401

    t = _torch.tensors(args)
    logits, topk = t["logits"], args["topk"]
    N, S = logits.shape
    ends, out = t["ends"].clamp(max=S), torch.full((N, topk), -1, dtype=torch.int32, device="cuda")

    def call():
        torch.ops._C.top_k_per_row_prefill(logits, t["starts"], ends, out, N, *logits.stride(), topk)
        return {"chosen": Sorted(out)}

    return call


PEERS = {"vllm": (Peer("top_k_per_row_prefill", _cuda),)}
