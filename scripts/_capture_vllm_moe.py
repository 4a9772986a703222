"""Cases of expert products, of their activations, and of MegaMoE's staging."""

import numpy as np
from _capture import FP8, FP8_MAX
from _capture_vllm import Arrays, Tensors, case
from _capture_vllm_routing import choices


# ---------------------------------------------------------------- experts
def bfloat16_weight(w: np.ndarray) -> Arrays:
    """As it is."""
    return {"": w.astype("bfloat16")}


def tensor_weight(w: np.ndarray) -> Arrays:
    """Float8 codes and a scale for each expert."""
    scale = np.abs(w).max((1, 2)) / FP8_MAX
    return {"": (w / scale[:, None, None]).astype(FP8), "_scale": scale.astype(np.float32)}


def block_weight(w: np.ndarray) -> Arrays:
    """Float8 codes and a scale for 128 x 128."""
    E, rows, columns = w.shape
    blocks = w.reshape(E, rows // 128, 128, columns // 128, 128)
    scale = np.abs(blocks).max((2, 4)) / FP8_MAX
    codes = np.clip(blocks / scale[:, :, None, :, None], -FP8_MAX, FP8_MAX)
    return {"": codes.reshape(w.shape).astype(FP8), "_scale": scale.astype(np.float32)}


def channel_weight(w: np.ndarray) -> Arrays:
    """Int8 codes and a scale for each output."""
    scale = np.abs(w).max(2, keepdims=True) / 127
    return {"": np.clip(np.rint(w / scale), -127, 127).astype(np.int8), "_scale": scale.astype(np.float32)}


def nibble_weight(w: np.ndarray) -> Arrays:
    """4-bit codes around 8, two in a byte, and a bfloat16 scale for 64 inputs."""
    blocks = w.reshape(*w.shape[:2], -1, 64)
    scale = (np.abs(blocks).max(-1) / 7).astype("bfloat16")
    codes = np.clip(np.rint(blocks / scale[..., None].astype(np.float64)), -8, 7) + 8
    codes = codes.reshape(w.shape).astype(np.uint8)
    return {"": codes[..., ::2] | codes[..., 1::2] << 4, "_scale": scale}


WEIGHTS = {
    "bf16": bfloat16_weight,
    "fp8_tensor": tensor_weight,
    "fp8_block": block_weight,
    "int8_channel": channel_weight,
    "int4_w4a16": nibble_weight,
}
TOKENS = 5


def tokens_of_experts(rng: np.random.Generator, width: int, count: int) -> Arrays:
    """Five tokens, of which one is zero, for the first and the last of two or three experts."""
    x = rng.standard_normal((TOKENS, width))
    x[3] = 0
    return {
        "x": x.astype("bfloat16"),
        "topk_weights": rng.uniform(0, 1, (TOKENS, 2)).astype(np.float32),
        "topk_ids": (count - 1) * choices(rng, TOKENS, 2, 2),
    }


def experts(mode: str, width: int, hidden: int, count: int, **params) -> None:
    """Add `moe/experts_small_MODE`; of three experts one has no tokens."""

    def inputs(rng: np.random.Generator) -> Arrays:
        arrays = tokens_of_experts(rng, width, count)
        for name, shape in (("w1", (2 * hidden, width)), ("w2", (width, hidden))):
            w = rng.standard_normal((count, *shape)) * shape[1] ** -0.5
            arrays |= {name + part: x for part, x in WEIGHTS[mode](w).items()}
        return arrays

    params = {"kernel": "fused_experts", "mode": mode, **params}

    @case("moe", f"experts_small_{mode}", params, inputs, {"o": ("bfloat16", TOKENS, width)})
    def call(t: Tensors) -> Tensors:
        from vllm.model_executor.layers.fused_moe import config
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

        scales = {name: t[name] for name in ("w1_scale", "w2_scale") if name in t}
        how = {
            "bf16": lambda: None,
            "fp8_tensor": lambda: config.fp8_w8a8_moe_quant_config(**scales),
            "fp8_block": lambda: config.fp8_w8a8_moe_quant_config(**scales, block_shape=[128, 128]),
            "int8_channel": lambda: config.int8_w8a8_moe_quant_config(
                **scales, a1_scale=None, a2_scale=None, per_act_token_quant=True
            ),
            "int4_w4a16": lambda: config.int4_w4a16_moe_quant_config(**scales, block_shape=[0, 64]),
        }[mode]()
        given = t["x"].clone(), t["w1"], t["w2"], t["topk_weights"], t["topk_ids"]
        return {"o": fused_experts(*given, quant_config=how)}


experts("bf16", 64, 64, 3)
experts("fp8_tensor", 64, 64, 3)
experts("fp8_block", 128, 128, 2)
experts("int8_channel", 64, 64, 3)
experts("int4_w4a16", 128, 128, 2, group=64)

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def mxfp4_weight(rng: np.random.Generator, rows: int, columns: int) -> Arrays:
    """Any codes, with exponents of -8 to -4."""
    codes = rng.integers(0, 256, (2, rows, columns // 2), dtype=np.uint8)
    return {"": codes, "_scale": rng.integers(119, 124, (2, rows, columns // 32), dtype=np.uint8)}


def mxfp4_inputs(rng: np.random.Generator) -> Arrays:
    """Weights of 64 inputs and 64 hidden numbers."""
    arrays = tokens_of_experts(rng, 64, 2)
    for name, rows in (("w1", 128), ("w2", 64)):
        arrays |= {name + part: x for part, x in mxfp4_weight(rng, rows, 64).items()}
    return arrays


@case(
    "moe",
    "experts_small_mxfp4",
    {"kernel": "fused_experts of dequantized weights", "mode": "mxfp4_w4a16"},
    mxfp4_inputs,
    {
        "o": ("bfloat16", TOKENS, 64),
        "w1_dequant": ("bfloat16", 2, 128, 64),
        "w2_dequant": ("bfloat16", 2, 64, 64),
    },
)
def mxfp4(t: Tensors) -> Tensors:
    """Weight-only: the products are those of bfloat16 weights, which hold every MXFP4 number."""
    import torch
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    values = torch.tensor(np.concatenate([E2M1, -E2M1]), dtype=torch.float32, device="cuda")

    def dense(name: str) -> torch.Tensor:
        codes, scale = t[name], torch.exp2(t[f"{name}_scale"].float() - 127)
        pairs = torch.stack([values[(codes & 15).long()], values[(codes >> 4).long()]], -1)
        return (pairs.flatten(-2) * scale.repeat_interleave(32, -1)).to(torch.bfloat16)

    w1, w2 = dense("w1"), dense("w2")
    o = fused_experts(t["x"].clone(), w1, w2, t["topk_weights"], t["topk_ids"])
    return {"o": o, "w1_dequant": w1, "w2_dequant": w2}


# ---------------------------------------------------------------- activations
def activation(name: str, op: str, *options: float, **params) -> None:
    """Add `moe/act_NAME`: rows of zeros of both signs, of numbers at the limits, of large ones."""

    def inputs(rng: np.random.Generator) -> Arrays:
        x = rng.standard_normal((5, 256)) * 8
        x[1] = np.where(np.arange(256) % 2, -0.0, 0.0)
        x[2] = np.resize([10.0, -10, 7, -7, 10.0625, 6.96875, -88, 88], 256)
        x[3] *= 30
        x[4] *= 1e-3
        return {"x": x.astype("bfloat16")}

    @case("moe", f"act_{name}", {"kernel": op, **params}, inputs, {"o": ("bfloat16", 5, 128)})
    def call(t: Tensors) -> Tensors:
        import torch

        o = torch.full((5, 128), torch.nan, dtype=torch.bfloat16, device="cuda")
        getattr(torch.ops._C, op)(o, t["x"], *options)
        return {"o": o}


activation("hard_silu", "silu_and_mul")
activation("hard_silu_clamp10", "silu_and_mul_with_clamp", 10.0, limit=10.0)
activation("hard_swigluoai", "swigluoai_and_mul", 1.702, 7.0, alpha=1.702, limit=7.0)


# ---------------------------------------------------------------- MegaMoE's staging
def staged(rng: np.random.Generator) -> Arrays:
    """Rows: normal, zero, tiny, an outlier, powers of two that are the largest code or just above it."""
    x = rng.standard_normal((5, 256))
    x[1] = 0
    x[2] = np.where(np.arange(256) % 2, -1e-7, 1e-7)
    x[3, 0] = 3e4
    x[4, ::32] = np.array([448, 450, 224, 1, 512, 0.875, 2.0**-20, 7.0])
    ids = choices(rng, 5, 4, 3)
    ids[4, 1:] = -1
    weights = rng.uniform(0, 1, (5, 3)).astype(np.float32)
    return {"x": x.astype("bfloat16"), "topk_weights": weights, "topk_ids": ids}


@case(
    "moe",
    "megamoe_input_staging_hard",
    {"kernel": "prepare_megamoe_inputs", "group": 32},
    staged,
    {
        "x_fp8": ("float8_e4m3fn", 5, 256),
        "x_sf": ("int32", 5, 2),
        "topk_idx": ("int64", 5, 3),
        "topk_weights": ("float32", 5, 3),
    },
)
def staging(t: Tensors) -> Tensors:
    """Codes, four exponents to a word, and copies of ids and weights."""
    import torch
    from vllm.models.deepseek_v4.nvidia.ops.prepare_megamoe import prepare_megamoe_inputs

    out = {
        "x_fp8": torch.full((5, 256), torch.nan, device="cuda").to(torch.float8_e4m3fn),
        "x_sf": torch.full((5, 2), -1, dtype=torch.int32, device="cuda"),
        "topk_idx": torch.full((5, 3), -2, dtype=torch.int64, device="cuda"),
        "topk_weights": torch.full((5, 3), torch.nan, device="cuda"),
    }
    prepare_megamoe_inputs(t["x"], t["topk_weights"], t["topk_ids"], *out.values())
    return out
