"""vLLM's copies of rows by expert."""

from typing import Any

from scripts._bench.peers import Call, Peer, Unsupported, _torch


def _permuted(args: dict[str, Any]) -> Call:
    from vllm.model_executor.layers.fused_moe.moe_permute_unpermute import MoEPermuteScratch, moe_permute

    if args["expert_map"] is not None:
        raise Unsupported("timed without expert_map only")
    t, experts = _torch.tensors(args), args["num_experts"]
    x, ids = t["x"], t["topk_ids"]
    scratch = MoEPermuteScratch(*ids.shape, experts, experts, x.device, x.shape[1], x.dtype)

    def call():
        rows, _, offsets, positions, *_ = moe_permute(x, None, ids, experts, experts, scratch=scratch)
        return {"permuted": rows, "offsets": offsets, "positions": positions.view(ids.shape)}

    return call


PEERS = {"vllm": (Peer("moe_permute (CUDA)", _permuted),)}
