"""Cases of products of quantized numbers and of weights of few bits."""

import numpy as np
from _capture import FP8, FP8_MAX
from _capture_vllm import Arrays, Tensors, case

BLOCK = 128


# ---------------------------------------------------------------- codes of both sides
M, K, F = 17, 128, 64


def operands(rng: np.random.Generator, codes: np.dtype) -> Arrays:
    """Codes `a [M, K]` and `b [F, K]`, each with a row of zeros and one of the largest code, and their scales."""
    a, b = rng.standard_normal((M, K)) * 20, rng.standard_normal((F, K)) * 20
    top = FP8_MAX if codes == FP8 else 127
    for x in (a, b):
        x[3], x[5] = 0, top
    arrays = {"a": np.clip(a, -top - (codes != FP8), top), "b": np.clip(b, -top, top)}
    arrays = {name: (x if codes == FP8 else np.rint(x)).astype(codes) for name, x in arrays.items()}
    scales = {"a_scale": rng.uniform(0.001, 0.011, (M, 1)), "b_scale": rng.uniform(0.001, 0.011, (1, F))}
    return arrays | {name: x.astype(np.float32) for name, x in scales.items()}


def fp8_operands(rng: np.random.Generator) -> Arrays:
    """With a bias."""
    return operands(rng, FP8) | {"bias": rng.standard_normal(F).astype("bfloat16")}


def int8_operands(rng: np.random.Generator) -> Arrays:
    """With a zero point for each row of `a`."""
    return operands(rng, np.dtype(np.int8)) | {"azp": rng.integers(-20, 20, (M, 1), dtype=np.int32)}


@case("quant", "cutlass_fp8_small", {"kernel": "cutlass_scaled_mm"}, fp8_operands, {"o": ("bfloat16", M, F)})
def cutlass_fp8(t: Tensors) -> Tensors:
    """A product of float8 codes."""
    import torch
    from vllm import _custom_ops as ops

    given = t["a"], t["b"].t(), t["a_scale"], t["b_scale"]
    return {"o": ops.cutlass_scaled_mm(*given, torch.bfloat16, t["bias"])}


@case("quant", "cutlass_int8_small_azp", {"kernel": "cutlass_scaled_mm_azp"}, int8_operands, {"o": ("bfloat16", M, F)})
def cutlass_int8(t: Tensors) -> Tensors:
    """A product of int8 codes; the sums of the weight's codes come with it."""
    import torch
    from vllm import _custom_ops as ops

    given = t["a"], t["b"].t(), t["a_scale"], t["b_scale"]
    sums = t["b"].int().sum(1, dtype=torch.int32)[None]
    return {"o": ops.cutlass_scaled_mm_azp(*given, torch.bfloat16, sums, t["azp"])}


def fp8_blocks(x: np.ndarray, rows: int, power: bool) -> Arrays:
    """Codes and scales of blocks of `rows` x 128 numbers; scales are powers of two if `power`."""
    blocks = x.reshape(x.shape[0] // rows, rows, x.shape[1] // BLOCK, BLOCK).astype(np.float32)
    scale = np.maximum(np.abs(blocks).max((1, 3)), 1e-10) / np.float32(FP8_MAX)
    scale = (2.0 ** np.ceil(np.log2(scale)) if power else scale).astype(np.float32)
    codes = np.clip(blocks / scale[:, None, :, None], -FP8_MAX, FP8_MAX)
    return {"q": codes.reshape(x.shape).astype(FP8), "scale": scale}


def block_operands(rng: np.random.Generator) -> Arrays:
    """Activations with a power of two for 128 numbers, weights with a scale for 128 x 128."""
    x, w = rng.standard_normal((18, 256)), rng.standard_normal((BLOCK, 256)) * 0.05
    x[4] = 0
    x, w = fp8_blocks(x, 1, True), fp8_blocks(w, BLOCK, False)
    return {"x_q": x["q"], "x_scale": x["scale"], "w_q": w["q"], "w_scale": w["scale"]}


@case("quant", "block_fp8_mm_small_triton", {"kernel": "triton"}, block_operands, {"o": ("bfloat16", 18, BLOCK)})
def block_triton(t: Tensors) -> Tensors:
    """VLLM's Triton kernel."""
    import torch
    from vllm.model_executor.layers.quantization.utils.fp8_utils import w8a8_triton_block_scaled_mm

    given = t["x_q"], t["w_q"], t["x_scale"], t["w_scale"]
    return {"o": w8a8_triton_block_scaled_mm(*given, [BLOCK, BLOCK], torch.bfloat16)}


@case("quant", "block_fp8_mm_small_deepgemm", {"kernel": "deep_gemm"}, block_operands, {"o": ("bfloat16", 18, BLOCK)})
def block_deepgemm(t: Tensors) -> Tensors:
    """DeepGEMM."""
    import torch
    from vllm.utils.deep_gemm import fp8_gemm_nt

    o = torch.full((18, BLOCK), torch.nan, dtype=torch.bfloat16, device="cuda")
    fp8_gemm_nt((t["x_q"], t["x_scale"]), (t["w_q"], t["w_scale"]), o)
    return {"o": o}


# ---------------------------------------------------------------- weights of few bits
def words(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Any bits."""
    return rng.integers(-(2**31), 2**31 - 1, shape, dtype=np.int32, endpoint=True)


def gptq(name: str, bits: int, v2: bool, rows: int, shuffled: bool = False) -> None:
    """Add `quant/gptq_NAME`: groups of 64 of its inputs, in order or, as after sorting by activation, not."""
    columns, group, tokens = 128, 64, 3

    def inputs(rng: np.random.Generator) -> Arrays:
        groups = np.arange(rows, dtype=np.int32) // group
        return {
            "x": rng.standard_normal((tokens, rows)).astype(np.float16),
            "qweight": words(rng, rows * bits // 32, columns),
            "qzeros": words(rng, rows // group, columns * bits // 32),
            "scales": rng.uniform(0.005, 0.025, (rows // group, columns)).astype(np.float16),
            "g_idx": rng.permutation(groups) if shuffled else groups,
        }

    params = {"kernel": "gptq_gemm", "bits": bits, "group": group, "v2": v2}

    @case("quant", f"gptq_{name}", params, inputs, {"o": ("float16", tokens, columns)})
    def call(t: Tensors) -> Tensors:
        from vllm import _custom_ops as ops

        given = [t[name] for name in ("x", "qweight", "qzeros", "scales", "g_idx")]
        return {"o": ops.gptq_gemm(*given, False, v2, bits)}


gptq("4bit_v1_shuffled", 4, False, 256, shuffled=True)
gptq("4bit_v2_small", 4, True, 256)
gptq("8bit_v1_small", 8, False, 128)


def awq_inputs(rng: np.random.Generator) -> Arrays:
    """256 inputs in groups of 64, 64 outputs: vLLM's kernel takes no fewer outputs than a group has inputs."""
    return {
        "x": rng.standard_normal((3, 256)).astype(np.float16),
        "qweight": words(rng, 256, 8),
        "qzeros": words(rng, 4, 8),
        "scales": rng.uniform(0.005, 0.025, (4, 64)).astype(np.float16),
    }


@case(
    "quant",
    "awq_small",
    {"kernel": "awq_gemm", "group": 64},
    awq_inputs,
    {"w": ("float16", 256, 64), "o": ("float16", 3, 64)},
)
def awq(t: Tensors) -> Tensors:
    """The weight, and a product in eight parts."""
    from vllm import _custom_ops as ops

    w = ops.awq_dequantize(t["qweight"], t["scales"], t["qzeros"], 0, 0, 0)
    return {"w": w, "o": ops.awq_gemm(t["x"], t["qweight"], t["scales"], t["qzeros"], 8)}


def marlin_inputs(rng: np.random.Generator) -> Arrays:
    """A weight [128, 64] whose group 1 of column 5 is all of one sign."""
    w = rng.standard_normal((128, 64)) * 0.05
    w[64:, 5] = np.abs(w[64:, 5])
    return {"x": rng.standard_normal((5, 128)).astype(np.float16), "w": w.astype(np.float16)}


def marlin_weight(t: Tensors) -> Tensors:
    """Codes and scales in Marlin's order, and the weight that they stand for."""
    from vllm.model_executor.layers.quantization.utils.marlin_utils_test import marlin_quantize
    from vllm.scalar_type import scalar_types

    dense, codes, scales, *_ = marlin_quantize(t["w"], scalar_types.uint4b8, 64, False)
    return {"w_dequant": dense, "marlin_qweight": codes, "marlin_scales": scales}


@case(
    "quant",
    "marlin_uint4b8_group64",
    {"kernel": "marlin_gemm", "group": 64},
    marlin_inputs,
    {"o": ("float16", 5, 64)},
    made={
        "w_dequant": ("float16", 128, 64),
        "marlin_qweight": ("int32", 8, 128),
        "marlin_scales": ("float16", 2, 64),
    },
    make=marlin_weight,
)
def marlin(t: Tensors) -> Tensors:
    """Without a zero point, without an order of the inputs."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_make_workspace_new
    from vllm.scalar_type import scalar_types

    none = torch.empty(0, dtype=torch.int32, device="cuda")
    space = marlin_make_workspace_new(torch.device("cuda"))
    weight = t["marlin_qweight"], None, t["marlin_scales"], None, None, None, none, none, space
    sizes = len(t["x"]), 64, 128
    return {"o": ops.marlin_gemm(t["x"], None, *weight, scalar_types.uint4b8, *sizes, True, False, True, False)}
