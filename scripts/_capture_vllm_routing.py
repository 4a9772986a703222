"""Cases of routing to experts, of sorting by expert, and of balancing experts."""

import numpy as np
from _capture_vllm import Arrays, Tensors, case


def choices(rng: np.random.Generator, tokens: int, experts: int, slots: int) -> np.ndarray:
    """Each token's experts, all different, int32."""
    return np.stack([rng.permutation(experts)[:slots] for _ in range(tokens)]).astype(np.int32)


# ---------------------------------------------------------------- routing
def wide_logits(rng: np.random.Generator, tokens: int, experts: int) -> np.ndarray:
    """Logits of which row 1 has large ones of both signs and most of row 2 are negative; no two of a row are equal."""
    x = (rng.standard_normal((tokens, experts)) * 3).astype(np.float32)
    x[1, :4] = 30, -30, 100, 20
    x[2] -= 2
    return x


def mild_logits(rng: np.random.Generator, tokens: int, experts: int) -> np.ndarray:
    """The same closer together: no two sigmoids are equal in float32."""
    return wide_logits(rng, tokens, experts) / 8


def tied_logits(rng: np.random.Generator, tokens: int, experts: int) -> np.ndarray:
    """Logits of few values, each many times; row 0 has but one."""
    x = rng.integers(-2, 3, (tokens, experts)).astype(np.float32)
    x[0] = 0.5
    return x


def router(name: str, call, inputs, experts: int, slots: int, **params) -> None:
    """Add `moe/router_NAME` for 5 tokens; `call` gets the tensors and hidden states that only have a length."""
    shape = 5, slots
    outputs = {"weights": ("float32", *shape), "ids": ("int32", *shape)}

    @case("moe", f"router_{name}", {"topk": slots, **params}, lambda rng: inputs(rng, 5, experts), outputs)
    def run(t: Tensors) -> Tensors:
        import torch

        hidden = torch.zeros(5, 64, dtype=torch.bfloat16, device="cuda")
        weights, ids, *_ = call(t, hidden)
        return {"weights": weights, "ids": ids}


def plain(name: str, scoring: str, renormalize: bool, logits=wide_logits) -> None:
    """Add a router without groups or bias."""

    def call(t: Tensors, hidden):
        from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk

        return fused_topk(hidden, t["logits"], 4, renormalize, scoring_func=scoring)

    def inputs(*shape) -> Arrays:
        return {"logits": logits(*shape)}

    router(name, call, inputs, 32, 4, kernel="fused_topk", scoring=scoring, renormalize=renormalize)


plain("softmax_wide", "softmax", False)
plain("softmax_wide_renorm", "softmax", True)
plain("sigmoid_mild_renorm", "sigmoid", True, mild_logits)
plain("softmax_ties", "softmax", True, tied_logits)


def grouped(name: str, scoring: str, bias: bool) -> None:
    """Add a router that keeps 4 of 8 groups of 8 experts; with a bias it is vLLM's kernel, else its torch form."""
    factor = 2.5 if bias else 1.0

    def call(t: Tensors, hidden):
        from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import grouped_topk

        return grouped_topk(hidden, t["logits"], 4, True, 8, 4, scoring, factor, t.get("bias"))

    def inputs(rng, tokens, experts) -> Arrays:
        arrays = {"logits": rng.standard_normal((tokens, experts)).astype(np.float32)}
        return arrays | ({"bias": (0.1 * rng.standard_normal(experts)).astype(np.float32)} if bias else {})

    params = {"kernel": "grouped_topk", "scoring": scoring, "renormalize": True}
    router(name, call, inputs, 64, 4, **params, n_group=8, topk_group=4, routed_scaling_factor=factor)


grouped("grouped_small_sigmoid_bias", "sigmoid", True)
grouped("grouped_small_softmax_bias", "softmax", True)
grouped("grouped_small_softmax", "softmax", False)


def softplus(name: str, table: bool) -> None:
    """Add DeepSeek-V4's router over 64 experts: by score and bias, or by a table of tokens."""

    def call(t: Tensors, hidden):
        from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import fused_topk_bias

        more = {"input_tokens": t["tokens"], "hash_indices_table": t["table"]} if table else {}
        given = hidden, t["logits"], "sqrtsoftplus", t.get("bias"), 4, True
        return fused_topk_bias(*given, routed_scaling_factor=1.5, **more)

    def inputs(rng, tokens, experts) -> Arrays:
        arrays = {"logits": wide_logits(rng, tokens, experts)}
        if table:
            return arrays | {"tokens": rng.integers(0, 12, tokens), "table": choices(rng, 12, experts, 4)}
        return arrays | {"bias": (0.1 * rng.standard_normal(experts) + 8).astype(np.float32)}

    params = {"kernel": "fused_topk_bias", "scoring": "sqrtsoftplus", "renormalize": True}
    router(name, call, inputs, 64, 4, **params, routed_scaling_factor=1.5)


softplus("sqrtsoftplus_wide_bias8", False)
softplus("hash_wide", True)


# ---------------------------------------------------------------- sorting
COUNTS = (7, 0, 16, 1, 2, 0, 0, 0)
"""Slots of each expert: none, a full block, less than one."""


def slots_of_experts(rng: np.random.Generator) -> Arrays:
    """Ids of 13 tokens and 2 slots in any order, with `COUNTS`."""
    ids = rng.permutation(np.repeat(np.arange(len(COUNTS)), COUNTS))
    return {"topk_ids": ids.reshape(13, 2).astype(np.int32)}


BLOCKS = sum(-(-n // 16) for n in COUNTS)


@case(
    "moe",
    "align_block_size_empty_experts",
    {"kernel": "moe_align_block_size", "block_size": 16, "num_experts": len(COUNTS)},
    slots_of_experts,
    {
        "sorted_token_ids": ("int32", 16 * BLOCKS),
        "expert_ids": ("int32", BLOCKS),
        "num_tokens_post_padded": ("int32", 1),
    },
)
def align(t: Tensors) -> Tensors:
    """Cut to what is in use; the rest is not written."""
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

    slots, experts, padded = moe_align_block_size(t["topk_ids"], 16, len(COUNTS))
    return {
        "sorted_token_ids": slots[: 16 * BLOCKS],
        "expert_ids": experts[:BLOCKS],
        "num_tokens_post_padded": padded,
    }


def permuted(rng: np.random.Generator) -> Arrays:
    """Seven tokens for three of the first six experts each."""
    return {
        "x": rng.standard_normal((7, 128)).astype("bfloat16"),
        "topk_ids": choices(rng, 7, 6, 3),
        "topk_weights": rng.uniform(0, 1, (7, 3)).astype(np.float32),
    }


@case(
    "moe",
    "permute_unpermute_empty_experts",
    {"kernel": "moe_permute + moe_unpermute", "scale_between": 2.0},
    permuted,
    {
        "permuted": ("bfloat16", 21, 128),
        "expert_first_token_offset": ("int64", 9),
        "inv_permuted_idx": ("int32", 21),
        "o": ("bfloat16", 7, 128),
    },
)
def permute(t: Tensors) -> Tensors:
    """Rows by expert, doubled, and added up with their weights; experts 6 and 7 of 8 have none."""
    import torch
    from vllm.model_executor.layers.fused_moe.moe_permute_unpermute import moe_permute, moe_unpermute

    rows, _, offsets, inverse, *_ = moe_permute(t["x"], None, t["topk_ids"], 8)
    o = torch.full_like(t["x"], torch.nan)
    moe_unpermute(o, rows * 2, t["topk_weights"], inverse, offsets)
    return {"permuted": rows, "expert_first_token_offset": offsets, "inv_permuted_idx": inverse, "o": o}


# ---------------------------------------------------------------- balancing
def loads(rng: np.random.Generator) -> Arrays:
    """Three layers: different loads, a very uneven one, and loads of which some are equal and some zero."""
    load = np.stack([rng.choice(np.arange(1, 100000), 16, replace=False) for _ in range(3)]).astype(np.float32)
    load[1, 5] = 5000011
    load[2, ::3], load[2, 1::3] = 0, 40
    return {"load": load}


@case(
    "moe",
    "eplb_rebalance_uneven",
    {"kernel": "DefaultEplbPolicy", "num_replicas": 24, "num_groups": 4, "num_nodes": 2, "num_ranks": 4},
    loads,
    {"physical_to_logical": ("int64", 3, 24)},
)
def eplb(t: Tensors) -> Tensors:
    """On the CPU, as vLLM does it."""
    from vllm.distributed.eplb.policy.default import DefaultEplbPolicy

    found = DefaultEplbPolicy.rebalance_experts(t["load"].cpu(), 24, 4, 2, 4)
    return {"physical_to_logical": found[0] if isinstance(found, tuple) else found}
