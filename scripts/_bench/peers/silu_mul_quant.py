"""vLLM's SiLU-and-multiply kernels."""

from typing import Any

from scripts._bench.peers import Call, Peer, Unsupported, _torch


def _silu(args: dict[str, Any]) -> Call:
    import torch
    import vllm._custom_ops  # noqa: F401 (registers torch.ops._C)

    t = _torch.tensors(args)
    x, mode, limit = t["x"], args["mode"], args["limit"]
    shape = (x.shape[0], x.shape[1] // 2)
    if mode == "none":
        o = torch.empty(shape, dtype=x.dtype, device=x.device)

        def plain():
            if limit is None:
                torch.ops._C.silu_and_mul(o, x)
            else:
                torch.ops._C.silu_and_mul_with_clamp(o, x, limit)
            return {"o": o}

        return plain
    if mode != "static" or limit is not None:
        raise Unsupported(f"no kernel of mode {mode!r} with limit {limit}")
    q, scale = torch.empty(shape, dtype=torch.float8_e4m3fn, device=x.device), t["scale"].reshape(1)

    def static():
        torch.ops._C.silu_and_mul_quant(q, x, scale)
        return {"q": q}

    return static


PEERS = {"vllm": (Peer("silu_and_mul, silu_and_mul_quant (CUDA)", _silu),)}
