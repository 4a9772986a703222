"""Configurations of the models: what is read, and every option that is refused."""

import json
from pathlib import Path

import pytest

from jaxattn.models import CheckpointError, DeepseekV3Config, GptOssConfig, load_model

DATA = Path(__file__).resolve().parents[2] / "parity" / "data" / "models"
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}


def stored(name):
    return json.loads((DATA / name / "config.json").read_text())


def test_deepseek_v3_of_deepseek():
    """The configuration that DeepSeek publishes, by hand."""
    published = {
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "ep_size": 1,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "topk_method": "noaux_tc",
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "hidden_act": "silu",
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": YARN | {"beta_fast": 32, "beta_slow": 1},
        "attention_bias": False,
        "tie_word_embeddings": False,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "torch_dtype": "bfloat16",
    }
    config = DeepseekV3Config.from_hf(published)
    assert (config.max_positions, config.q_rank, config.kv_rank, config.shared_width) == (163840, 1536, 512, 2048)
    assert [m is None for m in config.moe] == [True] * 3 + [False] * 58
    moe = config.moe[-1]
    assert moe is not None
    assert (moe.format, moe.ue8m0, moe.num_groups, moe.kept_groups, moe.shared_width) == ("fp8_block", False, 8, 4, 0)
    assert config.extra_layers == 1
    assert f"{config.rope.softmax_scale(192):.7f}" == "0.1352338"


def test_gpt_oss_windows_alternate_by_default():
    config = stored("gpt_oss")
    del config["layer_types"]
    assert GptOssConfig.from_hf(config).windows == (5, None, 5)
    assert GptOssConfig.from_hf(stored("gpt_oss")).moe.format == "mxfp4"


V32 = {"model_type": "deepseek_v32", "index_n_heads": 3, "index_head_dim": 16, "index_topk": 2048}
V3, V2, OSS = "deepseek_v3", "deepseek_v2", "gpt_oss"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            V3,
            {"model_type": "llama"},
            "model_type must be 'deepseek_v3' or 'deepseek_v32' or 'deepseek_v2', got 'llama'",
        ),
        (V3, {"kv_lora_rank": None}, "the configuration must have 'kv_lora_rank'; it has none"),
        (V3, {"hidden_size": 64.5}, "'hidden_size' must be a positive integer, got 64.5"),
        (V3, {"rms_norm_eps": "small"}, "'rms_norm_eps' must be a number, got 'small'"),
        (V3, {"hidden_act": "gelu"}, "'hidden_act' must be 'silu', got 'gelu'"),
        (V3, {"scoring_func": "softmax"}, "'scoring_func' must be 'sigmoid', got 'softmax'"),
        (V2, {"norm_topk_prob": True}, "'norm_topk_prob' must be False, got True"),
        (V2, {"topk_method": "noaux_tc"}, "'topk_method' must be 'greedy' or 'group_limited_greedy', got 'noaux_tc'"),
        (V3, {"tie_word_embeddings": True}, "'tie_word_embeddings' must be False, got True"),
        (V3, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "the type must be 'default' or 'yarn', got 'linear'"),
        (V3, {"rope_scaling": YARN | {"short_factor": 1}}, "'rope_scaling' knows .*, got short_factor as well"),
        (V3, {"rope_scaling": "yarn"}, "'rope_scaling' must be a table, got 'yarn'"),
        (V3, {"rope_scaling": YARN | {"mscale": 0}}, "'mscale' and 'mscale_all_dim' must both be given or both be"),
        (V3, {"rope_scaling": YARN | {"attention_factor": 1.5}}, "'attention_factor' is not supported; leave it out"),
        (V3, {"quantization_config": {"quant_method": "awq"}}, "'quant_method' must be 'fp8' or 'mxfp4', got 'awq'"),
        (V3, {"quantization_config": {"quant_method": "mxfp4"}}, "'quant_method' must be 'fp8', got 'mxfp4'"),
        (
            V3,
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            r"'weight_block_size' must be \[128, 128\] or \(128, 128\), got \[64, 64\]",
        ),
        (
            V3,
            {"quantization_config": {"quant_method": "fp8"}},
            "FP8 experts need a moe_intermediate_size of a multiple of 128, got 32",
        ),
        (
            V3,
            {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.mlp"]}},
            "modules_to_not_convert may name lm_head, gate, embed_tokens, got model.layers.0.mlp",
        ),
        (V3, {"model_type": "deepseek_v32"}, "the configuration must have 'index_n_heads'; it has none"),
        (V3, V32 | {"index_topk": 0}, "'index_topk' must be a positive integer, got 0"),
        (V3, V32 | {"q_lora_rank": None}, "the configuration must have 'q_lora_rank'; it has none"),
        (OSS, {"model_type": "deepseek_v3"}, "model_type must be 'gpt_oss', got 'deepseek_v3'"),
        (OSS, {"swiglu_alpha": 1.5}, "'swiglu_alpha' must be 1.702, got 1.5"),
        (OSS, {"layer_types": ["full_attention"]}, "'layer_types' must name sliding_attention or full_attention for 3"),
        (OSS, {"quantization_config": {"quant_method": "fp8"}}, "'quant_method' must be 'mxfp4', got 'fp8'"),
    ],
)
def test_options_that_would_change_the_mathematics_are_refused(name, changes, message):
    reader = GptOssConfig if name == OSS else DeepseekV3Config
    with pytest.raises(ValueError, match=f"{reader.__name__}.*: {message}"):
        reader.from_hf(stored(name) | changes)


def write(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").symlink_to(DATA / V3 / "model.safetensors")


def test_loading_names_the_file(tmp_path):
    write(tmp_path, stored(V3) | {"model_type": "llama"})
    known = "deepseek_v2 or deepseek_v3 or deepseek_v32 or deepseek_v4 or gpt_oss"
    message = f"config.json: model_type must be {known}, got 'llama'"
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(stored(V3) | {"hidden_act": "gelu"}))
    with pytest.raises(
        CheckpointError, match=r"config\.json: DeepseekV3Config: 'hidden_act' must be 'silu', got 'gelu'"
    ):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(stored(V3) | {"torch_dtype": "float16"}))
    with pytest.raises(CheckpointError, match="the model's dtype must be bfloat16 or float32, got 'float16'; name one"):
        load_model(tmp_path)


def test_a_checkpoint_of_another_architecture_is_refused_as_a_whole(tmp_path):
    write(tmp_path, stored(OSS) | {"torch_dtype": "bfloat16"})
    with pytest.raises(CheckpointError) as e:
        load_model(tmp_path, progress=False)
    message = str(e.value)
    assert "GptOssForCausalLM: the checkpoint" in message
    assert "model.layers.0.self_attn.sinks: missing; must have shape [8]" in message
    assert "model.safetensors: model.layers.0.self_attn.q_a_proj.weight: unknown" in message
