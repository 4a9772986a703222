"""vLLM's gather of V4's rows."""

from typing import Any

from scripts._bench.peers import Call, Peer, Unsupported, _torch


def _triton(args: dict[str, Any]) -> Call:
    import torch

    if args["format"] != "v4" or args["dtype"] != "bfloat16":
        raise Unsupported("only V4's rows as bfloat16")
    from vllm.models.deepseek_v4.common.ops.cache_utils import dequantize_and_gather_k_cache_triton

    t = _torch.tensors(args)
    (P, width), page = t["cache"].shape, args["page"]
    rows = t["cache"].as_strided((P, page, 584), (width, 584, 1))
    out = torch.zeros(t["lengths"].shape[0], args["rows"], 512, device="cuda", dtype=torch.bfloat16)

    def call():
        dequantize_and_gather_k_cache_triton(out, rows, t["lengths"], t["gathered"], t["page_table"], page, 0)
        return {"values": out}

    return call


PEERS = {"vllm": (Peer("dequantize_and_gather_k_cache_triton", _triton),)}
