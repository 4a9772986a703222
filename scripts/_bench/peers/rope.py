"""vLLM's rotation, which takes whole heads and a table in their dtype."""

from typing import Any

from scripts._bench.peers import Call, Peer, Unsupported, _torch


def _cuda(args: dict[str, Any]) -> Call:
    if args["inverse"] or args["cos_sin"].shape[1] != args["x"].shape[2]:
        raise Unsupported("only forward, and heads that are rotated whole")
    from vllm import _custom_ops as ops

    t = _torch.tensors(args, copy=("x",))
    (N, H, D), positions = t["x"].shape, t["positions"].long()
    table, flat = t["cos_sin"].to(t["x"].dtype), t["x"].view(N, H * D)

    def call():
        ops.rotary_embedding(positions, flat, None, D, table, not args["interleaved"])
        return {"o": t["x"]}

    return call


PEERS = {"vllm": (Peer("rotary_embedding (in place)", _cuda),)}
