"""vLLM's sorting of tokens by expert into blocks."""

from typing import Any

from scripts._bench.peers import Call, Peer, Unsupported, _torch


def _aligned(args: dict[str, Any]) -> Call:
    import torch
    from vllm import _custom_ops

    from jaxattn.ops.align_block_size import capacity

    if args["expert_map"] is not None:
        raise Unsupported("timed without expert_map only")
    ids, block, experts = _torch.tensor(args["topk_ids"]), args["block_size"], args["num_experts"]
    pairs = ids.numel()
    rows = capacity(pairs, block, experts)
    sizes = {"sorted_ids": rows, "expert_ids": rows // block, "padded": 1}
    out = {name: torch.empty(size, dtype=torch.int32, device=ids.device) for name, size in sizes.items()}
    first = [True]

    def call():
        _custom_ops.moe_align_block_size(ids, experts, block, *out.values(), None)
        if first[0]:  # the call that is compared
            first[0] = False
            return _in_order(out, block, pairs, experts)
        return out

    return call


def _in_order(out: dict[str, Any], block: int, pairs: int, experts: int) -> dict[str, Any]:
    """Its result with the pairs of an expert in their order, which it leaves open, and without what is not in use."""
    import torch

    used = int(out["padded"]) // block
    expert_ids = out["expert_ids"].clone()
    expert_ids[used:] = experts  # behind all others
    keys = expert_ids.repeat_interleave(block).long() * (pairs + 1) + out["sorted_ids"]
    keys[used * block :] = experts * (pairs + 1) + pairs
    sorted_ids = (keys.sort().values % (pairs + 1)).to(torch.int32)
    expert_ids[used:] = -1
    return out | {"sorted_ids": sorted_ids, "expert_ids": expert_ids}


PEERS = {"vllm": (Peer("moe_align_block_size (CUDA)", _aligned),)}
