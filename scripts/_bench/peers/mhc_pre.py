"""vLLM's TileLang kernels of hyper-connections, if the package is there, and its PyTorch form."""

from typing import Any

from scripts._bench.peers import Call, Peer, Unsupported, _torch


def _build(args: dict[str, Any], pre, fused) -> Call:
    t = _torch.tensors(args)
    weights = t["fn"], t["scale"], t["base"]
    numbers = args["rms_eps"], args["eps"], args["eps"], args["post_mult"], args["iters"]

    def first():
        post, comb, x = pre(t["residual"], *weights, *numbers)
        return {"layer_input": x, "post": post[..., 0], "comb": comb}

    def both():
        streams, post, comb, x = fused(t["y"], t["residual"], t["post"][..., None], t["comb"], *weights, *numbers)
        return {"layer_input": x, "post": post[..., 0], "comb": comb, "new_residual": streams}

    return first if t["y"] is None else both


def _tilelang(args: dict[str, Any]) -> Call:
    import importlib.util

    if importlib.util.find_spec("tilelang") is None:
        raise Unsupported("the package tilelang is not installed")
    from vllm.model_executor.kernels.mhc.tilelang import mhc_fused_post_pre_tilelang, mhc_pre_tilelang

    return _build(args, mhc_pre_tilelang, mhc_fused_post_pre_tilelang)


def _pytorch(args: dict[str, Any]) -> Call:
    import torch
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch, mhc_pre_torch

    torch.backends.cuda.matmul.allow_tf32 = False

    def fused(y, residual, post, comb, *rest):
        streams = mhc_post_torch(y, residual, post, comb)
        return streams, *mhc_pre_torch(streams, *rest)

    return _build(args, mhc_pre_torch, fused)


PEERS = {"vllm": (Peer("TileLang", _tilelang), Peer("PyTorch, float32", _pytorch))}
