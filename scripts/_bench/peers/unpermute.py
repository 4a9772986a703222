"""vLLM's weighted sum of the experts' rows."""

from typing import Any

from scripts._bench.peers import Call, Peer, Unsupported, _torch


def _unpermuted(args: dict[str, Any]) -> Call:
    import torch
    from vllm.model_executor.layers.fused_moe.moe_permute_unpermute import moe_unpermute

    if args["weights"] is None:
        raise Unsupported("timed with weights only")
    t = _torch.tensors(args)
    if bool((t["positions"] < 0).any()):
        raise Unsupported("timed where every pair has a row only")
    y, positions = t["y"], t["positions"].flatten()
    o = torch.empty(t["positions"].shape[0], y.shape[1], dtype=y.dtype, device=y.device)

    def call():
        moe_unpermute(o, y, t["weights"], positions)
        return {"o": o}

    return call


PEERS = {"vllm": (Peer("moe_unpermute (CUDA)", _unpermuted),)}
