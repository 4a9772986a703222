"""Cases of quantizers, and of norms and activations that quantize their result."""

import numpy as np
from _capture import FP8_MAX
from _capture_vllm import Arrays, Tensors, case

N = 256
BLOCK = 128


def hard_rows(rng: np.random.Generator, dtype: str = "bfloat16") -> np.ndarray:
    """Eight rows: normal, zeros of both signs, tiny and halves of 1/8, an outlier, two of ties, powers of two, sparse.

    The ties lie between float8 codes where 448 gives the scale 1, and between int8 codes where -128 and 127 do.
    """
    x = rng.standard_normal((8, N))
    sign = np.where(np.arange(N) % 2, -1.0, 1.0)
    x[1] = 0 * sign
    x[2, :BLOCK] = 1e-7 * sign[:BLOCK]
    x[2, BLOCK:] = (np.arange(BLOCK) - 63.5) / 16
    x[3, 0] = 3e4
    x[4] = sign * np.resize([17.0, 19, 34, 38, 4.25, 4.75, 0.53125, 2.0**-10, 3 * 2.0**-10], N)
    x[5] = np.resize(np.arange(-60, 61) + 0.5, N)
    x[6] = sign * 2.0 ** (np.arange(N) % 18 - 9)
    x[7, :BLOCK] = 0
    x[7, BLOCK:] *= 1e-3
    x[4, ::BLOCK], x[5, :2] = FP8_MAX, (127, -128)
    return x.astype(dtype)


def with_scale(low: float, high: float):
    """Inputs `x` and a `scale` between two numbers."""

    def inputs(rng: np.random.Generator) -> Arrays:
        return {"x": hard_rows(rng), "scale": rng.uniform(low, high, 1).astype(np.float32)}

    return inputs


def only_x(rng: np.random.Generator) -> Arrays:
    """Inputs `x` alone."""
    return {"x": hard_rows(rng)}


# ---------------------------------------------------------------- float8
CODES = ("float8_e4m3fn", 8, N)


def fp8(name: str, inputs, params: dict, scales: int) -> None:
    """Add `quant/fp8_NAME`: one scale, or one per row."""
    shape = ("float32", 1) if scales == 1 else ("float32", scales, 1)

    @case("quant", f"fp8_{name}", {"kernel": "scaled_fp8_quant", **params}, inputs, {"q": CODES, "scale": shape})
    def call(t: Tensors) -> Tensors:
        import torch
        from vllm import _custom_ops as ops

        bound = torch.tensor([10.0], device="cuda") if params.get("ub") else None
        token = params.get("per_token", False)
        q, scale = ops.scaled_fp8_quant(t["x"], t.get("scale"), use_per_token_if_dynamic=token, scale_ub=bound)
        return {"q": q, "scale": scale}


fp8("hard_static", with_scale(0.005, 0.02), {"static": True}, 1)
fp8("hard_tensor", only_x, {}, 1)
fp8("hard_token", only_x, {"per_token": True}, 8)
fp8("hard_token_ub10", only_x, {"per_token": True, "ub": True}, 8)
fp8("hard_token_fp16", lambda rng: {"x": hard_rows(rng, "float16")}, {"per_token": True}, 8)


def tiny_rows(rng: np.random.Generator) -> Arrays:
    """Rows below the floor of the scale: subnormal numbers, the smallest normal ones, and both beside 1e-9."""
    x = rng.standard_normal((8, N)) * 2.0 ** np.array([-130.0, -128, -126, -60, -40, -34, -33, -32])[:, None]
    x[4, ::2] = 1e-9
    return {"x": x.astype("bfloat16")}


def fp8_group(name: str, inputs, ue8m0: bool) -> None:
    """Add `quant/fp8_NAME`: a scale for 128 numbers, any or a power of two."""
    params = {"kernel": "per_token_group_quant_fp8", "group": BLOCK, "ue8m0": ue8m0, "eps": 1e-10}

    @case("quant", f"fp8_{name}", params, inputs, {"q": CODES, "scale": ("float32", 8, N // BLOCK)})
    def call(t: Tensors) -> Tensors:
        from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

        q, scale = per_token_group_quant_fp8(t["x"], BLOCK, use_ue8m0=ue8m0)
        return {"q": q, "scale": scale}


fp8_group("hard_group128", only_x, False)
fp8_group("hard_group128_ue8m0", only_x, True)
fp8_group("tiny_group128", tiny_rows, False)
fp8_group("tiny_group128_ue8m0", tiny_rows, True)


# ---------------------------------------------------------------- int8
def int8(name: str, inputs, params: dict) -> None:
    """Add `quant/int8_NAME`."""
    sizes = (1,) if params.get("static") else (8, 1)
    outputs = {"q": ("int8", 8, N), "scale": ("float32", *sizes)}
    outputs |= {"azp": ("int32", *sizes)} if params.get("azp") else {}

    @case("quant", f"int8_{name}", {"kernel": "scaled_int8_quant", **params}, inputs, outputs)
    def call(t: Tensors) -> Tensors:
        from vllm import _custom_ops as ops

        q, scale, azp = ops.scaled_int8_quant(t["x"], t.get("scale"), t.get("azp"), symmetric=not params.get("azp"))
        return {"q": q, "scale": scale} | ({"azp": azp} if params.get("azp") else {})


def int8_static(rng: np.random.Generator) -> Arrays:
    """A scale of 1/8, so that row 2 is all ties."""
    return {"x": hard_rows(rng), "scale": np.array([0.125], np.float32)}


int8("hard_static", int8_static, {"static": True})
int8("hard_token", only_x, {})
int8("hard_static_azp", lambda rng: int8_static(rng) | {"azp": np.array([-5], np.int32)}, {"static": True, "azp": True})
int8("hard_token_azp", only_x, {"azp": True})


# ---------------------------------------------------------------- blocks of 32 and 16
@case(
    "quant",
    "mxfp8_hard",
    {"kernel": "mxfp8_e4m3_quantize", "group": 32},
    only_x,
    {"q": CODES, "scale": ("uint8", 8, N // 32), "dequant": ("bfloat16", 8, N)},
)
def mxfp8(t: Tensors) -> Tensors:
    """Codes, exponents, and the numbers that they stand for."""
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import dequant_mxfp8_to_bf16, mxfp8_e4m3_quantize

    q, scale = mxfp8_e4m3_quantize(t["x"])
    return {"q": q, "scale": scale, "dequant": dequant_mxfp8_to_bf16(q, scale)}


def nvfp4_inputs(rng: np.random.Generator) -> Arrays:
    """Rows without the outlier, which would leave the other blocks no scale."""
    x = np.clip(hard_rows(rng).astype(np.float32), -48, 48)
    scale = FP8_MAX * 6 / np.abs(x).max()
    return {"x": x.astype("bfloat16"), "global_scale": np.array([scale], np.float32)}


@case(
    "quant",
    "nvfp4_hard",
    {"kernel": "ref_nvfp4_quant", "group": 16},
    nvfp4_inputs,
    {"q": ("float32", 8, N), "scale": ("float32", 8, N // 16)},
)
def nvfp4(t: Tensors) -> Tensors:
    """Numbers instead of codes."""
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import ref_nvfp4_quant

    q, scale = ref_nvfp4_quant(t["x"], t["global_scale"], 16)
    return {"q": q.float(), "scale": scale.float()}


# ---------------------------------------------------------------- rotation, norms, activation
def rotated(rng: np.random.Generator) -> Arrays:
    """Normal rows, zeros, one hot, constant; their count is a multiple of 256, else vLLM 0.26.0 reads stale memory."""
    x = rng.standard_normal((6, BLOCK))
    x[2:5] = 0
    x[3, 77], x[4] = 3.0, -0.375
    return {"x": x.astype("bfloat16")}


@case("quant", "hadamard_rows", {"kernel": "hadacore_transform"}, rotated, {"o": ("bfloat16", 6, BLOCK)})
def hadamard(t: Tensors) -> Tensors:
    """In place on a clone: out of place vLLM 0.26.0 returns what was in the memory."""
    import torch

    return {"o": torch.ops._C.hadacore_transform(t["x"].clone(), True)}


def norm(name: str, outputs: dict, call, *, residual: bool = False, scale: bool = False, **params) -> None:
    """Add `quant/norm_NAME` over rows of which one is zero, one large and one tiny."""

    def inputs(rng: np.random.Generator) -> Arrays:
        gains = np.array([1.0, 0, 1e4, 1e-4])[:, None]
        arrays = {"x": rng.standard_normal((4, N)) * gains, "weight": rng.standard_normal(N)}
        if residual:
            arrays["residual"] = rng.standard_normal((4, N)) * gains[::-1]
        arrays = {key: x.astype("bfloat16") for key, x in arrays.items()}
        return arrays | ({"scale": rng.uniform(0.01, 0.05, 1).astype(np.float32)} if scale else {})

    case("quant", f"norm_{name}", {"eps": 1e-6, **params}, inputs, outputs)(call)


def _rms(t: Tensors) -> Tensors:
    import torch
    from vllm import _custom_ops as ops

    o = torch.full_like(t["x"], torch.nan)
    ops.rms_norm(o, t["x"], t["weight"], 1e-6)
    return {"o": o}


def _fused_add(t: Tensors) -> Tensors:
    from vllm import _custom_ops as ops

    o, residual = t["x"].clone(), t["residual"].clone()
    ops.fused_add_rms_norm(o, residual, t["weight"], 1e-6)
    return {"o": o, "residual": residual}


def _norm_token(t: Tensors) -> Tensors:
    import torch
    from vllm import _custom_ops as ops

    q, scale = ops.rms_norm_dynamic_per_token_quant(t["x"], t["weight"], 1e-6, torch.float8_e4m3fn)
    return {"q": q, "scale": scale}


def _norm_group(t: Tensors) -> Tensors:
    import torch
    from vllm import _custom_ops as ops

    q, scale = ops.rms_norm_per_block_quant(t["x"], t["weight"], 1e-6, torch.float8_e4m3fn, [1, BLOCK])
    return {"q": q, "scale": scale}


def _norm_static(t: Tensors) -> Tensors:
    import torch

    q = torch.full(t["x"].shape, torch.nan, device="cuda").to(torch.float8_e4m3fn)
    torch.ops._C.rms_norm_static_fp8_quant(q, t["x"], t["weight"], t["scale"], 1e-6)
    return {"q": q}


ROWS, ROW_CODES = ("bfloat16", 4, N), ("float8_e4m3fn", 4, N)
norm("hard_rms", {"o": ROWS}, _rms, kernel="rms_norm")
norm("hard_add", {"o": ROWS, "residual": ROWS}, _fused_add, residual=True, kernel="fused_add_rms_norm")
norm(
    "hard_token_fp8",
    {"q": ROW_CODES, "scale": ("float32", 4, 1)},
    _norm_token,
    kernel="rms_norm_dynamic_per_token_quant",
)
norm(
    "hard_group_fp8",
    {"q": ROW_CODES, "scale": ("float32", 4, N // BLOCK)},
    _norm_group,
    kernel="rms_norm_per_block_quant",
    group=BLOCK,
)
norm("hard_static_fp8", {"q": ROW_CODES}, _norm_static, scale=True, kernel="rms_norm_static_fp8_quant")


def gates(rng: np.random.Generator) -> Arrays:
    """A row of zero gates, one of gates whose exponential overflows, one whose products saturate."""
    x = rng.standard_normal((4, N))
    x[1, : N // 2] = np.where(np.arange(N // 2) % 2, -0.0, 0.0)
    x[2, : N // 2] *= 60
    x[3] *= 30
    return {"x": x.astype("bfloat16"), "scale": np.array([0.02], np.float32)}


@case("quant", "silu_mul_hard_static_fp8", {"kernel": "silu_and_mul_quant"}, gates, {"q": ("float8_e4m3fn", 4, N // 2)})
def silu_mul(t: Tensors) -> Tensors:
    """A scale for the whole tensor."""
    import torch

    q = torch.full((4, N // 2), torch.nan, device="cuda").to(torch.float8_e4m3fn)
    torch.ops._C.silu_and_mul_quant(q, t["x"], t["scale"])
    return {"q": q}
