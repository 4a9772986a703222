"""vLLM's TileLang kernel that updates hyper-connected streams, if the package is there, and its PyTorch form."""

from typing import Any

from scripts._bench.peers import Call, Peer, Unsupported, _torch


def _build(args: dict[str, Any], mix) -> Call:
    t = _torch.tensors(args)
    post = t["post"][..., None]
    return lambda: {"new_residual": mix(t["y"], t["residual"], post, t["comb"])}


def _tilelang(args: dict[str, Any]) -> Call:
    import importlib.util

    if importlib.util.find_spec("tilelang") is None:
        raise Unsupported("the package tilelang is not installed")
    from vllm.model_executor.kernels.mhc.tilelang import mhc_post_tilelang

    return _build(args, mhc_post_tilelang)


def _pytorch(args: dict[str, Any]) -> Call:
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch

    return _build(args, mhc_post_torch)


PEERS = {"vllm": (Peer("TileLang", _tilelang), Peer("PyTorch", _pytorch))}
