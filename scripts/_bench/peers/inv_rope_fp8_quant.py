"""vLLM's kernel in front of V4's grouped projection."""

from typing import Any

from scripts._bench.peers import Call, Peer, _torch


def _fused(args: dict[str, Any]) -> Call:
    from vllm.models.deepseek_v4.common.ops import fused_inv_rope_fp8_quant

    t = _torch.tensors(args)
    positions, table, groups = t["positions"].long(), t["cos_sin"].float(), args["groups"]

    def call():
        q, scale = fused_inv_rope_fp8_quant(t["o"], positions, table, groups, t["o"].shape[1] // groups)
        return {"q": q, "scale": scale}

    return call


PEERS = {"vllm": (Peer("fused_inv_rope_fp8_quant", _fused),)}
