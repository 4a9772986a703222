"""More cases of attention: quantised caches, merging, cascades and contiguous FlashAttention 3."""

import numpy as np
from _capture import CaseData, Paged
from _capture_vllm import VLLM, launch, to_gpu, to_numpy

SINKS = (-np.inf, 0.0, 0.5, 4.0)
GARBAGE = 1000.0  # where FlashAttention 3 may multiply a dead value by zero


# ---------------------------------------------------------------- caches with one scale per token and head
def token_head_cache(t: dict, mode: str, pool: int, page: int) -> dict:
    """Codes and scales by vLLM of `key` and `value` (tensors), in caches whose other slots keep the byte 0."""
    import torch
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash_per_token_head_quant
    from vllm.v1.kv_cache_interface import KVQuantMode

    stored = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}[mode]
    caches = {}
    for name, new in (("k", t["key"]), ("v", t["value"])):
        _, K, D = new.shape
        width = D // 2 if mode == "int4" else D
        caches[f"{name}_cache"] = torch.zeros(pool, page, K, width, dtype=torch.uint8, device="cuda").view(stored)
        caches[f"{name}_scale_cache"] = torch.zeros(pool, page, K, device="cuda")
    order = ("k_cache", "v_cache", "k_scale_cache", "v_scale_cache")
    triton_reshape_and_cache_flash_per_token_head_quant(
        t["key"],
        t["value"],
        *(caches[x] for x in order),
        t["slot_mapping"],
        kv_quant_mode=getattr(KVQuantMode, f"{mode.upper()}_PER_TOKEN_HEAD"),
    )
    return caches


def cache_rows(rng: np.random.Generator, T: int, K: int, D: int, dtype: str) -> dict[str, np.ndarray]:
    """Keys and values with a head of zeros, an outlier, a constant head, and slots that skip two tokens.

    Their size must be a multiple of 256 for 4 bits: vLLM 0.26.0 rotates what lies beyond one from stale memory.
    """
    slots = np.array([3, 17, -1, 40, 31, 0, -1, 63], np.int64)[:T]
    rows = {name: rng.standard_normal((T, K, D)) for name in ("key", "value")}
    for x in rows.values():
        x[0, 0], x[1, -1, 3], x[3, 0] = 0, 3e4, 0.375
    return {name: x.astype(dtype) for name, x in rows.items()} | {"slot_mapping": slots}


def cache_write(name: str, mode: str, K: int = 2, D: int = 64, dtype: str = "bfloat16") -> None:
    """Add `kv_cache/cache_write_NAME`: `mode` is auto, fp8, or int8, fp8 or int4 with `_token_head`."""

    @VLLM.add("kv_cache", f"cache_write_{name}")
    def run(rng: np.random.Generator) -> CaseData:
        arrays = cache_rows(rng, 8, K, D, dtype)
        t = {key: to_gpu(array) for key, array in arrays.items()}
        if mode.endswith("_token_head"):
            caches, kernels = launch(lambda: token_head_cache(t, mode.removesuffix("_token_head"), 4, 16))
            params = {"kernel": "triton_reshape_and_cache_flash_per_token_head_quant", "kv_cache_dtype": mode}
            outputs = {key: to_numpy(x) for key, x in caches.items()}
            if mode == "int4_token_head":
                from vllm.v1.attention.ops.int4_per_token_head import single_rht

                # on the way to the codes, so that a difference can be told from one in the rotation
                outputs |= {f"rotated_{x}": to_numpy(single_rht(t[x].float()).to(t[x].dtype)) for x in ("key", "value")}
            return CaseData(params | {"device_kernels": kernels}, arrays, outputs)
        import torch
        from vllm import _custom_ops as ops

        for scale in ("k_scale", "v_scale"):
            arrays[scale] = rng.uniform(0.01, 0.05, 1).astype(np.float32)
            t[scale] = to_gpu(arrays[scale])
        kind = torch.uint8 if mode == "fp8" else t["key"].dtype
        k, v = (torch.zeros(4, 16, K, D, dtype=kind, device="cuda") for _ in range(2))
        _, kernels = launch(
            lambda: ops.reshape_and_cache_flash(
                t["key"], t["value"], k, v, t["slot_mapping"], mode, t["k_scale"], t["v_scale"]
            )
        )
        params = {"kernel": "reshape_and_cache_flash", "kv_cache_dtype": mode, "device_kernels": kernels}
        return CaseData(params, arrays, {"k_cache": to_numpy(k), "v_cache": to_numpy(v)})


def unified_token_head(name: str, mode: str, *shape, **options) -> None:
    """Add `kv_cache/paged_NAME`: Triton unified attention over a cache that vLLM has quantised per head."""
    paged = Paged(*shape, dead=0.0, **options)

    @VLLM.add("kv_cache", f"paged_{name}")
    def run(rng: np.random.Generator) -> CaseData:
        import torch
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
        from vllm.v1.kv_cache_interface import KVQuantMode

        arrays = paged.inputs(rng)
        t = {key: to_gpu(array) for key, array in arrays.items()}
        pool = t["k"].shape[0]
        rows = {"key": t["k"].flatten(0, 1), "value": t["v"].flatten(0, 1)}
        rows["slot_mapping"] = torch.arange(pool * paged.page, device="cuda")
        caches = token_head_cache(rows, mode, pool, paged.page)
        out = torch.full_like(t["q"], torch.nan)

        def call():
            unified_attention(
                q=t["q"],
                k=caches["k_cache"],
                v=caches["v_cache"],
                out=out,
                cu_seqlens_q=t["cu_seqlens_q"],
                max_seqlen_q=max(paged.queries),
                seqused_k=t["seq_lens"],
                max_seqlen_k=max(paged.lengths),
                softmax_scale=paged.scale,
                causal=True,
                window_size=(paged.window - 1, 0) if paged.window else (-1, -1),
                block_table=t["block_table"],
                softcap=paged.softcap,
                q_descale=None,
                k_descale=None,
                v_descale=None,
                sinks=t.get("sinks"),
                kv_quant_mode=getattr(KVQuantMode, f"{mode.upper()}_PER_TOKEN_HEAD"),
                k_scale_cache=caches["k_scale_cache"],
                v_scale_cache=caches["v_scale_cache"],
            )

        _, kernels = launch(call)
        arrays |= {"k": caches["k_cache"], "v": caches["v_cache"]}
        arrays |= {f"{x}_scale_cache": caches[f"{x}_scale_cache"] for x in "kv"}
        arrays = {key: x if isinstance(x, np.ndarray) else to_numpy(x) for key, x in arrays.items()}
        params = paged.params("triton_unified_attention", kv_cache_dtype=f"{mode}_token_head", device_kernels=kernels)
        return CaseData(params, arrays, {"o": to_numpy(out)})


cache_write("copy_fp16_d128", "auto", D=128, dtype="float16")
cache_write("fp8_outliers", "fp8", K=3)
for MODE in ("int8", "fp8", "int4"):
    cache_write(f"{MODE}_token_head", f"{MODE}_token_head")
    cache_write(f"{MODE}_token_head_d128", f"{MODE}_token_head", K=1, D=128)
    unified_token_head(f"{MODE}_token_head", MODE, (1, 3), (40, 20), sinks=SINKS, gain=2.0)
    unified_token_head(f"{MODE}_token_head_d128", MODE, (2, 1), (20, 15), K=2, D=128, spare_pages=0)


# ---------------------------------------------------------------- merging
def merge(name: str, dtype: str = "bfloat16", D: int = 64, fp8: bool = False) -> None:
    """Add `partial_attention/merge_states_NAME`: some rows of either side are marked empty, by either infinity."""

    @VLLM.add("partial_attention", f"merge_states_{name}")
    def run(rng: np.random.Generator) -> CaseData:
        import torch
        from vllm import _custom_ops as ops

        T, H = 6, 3
        arrays = {f"{side}_o": rng.standard_normal((T, H, D)).astype(dtype) for side in ("prefix", "suffix")}
        for side, row in (("prefix", 1), ("suffix", 3)):
            lse = (3 * rng.standard_normal((H, T))).astype(np.float32)
            lse[0, row], lse[1, row] = -np.inf, np.inf
            arrays[f"{side}_lse"] = lse
        t = {key: to_gpu(array) for key, array in arrays.items()}
        kind = torch.float8_e4m3fn if fp8 else t["prefix_o"].dtype
        out, lse = torch.empty_like(t["prefix_o"], dtype=kind), torch.full_like(t["prefix_lse"], torch.nan)
        more = {}
        if fp8:
            arrays["out_scale"] = rng.uniform(0.005, 0.02, 1).astype(np.float32)
            more = {"output_scale": to_gpu(arrays["out_scale"])}
        _, kernels = launch(
            lambda: ops.merge_attn_states(
                out, t["prefix_o"], t["prefix_lse"], t["suffix_o"], t["suffix_lse"], lse, **more
            )
        )
        params = {"kernel": "merge_attn_states", "device_kernels": kernels}
        return CaseData(params, arrays, {"o": to_numpy(out), "lse": to_numpy(lse)})


merge("infinities")
merge("fp8_out", fp8=True)


def cascade(name: str, *shape, common: int, **options) -> None:
    """Add `partial_attention/cascade_NAME`: as vLLM's FlashAttention back end does it, two calls and a merge."""
    paged = Paged(*shape, dead=GARBAGE, **options)

    @VLLM.add("partial_attention", f"cascade_{name}")
    def run(rng: np.random.Generator) -> CaseData:
        import torch
        from vllm.v1.attention.backends.flash_attn import cascade_attention

        arrays = paged.inputs(rng)
        arrays["block_table"][:, : common // paged.page] = arrays["block_table"][0, : common // paged.page]
        t = {key: to_gpu(array) for key, array in arrays.items()}
        rows = t["q"].shape[0]
        out = torch.full_like(t["q"], torch.nan)

        def call():
            cascade_attention(
                out,
                t["q"],
                t["k"],
                t["v"],
                cu_query_lens=t["cu_seqlens_q"],
                max_query_len=max(paged.queries),
                cu_prefix_query_lens=torch.tensor([0, rows], dtype=torch.int32, device="cuda"),
                prefix_kv_lens=torch.tensor([common], dtype=torch.int32, device="cuda"),
                suffix_kv_lens=t["seq_lens"] - common,
                max_kv_len=max(paged.lengths),
                softmax_scale=paged.scale,
                alibi_slopes=None,
                sliding_window=(-1, -1),
                logits_soft_cap=paged.softcap,
                block_table=t["block_table"],
                common_prefix_len=common,
                max_num_splits=0,
                fa_version=3,
                s_aux=t["sinks"].to(torch.bfloat16) if "sinks" in t else None,
            )

        _, kernels = launch(call)
        params = paged.params(
            "flash_attention_3 x2 + merge_attn_states", device_kernels=kernels, common_prefix_len=common
        )
        return CaseData(params, arrays, {"o": to_numpy(out)})


cascade("decode", (1, 1, 1), (40, 33, 50), common=32)
cascade("mixed_sinks", (1, 3, 2), (49, 60, 51), common=48, sinks=SINKS, gain=2.0)


def flash3_contiguous(
    name: str, queries, lengths, *, H: int = 4, K: int = 1, D: int = 64, Dv: int = 0, **options
) -> None:
    """Add `partial_attention/fa3_NAME`: FlashAttention 3 over packed keys; options: causal, window, softcap, sinks."""
    causal, window = options.get("causal", True), options.get("window", 0)
    softcap, sinks = options.get("softcap", 0.0), options.get("sinks")

    @VLLM.add("partial_attention", f"fa3_{name}")
    def run(rng: np.random.Generator) -> CaseData:
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        def packed(rows, heads, width, gain=1.0):
            return (rng.standard_normal((sum(rows), heads, width)) * gain).astype("bfloat16")

        arrays = {"q": packed(queries, H, D, 2.0), "k": packed(lengths, K, D), "v": packed(lengths, K, Dv or D)}
        for side, rows in (("q", queries), ("k", lengths)):
            arrays[f"cu_seqlens_{side}"] = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
        if sinks is not None:
            arrays["sinks"] = np.resize(np.array(sinks, "bfloat16"), H)
        t = {key: to_gpu(array) for key, array in arrays.items()}

        def call():
            return flash_attn_varlen_func(
                t["q"],
                t["k"],
                t["v"],
                max(queries),
                t["cu_seqlens_q"],
                max(lengths),
                cu_seqlens_k=t["cu_seqlens_k"],
                softmax_scale=D**-0.5,
                causal=causal,
                window_size=[window - 1, 0 if causal else window - 1] if window else None,
                softcap=softcap,
                return_softmax_lse=True,
                fa_version=3,
                s_aux=t.get("sinks"),
            )

        (o, lse), kernels = launch(call)
        params = {"kernel": "flash_attention_3", "scale": D**-0.5, "causal": causal, "window": window}
        params |= {"softcap": softcap, "lse_includes_sink": sinks is not None}
        params |= {"lse_layout": "HT", "device_kernels": kernels}
        return CaseData(params, arrays, {"o": to_numpy(o), "lse": to_numpy(lse)})


flash3_contiguous("causal_short", (1, 5, 9), (12, 5, 20))
flash3_contiguous("full_short", (4, 9), (15, 9), H=2, K=2, causal=False)
flash3_contiguous("window5_sinks", (6, 9), (6, 17), window=5, sinks=SINKS)
flash3_contiguous("softcap2", (3, 5), (7, 12), softcap=2.0)
flash3_contiguous("mla_192_128", (3, 5), (9, 12), H=2, K=2, D=192, Dv=128)
flash3_contiguous("gqa6_d128", (4,), (13,), H=6, D=128)


@VLLM.add("partial_attention", "dcp_combine_empty_ranks")
def dcp_combine(rng: np.random.Generator) -> CaseData:
    """Four ranks, some without keys; one head that no rank has keys for is left out: vLLM gives NaN there."""
    from vllm.v1.attention.ops.common import CPTritonContext, correct_attn_out

    N, B, H, D = 4, 2, 3, 64
    o = rng.standard_normal((N, B, H, D)).astype("bfloat16")
    lse = (2 * rng.standard_normal((N, B, H))).astype(np.float32)
    lse[0, 0], lse[1, 1, 0], lse[2, 0, 1], lse[2, 1, 2] = -np.inf, np.nan, np.inf, -np.inf
    ranks, kernels = [], []
    for rank in range(N):
        (part, total), kernels = launch(
            lambda rank=rank: correct_attn_out(to_gpu(o[rank]), to_gpu(lse), rank, CPTritonContext())
        )
        ranks.append(to_numpy(part))
    params = {"kernel": "correct_attn_out", "device_kernels": kernels}
    arrays = {"partial_o": o, "partial_lse": lse}
    return CaseData(params, arrays, {"corrected_o": np.stack(ranks), "lse": to_numpy(total)})
