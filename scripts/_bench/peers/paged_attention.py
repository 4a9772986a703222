"""vLLM's attention over pages: FlashAttention 3, with and without its schedule made ahead, and Triton's kernel."""

from typing import Any

import numpy as np

from scripts._bench.peers import Call, Peer, Unsupported, _torch

SEGMENTS = 16
"""Of Triton's kernel that is split over the keys, as vLLM allocates them."""


def _lengths(args: dict[str, Any]) -> tuple[int, int]:
    """(longest query, longest request)."""
    return int(np.diff(np.asarray(args["query_start"])).max()), int(np.asarray(args["lengths"]).max())


def _flash3(args: dict[str, Any], scheduled: bool) -> Call:
    import torch
    from vllm.vllm_flash_attn import flash_attn_varlen_func
    from vllm.vllm_flash_attn.flash_attn_interface import get_scheduler_metadata

    if args["k_scale"] is not None or "k_scale_pages" in args:
        raise Unsupported("FlashAttention 3 reads float8 caches with float8 queries only")
    t = _torch.tensors(args)
    queries, longest = _lengths(args)
    causal, window, softcap = args["causal"], args["window"], args["softcap"] or 0.0
    sides = (-1, -1) if window is None else (window - 1, 0 if causal else window - 1)
    (_, H, D), (_, page, K, _) = t["q"].shape, t["k_pages"].shape
    schedule = None
    if scheduled:
        schedule = get_scheduler_metadata(
            batch_size=t["lengths"].shape[0],
            max_seqlen_q=queries,
            max_seqlen_k=longest,
            num_heads_q=H,
            num_heads_kv=K,
            headdim=D,
            cache_seqlens=t["lengths"],
            qkv_dtype=t["q"].dtype,
            cu_seqlens_q=t["query_start"],
            page_size=page,
            causal=causal,
            window_size=sides,
            has_softcap=bool(softcap),
        )
    sinks = None if t["sinks"] is None else t["sinks"].to(torch.bfloat16)
    out = torch.empty_like(t["q"])

    def call():
        o = flash_attn_varlen_func(
            t["q"],
            t["k_pages"],
            t["v_pages"],
            queries,
            t["query_start"],
            longest,
            seqused_k=t["lengths"],
            softmax_scale=args["scale"],
            causal=causal,
            window_size=list(sides),
            softcap=softcap,
            block_table=t["page_table"],
            out=out,
            scheduler_metadata=schedule,
            fa_version=3,
            s_aux=sinks,
        )
        return {"o": o}

    return call


def _triton(args: dict[str, Any], split: bool) -> Call:
    import torch
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import KVQuantMode

    t = _torch.tensors(args)
    queries, longest = _lengths(args)
    if split and queries > 1:
        raise Unsupported("Triton's kernel is split over the keys for single queries only")
    B, (N, H, D) = t["lengths"].shape[0], t["q"].shape
    out = torch.empty_like(t["q"])
    more: dict[str, Any] = {"sinks": t["sinks"]}
    k_scale = v_scale = None
    if t["k_scale"] is not None:
        k_scale, v_scale = (t[x].reshape(1).expand(B, t["k_pages"].shape[2]) for x in ("k_scale", "v_scale"))
        more["kv_quant_mode"] = KVQuantMode.FP8_PER_TENSOR
    if "k_scale_pages" in args:
        name = {"int8": "INT8", "float8_e4m3fn": "FP8", "uint8": "INT4"}[args["k_pages"].dtype.name]
        more["kv_quant_mode"] = getattr(KVQuantMode, f"{name}_PER_TOKEN_HEAD")
        more |= {"k_scale_cache": t["k_scale_pages"], "v_scale_cache": t["v_scale_pages"]}
    if split:
        part = torch.empty((N, H, SEGMENTS, D), dtype=torch.float32, device=out.device)
        sums = torch.empty((2, N, H, SEGMENTS), dtype=torch.float32, device=out.device)
        more |= {"seq_threshold_3D": B, "num_par_softmax_segments": SEGMENTS, "softmax_segm_output": part}
        more |= {"softmax_segm_max": sums[0], "softmax_segm_expsum": sums[1]}
    window = (-1, -1) if args["window"] is None else (args["window"] - 1, 0)

    def call():
        unified_attention(
            q=t["q"],
            k=t["k_pages"],
            v=t["v_pages"],
            out=out,
            cu_seqlens_q=t["query_start"],
            max_seqlen_q=queries,
            seqused_k=t["lengths"],
            max_seqlen_k=longest,
            softmax_scale=args["scale"],
            causal=args["causal"],
            window_size=window,
            block_table=t["page_table"],
            softcap=args["softcap"] or 0.0,
            q_descale=None,
            k_descale=k_scale,
            v_descale=v_scale,
            **more,
        )
        return {"o": out}

    return call


PEERS = {
    "vllm": (
        Peer("FlashAttention 3", lambda args: _flash3(args, scheduled=False)),
        Peer("FlashAttention 3, scheduled ahead", lambda args: _flash3(args, scheduled=True)),
        Peer("Triton", lambda args: _triton(args, split=False)),
        Peer("Triton, split keys", lambda args: _triton(args, split=True)),
    )
}
