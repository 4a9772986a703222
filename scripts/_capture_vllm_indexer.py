"""Cases of DeepSeek-V4's indexer and of the lists that its choice becomes; 4-bit queries need a Blackwell GPU."""

import numpy as np
from _capture import FP8, FP8_MAX
from _capture_vllm import Arrays, Tensors, case, to_gpu
from _capture_vllm_dsv4 import angles, bfloat16, rotated


# ---------------------------------------------------------------- indexer
def query_inputs(rng: np.random.Generator) -> Arrays:
    """Two tokens of 64 heads, one of them zero, one tiny, one whose largest number is a power of two times 448."""
    q = rng.standard_normal((2, 64, 128))
    q[1, 0], q[1, 1] = 0, 1e-6
    q[0, 5] = np.resize([7.0, 17 / 64, -19 / 64, 2**-12], 128)  # at position 0 nothing is rotated
    return rotated((0, 4095), q=q.astype("bfloat16"), weights=bfloat16(rng, 2, 64))


QUERY = {"softmax_scale": 128**-0.5, "head_scale": 64**-0.5, "fp4": False}


@case(
    "dsv4",
    "indexer_q_hard_fp8",
    {"kernel": "fused_indexer_q_rope_quant", **QUERY},
    query_inputs,
    {"q": ("float8_e4m3fn", 2, 64, 128), "weights": ("float32", 2, 64)},
)
def indexer_q(t: Tensors) -> Tensors:
    """Codes, and head weights that hold the codes' scales."""
    from vllm.models.deepseek_v4.common.ops import fused_indexer_q_rope_quant

    given = t["positions"], t["q"].clone(), to_gpu(angles()), t["weights"].clone()
    q, weights = fused_indexer_q_rope_quant(*given, QUERY["softmax_scale"], QUERY["head_scale"], False)
    return {"q": q, "weights": weights}


def index_inputs(rng: np.random.Generator) -> Arrays:
    """Four tokens of 64 heads and 128 entries; ranges that are empty, shorter than 16, inner, full."""
    k = rng.standard_normal((128, 128))
    scale = (2.0 ** np.ceil(np.log2(np.abs(k).max(-1) / FP8_MAX))).astype(np.float32)
    return {
        "q": rng.standard_normal((4, 64, 128)).astype(FP8),
        "k": (k / scale[:, None]).astype(FP8),
        "k_scale": scale,
        "weights": (0.1 * rng.standard_normal((4, 64))).astype(np.float32),
        "starts": np.array([0, 0, 7, 0], np.int32),
        "ends": np.array([0, 13, 100, 128], np.int32),
    }


@case(
    "dsv4",
    "indexer_logits_and_topk_ranges",
    {"kernel": "deep_gemm mqa_logits + top_k_per_row_prefill", "topk": 16},
    index_inputs,
    {"logits": ("float32", 4, 128), "topk_indices": ("int32", 4, 16)},
)
def index(t: Tensors) -> Tensors:
    """The chosen entries stand in no order; -1 behind them."""
    import torch
    from vllm.utils.deep_gemm import fp8_fp4_mqa_logits

    ranges = t["starts"], t["ends"]
    logits = fp8_fp4_mqa_logits((t["q"], None), (t["k"], t["k_scale"]), t["weights"], *ranges, clean_logits=True)
    chosen = torch.full((4, 16), -1, dtype=torch.int32, device="cuda")
    torch.ops._C.top_k_per_row_prefill(logits, *ranges, chosen, 4, logits.stride(0), logits.stride(1), 16)
    return {"logits": logits[:, :128], "topk_indices": chosen}


# ---------------------------------------------------------------- lists of indices
WINDOW, RATIO, TOPK, ENTRIES = 128, 4, 16, 64


def list_inputs(rng: np.random.Generator) -> Arrays:
    """Requests of 2 tokens without an entry, of 3 new of 200 tokens, and of 1 token beside full lists."""
    queries, lengths = np.array([2, 3, 1]), np.array([3, 200, 131])
    chosen = np.full((queries.sum(), TOPK), -1, np.int32)
    row = 0
    for new, length in zip(queries, lengths, strict=True):
        for position in range(length - new, length):
            entries = rng.permutation((position + 1) // RATIO)[:TOPK]
            chosen[row, : entries.size] = entries
            row += 1
    gathered = np.minimum(lengths, queries + np.minimum(lengths - queries, WINDOW - 1))
    starts = np.concatenate([[0], np.cumsum(queries)])
    arrays = {"query_start_loc": starts, "seq_lens": lengths, "gather_lens": gathered}
    return {"topk_indices": chosen} | {key: x.astype(np.int32) for key, x in arrays.items()}


@case(
    "dsv4",
    "combine_topk_swa_indices_short",
    {
        "kernel": "combine_topk_swa_indices",
        "window": WINDOW,
        "ratio": RATIO,
        "topk": TOPK,
        "M": ENTRIES + 256,
        "N": ENTRIES,
    },
    list_inputs,
    {"indices": ("int32", 6, 256), "lens": ("int32", 6)},
)
def combine(t: Tensors) -> Tensors:
    """Chosen entries and the window, up to a multiple of 128 with -1."""
    from vllm.models.deepseek_v4.common.ops.cache_utils import combine_topk_swa_indices

    given = t["topk_indices"], t["query_start_loc"], t["seq_lens"], t["gather_lens"]
    lists, counts = combine_topk_swa_indices(*given, WINDOW, RATIO, TOPK, ENTRIES + 256, ENTRIES)
    return {"indices": lists, "lens": counts}
