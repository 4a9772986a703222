"""Test cases and support rows of weight-only products."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn._mechanism import Args, Case, in_one_program
from jaxattn.quant import awq as awq_format
from jaxattn.quant import fp8, gptq, int8, integers, marlin, mx, nf4, nvfp4, tiles, weights, wna16
from jaxattn.quant import primitives as p


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
    tiled: bool = False,
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
        tiled: pack it for the kernel.
    """
    x = jnp.asarray(rng.standard_normal((N, M)).astype(dtype))
    W = jnp.asarray((rng.standard_normal((M, F)) * 0.05).astype(dtype))
    order = {"g_idx": jnp.asarray(rng.permutation(np.arange(M) // group), jnp.int32)} if act_order else {}

    def quantized(W):
        args: Args = _quantized(W, format, group, bits, block) | {"format": format} | order
        return tiles.pack(M=M, dtype=dtype, **args) if tiled else args

    return {"x": x} | in_one_program(quantized, W)


def _quantized(W, format: weights.Format, group: int, bits: int, block: bool) -> Args:
    if format in ("gptq", "gptq_v2"):
        q, scales, zero = integers.quantize(W, bits, group, symmetric=format == "gptq")
        w, zeros = gptq.pack(q, zero, bits, version=1 if format == "gptq" else 2)
        return {"w": w, "scales": scales, "zeros": zeros, "bits": bits}
    if format == "awq":
        return dict(zip(("w", "zeros", "scales"), awq_format.quantize(W, group), strict=True))
    if format == "marlin":
        return dict(zip(("w", "scales"), marlin.quantize(W, group, bits=bits), strict=True)) | {"bits": bits}
    if format == "wna16":
        w, scales, zeros = wna16.quantize(W.T, bits, group, symmetric=False)
        return {"w": w, "scales": scales, "zeros": zeros, "bits": bits}
    if format == "int8":
        return dict(zip(("w", "scales"), int8.quantize(W.T, "channel")[:2], strict=True))
    if format == "fp8":
        return dict(zip(("w", "scales"), fp8.quantize(W.T, "block" if block else "channel"), strict=True))
    if format == "nvfp4":
        w, scales, g = nvfp4.quantize(W.T)
        return {"w": w, "scales": scales, "global_scale": p.inverse(g)}
    if format in ("nf4", "fp4"):
        return dict(zip(("w", "scales"), nf4.quantize(W.T, format), strict=True))
    return dict(zip(("w", "scales"), mx.quantize(W.T, format), strict=True))


def _case(name: str, N: int, M: int, F: int, format: Any, *tags: str, **options) -> Case:
    def make(rng):
        return make_inputs(rng, N, M, F, format, **options)

    return Case(name=name, make=make, tags=frozenset(tags or ("smoke",)))


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


def _tiled(format: weights.Format, dtype: str, N: int = 64, M: int = 512, F: int = 256) -> Args:
    """The same weight packed."""
    args = _struct(format, dtype, N, M, F)
    arrays = {name: x for name, x in args.items() if hasattr(x, "shape") and name != "x"}
    shapes = jax.eval_shape(lambda a: _arrays(tiles.pack(M=M, dtype=dtype, format=format, **a)), arrays)
    bits = 8 if format in ("int8", "fp8", "mxfp8") else 4
    return {"x": args["x"], "format": format, "bits": bits, "tiled": True, **shapes}


def _arrays(args: Args) -> Args:
    return {name: x for name, x in args.items() if hasattr(x, "shape")}


def _large(N: int, format: Any, dtype: str, M: int = 8192, F: int = 8192) -> Case:
    """One of the benchmarks: a packed weight of groups of 128, drawn on the device."""

    def shapes():
        return _tiled(format, dtype, N, M, F)

    def draw(key, name, x):
        if name == "x":
            return jax.random.normal(key, x.shape).astype(x.dtype)
        if name == "w":
            words = jax.random.bits(key, x.shape, jnp.uint32)
            finite = jnp.uint32(0xBFBFBFBF if format == "fp8" else 0xFFFFFFFF)
            return jax.lax.bitcast_convert_type(words & finite, jnp.int32)
        if name == "zeros":
            return jnp.full(x.shape, 8, x.dtype)
        size = 2.0**-10 if name == "global_scale" or format != "nvfp4" else tiles.LIFT
        return (size * jax.random.uniform(key, x.shape, jnp.float32, 1, 2)).astype(x.dtype)

    def make(rng):
        key = jax.random.key(int(rng.integers(2**31)))
        return {
            name: draw(jax.random.fold_in(key, i), name, x) if hasattr(x, "shape") else x
            for i, (name, x) in enumerate(shapes().items())
        }

    return Case(name=f"{format}-tiled-N{N}-M{M}-F{F}", make=make, tags=frozenset({"bench"}), shapes=shapes)


CASES = (
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
    _case("gptq4-tiled-many-rows", 70, 256, 128, "gptq", dtype="float16", tiled=True),
    _case("gptq2-tiled-act-order", 5, 256, 64, "gptq", bits=2, act_order=True, tiled=True),
    _case("wna16-8bit-tiled", 3, 400, 64, "wna16", bits=8, group=400, tiled=True),
    _case("fp8-block-tiled", 5, 200, 192, "fp8", block=True, tiled=True),
    _case("mxfp4-tiled-odd-inputs", 9, 224, 64, "mxfp4", tiled=True),
    _case("nvfp4-tiled-fp16", 9, 272, 64, "nvfp4", dtype="float16", tiled=True),
    *(_large(N, "gptq", "float16") for N in (1, 16, 64, 128, 2048)),
    *(_large(N, name, "bfloat16") for name in ("mxfp4", "nvfp4", "int8", "fp8") for N in (1, 2048)),
)

SUPPORT = (
    *(
        (f"{dtype}, {format}", _struct(format, dtype))
        for dtype in ("bfloat16", "float16")
        for format in weights.FORMATS
    ),
    *((f"bfloat16, {name}, tiled", _tiled(name, "bfloat16")) for name in ("gptq", "mxfp4", "nvfp4", "nf4", "fp8")),
    ("float32, gptq", _struct("gptq", "float32")),
    ("bfloat16, gptq, 200 output features", _struct("gptq", "bfloat16", F=200)),
    (
        "bfloat16, gptq, act-order",
        _struct("gptq", "bfloat16") | {"g_idx": jax.ShapeDtypeStruct((512,), jnp.int32)},
    ),
)
