import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxattn.nn import FusedMoE, GatedMLP, MoEConfig
from jaxattn.quant import mx

EPS = float(jnp.finfo(jnp.float32).eps)
SMALL = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 64, "vocab_size": 50}
V2 = SMALL | {
    "model_type": "deepseek_v2",
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "routed_scaling_factor": 16.0,
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": False,
    "first_k_dense_replace": 1,
}
V3 = V2 | {
    "model_type": "deepseek_v3",
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
}
V4 = SMALL | {
    "model_type": "deepseek_v4",
    "n_routed_experts": 16,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "num_hash_layers": 3,
    "swiglu_limit": 10.0,
}
OSS = SMALL | {"model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 4, "swiglu_limit": 7.0}
QWEN = SMALL | {
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "decoder_sparse_step": 1,
}
MODELS = {"V2": (V2, 1), "V3": (V3, 3), "V4-hash": (V4, 0), "V4": (V4, 3), "gpt-oss": (OSS, 0), "Qwen3": (QWEN, 0)}


def layer(config, number, dtype=jnp.float32, **options):
    made = FusedMoE.from_hf(config, number, dtype=dtype, rngs=nnx.Rngs(0), **options)
    rng = np.random.default_rng(1)
    for name in ("gate_bias", "correction_bias", "w13_bias", "w2_bias"):
        if (p := getattr(made, name)) is not None:
            p[...] = jnp.asarray(rng.standard_normal(p.shape), p.dtype)
    return made


def values(moe, name):
    """A weight in float64."""
    w = getattr(moe, name)[...]
    return (
        np.float64(w)
        if moe.config.format == "none"
        else np.float64(mx.dequantize(w, getattr(moe, f"{name}_scale")[...]))
    )


def swiglu(h, c):
    oai = c.activation == "swigluoai"
    gate, up = (h[::2], h[1::2]) if oai else (h[: len(h) // 2], h[len(h) // 2 :])
    if c.limit:
        gate, up = np.minimum(gate, c.limit), np.clip(up, -c.limit, c.limit)
    return gate / (1 + np.exp(-(1.702 if oai else 1) * gate)) * (up + oai)


def dense(moe, x, tokens):
    """A loop over tokens and experts in float64, without quantization."""
    c = moe.config
    w13, w2, gate = values(moe, "w13"), values(moe, "w2"), np.float64(moe.gate[...])
    bias = [0.0 if b is None else np.float64(b[...]) for b in (moe.w13_bias, moe.w2_bias, moe.gate_bias)]
    o = np.zeros(x.shape)
    for t, row in enumerate(np.float64(x)):
        logits = gate @ row + bias[2]
        softmax = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        s = {"softmax": softmax, "sigmoid": 1 / (1 + np.exp(-logits))}.get(c.scoring, np.sqrt(np.log1p(np.exp(logits))))
        if c.vocab:
            ids = np.asarray(moe.table[...])[tokens[t]]
        else:
            choice = s + (0 if moe.correction_bias is None else np.float64(moe.correction_bias[...]))
            parts = np.sort(choice.reshape(c.num_groups, -1), -1)[:, ::-1]
            best = parts[:, :2].sum(-1) if c.correction_bias else parts[:, 0]
            kept = np.isin(np.arange(c.num_groups), np.argsort(-best)[: c.kept_groups])
            choice = np.where(np.repeat(kept, len(choice) // c.num_groups), choice, -np.inf)
            ids = np.argsort(-choice)[: c.top_k]
        weights = s[ids] / (s[ids].sum() if c.renormalize else 1) * c.scaling
        for e, w in zip(ids, weights, strict=True):
            h = w13[e] @ row + (bias[0] if np.ndim(bias[0]) == 0 else bias[0][e])
            o[t] += w * (w2[e] @ swiglu(h, c) + (bias[1] if np.ndim(bias[1]) == 0 else bias[1][e]))
        if moe.shared_w13 is not None:
            o[t] += np.float64(moe.shared_w2[...]) @ swiglu(np.float64(moe.shared_w13[...]) @ row, c)
    return o


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_is_a_dense_loop_over_experts(name, rng):
    config, number = MODELS[name]
    moe = layer(config, number, changes={"act_group": None})
    x = jnp.asarray(rng.standard_normal((7, 64)), jnp.float32)
    tokens = jnp.asarray(rng.integers(0, 50, 7), jnp.int32) if moe.table is not None else None
    y, expected = np.asarray(moe(x, tokens)), dense(moe, np.asarray(x), tokens)
    rms = np.sqrt(np.mean((y - expected) ** 2) / np.mean(expected**2))
    assert rms < 8 * EPS


def test_configurations_of_the_models():
    v3 = MoEConfig.from_hf(V3, 3)
    assert (v3.scoring, v3.num_groups, v3.kept_groups, v3.correction_bias) == ("sigmoid", 4, 2, True)
    assert (v3.scaling, v3.scaling_on, v3.shared_width, v3.format) == (2.5, None, 64, "none")
    v2 = MoEConfig.from_hf(V2, 1)
    assert (v2.scoring, v2.renormalize, v2.correction_bias, v2.shared_width) == ("softmax", False, False, 128)
    v4, hashed = MoEConfig.from_hf(V4, 3), MoEConfig.from_hf(V4, 2)
    assert (v4.scoring, v4.limit, v4.format, v4.act_group, v4.weight_on) == (
        "sqrtsoftplus",
        10,
        "mxfp4",
        32,
        "activation",
    )
    assert (v4.vocab, v4.correction_bias, hashed.vocab, hashed.correction_bias) == (None, True, 50, False)
    assert MoEConfig.from_hf(V4 | {"expert_dtype": "fp8"}, 3).format == "fp8_block"
    assert MoEConfig.from_hf(V4 | {"quantization_config": {"moe_quant_algo": "NVFP4"}}, 3).format == "nvfp4"
    oss = MoEConfig.from_hf(SimpleNamespace(**OSS))
    assert (oss.activation, oss.limit, oss.gate_bias, oss.expert_bias) == ("swigluoai", 7, True, True)
    assert MoEConfig.from_hf(QWEN, format="int8").format == "int8"


def test_shared_experts_may_be_a_module(rng):
    config = MoEConfig.from_hf(V3, 3)
    built_in = FusedMoE(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    shared = GatedMLP(64, config.shared_width, dtype=jnp.float32, rngs=nnx.Rngs(1))
    apart = FusedMoE(dataclasses.replace(config, shared_width=0), shared=shared, dtype=jnp.float32, rngs=nnx.Rngs(0))
    gate, up = jnp.split(built_in.shared_w13[...], 2)
    shared.gate_proj.kernel[...], shared.up_proj.kernel[...] = gate.T, up.T
    shared.down_proj.kernel[...] = built_in.shared_w2[...].T
    x = jnp.asarray(rng.standard_normal((5, 64)), jnp.float32)
    truth = built_in(x)
    assert np.abs(apart(x) - truth).max() <= 64 * EPS * np.abs(truth).max()
    assert apart.placement == built_in.placement == "output"


def test_float16_divides_the_shared_experts():
    placements = {dtype: layer(V3, 3, dtype).placement for dtype in (jnp.float16, jnp.bfloat16)}
    assert placements == {jnp.float16: "shared", jnp.bfloat16: "output"}
    assert layer(V4, 3, jnp.float16).placement == "weights"


def test_the_load_is_counted_without_padding(rng):
    moe = layer(QWEN, 0, track_load=True)
    x = jnp.asarray(rng.standard_normal((6, 64)), jnp.float32)
    step = nnx.jit(lambda moe, x, valid: moe(x, valid=valid))
    full = step(moe, x, 6)
    y = step(moe, x.at[4:].set(0), 4)
    ids = np.asarray(moe.route(x)[1])
    expected = np.bincount(ids.reshape(-1), minlength=16) + np.bincount(ids[:4].reshape(-1), minlength=16)
    np.testing.assert_array_equal(moe.load[...], expected)
    np.testing.assert_array_equal(y[:4], full[:4])
    assert not y[4:].any()


def test_bc67_a_token_does_not_depend_on_its_neighbours(rng):
    moe = layer(V4, 3, jnp.bfloat16)
    x = jnp.asarray(rng.standard_normal((9, 64)), jnp.bfloat16)
    np.testing.assert_array_equal(np.float32(moe(x)[2:3]), np.float32(moe(x[2:3])))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: MoEConfig.from_hf({"model_type": "llama"}),
            ValueError,
            "model_type must be one of deepseek_v2, .* got 'llama'",
        ),
        (
            lambda: MoEConfig.from_hf(V3, 2),
            ValueError,
            "layer 2 of this deepseek_v3 is dense; the first mixture is layer 3",
        ),
        (
            lambda: layer(V3, 3, shared=GatedMLP(64, 64, rngs=nnx.Rngs(0))),
            ValueError,
            "shared experts are a module or a width, got both; set shared_width=0",
        ),
        (lambda: MoEConfig.from_hf(QWEN, 1), ValueError, "layer 1 of this qwen3_moe is dense"),
        (
            lambda: MoEConfig.from_hf({"model_type": "qwen3_moe"}),
            ValueError,
            "the configuration must have 'hidden_size'",
        ),
        (
            lambda: layer(QWEN, 0)(jnp.zeros((2, 32))),
            ValueError,
            r"x must be tokens \[T M\] with M=64, got shape \(2, 32\)",
        ),
        (
            lambda: layer(QWEN, 0)(jnp.zeros((2, 64), jnp.bfloat16)),
            TypeError,
            "x must have dtype float32, got bfloat16; cast it to the layer's dtype",
        ),
        (lambda: layer(V4, 0)(jnp.zeros((2, 64))), ValueError, "this layer needs the token ids; pass tokens"),
        (
            lambda: layer(QWEN, 0)(jnp.zeros((2, 64)), jnp.zeros(2, jnp.int32)),
            ValueError,
            "this layer knows no token ids; leave tokens out",
        ),
        (
            lambda: FusedMoE(dataclasses.replace(MoEConfig.from_hf(QWEN), width=0), rngs=nnx.Rngs(0)),
            ValueError,
            "width must be at least 1, got 0",
        ),
    ],
)
def test_messages(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_gradients_reach_every_parameter(rng):
    moe = layer(V3, 3)
    x = jnp.asarray(rng.standard_normal((5, 64)), jnp.float32)
    grads = nnx.grad(lambda m: jnp.sum(m(x) ** 2))(moe)
    for path, g in nnx.to_flat_state(grads):
        assert jnp.abs(g[...]).max() > 0, path
    assert jax.tree.leaves(grads)
