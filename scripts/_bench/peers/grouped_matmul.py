"""Products of rows in groups: DeepGEMM for FP8 codes, PyTorch (CUTLASS) for bfloat16."""

from typing import Any

import numpy as np

from scripts._bench.peers import Call, Peer, Unsupported, _torch


def _deep_gemm(args: dict[str, Any]) -> Call:
    import torch
    from vllm.utils.deep_gemm import get_mk_alignment_for_contiguous_layout, m_grouped_fp8_gemm_nt_contiguous

    if args["a_scale"] is None or args["out_dtype"] != "bfloat16":
        raise Unsupported("multiplies codes with block scales, to bfloat16")
    sizes, multiple = _sizes(args), get_mk_alignment_for_contiguous_layout()[0]
    if (sizes % multiple).any():
        raise Unsupported(f"groups must have multiples of {multiple} rows")
    t = _torch.tensors(args)
    (N, G), F = t["a_scale"].shape, t["b"].shape[1]
    groups = torch.repeat_interleave(torch.arange(len(sizes)), torch.from_numpy(sizes)).to("cuda", torch.int32)
    out = torch.empty(N, F, device="cuda", dtype=torch.bfloat16)
    # the layout that DeepGEMM wants: columns of four rows' multiples
    scale = torch.empty_strided((N, G), (1, -(-N // 4) * 4), device="cuda", dtype=torch.float32)
    scale.copy_(t["a_scale"])

    def call():
        m_grouped_fp8_gemm_nt_contiguous((t["a"], scale), (t["b"], t["b_scale"]), out, groups)
        return {"o": out}

    return call


def _masked(args: dict[str, Any]) -> Call:
    """Few rows a group: DeepGEMM takes each group's in a frame of its own, of whole tiles; results are put together."""
    import torch
    from vllm.utils.deep_gemm import fp8_m_grouped_gemm_nt_masked, get_mk_alignment_for_contiguous_layout

    sizes, multiple = _sizes(args), get_mk_alignment_for_contiguous_layout()[0]
    if args["a_scale"] is None or args["out_dtype"] != "bfloat16" or len(set(sizes)) > 1 or sizes[0] > multiple:
        raise Unsupported(f"timed with codes, block scales and equal groups of at most {multiple} rows")
    t, E, rows = _torch.tensors(args), len(sizes), int(sizes[0])
    G, (_, F, M) = t["a_scale"].shape[1], t["b"].shape
    a = torch.zeros(E, multiple, M, device="cuda").to(t["a"].dtype)
    a.view(torch.uint8)[:, :rows] = t["a"].view(torch.uint8).view(E, rows, M)
    scale = torch.zeros(E, G, multiple, device="cuda", dtype=torch.float32).transpose(1, 2)
    scale[:, :rows] = t["a_scale"].view(E, rows, G)
    out = torch.zeros(E, multiple, F, device="cuda", dtype=torch.bfloat16)
    counts = torch.full((E,), rows, device="cuda", dtype=torch.int32)

    def call():
        fp8_m_grouped_gemm_nt_masked((a, scale), (t["b"], t["b_scale"]), out, counts, rows)
        return {"o": out[:, :rows].reshape(E * rows, F)}

    return call


def _grouped_mm(args: dict[str, Any]) -> Call:
    import torch

    if args["a"].dtype != "bfloat16" or args["out_dtype"] != "bfloat16":
        raise Unsupported("multiplies bfloat16")
    _sizes(args)
    t = _torch.tensors(args)
    b, ends = t["b"].transpose(1, 2), t["offsets"][1:].contiguous()
    return lambda: {"o": torch.nn.functional.grouped_mm(t["a"], b, offs=ends)}


def _sizes(args: dict[str, Any]) -> np.ndarray:
    """Rows of every group."""
    sizes = np.diff(np.asarray(args["offsets"]))
    if sizes.sum() < len(args["a"]):
        raise Unsupported("rows of no group are left as they were")
    return sizes


PEERS = {
    "vllm": (
        Peer("m_grouped_fp8_gemm_nt_contiguous (DeepGEMM)", _deep_gemm),
        Peer("fp8_m_grouped_gemm_nt_masked (DeepGEMM), results put together", _masked),
    ),
    "torch": (Peer("grouped_mm (CUTLASS)", _grouped_mm),),
}
