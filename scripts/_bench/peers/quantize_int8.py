"""vLLM's INT8 quantizer."""

from typing import Any

from scripts._bench.peers import Call, Peer, Unsupported, _torch


def _quantize(args: dict[str, Any]) -> Call:
    from vllm import _custom_ops as ops

    t = _torch.tensors(args)
    if args["granularity"] not in ("tensor", "token") or args["rule"] != "cuda":
        raise Unsupported(f"no CUDA kernel per {args['granularity']} with rule {args['rule']!r}")
    x = t["x"]
    scale, azp = (None if t[name] is None else t[name].reshape(1) for name in ("scale", "azp"))
    symmetric = args["symmetric"] and azp is None
    shape = () if scale is not None else (x.shape[0], 1)

    def call():
        q, s, zero = ops.scaled_int8_quant(x, scale, azp, symmetric=symmetric)
        return {"q": q, "scale": s.reshape(shape)} | ({} if symmetric else {"azp": zero.reshape(shape)})

    return call


PEERS = {"vllm": (Peer("scaled_int8_quant (CUDA)", _quantize),)}
