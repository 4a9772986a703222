"""Cases of latent attention: decoding, rotary embedding, cache writes, sparse prefill."""

import numpy as np
from _capture_vllm import Arrays, Tensors, case

GARBAGE = 1000.0
"""What rows of a cache hold that no query may read."""


# ---------------------------------------------------------------- decoding
def decode(name: str, lengths: tuple[int, ...], heads: int, splits: int) -> None:
    """Add `mla/decode_NAME`: one query a request over pages of 16 rows, its keys in `splits` parts."""
    page, scale, requests = 16, 192**-0.5, len(lengths)

    def inputs(rng: np.random.Generator) -> Arrays:
        counts = [-(-n // page) for n in lengths]
        order = rng.permutation(sum(counts) + 1).astype(np.int32)
        table = np.full((requests, max(counts)), order[-1], np.int32)
        cache = np.full((order.size, page, 1, 576), GARBAGE)
        for b, pages in enumerate(np.split(order[:-1], np.cumsum(counts)[:-1])):
            table[b, : pages.size] = pages
            rows = np.arange(lengths[b])
            cache[pages[rows // page], rows % page] = rng.standard_normal((lengths[b], 1, 576))
        return {
            "q": rng.standard_normal((requests, heads, 576)).astype("bfloat16"),
            "kv_cache": cache.astype("bfloat16"),
            "block_table": table,
            "seq_lens": np.array(lengths, np.int32),
        }

    params = {"kernel": "triton_decode_attention", "scale": scale, "page": page}
    outputs = {"o": ("bfloat16", requests, heads, 512), "lse": ("float32", requests, heads)}

    @case("mla", f"decode_{name}", params, inputs, outputs)
    def call(t: Tensors) -> Tensors:
        import torch
        from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

        o = torch.full((requests, heads, 512), torch.nan, dtype=torch.bfloat16, device="cuda")
        lse = torch.full((requests, heads), torch.nan, device="cuda")
        partial = torch.zeros(requests, heads, splits, 513, device="cuda")
        given = t["q"], t["kv_cache"], t["kv_cache"][..., :512]
        where = t["block_table"], t["seq_lens"]
        decode_attention_fwd(*given, o, lse, *where, partial, splits, scale, page, is_mla=True)
        return {"o": o, "lse": lse}


decode("short_h8", (1, 16, 30), 8, 4)


# ---------------------------------------------------------------- rotary embedding
def rope(name: str, neox: bool, factor: float, original: int, mscale: tuple[float, float]) -> None:
    """Add `mla/rope_NAME`: YaRN with two magnitude scales, up to the last position."""
    positions = np.array([0, 1, 31, 2047, 2048, int(factor * original) - 1])
    base, count = 10000.0, positions.size

    def inputs(rng: np.random.Generator) -> Arrays:
        arrays = {"q": rng.standard_normal((count, 2 * 64)), "k": rng.standard_normal((count, 64))}
        return {"positions": positions} | {key: x.astype("bfloat16") for key, x in arrays.items()}

    params = {"kernel": "rotary_embedding", "base": base, "scaling_factor": factor, "original_max_position": original}
    params |= {"mscale": mscale[0], "mscale_all_dim": mscale[1], "is_neox": neox, "beta_fast": 32, "beta_slow": 1}
    outputs = {"q": ("bfloat16", count, 128), "k": ("bfloat16", count, 64), "cos_sin_rows": ("float32", count, 64)}

    @case("mla", f"rope_{name}", params, inputs, outputs)
    def call(t: Tensors) -> Tensors:
        import torch
        from vllm import _custom_ops as ops
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.rotary_embedding import deepseek_scaling_rope

        scales = {"mscale": mscale[0], "mscale_all_dim": mscale[1]}
        with set_current_vllm_config(VllmConfig()):
            module = deepseek_scaling_rope.DeepseekScalingRotaryEmbedding(
                64, 64, original, base, neox, factor, torch.float32, **scales
            )
        table = module.cos_sin_cache.to("cuda").float()
        q, k = t["q"].clone(), t["k"].clone()
        ops.rotary_embedding(t["positions"], q, k, 64, table.to(q.dtype), neox)
        return {"q": q, "k": k, "cos_sin_rows": table[t["positions"]]}


rope("last_position_interleaved", False, 40.0, 4096, (1.0, 1.0))
rope("two_scales_neox", True, 16.0, 2048, (1.0, 0.707))


# ---------------------------------------------------------------- cache writes
def latent_rows(rng: np.random.Generator) -> Arrays:
    """Rows with blocks of zeros, tiny ones, an outlier, a block whose largest is a power of two times 448; a dead slot.

    A row without a slot follows one with it, and slot 0 and the last one are written.
    """
    kv, pe = rng.standard_normal((6, 512)), rng.standard_normal((6, 64))
    kv[1, :128], kv[1, 128:256] = np.where(np.arange(128) % 2, -0.0, 0.0), 1e-6
    kv[2, 300], kv[4, :128] = 3e4, np.resize([28.0, 17 / 16, -19 / 16, 2**-14, -28], 128)
    pe[1] = 0
    arrays = {"kv_c": kv.astype("bfloat16"), "k_pe": pe.astype("bfloat16")}
    return arrays | {"slot_mapping": np.array([3, 0, 15, -1, 8, 7]), "scale": np.array([0.02], np.float32)}


def cache_write(kind: str, stored: str, width: int) -> None:
    """Add `mla/cache_write_hard_KIND`: two pages of 8 rows that were zero."""
    params = {"kernel": "concat_and_cache_mla", "kv_cache_dtype": kind}

    @case("mla", f"cache_write_hard_{kind}", params, latent_rows, {"kv_cache": (stored, 2, 8, width)})
    def call(t: Tensors) -> Tensors:
        import torch
        from vllm import _custom_ops as ops

        cache = torch.zeros(2, 8, width, dtype=getattr(torch, stored), device="cuda")
        ops.concat_and_cache_mla(t["kv_c"], t["k_pe"], cache, t["slot_mapping"], kind, t["scale"])
        return {"kv_cache": cache}


cache_write("auto", "bfloat16", 576)
cache_write("fp8", "uint8", 576)
cache_write("fp8_ds_mla", "uint8", 656)


# ---------------------------------------------------------------- sparse prefill
def sparse_prefill(name: str, width: int, counts: tuple[int, ...], limits: tuple[int, ...] | None, sinks: bool) -> None:
    """Add `mla/sparse_prefill_NAME`: token t has `counts[t]` rows of 48, then -1; `limits[t]` cuts its list."""
    heads, rows, topk, tokens, scale = 64, 48, 128, len(counts), width**-0.5

    def inputs(rng: np.random.Generator) -> Arrays:
        lists = np.full((tokens, 1, topk), -1, np.int32)
        for t, count in enumerate(counts):
            lists[t, 0, :count] = rng.permutation(rows)[:count]
            lists[t, 0, count // 2 : count // 2 + 2] = -1  # holes
        q, kv = rng.standard_normal((tokens, heads, width)), rng.standard_normal((rows, 1, width))
        arrays = {"q": q.astype("bfloat16"), "kv": kv.astype("bfloat16"), "indices": lists}
        if limits is not None:
            arrays["topk_length"] = np.array(limits, np.int32)
        if sinks:
            arrays["sinks"] = rng.standard_normal(heads).astype(np.float32)
            arrays["sinks"][:3] = -np.inf, np.inf, 3
        return arrays

    outputs = {"o": ("bfloat16", tokens, heads, 512)}
    outputs |= {name: ("float32", tokens, heads) for name in ("max_logits", "lse")}

    @case("mla", f"sparse_prefill_{name}", {"kernel": "flash_mla_sparse_fwd", "scale": scale}, inputs, outputs)
    def call(t: Tensors) -> Tensors:
        from vllm.third_party.flashmla.flash_mla_interface import flash_mla_sparse_fwd

        given = t["q"], t["kv"], t["indices"], scale, 512, t.get("sinks"), t.get("topk_length")
        o, largest, lse = flash_mla_sparse_fwd(*given)
        return {"o": o, "max_logits": largest, "lse": lse}


sparse_prefill("512_holes_sinks_empty", 512, (40, 0), (23, 128), True)
