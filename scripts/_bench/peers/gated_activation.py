"""vLLM's activation without clamps."""

from typing import Any

from scripts._bench.peers import Call, Peer, Unsupported, _torch


def _cuda(args: dict[str, Any]) -> Call:
    import torch
    from vllm import _custom_ops  # noqa: F401

    if args["kind"] != "silu" or args["limit"] is not None:
        raise Unsupported("only silu without a limit")
    x = _torch.tensors(args)["x"]
    out = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device="cuda")

    def call():
        torch.ops._C.silu_and_mul(out, x)
        return {"o": out}

    return call


PEERS = {"vllm": (Peer("silu_and_mul", _cuda),)}
