"""vLLM's cache writes: the CUDA kernel, and Triton's with one scale per token and head."""

from typing import Any

from scripts._bench.peers import Call, Peer, Unsupported, _torch

MODES = {"int8_token_head": "INT8", "fp8_token_head": "FP8", "int4_token_head": "INT4"}
CACHES = ("k_pages", "v_pages", "k_scale_pages", "v_scale_pages")


def _caches(t: dict[str, Any]) -> dict[str, Any]:
    return {name: t[name] for name in CACHES if t[name] is not None}


def _cuda(args: dict[str, Any]) -> Call:
    import torch
    from vllm import _custom_ops as ops

    mode = args["mode"]
    if mode not in ("copy", "fp8"):
        raise Unsupported("the CUDA kernel has no scales per token and head")
    t = _torch.tensors(args, copy=CACHES)
    one = torch.ones(1, device="cuda")
    scales = [one if t[x] is None else t[x].reshape(1) for x in ("k_scale", "v_scale")]
    pages = [t[x].view(torch.uint8) if mode == "fp8" else t[x] for x in CACHES[:2]]
    slots = t["slots"].long()

    def call():
        kind = "fp8" if mode == "fp8" else "auto"
        ops.reshape_and_cache_flash(t["key"], t["value"], *pages, slots, kind, *scales)
        return _caches(t)

    return call


def _triton(args: dict[str, Any]) -> Call:
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash_per_token_head_quant
    from vllm.v1.kv_cache_interface import KVQuantMode

    if args["mode"] not in MODES:
        raise Unsupported("only with scales per token and head")
    t = _torch.tensors(args, copy=CACHES)
    slots, kind = t["slots"].long(), getattr(KVQuantMode, f"{MODES[args['mode']]}_PER_TOKEN_HEAD")

    def call():
        triton_reshape_and_cache_flash_per_token_head_quant(
            t["key"], t["value"], *(t[x] for x in CACHES), slots, kv_quant_mode=kind
        )
        return _caches(t)

    return call


PEERS = {"vllm": (Peer("reshape_and_cache_flash (CUDA)", _cuda), Peer("Triton, per token and head", _triton))}
