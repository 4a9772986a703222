"""Matrix product of unquantized activations with a weight in any of the weight-only formats."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxattn import _checks, _mechanism
from jaxattn._mechanism import Args, Case, Mechanism
from jaxattn.quant import awq as awq_format
from jaxattn.quant import fp8, gptq, int8, integers, marlin, mx, nf4, nvfp4, weights, wna16
from jaxattn.quant import primitives as p

_OP = "weight_only_matmul"
_GIVEN = {
    "gptq": ("zeros",),
    "gptq_v2": ("zeros",),
    "awq": ("zeros",),
    "nvfp4": ("global_scale",),
}
"""Format -> arguments that it needs beside `w` and `scales`."""
_TAKEN = {"gptq": ("zeros", "g_idx"), "gptq_v2": ("zeros", "g_idx"), "wna16": ("zeros",)} | {
    name: _GIVEN[name] for name in ("awq", "nvfp4")
}
"""Format -> arguments that it knows."""


def weight_only_matmul(
    x: Float[Array, "N M"],
    w: Array,
    scales: Array,
    *,
    format: weights.Format,
    zeros: Array | None = None,
    g_idx: Int32[Array, " M"] | None = None,
    global_scale: Float[Array, ""] | float | None = None,
    bits: int = 4,
    implementation: str | None = None,
    config: Any = None,
) -> Float[Array, "N F"]:
    """`o = x @ W` with W the dequantized weight [M, F] in the dtype of `x`; float32 sums, one rounding.

    Layouts of `w`, `scales` and `zeros` are the checkpoints', see the table of `jaxattn.quant.weights`. W is rounded to
    the dtype of `x` before the product, as tensor cores take it.

    Args:
        x: bfloat16, float16 or float32 (float64: reference only).
        w: packed codes.
        scales: in the dtype of `x` for gptq, gptq_v2, awq, marlin and wna16, else as in the table.
        format: one of `jaxattn.quant.weights.FORMATS`.
        zeros: packed zero points; gptq, gptq_v2 and awq need them, wna16 takes them.
        g_idx: group of each input feature; gptq and gptq_v2 only, None = consecutive groups.
        global_scale: what nvfp4 multiplies with ("weight_scale_2", the reciprocal of the quantizer's).
        bits: width of the codes: gptq 2, 3, 4, 8; marlin and wna16 4, 8.
        implementation: None (choose) or "reference".
        config: launch configuration of the named kernel.

    Raises:
        TypeError: dtypes; ValueError: shapes or options that do not belong together;
        NotImplementedError: the named implementation cannot run this call.

    Source: vLLM 0.26.0 `gptq_gemm`, `awq_gemm`, `marlin_gemm`, `bitsandbytes.py`.
    """
    args = prepare(x, w, scales, format=format, zeros=zeros, g_idx=g_idx, global_scale=global_scale, bits=bits)
    return _mechanism.run(MECHANISM, args, implementation, config)


def prepare(x, w, scales, *, format, zeros=None, g_idx=None, global_scale=None, bits=4) -> Args:
    """Validate and complete the arguments of `weight_only_matmul`; raises as it does."""
    M = _checks.check_shapes(_OP, x=(x, "N M"))["M"]
    dtype = _checks.check_dtype(_OP, "x", x, _checks.FLOATS)
    if format not in weights.FORMATS:
        raise ValueError(f"{_OP}: format must be one of {', '.join(weights.FORMATS)}, got {format!r}")
    if bits not in weights.WIDTHS.get(format, (bits,)):
        raise ValueError(f"{_OP}: bits of {format} must be one of {weights.WIDTHS[format]}, got {bits}")
    extra = {"zeros": zeros, "g_idx": g_idx, "global_scale": global_scale}
    for name, value in extra.items():
        if value is None and name in _GIVEN.get(format, ()):
            raise ValueError(f"{_OP}: format {format!r} needs {name}; pass it")
        if value is not None and name not in _TAKEN.get(format, ()):
            raise ValueError(f"{_OP}: format {format!r} knows no {name}; leave it out")
    kinds = _dtypes(format, dtype)
    for name, array in (("w", w), ("scales", scales), *((n, extra[n]) for n in ("zeros", "g_idx"))):
        if array is not None:
            if not _checks.is_array(array):
                raise TypeError(f"{_OP}: {name} must be an array, got {type(array).__name__}")
            _checks.check_dtype(_OP, name, array, kinds[name])
    for name, (array, shape) in _shapes(M, w, scales, zeros, g_idx, format, bits).items():
        if tuple(array.shape) != shape:
            raise ValueError(
                f"{_OP}: {name} of format {format!r} must be {shape} for {M} input features, got {tuple(array.shape)}"
            )
    return {
        "x": x,
        "w": w,
        "scales": scales,
        "format": format,
        "zeros": zeros,
        "g_idx": g_idx,
        "global_scale": _checks.number(_OP, "global_scale", global_scale),
        "bits": int(bits),
    }


def _dtypes(format: str, dtype: str) -> dict[str, tuple[str, ...]]:
    """Argument -> dtypes that the format has; float64 stands in for float codes and scales in truths."""
    packed = ("int32",) if format in ("gptq", "gptq_v2", "awq", "marlin") else ("uint8",)
    codes = {"int8": ("int8",), "fp8": ("float8_e4m3fn", "float8_e5m2"), "mxfp8": ("float8_e4m3fn",)}.get(
        format, packed
    )
    scales = {"mxfp4": ("uint8",), "mxfp8": ("uint8",), "nvfp4": ("float8_e4m3fn",)}.get(format, ("float32",))
    scales = (dtype,) if format in weights.INTEGERS else scales
    wide = (_checks.F64,) if dtype == _checks.F64 else ()
    return {"w": codes + wide, "scales": scales + wide, "zeros": packed, "g_idx": ("int32",)}


def _shapes(M, w, scales, zeros, g_idx, format, bits) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Argument -> the array and the shape that it must have, given the output features of `w`."""
    if w.ndim != (1 if format in ("nf4", "fp4") else 2):
        raise ValueError(f"{_OP}: w of format {format!r} cannot have shape {tuple(w.shape)}; see jaxattn.quant.weights")
    if scales.ndim != w.ndim:
        raise ValueError(f"{_OP}: scales of format {format!r} cannot have shape {tuple(scales.shape)}")
    G = scales.shape[0]
    if format in ("gptq", "gptq_v2"):
        F = w.shape[1]
        found = {"w": (w, (M * bits // 32, F)), "scales": (scales, (G, F)), "zeros": (zeros, (G, F * bits // 32))}
        found |= {} if g_idx is None else {"g_idx": (g_idx, (M,))}
    elif format == "awq":
        W = w.shape[1]
        found = {"w": (w, (M, W)), "scales": (scales, (G, 8 * W)), "zeros": (zeros, (G, W))}
    elif format == "marlin":
        F = w.shape[1] * 2 // bits
        found = {"w": (w, (M // 16, F * bits // 2)), "scales": (scales, (G, F))}
    elif format == "wna16":
        F, G = w.shape[0], scales.shape[1]
        found = {"w": (w, (F, M * bits // 8)), "scales": (scales, (F, G))}
        found |= {} if zeros is None else {"zeros": (zeros, (F * bits // 8, G))}
    elif format in ("nf4", "fp4"):
        F = 2 * w.shape[0] // M
        return {"w": (w, (F * M // 2,)), "scales": (scales, (F * M // nf4.BLOCK,))}
    else:
        F = w.shape[0]
        width = M // 2 if format in ("mxfp4", "nvfp4") else M
        columns = {"mxfp4": M // 32, "mxfp8": M // 32, "nvfp4": M // 16}.get(format, 1)
        blocks = format == "fp8" and scales.shape[1] != 1
        found = {"w": (w, (F, width)), "scales": (scales, (-(-F // 128), -(-M // 128)) if blocks else (F, columns))}
        return found
    if G == 0 or (M % G and g_idx is None):
        raise ValueError(f"{_OP}: the groups of scales must divide the {M} input features, got {G}")
    return found


def _reference(x, w, scales, *, format, zeros, g_idx, global_scale, bits):
    """Dequantize, then multiply at the highest precision."""
    W = weights.dequantize(
        w,
        scales,
        format,
        M=x.shape[1],
        dtype=x.dtype.name,
        zeros=zeros,
        g_idx=g_idx,
        global_scale=global_scale,
        bits=bits,
    )
    return jnp.matmul(p.wide(x), p.wide(p.rounded(W, x.dtype)), precision="highest").astype(x.dtype)


def _outputs(**_):
    return ("o",)


def _features(w, M: int, format: str, bits: int) -> int:
    """Output features."""
    if format in ("gptq", "gptq_v2"):
        return w.shape[1]
    if format in ("nf4", "fp4"):
        return 2 * w.shape[0] // M
    return {"awq": 8 * w.shape[-1], "marlin": w.shape[-1] * 2 // bits}.get(format, w.shape[0])


def _cost(*, x, w, scales, format, bits, **_):
    """2 N M F flops; activations, codes and scales read, the result written once."""
    (N, M), item = x.shape, jnp.dtype(x.dtype).itemsize
    F = _features(w, M, format, bits)
    read = sum(y.size * jnp.dtype(y.dtype).itemsize for y in (w, scales))
    return 2 * N * M * F, read + item * N * (M + F)


def make_inputs(
    rng: np.random.Generator,
    N: int,
    M: int,
    F: int,
    format: weights.Format,
    *,
    dtype: str = "bfloat16",
    group: int = 64,
    bits: int = 4,
    act_order: bool = False,
    block: bool = False,
) -> Args:
    """Random activations and a quantized random weight.

    Args:
        rng: source of randomness.
        N: rows of activations.
        M: input features.
        F: output features.
        format: of the weight.
        dtype: of the activations.
        group: input features that share a scale, for integer formats.
        bits: width of the codes.
        act_order: GPTQ: groups of shuffled input features.
        block: fp8: one scale per 128 x 128, else one per output feature.
    """
    x = jnp.asarray(rng.standard_normal((N, M)), dtype)
    W = jnp.asarray(rng.standard_normal((M, F)) * 0.05, dtype)
    args: Args = {"x": x, "format": format}
    if format in ("gptq", "gptq_v2"):
        q, scales, zero = integers.quantize(W, bits, group, symmetric=format == "gptq")
        w, zeros = gptq.pack(q, zero, bits, version=1 if format == "gptq" else 2)
        args |= {"w": w, "scales": scales, "zeros": zeros, "bits": bits}
        if act_order:
            args["g_idx"] = jnp.asarray(rng.permutation(np.arange(M) // group), jnp.int32)
    elif format == "awq":
        args |= dict(zip(("w", "zeros", "scales"), awq_format.quantize(W, group), strict=True))
    elif format == "marlin":
        args |= dict(zip(("w", "scales"), marlin.quantize(W, group, bits=bits), strict=True)) | {"bits": bits}
    elif format == "wna16":
        w, scales, zeros = wna16.quantize(W.T, bits, group, symmetric=False)
        args |= {"w": w, "scales": scales, "zeros": zeros, "bits": bits}
    elif format == "int8":
        args |= dict(zip(("w", "scales"), int8.quantize(W.T, "channel")[:2], strict=True))
    elif format == "fp8":
        args |= dict(zip(("w", "scales"), fp8.quantize(W.T, "block" if block else "channel"), strict=True))
    elif format == "nvfp4":
        w, scales, g = nvfp4.quantize(W.T)
        args |= {"w": w, "scales": scales, "global_scale": p.inverse(g)}
    elif format in ("nf4", "fp4"):
        args |= dict(zip(("w", "scales"), nf4.quantize(W.T, format), strict=True))
    else:
        args |= dict(zip(("w", "scales"), mx.quantize(W.T, format), strict=True))
    return args


def _case(name: str, N: int, M: int, F: int, format: weights.Format, *tags: str, **options) -> Case:
    def make(rng):
        return make_inputs(rng, N, M, F, format, **options)

    return Case(name=name, make=make, tags=frozenset(tags or ("smoke",)))


_CASES = (
    _case("gptq4", 5, 256, 128, "gptq", dtype="float16"),
    _case("gptq4-fp32", 5, 256, 128, "gptq", dtype="float32"),
    _case("awq-fp32", 5, 256, 128, "awq", dtype="float32"),
    _case("gptq4-act-order-fp32", 5, 256, 64, "gptq", dtype="float32", act_order=True),
    _case("gptq3-v2-fp32", 5, 128, 32, "gptq_v2", dtype="float32", bits=3),
    _case("gptq2", 5, 128, 64, "gptq", bits=2),
    _case("gptq8", 5, 128, 64, "gptq", bits=8),
    _case("marlin4-fp32", 17, 256, 128, "marlin", dtype="float32"),
    _case("marlin8-channel", 3, 128, 64, "marlin", bits=8, group=128),
    _case("wna16-fp32", 5, 128, 64, "wna16", dtype="float32"),
    _case("wna16-8bit", 5, 128, 64, "wna16", bits=8),
    _case("int8-fp32", 5, 128, 64, "int8", dtype="float32"),
    _case("fp8", 5, 128, 64, "fp8"),
    _case("fp8-block-fp32", 5, 200, 130, "fp8", dtype="float32", block=True),
    _case("mxfp4-fp32", 5, 128, 64, "mxfp4", dtype="float32"),
    _case("mxfp8", 5, 128, 64, "mxfp8"),
    _case("nvfp4-fp32", 5, 128, 64, "nvfp4", dtype="float32"),
    _case("nf4-fp32", 5, 128, 64, "nf4", dtype="float32"),
    _case("fp4", 5, 128, 64, "fp4"),
    *(
        _case(f"gptq4-8192-N{N}", N, 8192, 8192, "gptq", "full", "bench", dtype="float16", group=128)
        for N in (1, 16, 128, 2048)
    ),
)


def _struct(format: weights.Format, dtype: str, N: int = 64, M: int = 512, F: int = 256) -> Args:
    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    G = M // 128
    zeros = {"zeros": array(G, F // 8, dtype="int32")}
    arrays = {
        "gptq": {"w": array(M // 8, F, dtype="int32"), "scales": array(G, F), **zeros},
        "awq": {"w": array(M, F // 8, dtype="int32"), "scales": array(G, F), **zeros},
        "marlin": {"w": array(M // 16, 2 * F, dtype="int32"), "scales": array(G, F)},
        "wna16": {"w": array(F, M // 2, dtype="uint8"), "scales": array(F, G)},
        "int8": {"w": array(F, M, dtype="int8"), "scales": array(F, 1, dtype="float32")},
        "fp8": {"w": array(F, M, dtype=fp8.E4M3), "scales": array(F, 1, dtype="float32")},
        "mxfp4": {"w": array(F, M // 2, dtype="uint8"), "scales": array(F, M // 32, dtype="uint8")},
        "mxfp8": {"w": array(F, M, dtype=fp8.E4M3), "scales": array(F, M // 32, dtype="uint8")},
        "nvfp4": {"w": array(F, M // 2, dtype="uint8"), "scales": array(F, M // 16, dtype=fp8.E4M3)},
        "nf4": {"w": array(F * M // 2, dtype="uint8"), "scales": array(F * M // 64, dtype="float32")},
    }
    arrays |= {"gptq_v2": arrays["gptq"], "fp4": arrays["nf4"]}
    more = {"global_scale": array(dtype="float32")} if format == "nvfp4" else {}
    return {"x": array(N, M), "format": format, **arrays[format], **more}


_SUPPORT = tuple(
    (f"{dtype}, {format}", _struct(format, dtype)) for dtype in ("bfloat16", "float16") for format in weights.FORMATS
)

MECHANISM = Mechanism(
    name=_OP,
    source="vLLM 0.26.0 csrc/quantization/gptq, awq, marlin; https://arxiv.org/abs/2210.17323",
    op=weight_only_matmul,
    prepare=prepare,
    reference=_reference,
    outputs=_outputs,
    kernels={},
    cases=_CASES,
    cost=_cost,
    captures=("quant/gptq_*", "quant/awq", "quant/marlin_*"),
    support=_SUPPORT,
)
