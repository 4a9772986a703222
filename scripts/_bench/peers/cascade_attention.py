"""vLLM's cascade of two FlashAttention 3 calls and a merge, and flat FlashAttention 3."""

from typing import Any

import numpy as np

from scripts._bench.peers import Call, Peer, Unsupported, _torch
from scripts._bench.peers.paged_attention import _flash3


def _cascade(args: dict[str, Any], scheduled: bool) -> Call:
    import torch
    from vllm.v1.attention.backends.flash_attn import cascade_attention
    from vllm.vllm_flash_attn.flash_attn_interface import get_scheduler_metadata

    groups = np.asarray(args["group_start"])
    if groups.tolist() != [[0, args["lengths"].shape[0]]] or args["k_scale"] is not None:
        raise Unsupported("vLLM's cascade has one prefix that all requests share, and no float8 caches")
    common = int(np.asarray(args["shared"])[0, 0])
    t = _torch.tensors(args)
    queries = int(np.diff(np.asarray(args["query_start"])).max())
    longest = int(np.asarray(args["lengths"]).max())
    (N, H, D), (_, page, K, _) = t["q"].shape, t["k_pages"].shape
    out, softcap = torch.empty_like(t["q"]), args["softcap"] or 0.0
    rows, prefix = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, N], [common]))
    suffix = t["lengths"] - common

    def schedule(starts, lengths, most, longest, causal):
        if not scheduled:
            return None
        return get_scheduler_metadata(
            batch_size=lengths.shape[0],
            max_seqlen_q=most,
            max_seqlen_k=longest,
            num_heads_q=H,
            num_heads_kv=K,
            headdim=D,
            cache_seqlens=lengths,
            qkv_dtype=t["q"].dtype,
            cu_seqlens_q=starts,
            page_size=page,
            causal=causal,
            has_softcap=bool(softcap),
        )

    schedules = {
        "prefix_scheduler_metadata": schedule(rows, prefix, N, common, False),
        "suffix_scheduler_metadata": schedule(t["query_start"], suffix, queries, longest - common, True),
    }

    def call():
        cascade_attention(
            out,
            t["q"],
            t["k_pages"],
            t["v_pages"],
            cu_query_lens=t["query_start"],
            max_query_len=queries,
            cu_prefix_query_lens=rows,
            prefix_kv_lens=prefix,
            suffix_kv_lens=suffix,
            max_kv_len=longest,
            softmax_scale=args["scale"],
            alibi_slopes=None,
            sliding_window=(-1, -1),
            logits_soft_cap=softcap,
            block_table=t["page_table"],
            common_prefix_len=common,
            max_num_splits=0,
            fa_version=3,
            s_aux=None if t["sinks"] is None else t["sinks"].to(torch.bfloat16),
            **schedules,
        )
        return {"o": out}

    return call


def _flat(args: dict[str, Any]) -> Call:
    return _flash3(args | {"causal": True, "window": None}, scheduled=True)


PEERS = {
    "vllm": (
        Peer("cascade (FlashAttention 3 twice, merge)", lambda args: _cascade(args, scheduled=False)),
        Peer("cascade, scheduled ahead", lambda args: _cascade(args, scheduled=True)),
        Peer("flat FlashAttention 3, scheduled ahead", _flat),
    )
}
