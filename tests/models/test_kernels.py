"""Which kernel every call of the models takes on an sm_90a GPU, at the sizes that are published.

Models are traced from shapes alone: nothing is allocated, compiled or computed. They have a layer of each kind.
What a kernel refuses here, it refuses for good.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxattn import _checks, _mechanism
from jaxattn.models import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
)
from jaxattn.nn import FusedMoE

CAPACITY = 8192
"""Tokens of a request."""
DECODE_ONE, DECODE, PREFILL = (1, 1), (64, 64), (4, 4096)
"""Requests and rows of a step."""
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "quantization_config": FP8,
}
V32 = V3 | {
    "model_type": "deepseek_v32",
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "quantization_config": FP8 | {"scale_fmt": "ue8m0"},
}
V4 = {
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 3,
    "compress_ratios": [0, 4, 128, 0],
    "num_hash_layers": 1,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.5,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "max_position_embeddings": 1048576,
    "quantization_config": FP8 | {"scale_fmt": "ue8m0"},
}
V4_PRO = V4 | {
    "hidden_size": 7168,
    "moe_intermediate_size": 3072,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "index_topk": 1024,
    "n_routed_experts": 384,
    "routed_scaling_factor": 2.5,
}
OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 2,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 131072,
    "quantization_config": {"quant_method": "mxfp4"},
}
QWEN = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}


def v4(config):
    return DeepseekV4Config.from_hf(config, max_positions=CAPACITY, chunk=4096)


MODELS: dict[str, Callable[[], nnx.Module]] = {
    "deepseek-v3": lambda: DeepseekV3ForCausalLM(DeepseekV3Config.from_hf(V3), rngs=nnx.Rngs(0)),
    "deepseek-v3.2": lambda: DeepseekV3ForCausalLM(DeepseekV3Config.from_hf(V32), rngs=nnx.Rngs(0)),
    "deepseek-v4-flash": lambda: DeepseekV4ForCausalLM(v4(V4), rngs=nnx.Rngs(0)),
    "deepseek-v4-pro": lambda: DeepseekV4ForCausalLM(v4(V4_PRO), rngs=nnx.Rngs(0)),
    "gpt-oss-20b": lambda: GptOssForCausalLM(GptOssConfig.from_hf(OSS), rngs=nnx.Rngs(0)),
}
TABLE = "routing by a table is a gather, which is left to XLA"
"""DeepSeek-V4's first layers."""
_V4 = {
    "mosaic": "compressor gated_activation grouped_projection indexer indexer_q inv_rope_fp8_quant mhc_head mhc_post "
    "mhc_pre q_kv_rms_norm qnorm_rope_kv_insert quantize_fp8 rms_norm_quant router scaled_matmul sparse_mla",
    "decoded": "experts",
    TABLE: "router",
    "no kernel": "routed_scaling",
}
TAKEN = {
    "deepseek-v3": {
        "mosaic": "experts gated_activation latent_cache_write mla q_kv_rms_norm quantize_fp8 rms_norm_quant rope "
        "router scaled_matmul",
        "no kernel": "routed_scaling",
    },
    "deepseek-v3.2": {
        "mosaic": "experts gated_activation indexer indexer_q latent_cache_write q_kv_rms_norm quantize_fp8 "
        "rms_norm_quant rope router scaled_matmul sparse_mla",
        "no kernel": "routed_scaling",
    },
    "deepseek-v4-flash": _V4,
    "deepseek-v4-pro": _V4,
    "gpt-oss-20b": {
        "mosaic": "cache_write paged_attention rms_norm_quant rope router",
        "decoded": "experts",
        "no kernel": "routed_scaling",
    },
}
"""Model -> kernel, or what all kernels say -> ops. A sum of two tensors, `routed_scaling`, is XLA's to fuse."""


# ---------------------------------------------------------------- what is taken
def choice(mechanism, args):
    """The first kernel that takes these arguments, or the reasons of all."""
    reasons = {name: kernel.why_not(**args) for name, kernel in mechanism.kernels.items()}
    taken = [name for name, reason in reasons.items() if reason is None]
    return taken[0] if taken else "; ".join(map(str, reasons.values())) or "no kernel"


RESULTS = {}
"""What references return, which take long to trace: by name, shapes and options."""


def result(mechanism, args):
    if mechanism.name == "scaled_matmul":
        return jax.ShapeDtypeStruct((len(args["a"]), len(args["b"])), args["out_dtype"])
    arrays = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in args.items() if _checks.is_array(x)}
    static = {name: x for name, x in args.items() if name not in arrays}
    key = (mechanism.name, *arrays.items(), *static.items())
    if key not in RESULTS:
        RESULTS[key] = jax.eval_shape(lambda arrays: mechanism.reference(**arrays, **static), arrays)
    return RESULTS[key]


@pytest.fixture
def taken(monkeypatch):
    """Choice -> ops, filled while something is traced; results are zeros."""
    found, inside = {}, []

    def run(mechanism, args, implementation, config=None):
        assert implementation is config is None
        if inside or mechanism.name == "softmax_scale":  # a reference's own, of Python numbers
            return mechanism.reference(**args)
        found.setdefault(choice(mechanism, args), set()).add(mechanism.name)
        inside.append(mechanism.name)
        out = result(mechanism, args)
        inside.pop()
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out)

    monkeypatch.setattr(_mechanism, "run", run)
    return found


def ops(table):
    return {choice: set(names.split()) for choice, names in table.items()}


def integers(*sizes):
    return [jax.ShapeDtypeStruct((n,), jnp.int32) for n in sizes]


def step(requests, rows):
    """A step of a model, multi-token prediction included."""

    def run(model, tokens, lengths, start):
        cache, tables = model.make_cache(requests, CAPACITY)
        batch = model.make_batch(tables, lengths, start, tokens=rows)
        if not hasattr(model, "mtp"):
            return model(tokens, cache, batch)
        streams = model.streams(tokens, cache, batch)
        return model.logits(streams), model.predict(0, tokens, streams, cache, batch)

    return run, integers(rows, requests, requests + 1)


@functools.cache
def split(make):
    """A module's graph and the shapes of its variables."""
    return nnx.split(nnx.eval_shape(make))


def trace(make, run, args):
    """`run(module, *args)` on shapes."""
    graph, state = split(make)
    jax.eval_shape(lambda state, *args: run(nnx.merge(graph, state), *args), state, *args)


# ---------------------------------------------------------------- whole models
@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param("deepseek-v3", DECODE_ONE, id="v3-decode-one"),
        pytest.param("deepseek-v3", DECODE, id="v3-decode"),
        pytest.param("deepseek-v3", PREFILL, id="v3-prefill"),
        pytest.param("deepseek-v4-flash", DECODE, id="v4-flash-decode"),
        pytest.param("deepseek-v4-flash", PREFILL, id="v4-flash-prefill"),
        pytest.param("deepseek-v3.2", DECODE, id="v3.2-decode"),
        pytest.param("deepseek-v3.2", PREFILL, id="v3.2-prefill"),
        pytest.param("deepseek-v4-pro", DECODE_ONE, id="v4-pro-decode-one"),
        pytest.param("gpt-oss-20b", DECODE_ONE, id="gpt-oss-decode-one"),
        pytest.param("gpt-oss-20b", DECODE, id="gpt-oss-decode"),
        pytest.param("gpt-oss-20b", PREFILL, id="gpt-oss-prefill"),
    ],
)
def test_what_a_step_takes(name, size, taken):
    trace(MODELS[name], *step(*size))
    assert taken == ops(TAKEN[name])


def test_what_an_expanded_prefill_takes(taken):
    """Keys and values of every head, DeepSeek-V3."""

    def run(model, x, lengths, start):
        cache, tables = model.make_cache(4, CAPACITY)
        batch = model.make_batch(tables, lengths, start, tokens=4096)
        return model.model.layers[0].self_attn(x, cache[0], batch, expand=True)

    x = jax.ShapeDtypeStruct((4096, 7168), jnp.bfloat16)
    trace(MODELS["deepseek-v3"], run, [x, *integers(4, 5)])
    assert taken == {
        "mosaic": {"attention", "latent_cache_write", "merge_states", "q_kv_rms_norm", "quantize_fp8", "rope"}
        | {"scaled_matmul"}
    }


# ---------------------------------------------------------------- experts
V2_LITE = {
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "topk_method": "greedy",
}
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
LAYERS = {
    "qwen3-30b-a3b": (QWEN, {}, "mosaic"),
    "qwen3-235b-a22b": (QWEN | {"hidden_size": 4096, "moe_intermediate_size": 1536}, {}, "mosaic"),
    "deepseek-v2-lite": (V2_LITE, {}, "mosaic"),
    "mixtral-8x7b": (MIXTRAL, {}, "mosaic"),
    "gpt-oss-120b": (OSS | {"num_local_experts": 128}, {}, "decoded"),
    "gpt-oss-20b-bf16": (OSS, {"format": "none"}, "mosaic"),
    "deepseek-v3-int8": (V3, {"format": "int8"}, "mosaic"),
    "deepseek-v4-flash-base-fp8": (V4 | {"expert_dtype": "fp8"}, {}, "mosaic"),
}
"""Layer -> configuration, changes of its `MoEConfig`, and what multiplies its experts."""


@pytest.mark.parametrize("name", LAYERS)
def test_what_experts_take(name, taken):
    config, changes, kernel = LAYERS[name]

    def make():
        return FusedMoE.from_hf(config, 3, changes=changes, rngs=nnx.Rngs(0))

    for tokens in (1, 64, 4096):
        x = jax.ShapeDtypeStruct((tokens, config["hidden_size"]), jnp.bfloat16)
        trace(make, lambda layer, x: layer(x), [x])
    for op, wanted in {"experts": kernel, "router": "mosaic"}.items():
        assert [choice for choice, names in taken.items() if op in names] == [wanted]
