"""vLLM's RMSNorm kernels."""

from typing import Any

from scripts._bench.peers import Call, Peer, Unsupported, _torch


def _norm(args: dict[str, Any]) -> Call:
    import torch
    from vllm import _custom_ops as ops

    t = _torch.tensors(args, copy=("residual",))
    x, w, eps, mode = t["x"], t["weight"], args["eps"], args["mode"]
    if t["residual"] is not None:
        raise Unsupported("writes the sum over its residual, and so computes another one in every call")
    kind = torch.float8_e4m3fn
    if mode == "none":
        o = torch.empty_like(x)

        def plain():
            ops.rms_norm(o, x, w, eps)
            return {"o": o}

        return plain
    if mode == "static":
        q, scale = torch.empty_like(x, dtype=kind), t["scale"].reshape(1)

        def static():
            torch.ops._C.rms_norm_static_fp8_quant(q, x, w, scale, eps)
            return {"q": q}

        return static
    if mode == "token":
        bound = None if t["upper_bound"] is None else t["upper_bound"].reshape(1)

        def token():
            q, s = ops.rms_norm_dynamic_per_token_quant(x, w, eps, kind, bound)
            return {"q": q, "scale": s}

        return token

    def group():
        q, s = ops.rms_norm_per_block_quant(x, w, eps, kind, [1, args["group"]])
        return {"q": q, "scale": s}

    return group


PEERS = {"vllm": (Peer("rms_norm and its quantized forms (CUDA)", _norm),)}
