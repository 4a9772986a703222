"""Tiny random checkpoints in Hugging Face's layout, one of each kind that the models read.

    python scripts/make_tiny_checkpoints.py OUT [--only NAME]

DeepSeek-V4's, with every kind of layer, hash routing, an MTP block, FP8 and MXFP4, is written only if it is named:
`--only deepseek_v4`; `parity/models/tiny_deepseek_v4.py` makes it, and the repository does not store it.

Sizes are small and odd on purpose: V2 has biases, value heads differ from key heads, windows are shorter than prompts,
YaRN's magnitudes do not cancel, blocks of FP8 weights are cut off. Equal arguments give equal bytes. Runs on Python
3.11 and needs numpy and ml_dtypes.
"""

import argparse
import hashlib
import json
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from parity.models import tiny_deepseek_v4

BF16, FP8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
CODES = {"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float32": "F32", "uint8": "U8", "int64": "I64"}
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}

V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rope_scaling": YARN | {"original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 0.8},
    "num_nextn_predict_layers": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
V3_FP8 = V3 | {
    "hidden_size": 160,
    "intermediate_size": 144,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "vocab_size": 64,
    "num_nextn_predict_layers": 1,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}
V2 = V3 | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_hidden_layers": 2,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "attention_bias": True,
    "n_group": 3,
    "topk_group": 2,
    "topk_method": "group_limited_greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 4.0,
    "rope_scaling": YARN | {"original_max_position_embeddings": 32, "mscale": 0.707, "mscale_all_dim": 0.707},
}
V2_LITE = V2 | {
    "attention_bias": False,
    "q_lora_rank": None,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "swiglu_limit": 1.5,
    "attention_bias": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 150000.0,
    "rope_scaling": YARN | {"original_max_position_embeddings": 16, "truncate": False},
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
CHECKPOINTS = {
    "deepseek_v3": (V3, 1),
    "deepseek_v3_fp8": (V3_FP8, 2),
    "deepseek_v2": (V2, 1),
    "deepseek_v2_lite": (V2_LITE, 1),
    "gpt_oss": (OSS, 2),
}
"""Name -> configuration, number of shards."""
V4 = "deepseek_v4"
LENGTHS = (13, 6)
"""Tokens of the prompts beside each checkpoint; the first is longer than the windows."""


class Tensors:
    """Random tensors under names, drawn in the order in which they are asked for."""

    def __init__(self, seed: str):
        """No tensors yet."""
        self.rng = np.random.default_rng(list(hashlib.sha256(seed.encode()).digest()))
        self.found = {}

    def normal(self, name, *shape, scale, mean=0.0, dtype=BF16):
        """A tensor of normally distributed numbers."""
        self.found[name] = (mean + scale * self.rng.standard_normal(shape)).astype(dtype)

    def norm(self, name, size):
        """The weight of a norm."""
        self.normal(f"{name}.weight", size, scale=0.2, mean=1.0)

    def linear(self, name, outputs, inputs, *, fp8=False, bias=False):
        """Weight [outputs, inputs] whose products have a variance of about 1."""
        scale = inputs**-0.5
        if fp8:
            blocks = -(-outputs // 128), -(-inputs // 128)
            self.normal(f"{name}.weight", outputs, inputs, scale=64.0, dtype=FP8)
            factor = scale / 64 * np.exp2(self.rng.uniform(-1, 1, blocks))
            self.found[f"{name}.weight_scale_inv"] = factor.astype(np.float32)
        else:
            self.normal(f"{name}.weight", outputs, inputs, scale=scale)
        if bias:
            self.normal(f"{name}.bias", outputs, scale=0.5)

    def mlp(self, name, features, width, fp8):
        """Gate, value and down projections."""
        for part in ("gate_proj", "up_proj"):
            self.linear(f"{name}.{part}", width, features, fp8=fp8)
        self.linear(f"{name}.down_proj", features, width, fp8=fp8)

    def mxfp4(self, name, experts, outputs, inputs):
        """Random codes, and scales around what gives products a variance of about 1."""
        self.found[f"{name}_blocks"] = self.rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        middle = 127 + int(np.round(np.log2(inputs**-0.5 / 2.6)))
        scales = self.rng.integers(middle - 1, middle + 2, (experts, outputs, inputs // 32))
        self.found[f"{name}_scales"] = scales.astype(np.uint8)


def deepseek(name, c):
    """DeepSeek-V2 or V3."""
    t, fp8 = Tensors(name), "quantization_config" in c
    M, H = c["hidden_size"], c["num_attention_heads"]
    key, value = c["qk_nope_head_dim"] + c["qk_rope_head_dim"], c["v_head_dim"]
    R, bias = c["kv_lora_rank"], c.get("attention_bias", False)
    t.normal("model.embed_tokens.weight", c["vocab_size"], M, scale=1.0)
    for i in range(c["num_hidden_layers"] + c["num_nextn_predict_layers"]):
        layer = f"model.layers.{i}"
        attn, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        if i == c["num_hidden_layers"]:  # a multi-token prediction layer, of which a part is enough
            t.norm(f"{layer}.enorm", M)
            t.linear(f"{layer}.eh_proj", M, 2 * M)
            continue
        t.norm(f"{layer}.input_layernorm", M)
        t.norm(f"{layer}.post_attention_layernorm", M)
        if c["q_lora_rank"] is None:
            t.linear(f"{attn}.q_proj", H * key, M, fp8=fp8)
        else:
            t.linear(f"{attn}.q_a_proj", c["q_lora_rank"], M, fp8=fp8, bias=bias)
            t.norm(f"{attn}.q_a_layernorm", c["q_lora_rank"])
            t.linear(f"{attn}.q_b_proj", H * key, c["q_lora_rank"], fp8=fp8)
        t.linear(f"{attn}.kv_a_proj_with_mqa", R + c["qk_rope_head_dim"], M, fp8=fp8, bias=bias)
        t.norm(f"{attn}.kv_a_layernorm", R)
        t.linear(f"{attn}.kv_b_proj", H * (c["qk_nope_head_dim"] + value), R, fp8=fp8)
        t.linear(f"{attn}.o_proj", M, H * value, fp8=fp8, bias=bias)
        if i < c["first_k_dense_replace"]:
            t.mlp(mlp, M, c["intermediate_size"], fp8)
            continue
        t.linear(f"{mlp}.gate", c["n_routed_experts"], M)
        if c["model_type"] == "deepseek_v3":
            t.normal(f"{mlp}.gate.e_score_correction_bias", c["n_routed_experts"], scale=0.1, dtype=np.float32)
        for e in range(c["n_routed_experts"]):
            t.mlp(f"{mlp}.experts.{e}", M, c["moe_intermediate_size"], fp8)
        t.mlp(f"{mlp}.shared_experts", M, c["n_shared_experts"] * c["moe_intermediate_size"], fp8)
    t.norm("model.norm", M)
    t.linear("lm_head", c["vocab_size"], M)
    return t.found


def gpt_oss(name, c):
    """gpt-oss."""
    t = Tensors(name)
    M, H, K, D = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    E, F = c["num_local_experts"], c["intermediate_size"]
    t.normal("model.embed_tokens.weight", c["vocab_size"], M, scale=1.0)
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        t.norm(f"{layer}.input_layernorm", M)
        t.norm(f"{layer}.post_attention_layernorm", M)
        for part, outputs in (("q_proj", H * D), ("k_proj", K * D), ("v_proj", K * D)):
            t.linear(f"{layer}.self_attn.{part}", outputs, M, bias=True)
        t.linear(f"{layer}.self_attn.o_proj", M, H * D, bias=True)
        t.normal(f"{layer}.self_attn.sinks", H, scale=1.5)
        t.linear(f"{layer}.mlp.router", E, M, bias=True)
        for part, outputs, inputs in (("gate_up_proj", 2 * F, M), ("down_proj", M, F)):
            t.mxfp4(f"{layer}.mlp.experts.{part}", E, outputs, inputs)
            t.normal(f"{layer}.mlp.experts.{part}_bias", E, outputs, scale=0.5)
    t.norm("model.norm", M)
    t.linear("lm_head", c["vocab_size"], M)
    return t.found


MAKERS = {"deepseek_v3": deepseek, "deepseek_v2": deepseek, "gpt_oss": gpt_oss}


def write(path, tensors):
    """A safetensors file."""
    table, chunks, offset = {}, [], 0
    for name in sorted(tensors, key=lambda n: (-tensors[n].itemsize, n)):
        raw = tensors[name].tobytes()
        shape, end = list(tensors[name].shape), offset + len(raw)
        table[name] = {"dtype": CODES[tensors[name].dtype.name], "shape": shape, "data_offsets": [offset, end]}
        chunks.append(raw)
        offset = end
    header = json.dumps({"__metadata__": {"format": "pt"}, **table}).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(b"".join([struct.pack("<Q", len(header)), header, *chunks]))


def save(folder, config, tensors, shards):
    """A checkpoint folder, tensors dealt out to shards in turn, and prompts in `prompts.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    rng = np.random.default_rng(list(hashlib.sha256(f"{folder.name}/prompts".encode()).digest()))
    prompts = [rng.integers(3, config["vocab_size"], n).tolist() for n in LENGTHS]
    (folder / "prompts.json").write_text(json.dumps(prompts) + "\n")
    if shards == 1:
        write(folder / "model.safetensors", tensors)
        return
    files = {n: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, n in enumerate(tensors)}
    for file in set(files.values()):
        write(folder / file, {n: t for n, t in tensors.items() if files[n] == file})
    size = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write tiny random checkpoints.")
    parser.add_argument("out", type=Path, help="folder; each checkpoint is a folder in it")
    parser.add_argument("--only", choices=(*CHECKPOINTS, V4), help="one of them; default: all but DeepSeek-V4's")
    args = parser.parse_args(argv)
    for name in CHECKPOINTS if args.only is None else (args.only,):
        folder = args.out / name
        if name == V4:
            tiny_deepseek_v4.write(folder, quantized=True)
        else:
            config, shards = CHECKPOINTS[name]
            save(folder, config, MAKERS[config["model_type"]](name, config), shards)
        size = sum(p.stat().st_size for p in folder.iterdir())
        print(f"{folder}: {size / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
