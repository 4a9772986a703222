"""A tiny random DeepSeek-V4 checkpoint with every kind of layer, in the published names and formats.

Layers: 0 window-only and hash-routed, 1 C4A and hash-routed, 2 C128A, 3 C4A, and one MTP block. The quantized one has
FP8 linears (blocks of 128 x 128, UE8M0 scales) and MXFP4 experts; the bfloat16 one holds the same numbers dequantized,
which is exact, and no scales.

Needs numpy and ml_dtypes only: the capture script writes the checkpoint beside PyTorch, the tests beside JAX.
"""

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from parity._safetensors import CODES

BF16, F8, E8M0 = (np.dtype(t) for t in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu))
BLOCK, GROUP = 128, 32
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 160,
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 128,
    "sliding_window": 16,
    "compress_ratios": [0, 4, 128, 4, 0],
    "compress_rope_theta": 160000.0,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 256,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 4096,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_hash_layers": 2,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 1.5,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "num_nextn_predict_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
QUANTIZED = {
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    },
}


def tensors(seed: int = 0) -> Iterator[tuple[str, str, np.ndarray]]:
    """Name, format ("bf16", "f32", "i64", "fp8" or "fp4") and float32 (or int64) numbers of every tensor."""
    c = CONFIG
    M, V, C = c["hidden_size"], c["vocab_size"], c["hc_mult"]

    def rng(name):
        return np.random.default_rng(list(hashlib.sha256(f"{seed}/{name}".encode()).digest()))

    def normal(name, *shape, std=None, mean=0.0):
        std = shape[-1] ** -0.5 if std is None else std
        return name, mean + rng(name).standard_normal(shape).astype(np.float32) * np.float32(std)

    def norm(name, width=M):
        return "bf16", *normal(name, width, std=0.2, mean=1.0)

    def hyper(prefix, rows, scales):
        yield "f32", *normal(f"{prefix}_fn", rows, C * M)
        yield "f32", *normal(f"{prefix}_base", rows, std=0.5)
        yield "f32", *normal(f"{prefix}_scale", scales, std=0.1, mean=1.0)

    def compressor(prefix, width, dim, ratio):
        for part in ("wkv", "wgate"):
            yield "bf16", *normal(f"{prefix}.{part}.weight", width, M)
        yield "f32", *normal(f"{prefix}.ape", ratio, width, std=0.5)
        yield norm(f"{prefix}.norm.weight", dim)

    def attention(prefix, ratio):
        H, D, Rq, G, Ro = (c[n] for n in ("num_attention_heads", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank"))
        yield "fp8", *normal(f"{prefix}.wq_a.weight", Rq, M)
        yield norm(f"{prefix}.q_norm.weight", Rq)
        yield "fp8", *normal(f"{prefix}.wq_b.weight", H * D, Rq)
        yield "fp8", *normal(f"{prefix}.wkv.weight", D, M)
        yield norm(f"{prefix}.kv_norm.weight", D)
        yield "fp8", *normal(f"{prefix}.wo_a.weight", G * Ro, H // G * D)
        yield "fp8", *normal(f"{prefix}.wo_b.weight", M, G * Ro, std=3 * (G * Ro) ** -0.5)
        yield "f32", *normal(f"{prefix}.attn_sink", H, std=1.0)
        if ratio:
            yield from compressor(f"{prefix}.compressor", D * (2 if ratio == 4 else 1), D, ratio)
        if ratio == 4:
            h, d = c["index_n_heads"], c["index_head_dim"]
            yield "fp8", *normal(f"{prefix}.indexer.wq_b.weight", h * d, Rq)
            yield "bf16", *normal(f"{prefix}.indexer.weights_proj.weight", h, M)
            yield from compressor(f"{prefix}.indexer.compressor", 2 * d, d, 4)

    def experts(prefix, hashed):
        E, F, A = c["n_routed_experts"], c["moe_intermediate_size"], c["num_experts_per_tok"]
        yield "bf16", *normal(f"{prefix}.gate.weight", E, M)
        if hashed:
            name = f"{prefix}.gate.tid2eid"
            yield "i64", name, np.argsort(rng(name).random((V, E)), -1)[:, :A]
        else:
            yield "f32", *normal(f"{prefix}.gate.bias", E, std=0.1)
        for part, shape in (("w1", (F, M)), ("w2", (M, F)), ("w3", (F, M))):
            for e in range(E):
                yield "fp4", *normal(f"{prefix}.experts.{e}.{part}.weight", *shape)
            yield "fp8", *normal(f"{prefix}.shared_experts.{part}.weight", *shape)

    def layer(prefix, ratio, hashed):
        yield from attention(f"{prefix}.attn", ratio)
        yield from experts(f"{prefix}.ffn", hashed)
        for part in ("attn", "ffn"):
            yield norm(f"{prefix}.{part}_norm.weight")
            yield from hyper(f"{prefix}.hc_{part}", (2 + C) * C, 3)

    def all_of_them():
        yield "bf16", *normal("embed.weight", V, M, std=1.0)
        for i, ratio in enumerate(c["compress_ratios"][: c["num_hidden_layers"]]):
            yield from layer(f"layers.{i}", ratio, i < c["num_hash_layers"])
        yield from hyper("hc_head", C, 1)
        yield norm("norm.weight")
        yield "bf16", *normal("head.weight", V, M, std=3 * M**-0.5)
        for i in range(c["num_nextn_predict_layers"]):
            yield from layer(f"mtp.{i}", 0, False)
            for part in ("e_proj", "h_proj"):
                yield "fp8", *normal(f"mtp.{i}.{part}.weight", M, M)
            for part in ("enorm", "hnorm", "norm"):
                yield norm(f"mtp.{i}.{part}.weight")
            yield from hyper(f"mtp.{i}.hc_head", C, 1)

    for kind, name, x in all_of_them():
        yield name, kind, x


def encoded(name: str, kind: str, x: np.ndarray, quantized: bool) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors that a checkpoint stores for one weight."""
    if kind in ("fp8", "fp4"):
        codes, scale, values = fp8(x) if kind == "fp8" else fp4(x)
        if not quantized:
            yield name, values.astype(BF16)
            return
        yield name, codes
        yield name.removesuffix("weight") + "scale", scale
    else:
        yield name, x.astype({"bf16": BF16, "f32": np.float32, "i64": np.int64}[kind])


def fp8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """E4M3 codes, UE8M0 scales of blocks (128, 128), and the numbers that they stand for."""
    F, M = x.shape
    padded = np.pad(x, ((0, -F % BLOCK), (0, -M % BLOCK)))
    blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    exponent = np.ceil(np.log2(np.maximum(np.abs(blocks).max((1, 3)), 1e-4) / 448))
    scale = np.exp2(exponent).astype(np.float32)
    whole = np.repeat(np.repeat(scale, BLOCK, 0), BLOCK, 1)[:F, :M]
    codes = np.clip(x / whole, -448, 448).astype(F8)
    return codes, scale.astype(E8M0), codes.astype(np.float32) * whole


def fp4(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """MXFP4 bytes (int8, even index in the low bits), UE8M0 scales of 32 numbers, and the numbers they stand for."""
    F, M = x.shape
    groups = x.reshape(F, M // GROUP, GROUP)
    exponent = np.ceil(np.log2(np.maximum(np.abs(groups).max(-1), 1e-4) / 6))
    scale = np.exp2(exponent).astype(np.float32)
    scaled = groups / scale[..., None]
    codes = np.abs(np.abs(scaled)[..., None] - _E2M1).argmin(-1)
    values = np.copysign(_E2M1[codes], scaled) * scale[..., None]
    codes = (codes | (np.signbit(scaled) << 3)).astype(np.uint8).reshape(F, M)
    return (codes[:, ::2] | codes[:, 1::2] << 4).view(np.int8), scale.astype(E8M0), values.reshape(F, M)


def write(directory: Path, *, quantized: bool, seed: int = 0, shards: int = 3) -> str:
    """Write `config.json`, the shards and their index; returns the sha256 of all tensors."""
    directory.mkdir(parents=True, exist_ok=True)
    config = CONFIG | {"torch_dtype": "bfloat16"} | (QUANTIZED if quantized else {})
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    stored = [pair for name, kind, x in tensors(seed) for pair in encoded(name, kind, x, quantized)]
    return write_tensors(directory, stored, shards)


def write_tensors(directory: Path, stored: list[tuple[str, np.ndarray]], shards: int) -> str:
    """Write tensors as so many safetensors files and `model.safetensors.index.json`; returns their sha256."""
    digest, per_file, where = hashlib.sha256(), -(-len(stored) // shards), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        header, chunks, offset = {}, [], 0
        for name, x in stored[i * per_file : (i + 1) * per_file]:
            raw = np.ascontiguousarray(x).tobytes()
            header[name] = {
                "dtype": CODES[x.dtype],
                "shape": list(x.shape),
                "data_offsets": [offset, offset + len(raw)],
            }
            chunks.append(raw)
            offset += len(raw)
            where[name] = file
            digest.update(name.encode() + raw)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        (directory / file).write_bytes(b"".join([struct.pack("<Q", len(text)), text, *chunks]))
    index = {"metadata": {}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return digest.hexdigest()


def mtp_as_model(directory: Path, *, seed: int = 0) -> None:
    """Write the MTP block's layer, head and norm as a bfloat16 checkpoint of a one-layer model of its own.

    `e_proj`, `h_proj`, `enorm` and `hnorm`, which have no place in it, are left out.
    """
    directory.mkdir(parents=True, exist_ok=True)
    changes = {"num_hidden_layers": 1, "compress_ratios": [0], "num_hash_layers": 0, "num_nextn_predict_layers": 0}
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    stored = []
    for name, kind, x in tensors(seed):
        if name in ("embed.weight", "head.weight"):
            new = name
        elif not name.startswith("mtp.0.") or name.split(".")[2] in ("e_proj", "h_proj", "enorm", "hnorm"):
            continue
        else:
            rest = name.removeprefix("mtp.0.")
            new = rest if rest.startswith(("norm.", "hc_head_")) else f"layers.0.{rest}"
        stored += encoded(new, kind, x, False)
    write_tensors(directory, stored, 1)


def prompt(tokens: int, seed: int = 0) -> np.ndarray:
    """Random token ids, int32."""
    return np.random.default_rng([seed, tokens]).integers(2, CONFIG["vocab_size"], tokens).astype(np.int32)
