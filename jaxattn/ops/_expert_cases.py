"""Inputs of `experts` for tests, benchmarks and support tables."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn._mechanism import Args, Case, in_one_program
from jaxattn.ops import _expert_formats as formats


def make_inputs(
    rng: np.random.Generator,
    T: int,
    A: int,
    E: int,
    M: int,
    F: int,
    *,
    format: str = "none",
    dtype: str = "bfloat16",
    bias: bool = False,
    zeros: bool = False,
    hot: int = 0,
    mapped: bool = False,
    **options,
) -> Args:
    """Random arguments of `experts`: products of variance 1, weights quantized from them.

    Args:
        rng: source of randomness.
        T: tokens.
        A: experts of a token.
        E: local experts.
        M: model dim.
        F: feed-forward dim.
        format: of the weights.
        dtype: of the activations.
        bias: add biases.
        zeros: wna16 with zero points.
        hot: route to so many experts only (0 = all).
        mapped: ids count 2 E experts of which every second belongs to this rank; weights of the others are NaN.
        **options: passed on to the op.
    """
    total = (2 if mapped else 1) * E
    ids = np.stack([rng.permutation(hot or total)[:A] for _ in range(T)]) if T else np.zeros((0, A))
    weights = rng.random((T, A)).astype(np.float32)
    args: Args = {"x": jnp.asarray(rng.standard_normal((T, M), np.float32).astype(dtype))}

    def quantized(w):
        return formats.quantize_weight(w, format, dtype, zeros)

    for name, N, K in (("w13", 2 * F, M), ("w2", M, F)):
        w = rng.standard_normal((E, N, K), np.float32) * np.float32(K**-0.5)
        args |= {name if part == "w" else f"{name}_{part}": x for part, x in in_one_program(quantized, w).items()}
        if bias:
            args[f"{name}_bias"] = jnp.asarray(rng.standard_normal((E, N)).astype(dtype))
    if mapped:
        local = np.where(np.arange(total) % 2, -1, np.arange(total) // 2)
        args["expert_map"] = jnp.asarray(local, jnp.int32)
        weights[local[ids.astype(int)] < 0] = np.nan
    args |= {"weights": jnp.asarray(weights), "ids": jnp.asarray(ids, jnp.int32)}
    return args | ({} if format == "none" else {"format": format}) | options


def struct(
    T: int = 64,
    A: int = 6,
    E: int = 16,
    M: int = 1024,
    F: int = 512,
    *,
    format: str = "none",
    dtype: str = "bfloat16",
    bias: bool = False,
    zeros: bool = False,
    **options,
) -> Args:
    """Shapes of the arguments of `experts`."""

    def array(shape, kind="float32"):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(kind))

    args: Args = {"x": array((T, M), dtype), "weights": array((T, A)), "ids": array((T, A), "int32")}
    for name, N, K in (("w13", 2 * F, M), ("w2", M, F)):
        codes = {"none": dtype, "int8": "int8"}.get(format, "uint8" if format in formats.PACKED else "float8_e4m3fn")
        args[name] = array((E, N, K // 2 if format in formats.PACKED else K), codes)
        scale = {
            "fp8_tensor": array((E,)),
            "fp8_block": array((E, -(-N // 128), -(-K // 128))),
            "int8": array((E, N, 1)),
            "wna16": array((E, N, K // 128), dtype),
            "mxfp4": array((E, N, K // 32), "uint8"),
            "nvfp4": array((E, N, K // 16), "float8_e4m3fn"),
        }
        if format != "none":
            args[f"{name}_scale"] = scale[format]
        if zeros:
            args[f"{name}_zeros"] = array((E, N // 2, K // 128), "uint8")
        if format == "nvfp4":
            args[f"{name}_scale_2"] = array((E,))
        if bias:
            args[f"{name}_bias"] = array((E, N), dtype)
    return args | ({} if format == "none" else {"format": format}) | options


def _large(rng: np.random.Generator, shapes: Args) -> Args:
    """Random values for `struct`'s shapes, drawn on the device; products have a variance near 1."""

    def draw(name, x):
        key = jax.random.key(int(rng.integers(2**31)))
        if name == "ids":
            order = rng.random((x.shape[0], shapes["w13"].shape[0])).argsort(-1)
            return jnp.asarray(order[:, : x.shape[1]], jnp.int32)
        if name == "weights":
            return jax.random.uniform(key, x.shape)
        if x.dtype == jnp.uint8 and not name.endswith("scale"):
            return jax.random.bits(key, x.shape, jnp.uint8)
        K = shapes["x"].shape[1] if name.startswith("w13") else shapes["w13"].shape[1] // 2
        if name.endswith("scale"):
            return jnp.full(x.shape, 120 if x.dtype == jnp.uint8 else K**-0.5, x.dtype)
        size = K**-0.5 if x.dtype == jnp.bfloat16 and name != "x" else 1.0
        draw = jax.jit(lambda key: jax.lax.map(lambda k: size * jax.random.normal(k, x.shape[1:]), key).astype(x.dtype))
        return draw(jax.random.split(key, x.shape[0]))

    return {name: draw(name, x) if hasattr(x, "shape") else x for name, x in shapes.items()}


def _bench(
    name: str,
    T: int,
    E: int,
    A: int = 6,
    M: int = 4096,
    F: int = 2048,
    *,
    tags: tuple[str, ...] = ("bench",),
    **options,
) -> Case:
    def shapes() -> Args:
        return struct(T, A, E, M, F, **options)

    return Case(name=name, make=lambda rng: _large(rng, shapes()), tags=frozenset(tags), shapes=shapes)


def _case(name: str, *sizes: int, tags: tuple[str, ...] = ("smoke",), **options) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, *sizes, **options), tags=frozenset(tags))


_V4: dict[str, Any] = {"limit": 10.0}
_OSS: dict[str, Any] = {"activation": "swigluoai", "limit": 7.0, "bias": True}

CASES = (
    _case("bf16-T9-A2-E4", 9, 2, 4, 128, 128),
    _case("fp32-T7-A3-E5-limit", 7, 3, 5, 128, 64, dtype="float32", limit=0.5),
    _case("mxfp4-fp8-T9-A2-E4", 9, 2, 4, 256, 128, format="mxfp4", act_group=32, weight_on="activation", **_V4),
    _case("fp8-block-T9-A2-E4", 9, 2, 4, 256, 128, format="fp8_block"),
    _case("fp8-tensor-T9-A2-E4", 9, 2, 4, 128, 128, format="fp8_tensor"),
    _case("int8-T9-A2-E4", 9, 2, 4, 128, 128, format="int8"),
    _case("wna16-T9-A2-E4-zeros", 9, 2, 4, 128, 128, format="wna16", zeros=True),
    _case("mxfp4-T9-A2-E4", 9, 2, 4, 128, 128, format="mxfp4"),
    _case("mxfp4-fp8-128-T5-A2-E4", 5, 2, 4, 128, 128, format="mxfp4", act_group=128, **_V4),
    _case("nvfp4-T9-A2-E4", 9, 2, 4, 128, 128, format="nvfp4"),
    _case("nvfp4-fp8-T5-A2-E4", 5, 2, 4, 128, 128, format="nvfp4", act_group=32),
    _case("gpt-oss-mxfp4-T9-A2-E4", 9, 2, 4, 128, 64, format="mxfp4", **_OSS),
    _case("gpt-oss-fp32-T5-A4-E8", 5, 4, 8, 64, 64, dtype="float32", **_OSS),
    _case("fp16-T5-A1-E8-one-expert", 5, 1, 8, 128, 64, dtype="float16", hot=1),
    _case("bf16-T11-A4-E4-expert-map", 11, 4, 4, 128, 64, mapped=True),
    _case("fp32-T11-A4-E4-expert-map", 11, 4, 4, 64, 64, dtype="float32", mapped=True),
    _case("bf16-T70-A2-E4-on-activation", 70, 2, 4, 128, 64, weight_on="activation", bias=True),
    *(
        _bench(f"gpt-oss-T{T}-A4-E8-M2880-F2880", T, 8, 4, 2880, 2880, tags=("full",), format="mxfp4", **_OSS)
        for T in (40, 200)
    ),
    *(_bench(f"bf16-T{T}-A6-E64-M4096-F2048", T, 64) for T in (16, 256, 4096)),
    *(_bench(f"fp8_block-T{T}-A6-E256-M4096-F2048", T, 256, format="fp8_block") for T in (16, 256, 4096)),
    *(_bench(f"mxfp4-T{T}-A6-E256-M4096-F2048", T, 256, format="mxfp4", act_group=32, **_V4) for T in (16, 4096)),
    _bench("mxfp4-fp8-128-T4096-A6-E256-M4096-F2048", 4096, 256, format="mxfp4", act_group=128, **_V4),
    *(_bench(f"{f}-T16-A6-E256-M4096-F2048", 16, 256, format=f) for f in ("wna16", "nvfp4")),
    *(_bench(f"gpt-oss-T{T}-A4-E128-M2880-F2880", T, 128, 4, 2880, 2880, format="mxfp4", **_OSS) for T in (16, 4096)),
)


SUPPORT = (
    ("bfloat16", struct()),
    ("bfloat16, 4096 tokens", struct(4096)),
    ("float16", struct(dtype="float16")),
    ("float32", struct(dtype="float32")),
    ("bfloat16, gpt-oss (biases, swigluoai)", struct(**_OSS)),
    ("bfloat16, gpt-oss's sizes", struct(M=2880, F=2880)),
    ("bfloat16, weights on the activation", struct(weight_on="activation")),
    *((f"{f} weights", struct(format=f)) for f in formats.FORMATS[1:]),
    ("wna16 weights, zero points", struct(format="wna16", zeros=True)),
    ("wna16 weights, zero points, gpt-oss", struct(format="wna16", zeros=True, **_OSS)),
    ("mxfp4 weights, FP8 activations per 32", struct(format="mxfp4", act_group=32)),
    ("mxfp4 weights, FP8 activations per 32, 4096 tokens", struct(4096, format="mxfp4", act_group=32)),
    ("mxfp4 weights, gpt-oss", struct(M=2880, F=2880, format="mxfp4", **_OSS)),
    ("nvfp4 weights, FP8 activations per 128", struct(format="nvfp4", act_group=128)),
)
