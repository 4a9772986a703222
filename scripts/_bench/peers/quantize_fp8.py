"""vLLM's FP8 quantizers."""

from typing import Any

from scripts._bench.peers import Call, Peer, Unsupported, _torch


def _quantize(args: dict[str, Any]) -> Call:
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    t = _torch.tensors(args)
    x, granularity = t["x"], args["granularity"]
    if args["dtype"] != "float8_e4m3fn" or granularity not in ("tensor", "token", "group"):
        raise Unsupported(f"no {args['dtype']} codes per {granularity} in one call")
    if granularity == "group":
        if args["rule"] != "cuda":
            raise Unsupported(f"the rule {args['rule']!r} is another kernel's")

        def call():
            q, scale = per_token_group_quant_fp8(x, args["group"], use_ue8m0=args["ue8m0"])
            return {"q": q, "scale": scale}

        return call
    scale = None if t["scale"] is None else t["scale"].reshape(1)
    bound = None if t["upper_bound"] is None else t["upper_bound"].reshape(1)

    def whole():
        q, s = ops.scaled_fp8_quant(x, scale, use_per_token_if_dynamic=granularity == "token", scale_ub=bound)
        return {"q": q, "scale": s if granularity == "token" else s.reshape(())}

    return whole


PEERS = {"vllm": (Peer("scaled_fp8_quant, per_token_group_quant_fp8 (CUDA)", _quantize),)}
