"""Products of codes in vLLM: CUTLASS, and for FP8 blocks DeepGEMM and Triton."""

from typing import Any

from scripts._bench.peers import Call, Peer, Unsupported, _torch


def _cutlass(args: dict[str, Any]) -> Call:
    import torch
    from vllm import _custom_ops as ops

    if args["block"] is not None:
        raise Unsupported("timed without block scales only")
    t = _torch.tensors(args)
    kind, b = getattr(torch, args["out_dtype"]), t["b"].t()
    scales = t["a_scale"].reshape(-1, 1), t["b_scale"].reshape(1, -1)
    if t["azp"] is None:
        return lambda: {"o": ops.cutlass_scaled_mm(t["a"], b, *scales, kind, t["bias"])}
    sums, azp = t["b"].int().sum(1).to(torch.int32)[None], t["azp"].reshape(-1, 1)
    return lambda: {"o": ops.cutlass_scaled_mm_azp(t["a"], b, *scales, kind, sums, azp, t["bias"])}


def deep_gemm(args: dict[str, Any]) -> Call:
    """DeepGEMM's product of FP8 codes with block scales."""
    import torch
    from vllm.utils.deep_gemm import fp8_gemm_nt

    t = _blocks(args)
    out = torch.empty(len(t["a"]), len(t["b"]), device="cuda", dtype=getattr(torch, args["out_dtype"]))
    # the layout that DeepGEMM wants: columns of four rows' multiples
    N, G = t["a_scale"].shape
    scale = torch.empty_strided((N, G), (1, -(-N // 4) * 4), device="cuda", dtype=torch.float32)
    scale.copy_(t["a_scale"])

    def call():
        fp8_gemm_nt((t["a"], scale), (t["b"], t["b_scale"]), out)
        return {"o": out}

    return call


def _triton(args: dict[str, Any]) -> Call:
    import torch
    from vllm.model_executor.layers.quantization.utils.fp8_utils import w8a8_triton_block_scaled_mm

    t, kind = _blocks(args), getattr(torch, args["out_dtype"])
    given = t["a"], t["b"], t["a_scale"], t["b_scale"], [args["block"]] * 2, kind
    return lambda: {"o": w8a8_triton_block_scaled_mm(*given)}


def _blocks(args: dict[str, Any]) -> dict[str, Any]:
    if args["block"] is None:
        raise Unsupported("needs block scales")
    return _torch.tensors(args)


PEERS = {
    "vllm": (
        Peer("cutlass_scaled_mm (CUDA)", _cutlass),
        Peer("fp8_gemm_nt (DeepGEMM)", deep_gemm),
        Peer("w8a8_triton_block_scaled_mm", _triton),
    )
}
