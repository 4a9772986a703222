"""vLLM's kernel for the indexer's queries."""

from typing import Any

from scripts._bench.peers import Call, Peer, Unsupported, _torch


def _fused(args: dict[str, Any]) -> Call:
    if args["format"] != "fp8":
        raise Unsupported("its MXFP4 form needs Blackwell")
    if args["first"] or not args["interleaved"]:
        raise Unsupported("only V4's rotation: neighbours, last")
    from vllm.models.deepseek_v4.common.ops import fused_indexer_q_rope_quant

    t = _torch.tensors(args)
    positions, table = t["positions"].long(), t["cos_sin"].float()

    def call():
        q, weights = fused_indexer_q_rope_quant(positions, t["q"], table, t["weights"], *args["scales"], False)
        return {"q": q, "weights": weights}

    return call


PEERS = {"vllm": (Peer("fused_indexer_q_rope_quant", _fused),)}
