"""Matrix product of unquantized activations with a weight in any of the weight-only formats."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxattn import _checks, _mechanism
from jaxattn._mechanism import Args, Kernel, Mechanism
from jaxattn.ops._weight_only_matmul_cases import CASES, SUPPORT
from jaxattn.quant import nf4, tiles, weights
from jaxattn.quant import primitives as p
from pallas_kernels import _decode, _mosaic
from pallas_kernels import weight_only_matmul as mosaic

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
    tiled: bool = False,
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
        tiled: the arrays are those of `jaxattn.quant.tiles.pack`, which the kernel loads as they are; others it packs
            first, in every call.
        implementation: None (choose), "mosaic" (Hopper) or "reference".
        config: launch configuration of the named kernel.

    Raises:
        TypeError: dtypes; ValueError: shapes or options that do not belong together;
        NotImplementedError: the named implementation cannot run this call.

    Source: vLLM 0.26.0 `gptq_gemm`, `awq_gemm`, `marlin_gemm`, `bitsandbytes.py`.
    """
    given = {"zeros": zeros, "g_idx": g_idx, "global_scale": global_scale}
    args = prepare(x, w, scales, format=format, bits=bits, tiled=tiled, **given)
    return _mechanism.run(MECHANISM, args, implementation, config)


def prepare(x, w, scales, *, format, zeros=None, g_idx=None, global_scale=None, bits=4, tiled=False) -> Args:
    """Validate and complete the arguments of `weight_only_matmul`; raises as it does."""
    M = _checks.check_shapes(_OP, x=(x, "N M"))["M"]
    dtype = _checks.check_dtype(_OP, "x", x, _checks.FLOATS)
    if format not in weights.FORMATS:
        raise ValueError(f"{_OP}: format must be one of {', '.join(weights.FORMATS)}, got {format!r}")
    if not tiled and bits not in weights.WIDTHS.get(format, (bits,)):
        raise ValueError(f"{_OP}: bits of {format} must be one of {weights.WIDTHS[format]}, got {bits}")
    extra = {"zeros": zeros, "g_idx": g_idx, "global_scale": global_scale}
    for name, value in extra.items():
        if value is None and name in _GIVEN.get(format, ()):
            raise ValueError(f"{_OP}: format {format!r} needs {name}; pass it")
        if value is not None and name not in _TAKEN.get(format, ()):
            raise ValueError(f"{_OP}: format {format!r} knows no {name}; leave it out")
    kinds = _tiled_dtypes(format, dtype, scales) if tiled else _dtypes(format, dtype)
    for name, array in (("w", w), ("scales", scales), *((n, extra[n]) for n in ("zeros", "g_idx"))):
        if array is not None:
            if not _checks.is_array(array):
                raise TypeError(f"{_OP}: {name} must be an array, got {type(array).__name__}")
            _checks.check_dtype(_OP, name, array, kinds[name])
    shapes = _tiled_shapes(M, w, scales, zeros, g_idx, format, bits) if tiled else None
    for name, (array, shape) in (shapes or _shapes(M, w, scales, zeros, g_idx, format, bits)).items():
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
        "tiled": bool(tiled),
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


def _tiled_dtypes(format: str, dtype: str, scales) -> dict[str, tuple[str, ...]]:
    """The same of `tiles.pack`'s arrays."""
    number = (dtype, _checks.F64) if dtype == _checks.F64 else (dtype,)
    kind = ("float32", *number[1:]) if scales.ndim == 2 else number
    return {"w": ("int32",), "scales": kind, "zeros": number, "g_idx": ("int32",)}


def _tiled_shapes(M, w, scales, zeros, g_idx, format, bits) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """The same of `tiles.pack`'s arrays."""
    count = -(-M // tiles.INPUTS)
    if w.ndim != 3 or scales.ndim not in (2, 3) or bits not in (4, 8):
        raise ValueError(f"{_OP}: with tiled=True pass what tiles.pack returned, got w {tuple(w.shape)} and {bits=}")
    F = w.shape[0] * tiles.FEATURES
    grouped = (w.shape[0], count, tiles.FEATURES * max(1, scales.shape[-1] // tiles.FEATURES))
    found = {
        "w": (w, (w.shape[0], count, tiles.FEATURES * tiles.INPUTS * bits // 32)),
        "scales": (scales, (F, 1) if scales.ndim == 2 else grouped),
    }
    found |= {} if zeros is None else {"zeros": (zeros, grouped)}
    return found | ({} if g_idx is None else {"g_idx": (g_idx, (M,))})


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


def _reference(x, w, scales, *, format, zeros, g_idx, global_scale, bits, tiled):
    """Dequantize, then multiply at the highest precision."""
    W = (tiles if tiled else weights).dequantize(
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


def _run(*, config, x, w, scales, format, zeros, g_idx, global_scale, bits, tiled):
    """The kernel, on tiles."""
    dtype = x.dtype.name
    if not tiled:
        given = {"format": format, "zeros": zeros, "global_scale": global_scale, "bits": bits}
        args = tiles.pack(w, scales, M=x.shape[1], dtype=dtype, **given)
        w, scales, zeros, bits = args["w"], args["scales"], args.get("zeros"), args["bits"]
        global_scale = args.get("global_scale")
    code = tiles.code_of(scales, zeros, format, dtype, bits)
    lowered = format == "nvfp4" and code.dtype == jnp.bfloat16
    factor = None
    if format == "nvfp4":
        factor = jnp.asarray(global_scale, jnp.float32).reshape(1) / (_decode.LOWERED if lowered else 1)
    return mosaic.product(
        config=config,
        code=dataclasses.replace(code, lowered=lowered),
        x=x if g_idx is None else x[:, g_idx],
        w=w,
        scales=None if code.scale is None else scales,
        zeros=zeros,
        channel=scales.reshape(-1) if code.scale is None else None,
        factor=factor,
    )


def _why_not(*, x, w, scales, format, g_idx, bits, tiled, **_) -> str | None:
    """None if the kernel can run these arguments, else one sentence."""
    dtype, (N, M) = x.dtype.name, x.shape
    if dtype not in mosaic.DTYPES:
        return f"x must be {_mosaic.either(mosaic.DTYPES)}, got {dtype}"
    if 0 in (N, M):
        return f"needs rows and input features, got {N} and {M}"
    if M % 8:
        return f"the input features must be a multiple of 8, got {M}; pad x and the weight with zeros"
    if tiled:
        return None
    if g_idx is not None:
        return "act-order weights must be packed first: jaxattn.quant.tiles.pack"
    return tiles.why_not(w, scales, format=format, M=M, dtype=dtype, bits=bits)


def _sizes(x, w, format, bits, tiled, **_) -> dict[str, int]:
    F = w.shape[0] * tiles.FEATURES if tiled else tiles.features(w, format, x.shape[1], bits)
    wide = format in ("int8", "fp8", "mxfp8") or (bits == 8 and format in weights.INTEGERS)
    return {"N": x.shape[0], "M": x.shape[1], "F": F, "bits": 8 if wide else 4}


def _code(scales, zeros, format, x, bits, tiled, **_) -> _decode.Code | None:
    return tiles.code_of(scales, zeros, format, x.dtype, bits) if tiled else None


def _default_config(**args):
    return mosaic.default_config(**_sizes(**args), code=_code(**args))


def _configs(**args):
    return mosaic.configs(**_sizes(**args), code=_code(**args))


def _probe(rng: np.random.Generator, **args: Any) -> tuple[Args, np.ndarray]:
    """Eight rows of activations."""
    N = args["x"].shape[0]
    rows = rng.choice(N, min(N, 8), replace=False)
    return args | {"x": args["x"][rows]}, rows


def _cost(*, x, w, scales, format, bits, tiled, **_):
    """2 N M F flops; activations, codes and scales read, the result written once."""
    (N, M), item = x.shape, jnp.dtype(x.dtype).itemsize
    F = _sizes(x, w, format, bits, tiled)["F"]
    read = sum(y.size * jnp.dtype(y.dtype).itemsize for y in (w, scales))
    return 2 * N * M * F, read + item * N * (M + F)


MECHANISM = Mechanism(
    name=_OP,
    source="vLLM 0.26.0 csrc/quantization/gptq, awq, marlin; https://arxiv.org/abs/2210.17323",
    op=weight_only_matmul,
    prepare=prepare,
    reference=_reference,
    outputs=_outputs,
    kernels={
        "mosaic": Kernel(
            run=_run,
            why_not=_why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=_default_config,
            configs=_configs,
        )
    },
    cases=CASES,
    cost=_cost,
    probe=_probe,
    captures=("quant/gptq_*", "quant/awq*", "quant/marlin_*"),
    support=SUPPORT,
)
