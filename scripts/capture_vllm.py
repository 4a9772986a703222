"""Captures of vLLM's own kernels on a GPU.

    python scripts/capture_vllm.py OUT [--family attention] [--only GLOB] [--seed 0] [--commit SHA]
    python scripts/capture_vllm.py --list

A case is a function of a random generator under `@VLLM.add(family, name)` that draws inputs, calls vLLM and returns
parameters, inputs and outputs, or data under `@case(...)`; outputs that the caller allocates start as NaN. Needs vLLM
0.26 with its PyTorch and a CUDA GPU. Where only vLLM's kernels are wanted, a module `vllm_env` with a function
`install()` on the path may stand in for packages that its server needs.
"""

import sys

import _capture
import _capture_vllm_cache  # noqa: F401  these modules add their cases
import _capture_vllm_dsv4  # noqa: F401
import _capture_vllm_indexer  # noqa: F401
import _capture_vllm_matmul  # noqa: F401
import _capture_vllm_mla  # noqa: F401
import _capture_vllm_moe  # noqa: F401
import _capture_vllm_quant  # noqa: F401
import _capture_vllm_routing  # noqa: F401
import _capture_vllm_turboquant  # noqa: F401
import numpy as np
from _capture import CaseData, Paged
from _capture_vllm import VLLM, launch, machine, to_gpu, to_numpy


def unified(name: str, *shape, segments: int = 0, **options) -> None:
    """Add `attention/paged_unified_NAME`: Triton unified attention, split over the keys if `segments`."""
    paged = Paged(*shape, **options)

    @VLLM.add("attention", f"paged_unified_{name}")
    def run(rng: np.random.Generator) -> CaseData:
        import torch
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
        from vllm.v1.kv_cache_interface import KVQuantMode

        arrays = paged.inputs(rng)
        t = {key: to_gpu(array) for key, array in arrays.items()}
        out = torch.full_like(t["q"], torch.nan)
        more = {"sinks": t.get("sinks")}
        k_descale = v_descale = None
        if "k_scale" in t:
            k_descale, v_descale = (t[x].expand(len(paged.lengths), paged.K) for x in ("k_scale", "v_scale"))
            more["kv_quant_mode"] = KVQuantMode.FP8_PER_TENSOR
        if segments:
            partial = torch.full((*t["q"].shape[:2], segments, paged.D), torch.nan, device=out.device)
            more |= {"seq_threshold_3D": len(paged.lengths), "num_par_softmax_segments": segments}
            more |= {"softmax_segm_output": partial, "softmax_segm_max": partial[..., 0].contiguous()}
            more["softmax_segm_expsum"] = more["softmax_segm_max"].clone()

        def call():
            unified_attention(
                q=t["q"],
                k=t["k"],
                v=t["v"],
                out=out,
                cu_seqlens_q=t["cu_seqlens_q"],
                max_seqlen_q=max(paged.queries),
                seqused_k=t["seq_lens"],
                max_seqlen_k=max(paged.lengths),
                softmax_scale=paged.scale,
                causal=paged.causal,
                window_size=(paged.window - 1, 0) if paged.window else (-1, -1),
                block_table=t["block_table"],
                softcap=paged.softcap,
                q_descale=None,
                k_descale=k_descale,
                v_descale=v_descale,
                **more,
            )

        _, kernels = launch(call)
        split = {"segments": segments} if segments else {}
        params = paged.params("triton_unified_attention", device_kernels=kernels, **split)
        return CaseData(params, arrays, {"o": to_numpy(out)})


def flash3(name: str, *shape, **options) -> None:
    """Add `attention/paged_fa3_NAME`: FlashAttention 3 over pages, with its LSE `[H, T]` that includes the sink."""
    paged = Paged(*shape, **options)

    @VLLM.add("attention", f"paged_fa3_{name}")
    def run(rng: np.random.Generator) -> CaseData:
        import torch
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        arrays = paged.inputs(rng)
        t = {key: to_gpu(array) for key, array in arrays.items()}
        right = 0 if paged.causal else paged.window - 1
        sinks = t["sinks"].to(torch.bfloat16) if "sinks" in t else None
        out = torch.full_like(t["q"], torch.nan)

        def call():
            return flash_attn_varlen_func(
                t["q"],
                t["k"],
                t["v"],
                max(paged.queries),
                t["cu_seqlens_q"],
                max(paged.lengths),
                seqused_k=t["seq_lens"],
                softmax_scale=paged.scale,
                causal=paged.causal,
                window_size=[paged.window - 1, right] if paged.window else None,
                softcap=paged.softcap,
                block_table=t["block_table"],
                return_softmax_lse=True,
                out=out,
                fa_version=3,
                s_aux=sinks,
            )

        (o, lse), kernels = launch(call)
        layout = {"lse_includes_sink": sinks is not None, "lse_layout": "HT"}
        params = paged.params("flash_attention_3", device_kernels=kernels, **layout)
        return CaseData(params, arrays, {"o": to_numpy(o), "lse": to_numpy(lse)})


SINKS = (-np.inf, 0.0, 0.5, 4.0)  # exact in bfloat16; +inf gives NaN in vLLM's Triton kernel: inf - inf
unified("decode_lens", (1, 1, 1), (1, 16, 17), gain=2.0)
unified("decode_sinks", (1, 1), (1, 31), sinks=SINKS)
unified("decode_window9_sinks", (1, 1), (9, 33), window=9, sinks=SINKS, gain=2.0)
unified("window_beyond_length", (1, 2), (5, 12), window=64, spare_pages=0)
unified("prefill_window3", (17,), (30,), H=2, window=3, gain=2.0)
unified("mixed_prefill", (1, 3, 6), (17, 3, 14), gain=2.0)
unified("empty_requests", (0, 1, 0, 2), (0, 20, 5, 2), spare_pages=0)
unified("gqa1", (3,), (15,), H=2, K=2, spare_pages=0)
unified("gqa6", (3, 1), (10, 7), H=6)
unified("gqa7_page32", (2, 1), (33, 7), H=7, page=32, spare_pages=0)
unified("page64", (1,), (40,), page=64, spare_pages=0, gain=2.0)
unified("page128", (3,), (100,), page=128, spare_pages=0, gain=2.0)
unified("head128", (2,), (13,), H=2, D=128)
unified("head256", (2,), (15,), H=2, D=256, spare_pages=0)
unified("softcap2", (1, 3), (7, 12), softcap=2.0, gain=4.0, spare_pages=0)
unified("noncausal", (2, 4), (18, 4), H=2, causal=False, gain=2.0)
# 16 heads per KV head leave one query row per block: with more, vLLM 0.26.0 drops values, see docs/captures.md
unified("noncausal_window3", (5,), (9,), H=16, causal=False, window=3, gain=2.0, spare_pages=0)
unified("split_keys_sinks", (1, 1), (40, 33), segments=4, sinks=SINKS, gain=2.0, spare_pages=0)
unified("fp16_sinks", (1, 3), (17, 12), dtype="float16", sinks=SINKS, gain=2.0, spare_pages=0)
unified("fp32", (3,), (14,), H=2, dtype="float32", gain=2.0)
unified("fp8_cache", (1, 3), (40, 20), cache_dtype="float8_e4m3fn")

GARBAGE = 1000.0  # where FlashAttention 3 may multiply a dead value by zero
flash3("decode_sinks", (1, 1), (17, 31), sinks=SINKS, dead=GARBAGE, gain=2.0)
flash3("mixed_window9_sinks", (1, 3, 6), (17, 3, 14), window=9, sinks=SINKS, dead=GARBAGE, gain=2.0)
flash3("noncausal_window4", (3, 6), (12, 17), H=2, causal=False, window=4, dead=GARBAGE, gain=2.0)
flash3("softcap2", (1, 3), (7, 12), softcap=2.0, dead=GARBAGE, gain=4.0, spare_pages=0)
flash3("head128_fp16", (2,), (13,), H=2, D=128, dtype="float16", dead=GARBAGE)
flash3("nan_in_dead_slots", (1, 3), (18, 12))

if __name__ == "__main__":
    sys.exit(_capture.main(VLLM, "scripts/capture_vllm.py", machine))
