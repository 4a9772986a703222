"""vLLM's fused mixture of experts (Triton)."""

from typing import Any

from scripts._bench.peers import Call, Peer, Unsupported, _torch


def _fused(args: dict[str, Any]) -> Call:
    from vllm.model_executor.layers.fused_moe import config
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    plain = {"activation": "silu", "limit": None, "weight_on": "output", "expert_map": None, "w13_bias": None}
    for name, value in plain.items():
        if args[name] != value:
            raise Unsupported(f"timed with {name}={value!r} only")
    t, how = _torch.tensors(args), None
    scales = {"w1_scale": t["w13_scale"], "w2_scale": t["w2_scale"]}
    if args["format"] == "fp8_block":
        how = config.fp8_w8a8_moe_quant_config(**scales, block_shape=[128, 128])
    elif args["format"] == "int8":
        how = config.int8_w8a8_moe_quant_config(**scales, a1_scale=None, a2_scale=None, per_act_token_quant=True)
    elif args["format"] == "wna16" and args["w13_zeros"] is None:
        group = args["x"].shape[1] // args["w13_scale"].shape[2]
        how = config.int4_w4a16_moe_quant_config(**scales, block_shape=[0, group])
    elif args["format"] != "none":
        raise Unsupported(f"multiplies no weights of format {args['format']!r} on this card")
    given = t["x"], t["w13"], t["w2"], t["weights"], t["ids"]
    return lambda: {"o": fused_experts(*given, quant_config=how)}


PEERS = {"vllm": (Peer("fused_experts (Triton)", _fused),)}
