"""vLLM's routers."""

from typing import Any

from scripts._bench.peers import Call, Peer, Unsupported, _torch


def _route(args: dict[str, Any]) -> Call:
    import torch

    if args["table"] is not None:
        raise Unsupported("timed without a table only")
    t, k, again, factor = _torch.tensors(args), args["top_k"], args["renormalize"], args["scaling"]
    logits, bias, scoring = t["logits"], t["bias"], args["scoring"]
    x = torch.empty(len(logits), 64, dtype=torch.bfloat16, device="cuda")  # only its length is read
    if args["num_groups"] > 1:
        from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import grouped_topk

        groups = args["num_groups"], args["kept_groups"]
        return lambda: _named(grouped_topk(x, logits, k, again, *groups, scoring, factor, bias))
    if scoring == "sqrtsoftplus":
        from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import fused_topk_bias

        return lambda: _named(fused_topk_bias(x, logits, scoring, bias, k, again, routed_scaling_factor=factor))
    if bias is not None or factor != 1:
        raise Unsupported(f"timed with {scoring!r} without bias and scaling only")
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk

    return lambda: _named(fused_topk(x, logits, k, again, scoring_func=scoring))


def _named(found) -> dict[str, Any]:
    return {"weights": found[0], "ids": found[1]}


PEERS = {"vllm": (Peer("dsv4_topk, grouped_topk, topk_softmax (CUDA)", _route),)}
