"""vLLM's kernels for latent decoding: FlashMLA's dense kernel, and Triton's over any pages."""

from typing import Any

import numpy as np

from scripts._bench.peers import Call, Peer, Unsupported, _torch


def _decoding(args: dict[str, Any]) -> int:
    """Query tokens of every request.

    Raises:
        Unsupported: they differ, or the cache is not plain.
    """
    if args["format"] != "plain":
        raise Unsupported(f"written for a plain cache, got format {args['format']}")
    queries = set(np.diff(np.asarray(args["query_start"])).tolist())
    if len(queries) != 1 or len(args["q"]) != (len(args["query_start"]) - 1) * (tokens := queries.pop()):
        raise Unsupported("takes the same number of query tokens from every request")
    return tokens


def _flash_mla(args: dict[str, Any]) -> Call:
    from vllm.third_party.flashmla.flash_mla_interface import flash_mla_with_kvcache, get_mla_metadata

    tokens = _decoding(args)
    if (page := args["cache"].shape[1]) != 64:
        raise Unsupported(f"FlashMLA reads pages of 64 rows, got {page}")
    t = _torch.tensors(args)
    N, H, D = t["q"].shape
    q, cache = t["q"].view(N // tokens, tokens, H, D), t["cache"].unsqueeze(2)
    plan = get_mla_metadata()[0]  # filled by the first call

    def call():
        o, lse = flash_mla_with_kvcache(
            q,
            cache,
            t["page_table"],
            t["lengths"],
            args["value_dim"],
            plan,
            None,
            args["scale"],
            args["causal"],
        )
        out = {"o": o.view(N, H, -1)}
        return out | {"lse": lse.transpose(1, 2).reshape(N, H)} if args["return_lse"] else out

    return call


def _triton(args: dict[str, Any], splits: int) -> Call:
    import torch
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    if _decoding(args) != 1:
        raise Unsupported("Triton's kernel takes one query token of a request")
    t = _torch.tensors(args)
    (N, H, _), page, Dv = t["q"].shape, args["cache"].shape[1], args["value_dim"]
    cache = t["cache"].unsqueeze(2)
    o = torch.empty((N, H, Dv), dtype=t["q"].dtype, device=cache.device)
    lse = torch.empty((N, H), dtype=torch.float32, device=cache.device)
    parts = torch.empty((N, H, splits, Dv + 1), dtype=torch.float32, device=cache.device)

    def call():
        decode_attention_fwd(
            t["q"],
            cache,
            cache[..., :Dv],
            o,
            lse,
            t["page_table"],
            t["lengths"],
            parts,
            splits,
            args["scale"],
            page,
            is_mla=True,
        )
        return {"o": o} | ({"lse": lse} if args["return_lse"] else {})

    return call


PEERS = {
    "vllm": (
        Peer("FlashMLA", _flash_mla),
        Peer("Triton, 4 splits", lambda args: _triton(args, 4)),
        Peer("Triton, 32 splits", lambda args: _triton(args, 32)),
    )
}
