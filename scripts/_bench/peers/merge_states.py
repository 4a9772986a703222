"""vLLM's CUDA kernel that merges two partial results."""

from typing import Any

from scripts._bench.peers import Call, Peer, _torch


def _merge(args: dict[str, Any]) -> Call:
    import torch
    from vllm._custom_ops import merge_attn_states

    t = _torch.tensors(args)
    lse = [t[f"{side}_lse"].t().contiguous() for side in ("prefix", "suffix")]
    scale = t["out_scale"]
    kind = t["prefix_o"].dtype if scale is None else torch.float8_e4m3fn
    out, merged = torch.empty_like(t["prefix_o"], dtype=kind), torch.empty_like(lse[0])
    more = {} if scale is None else {"output_scale": scale.reshape(1)}

    def call():
        merge_attn_states(
            out,
            t["prefix_o"],
            lse[0],
            t["suffix_o"],
            lse[1],
            merged if args["return_lse"] else None,
            **more,
        )
        return {"o": out} | ({"lse": merged.t()} if args["return_lse"] else {})

    return call


PEERS = {"vllm": (Peer("merge_attn_states (CUDA)", _merge),)}
