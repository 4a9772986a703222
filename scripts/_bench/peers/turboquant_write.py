"""vLLM's store kernel of TurboQuant caches."""

from typing import Any

from scripts._bench.peers import Call, Peer, _torch


def _store(args: dict[str, Any]) -> Call:
    import torch
    from vllm.v1.attention.ops.triton_turboquant_store import triton_turboquant_store

    x = _torch.tensors({k: args[k] for k in ("key", "value", "pages", "slots")}, copy=("pages",))
    D, key_bits = x["key"].shape[2], args["key_bits"]
    midpoints = torch.tensor(args["midpoints"] or [0.0], device="cuda")
    matrix = rotation(D)
    packed = D if key_bits == 8 else D * key_bits // 8 + 2

    def call():
        triton_turboquant_store(
            x["key"],
            x["value"],
            x["pages"],
            x["slots"],
            matrix,
            midpoints,
            0 if key_bits == 8 else key_bits,
            packed,
            args["value_bits"],
            key_fp8=key_bits == 8,
        )
        return {"pages": x["pages"]}

    return call


def rotation(D: int):
    """Sylvester's Hadamard matrix over sqrt(D), float32."""
    import torch

    h = torch.ones(1, 1, device="cuda")
    while h.shape[0] < D:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return (h * D**-0.5).contiguous()


PEERS = {"vllm": (Peer("triton_turboquant_store", _store),)}
