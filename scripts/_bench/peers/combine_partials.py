"""vLLM's combination of what an all-to-all brought from every rank: partial outputs with their log-sum-exps behind."""

from typing import Any

from scripts._bench.peers import Call, Peer, Unsupported, _torch


def _combine(args: dict[str, Any]) -> Call:
    import torch
    from vllm.v1.attention.ops.dcp_alltoall import _dcp_a2a_lse_pack_dim, _dcp_a2a_unpack_combine

    if args["return_corrected"]:
        raise Unsupported("returns no rank's share")
    t = _torch.tensors(args)
    o, D = t["o"], t["o"].shape[-1]
    width = _dcp_a2a_lse_pack_dim(o.dtype)
    received = torch.cat([o, t["lse"].contiguous().view(o.dtype).reshape(*o.shape[:-1], width)], -1)

    def call():
        return dict(
            zip(("o", "lse"), _dcp_a2a_unpack_combine(received, D, width, True, args["base"] == "e"), strict=True)
        )

    return call


PEERS = {"vllm": (Peer("dcp_a2a combine (Triton)", _combine),)}
