"""Products with 4-bit weights in vLLM: Marlin; and PyTorch's with the dequantized weight."""

from typing import Any

import jax.numpy as jnp

from jaxattn.quant import marlin, tiles
from pallas_kernels import _decode
from scripts._bench.peers import Call, Peer, Unsupported, _torch


def _marlin(args: dict[str, Any]) -> Call:
    import torch
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_make_workspace_new
    from vllm.scalar_type import scalar_types

    if args["format"] != "gptq" or not args["tiled"] or args["bits"] != 4:
        raise Unsupported("timed with packed 4-bit codes around 8 only")
    (N, M), F = args["x"].shape, args["w"].shape[0] * tiles.FEATURES
    codes = _decode.unpack(args["w"], 4)[:, :M].T
    scales = _decode.untiled_scales(args["scales"], 1).T
    w, s = (_torch.tensor(x) for x in (marlin.pack(codes), marlin.permute_scales(scales, grouped=True)))
    x, none = _torch.tensor(args["x"]), torch.empty(0, dtype=torch.int32, device="cuda")
    work, kind = marlin_make_workspace_new(torch.device("cuda")), scalar_types.uint4b8

    def call():
        more = (none, none, work, kind, N, F, M, True, False, True, False)
        return {"o": ops.marlin_gemm(x, None, w, None, s, None, None, None, *more)}

    return call


def _dense(args: dict[str, Any]) -> Call:
    import torch

    given = {name: args[name] for name in ("zeros", "g_idx", "global_scale", "bits")}
    M, dtype = args["x"].shape[1], args["x"].dtype.name
    if not args["tiled"]:
        raise Unsupported("timed with packed weights only")
    w = tiles.dequantize(args["w"], args["scales"], args["format"], M=M, dtype=dtype, **given)
    w, x = _torch.tensor(jnp.asarray(w)), _torch.tensor(args["x"])
    return lambda: {"o": torch.matmul(x, w)}


PEERS = {
    "vllm": (Peer("marlin_gemm (CUDA)", _marlin),),
    "torch": (Peer("matmul with the dequantized weight", _dense),),
}
