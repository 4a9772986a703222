"""vLLM's fused kernel for V4's packed cache."""

from typing import Any

from scripts._bench.peers import Call, Peer, Unsupported, _torch

PADDED = (64, 128)
"""Heads of the kernel's result."""


def _cuda(args: dict[str, Any]) -> Call:
    import torch

    if args["format"] != "v4" or args["heads"] not in PADDED:
        raise Unsupported("only V4's cache, and q with 64 or 128 heads")
    from vllm import _custom_ops  # noqa: F401

    t = _torch.tensors(args, copy=("cache",))
    slots, positions = t["slots"].long(), t["positions"].long()
    table = t["cos_sin"].float()

    def call():
        q = torch.ops._C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
            t["q"], t["kv"], t["cache"], slots, positions, table, args["heads"], args["eps"], args["page"]
        )
        return {"q": q, "cache": t["cache"]}

    return call


PEERS = {"vllm": (Peer("fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert", _cuda),)}
