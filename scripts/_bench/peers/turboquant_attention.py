"""vLLM's decode kernel of TurboQuant caches."""

from typing import Any

import numpy as np

from scripts._bench.peers import Call, Peer, Unsupported, _torch
from scripts._bench.peers.turboquant_write import rotation


def _decode(args: dict[str, Any]) -> Call:
    if (np.diff(np.asarray(args["query_start"])) != 1).any() or args["stored"] is not None or args["return_lse"]:
        raise Unsupported("decodes one token of each request, all keys seen, without a log-sum-exp")
    import torch
    from vllm.v1.attention.ops.triton_turboquant_decode import triton_turboquant_decode_attention

    x = _torch.tensors({k: args[k] for k in ("q", "pages", "page_table", "lengths")})
    D, key_bits = x["q"].shape[2], args["key_bits"]
    levels = torch.tensor(args["levels"] or [0.0], device="cuda")
    matrix, holder = rotation(D), type("Buffers", (), {})()

    def call():
        o = triton_turboquant_decode_attention(
            x["q"],
            x["pages"],
            x["page_table"],
            x["lengths"],
            matrix,
            levels,
            args["scale"],
            0 if key_bits == 8 else key_bits,
            D if key_bits == 8 else D * key_bits // 8 + 2,
            args["value_bits"],
            key_fp8=key_bits == 8,
            norm_correction=args["norm_correction"],
            PiT=matrix,
            buf_holder=holder,
        )
        return {"o": o}

    return call


PEERS = {"vllm": (Peer("triton_turboquant_decode_attention", _decode),)}
