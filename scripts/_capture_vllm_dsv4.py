"""Cases of DeepSeek-V4: norms, packed caches, compressor, sparse decoding, hyper-connections.

Not here: 4-bit entries of the indexer, whose instructions need a Blackwell GPU, and windows of 128 tokens, whose inputs
and state would take 1.3 MiB.
"""

import numpy as np
from _capture import FP8, FP8_MAX
from _capture_vllm import Arrays, Tensors, case, to_gpu

EPS = 1e-6
PAGE, PAGE_BYTES = 16, 9792
"""Rows of a packed page, and its bytes: 16 x 584, then zeros up to a multiple of 576."""
DECODE_PAGE, DECODE_BYTES = 64, 37440
"""The same of the only pages that FlashMLA reads."""
NOPE, ROTARY = 448, 64


def angles(base: float = 10000.0, count: int = 4096) -> np.ndarray:
    """Cosines and then sines of 32 frequencies at positions from 0 on, [count, 64] float32."""
    angle = np.outer(np.arange(count), base ** (-np.arange(0, ROTARY, 2) / ROTARY))
    return np.concatenate([np.cos(angle), np.sin(angle)], -1).astype(np.float32)


def bfloat16(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Normal numbers."""
    return rng.standard_normal(shape).astype("bfloat16")


def rotated(positions: tuple[int, ...], **arrays: np.ndarray) -> Arrays:
    """The arrays, with positions and their rows of the table."""
    return arrays | {"positions": np.array(positions), "cos_sin": angles()[list(positions)]}


# ---------------------------------------------------------------- norms
def norm_inputs(rng: np.random.Generator) -> Arrays:
    """Rows of which one is zero and one tiny."""
    q, kv = rng.standard_normal((3, 512)), rng.standard_normal((3, 512))
    q[1], kv[2] = 0, kv[2] * 1e-4
    weights = {f"{name}_weight": bfloat16(rng, 512) for name in ("q", "kv")}
    return {"q": q.astype("bfloat16"), "kv": kv.astype("bfloat16")} | weights


@case(
    "dsv4",
    "q_kv_rmsnorm_hard",
    {"kernel": "fused_q_kv_rmsnorm", "eps": EPS},
    norm_inputs,
    {"q": ("bfloat16", 3, 512), "kv": ("bfloat16", 3, 512)},
)
def q_kv_norm(t: Tensors) -> Tensors:
    """Both latents at once."""
    from vllm.models.deepseek_v4.common.ops import fused_q_kv_rmsnorm

    q, kv = fused_q_kv_rmsnorm(t["q"], t["kv"], t["q_weight"], t["kv_weight"], EPS)
    return {"q": q, "kv": kv}


# ---------------------------------------------------------------- packed caches
SLOTS = np.array([0, 1, 15, -1, 8, 5])
"""Slots of six tokens in one page; the fourth has none."""


def latents(rng: np.random.Generator) -> np.ndarray:
    """Six rows with blocks of zeros of both signs, tiny ones, an outlier, powers of two times 448 and just above."""
    k = rng.standard_normal((6, NOPE + ROTARY)) * 2
    k[1, :64], k[1, 64:128] = np.where(np.arange(64) % 2, -0.0, 0.0), 1e-6
    k[2, 0] = 3e4
    k[4, :64], k[4, 64:128] = np.resize([448, 17, -19, 2**-9], 64), np.resize([14.0625, 0.5, -7], 64)
    k[5] = 0
    return k.astype("bfloat16")


@case(
    "dsv4",
    "k_cache_insert_and_gather_page",
    {"kernel": "quantize_and_insert_k_cache + dequantize_and_gather_k_cache", "page": PAGE, "page_bytes": PAGE_BYTES},
    lambda rng: {"k": latents(rng), "slot_mapping": SLOTS},
    {"cache": ("uint8", 1, PAGE_BYTES), "gathered": ("bfloat16", 1, PAGE, NOPE + ROTARY)},
)
def insert_and_gather(t: Tensors) -> Tensors:
    """One page that was zero; all of its rows come back."""
    import torch
    from vllm.models.deepseek_v4.common.ops import cache_utils

    cache = torch.zeros(1, PAGE_BYTES, dtype=torch.uint8, device="cuda")
    cache_utils.quantize_and_insert_k_cache(t["k"], cache, t["slot_mapping"], PAGE)
    out = torch.full((1, PAGE, NOPE + ROTARY), torch.nan, dtype=torch.bfloat16, device="cuda")
    rows = cache.as_strided((1, PAGE, 584), (PAGE_BYTES, 584, 1))
    lengths, table = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([PAGE], [[0]]))
    cache_utils.dequantize_and_gather_k_cache_triton(out, rows, lengths, None, table, PAGE, 0)
    return {"cache": cache, "gathered": out}


def qnorm_inputs(rng: np.random.Generator) -> Arrays:
    """Three tokens of 8 heads, one of them zero; the second token has no slot."""
    q = bfloat16(rng, 3, 8, NOPE + ROTARY)
    q[1, 2] = 0
    arrays = rotated((0, 1000, 4095), q=q, kv=latents(rng)[[4, 0, 1]])
    return arrays | {"slot_mapping": np.array([15, -1, 0])}


@case(
    "dsv4",
    "qnorm_rope_kv_insert_page",
    {"kernel": "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert", "eps": EPS, "page": PAGE},
    qnorm_inputs,
    {"q": ("bfloat16", 3, 8, NOPE + ROTARY), "q_pad_absmax": ("float32", 1), "cache": ("uint8", 1, PAGE_BYTES)},
)
def qnorm(t: Tensors) -> Tensors:
    """Q comes back with 64 heads; of those that do not exist the largest number is kept."""
    import torch

    cache = torch.zeros(1, PAGE_BYTES, dtype=torch.uint8, device="cuda")
    given = t["q"].clone(), t["kv"].clone(), cache, t["slot_mapping"], t["positions"], to_gpu(angles())
    q = torch.ops._C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(*given, 64, EPS, PAGE)
    padding = q[:, 8:].float().abs().amax().reshape(1)
    return {"q": q[:, :8], "q_pad_absmax": padding, "cache": cache}


def inverse_inputs(rng: np.random.Generator) -> Arrays:
    """Three tokens of 8 heads, one of them zero, one tiny."""
    o = rng.standard_normal((3, 8, NOPE + ROTARY))
    o[1, 3], o[2, 0] = 0, 1e-12
    return rotated((0, 3, 4095), o=o.astype("bfloat16"))


@case(
    "dsv4",
    "inv_rope_fp8_quant_hard",
    {"kernel": "fused_inv_rope_fp8_quant", "n_groups": 2, "heads_per_group": 4},
    inverse_inputs,
    {"o_fp8": ("float8_e4m3fn", 3, 2, 2048), "scale": ("float32", 3, 2, 16)},
)
def inverse(t: Tensors) -> Tensors:
    """Rotates back, then quantizes."""
    from vllm.models.deepseek_v4.common.ops import fused_inv_rope_fp8_quant

    codes, scale = fused_inv_rope_fp8_quant(t["o"], t["positions"], to_gpu(angles()), 2, 4)
    return {"o_fp8": codes, "scale": scale}


# ---------------------------------------------------------------- compressor
def compress(name: str, tokens: int, width: int, bits: tuple[int, int, int]) -> None:
    """Add `dsv4/compress_NAME`: overlapping windows of 4 tokens.

    `bits` are the numbers of a scale and the bytes of a row and of its scales.
    """
    ratio, columns, state_page = 4, 2 * width, 4
    pages = -(-tokens // state_page)
    group, row, scales = bits

    def inputs(rng: np.random.Generator) -> Arrays:
        arrays = {
            "kv": rng.standard_normal((tokens, columns)),
            "score": rng.standard_normal((tokens, columns)),
            "ape": rng.standard_normal((ratio, columns)),
            "cos_sin": angles(160000.0, tokens),
        }
        arrays["score"][5] *= 20  # one token outweighs its window
        arrays = {key: x.astype(np.float32) for key, x in arrays.items()}
        return arrays | {"norm_weight": bfloat16(rng, width)}

    params = {"kernel": "save_partial_states + compress_norm_rope_store", "ratio": ratio, "head_dim": width}
    params |= {"overlap": True, "eps": EPS, "page": PAGE, "state_page": state_page, "fp4": False}
    outputs = {
        "cache": ("uint8", 1, PAGE, row + scales),
        "state": ("float32", pages, state_page, 2 * columns),
    }

    @case("dsv4", f"compress_{name}", params, inputs, outputs)
    def call(t: Tensors) -> Tensors:
        import types

        import torch
        from vllm.models.deepseek_v4.common.ops.fused_compress_quant_cache import compress_norm_rope_store_triton
        from vllm.models.deepseek_v4.common.ops.save_partial_states import save_partial_states

        state = torch.zeros(pages, state_page, 2 * columns, device="cuda")
        cache = torch.zeros(1, PAGE, row + scales, dtype=torch.uint8, device="cuda")
        positions = torch.arange(tokens, device="cuda")
        save_partial_states(
            t["kv"], t["score"], t["ape"], positions, state, positions.clone(), state_page, columns, ratio
        )
        entries = torch.where((positions + 1) % ratio == 0, positions // ratio, -1)
        request = torch.zeros(tokens, dtype=torch.int32, device="cuda")
        table = torch.arange(pages, dtype=torch.int32, device="cuda")[None]
        states = state, tokens, request, positions, positions.clone(), table, state_page, columns
        kept = types.SimpleNamespace(slot_mapping=entries)
        how = width, ROTARY, ratio, True, False, t["norm_weight"], EPS, group, row, scales
        compress_norm_rope_store_triton(*states, to_gpu(angles(160000.0)), cache, kept, {}, *how)
        return {"cache": cache, "state": state}


compress("c4_main_short", 8, 512, (64, 576, 8))
compress("c4_indexer_fp8_short", 9, 128, (128, 128, 4))


# ---------------------------------------------------------------- sparse decoding
def packed_page(rng: np.random.Generator) -> np.ndarray:
    """64 rows as V4 stores them, [1, 37440] uint8: 448 codes and 64 bfloat16 each, then 7 exponents and a zero each."""
    rows = rng.standard_normal((DECODE_PAGE, NOPE + ROTARY))
    blocks = rows[:, :NOPE].reshape(DECODE_PAGE, 7, 64)
    exponent = np.ceil(np.log2(np.maximum(np.abs(blocks).max(-1), 1e-4) / FP8_MAX))
    codes = np.clip(blocks * 2.0 ** -exponent[..., None], -FP8_MAX, FP8_MAX).astype(FP8)
    data = [codes.reshape(DECODE_PAGE, NOPE).view(np.uint8), rows[:, NOPE:].astype("bfloat16").view(np.uint8)]
    scales = np.pad((exponent + 127).astype(np.uint8), ((0, 0), (0, 1)))
    page = np.concatenate([np.concatenate(data, 1).ravel(), scales.ravel()])
    return np.pad(page, (0, DECODE_BYTES - page.size))[None]


def sparse_decode(name: str, requests: int, counts: tuple[int, ...], extra: tuple[int, ...] | None) -> None:
    """Add `dsv4/sparse_decode_NAME`: request b has `counts[b]` rows of one page and `extra[b]` of another."""
    heads, width, scale = 64, NOPE + ROTARY, (NOPE + ROTARY) ** -0.5

    def lists(rng: np.random.Generator, places: int, counts: tuple[int, ...]) -> np.ndarray:
        found = np.full((requests, 1, places), -1, np.int32)
        for b, count in enumerate(counts):
            found[b, 0, :count] = rng.permutation(DECODE_PAGE)[:count]
        return found

    def inputs(rng: np.random.Generator) -> Arrays:
        sinks = rng.standard_normal(heads).astype(np.float32)
        sinks[:2] = -np.inf, 5
        arrays = {"q": bfloat16(rng, requests, 1, heads, width), "sinks": sinks, "cache": packed_page(rng)}
        arrays |= {"indices": lists(rng, 128, counts), "topk_length": np.array(counts, np.int32)}
        if extra is not None:
            arrays |= {"extra_cache": packed_page(rng), "extra_indices": lists(rng, 64, extra)}
            arrays["extra_topk_length"] = np.array(extra, np.int32)
        return arrays

    params = {"kernel": "flash_mla sparse_decode_fwd", "scale": scale, "page": DECODE_PAGE, "page_bytes": DECODE_BYTES}
    outputs = {"o": ("bfloat16", requests, 1, heads, width), "lse": ("float32", requests, heads, 1)}

    @case("dsv4", f"sparse_decode_{name}", params, inputs, outputs)
    def call(t: Tensors) -> Tensors:
        from vllm.third_party.flashmla.flash_mla_interface import flash_mla_with_kvcache, get_mla_metadata

        pages = {
            key: t[key].as_strided((1, DECODE_PAGE, 1, 584), (DECODE_BYTES, 584, 584, 1))
            for key in ("cache", "extra_cache")
            if key in t
        }
        more = {"topk_length": t["topk_length"]}
        if extra is not None:
            more |= {"extra_k_cache": pages["extra_cache"], "extra_indices_in_kvcache": t["extra_indices"]}
            more["extra_topk_length"] = t["extra_topk_length"]
        plan = get_mla_metadata()[0]
        given = t["q"], pages["cache"], None, None, width, plan, None, scale, False, True, t["indices"], t["sinks"]
        o, lse = flash_mla_with_kvcache(*given, **more)
        return {"o": o, "lse": lse}


sparse_decode("two_caches_short", 1, (50,), (41,))


# ---------------------------------------------------------------- hyper-connections
def stream_inputs(rng: np.random.Generator) -> Arrays:
    """Three tokens of 4 streams of 256 numbers; one token's streams are zero, one's are large."""
    residual = rng.standard_normal((3, 4, 256))
    residual[1], residual[2] = 0, residual[2] * 100
    arrays = {
        "fn": 0.02 * rng.standard_normal((24, 1024)),
        "scale": np.array([0.7, 1.1, 0.9]),
        "base": 0.5 * rng.standard_normal(24),
    }
    arrays = {key: x.astype(np.float32) for key, x in arrays.items()}
    return arrays | {"residual": residual.astype("bfloat16"), "y": bfloat16(rng, 3, 256)}


@case(
    "dsv4",
    "mhc_zero_and_large",
    {
        "kernel": "mhc_pre_torch + mhc_post_torch",
        "rms_eps": EPS,
        "pre_eps": EPS,
        "sinkhorn_eps": EPS,
        "post_mult": 2.0,
        "iters": 20,
    },
    stream_inputs,
    {
        "post": ("float32", 3, 4, 1),
        "comb": ("float32", 3, 4, 4),
        "layer_input": ("bfloat16", 3, 256),
        "new_residual": ("bfloat16", 3, 4, 256),
    },
)
def streams(t: Tensors) -> Tensors:
    """VLLM's torch form in full float32; its other form needs the tilelang package."""
    import torch
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch, mhc_pre_torch

    torch.backends.cuda.matmul.allow_tf32 = False
    given = t["residual"], t["fn"], t["scale"], t["base"]
    post, comb, x = mhc_pre_torch(*given, EPS, EPS, EPS, 2.0, 20)
    return {
        "post": post,
        "comb": comb,
        "layer_input": x,
        "new_residual": mhc_post_torch(t["y"], t["residual"], post, comb),
    }
