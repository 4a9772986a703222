"""vLLM's norm of two latents."""

from typing import Any

from scripts._bench.peers import Call, Peer, _torch


def _fused(args: dict[str, Any]) -> Call:
    from vllm.models.deepseek_v4.common.ops import fused_q_kv_rmsnorm

    t = _torch.tensors(args)

    def call():
        q, kv = fused_q_kv_rmsnorm(t["q"], t["kv"], t["q_weight"], t["kv_weight"], args["eps"])
        return {"q": q, "kv": kv}

    return call


PEERS = {"vllm": (Peer("fused_q_kv_rmsnorm", _fused),)}
