"""vLLM's writes of latent rows: V4's Triton kernel, and the CUDA kernel of the other formats."""

from typing import Any

from scripts._bench.peers import Call, Peer, Unsupported, _torch


def _triton(args: dict[str, Any]) -> Call:
    import torch

    if args["format"] != "v4":
        raise Unsupported("only V4's rows")
    from vllm.models.deepseek_v4.common.ops.cache_utils import quantize_and_insert_k_cache

    t = _torch.tensors(args, copy=("cache",))
    k, slots = torch.cat([t["latent"], t["rotary"]], 1), t["slots"].long()

    def call():
        quantize_and_insert_k_cache(k, t["cache"], slots, args["page"])
        return {"cache": t["cache"]}

    return call


def _cuda(args: dict[str, Any]) -> Call:
    import torch

    if args["format"] == "v4":
        raise Unsupported("not V4's rows")
    from vllm import _custom_ops as ops

    t = _torch.tensors(args, copy=("cache",))
    kind = {"plain": "auto", "fp8": "fp8", "fp8_ds_mla": "fp8_ds_mla"}[args["format"]]
    scale = torch.ones(1, device="cuda") if t["scale"] is None else t["scale"].float().reshape(1)
    pages = t["cache"] if kind == "auto" else t["cache"].view(torch.uint8)
    slots = t["slots"].long()

    def call():
        ops.concat_and_cache_mla(t["latent"], t["rotary"], pages, slots, kind, scale)
        return {"cache": t["cache"]}

    return call


PEERS = {"vllm": (Peer("quantize_and_insert_k_cache", _triton), Peer("concat_and_cache_mla", _cuda))}
