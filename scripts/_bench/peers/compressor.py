"""vLLM's two Triton kernels of the compressor."""

import types
from typing import Any

from scripts._bench.peers import Call, Peer, Unsupported, _torch

FORMATS = {"v4": (64, 576, 8), "indexer_fp8": (128, 128, 4)}
"""Numbers of a scale, bytes of a row, bytes of its scales."""


def _triton(args: dict[str, Any]) -> Call:
    import torch
    from vllm.models.deepseek_v4.common.ops.fused_compress_quant_cache import compress_norm_rope_store_triton
    from vllm.models.deepseek_v4.common.ops.save_partial_states import save_partial_states

    if args["format"] not in FORMATS or int(args["positions"].min()) < 0:
        raise Unsupported("only FP8 formats without padding tokens")
    t = _torch.tensors(args, copy=("cache", "state"))
    kv, (ratio, W), D, page = t["kv"], t["ape"].shape, t["weight"].shape[0], args["page"]
    spage, positions = t["state"].shape[1], t["positions"].long()
    request, table = t["request"].long(), t["state_table"]
    slots = table[request, positions // spage].long() * spage + positions % spage
    group, row, scales = FORMATS[args["format"]]
    (P, width), per = t["cache"].shape, row + scales
    cache = t["cache"].as_strided((P, page, per), (width, per, 1))
    entries = types.SimpleNamespace(slot_mapping=t["cache_slots"].long())
    weight, table_of_angles = t["weight"].to(torch.bfloat16), t["cos_sin"].float()

    def call():
        save_partial_states(kv, t["score"], t["ape"], positions, t["state"], slots, spage, W, ratio)
        compress_norm_rope_store_triton(
            t["state"],
            len(kv),
            t["request"],
            positions,
            slots,
            table,
            spage,
            W,
            table_of_angles,
            cache,
            entries,
            {},
            D,
            64,
            ratio,
            W > D,
            False,
            weight,
            args["eps"],
            group,
            row,
            scales,
        )
        return {"cache": t["cache"], "state": t["state"]}

    return call


PEERS = {"vllm": (Peer("save_partial_states + compress_norm_rope_store_triton", _triton),)}
