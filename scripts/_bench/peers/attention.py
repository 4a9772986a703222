"""vLLM's FlashAttention 3 over packed sequences, and cuDNN through JAX over a batch of equal ones."""

from typing import Any

import jax
import numpy as np

from scripts._bench.peers import Call, Peer, Unsupported, _torch


def _flash3(args: dict[str, Any]) -> Call:
    import torch
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    if args["query_start"] is None:
        raise Unsupported("a batch without starts")
    t = _torch.tensors(args)
    queries, keys = (int(np.diff(np.asarray(args[x])).max()) for x in ("query_start", "key_start"))
    causal, window = args["causal"], args["window"]
    sides = (-1, -1) if window is None else (window - 1, 0 if causal else window - 1)
    sinks = None if t["sinks"] is None else t["sinks"].to(torch.bfloat16)
    out = torch.empty((*t["q"].shape[:2], t["v"].shape[2]), dtype=t["q"].dtype, device=t["q"].device)

    def call():
        o = flash_attn_varlen_func(
            t["q"],
            t["k"],
            t["v"],
            queries,
            t["query_start"],
            keys,
            cu_seqlens_k=t["key_start"],
            softmax_scale=args["scale"],
            causal=causal,
            window_size=list(sides),
            softcap=args["softcap"] or 0.0,
            out=out,
            fa_version=3,
            s_aux=sinks,
        )
        return {"o": o}

    return call


def _cudnn(args: dict[str, Any]) -> Call:
    if args["sinks"] is not None or args["softcap"] is not None or not args["causal"]:
        raise Unsupported("plain causal attention only")
    starts = [np.asarray(args[x]) for x in ("query_start", "key_start")]
    lengths = np.diff(starts[0])
    if (starts[0] != starts[1]).any() or len(set(lengths.tolist())) > 1:
        raise Unsupported("sequences of one length only")
    B, T, window = lengths.size, int(lengths[0]), args["window"]
    scale, left = args["scale"], None if window is None else (window - 1, 0)

    @jax.jit
    def function(q, k, v):
        q, k, v = (x.reshape(B, T, *x.shape[1:]) for x in (q, k, v))
        more = {"scale": scale, "is_causal": True, "implementation": "cudnn"}
        o = jax.nn.dot_product_attention(q, k, v, local_window_size=left, **more)
        return o.reshape(B * T, *o.shape[2:])

    return lambda: {"o": function(args["q"], args["k"], args["v"])}


PEERS = {"vllm": (Peer("FlashAttention 3", _flash3),), "jax": (Peer("cuDNN", _cudnn),)}
