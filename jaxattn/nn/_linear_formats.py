"""What each format of a linear layer stores, how a weight gets there and how the layer multiplies with it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxattn.nn import _checkpoint_names as names
from jaxattn.ops.quantize_fp8 import quantize_fp8
from jaxattn.ops.quantize_int8 import quantize_int8
from jaxattn.ops.scaled_matmul import scaled_matmul
from jaxattn.ops.weight_only_matmul import weight_only_matmul
from jaxattn.quant import awq, fp8, gptq, int8, marlin, mx, nf4, nvfp4, tiles, weights, wna16
from jaxattn.quant import primitives as p

BLOCK = 128

type Tensors = dict[str, Array]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a layer was made for."""

    inputs: int
    outputs: int
    dtype: str
    group: int
    bits: int
    ue8m0: bool
    implementation: str | None
    tiled: bool = False
    """The tensors are those of `jaxattn.quant.tiles.pack`."""


@dataclass(frozen=True)
class Tensor:
    """A stored tensor; `shape` has one number for each axis."""

    shape: tuple[int, ...]
    dtype: str
    required: bool = True


@dataclass(frozen=True, kw_only=True)
class Format:
    """One format: its tensors under their names in checkpoints, and its arithmetic."""

    what: str
    tensors: Callable[[Options], dict[str, Tensor]]
    quantize: Callable[[Float[Array, "F M"], Options], Tensors]
    """Tensors of a weight, one row per output feature, rounded to nearest."""
    apply: Callable[[Float[Array, "N M"], Mapping[str, Array | None], Options], Float[Array, "N F"]]
    multiple_inputs: Callable[[Options], int] = lambda options: 1
    """Input features must be a multiple of this."""
    multiple_outputs: Callable[[Options], int] = lambda options: 1
    matrix: Callable[[Mapping[str, Array | None], Options, str], Float[Array, "M F"]]
    """The weight as numbers, input features first, in the named dtype."""
    packs: tuple[Any, Mapping[str, str]] | None = None
    """Weight-only formats: the op's name for it, and argument of the op -> tensor."""
    read: Callable[[dict[str, Any]], dict[str, Any]] = lambda given: given
    """Tensors under names of other tools -> under those of `tensors`."""
    derive: Callable[[Mapping[str, Array]], Mapping[str, Array]] = lambda tensors: {}
    """Tensors that checkpoints do not hold, of those that they do."""


# ---------------------------------------------------------------- FP8 and INT8 activations
def _fp8_tensors(options: Options, *scale: int, name: str = "weight_scale", static: bool = False) -> dict[str, Tensor]:
    found = {"weight": Tensor((options.outputs, options.inputs), fp8.E4M3), name: Tensor(scale, "float32")}
    return found | ({"input_scale": Tensor((), "float32", required=False)} if static else {})


def _fp8_apply(x, t, options: Options, granularity: str):
    scale, bound = t.get("input_scale"), t.get("input_scale_ub")
    kind: Any = "tensor" if scale is not None else granularity
    q, s = quantize_fp8(x, granularity=kind, scale=scale, upper_bound=bound, implementation=options.implementation)
    return scaled_matmul(
        q, t["weight"], s, t["weight_scale"], out_dtype=options.dtype, implementation=options.implementation
    )


def _fp8_block_apply(x, t, options: Options):
    q, s = quantize_fp8(x, granularity="group", ue8m0=options.ue8m0, implementation=options.implementation)
    return scaled_matmul(
        q,
        t["weight"],
        s,
        t["weight_scale_inv"],
        block=BLOCK,
        out_dtype=options.dtype,
        implementation=options.implementation,
    )


def _fp8_matrix(granularity: Any, scale: str = "weight_scale"):
    def matrix(t, options: Options, dtype: str):
        del options
        return fp8.dequantize(t["weight"], t[scale], granularity, group=BLOCK, dtype=dtype).T

    return matrix


def _int8_matrix(t, options: Options, dtype: str):
    del options
    return int8.dequantize(t["weight"], t["weight_scale"], granularity="channel", dtype=dtype).T


def _named(*names: str):
    """What a quantizer returns, under names."""
    return lambda arrays: dict(zip(names, arrays, strict=True))


def _int8_tensors(options: Options) -> dict[str, Tensor]:
    return {
        "weight": Tensor((options.outputs, options.inputs), "int8"),
        "weight_scale": Tensor((options.outputs, 1), "float32"),
        "input_scale": Tensor((), "float32", required=False),
        "input_zero_point": Tensor((), "int32", required=False),
    }


def _int8_apply(x, t, options: Options, symmetric: bool):
    if t.get("input_scale") is not None:
        how = {"granularity": "tensor", "scale": t["input_scale"], "azp": t.get("input_zero_point")}
    else:
        how = {"granularity": "token", "symmetric": symmetric}
    q, s, *azp = quantize_int8(x, **how, implementation=options.implementation)
    return scaled_matmul(
        q,
        t["weight"],
        s,
        t["weight_scale"],
        azp=azp[0] if azp else None,
        b_sums=t.get("weight_sums") if azp else None,
        out_dtype=options.dtype,
        implementation=options.implementation,
    )


def _int8_quantize(w, options: Options):
    del options
    q, s, _ = int8.quantize(w, "channel")
    return {"weight": q, "weight_scale": s}


# ---------------------------------------------------------------- weight only
def _weight_only(format: Any, w: str, scales: str, **more: str) -> dict[str, Any]:
    """`apply`, `matrix` and `packs` of a weight-only format; `more` maps arguments of the op to tensors."""
    arguments = {"w": w, "scales": scales, **more}

    def apply(x, t, options: Options):
        return weight_only_matmul(
            x,
            format=format,
            bits=options.bits,
            tiled=options.tiled,
            implementation=options.implementation,
            **{name: t[tensor] for name, tensor in arguments.items()},
        )

    def matrix(t, options: Options, dtype: str):
        dequantize = tiles.dequantize if options.tiled else weights.dequantize
        found = dequantize(
            format=format,
            M=options.inputs,
            dtype=options.dtype,
            bits=options.bits,
            **{name: t[tensor] for name, tensor in arguments.items()},
        )
        return found.astype(dtype)

    return {"apply": apply, "matrix": matrix, "packs": (format, arguments)}


def _gptq_tensors(options: Options) -> dict[str, Tensor]:
    M, F, bits = options.inputs, options.outputs, options.bits
    return {
        "qweight": Tensor((M * bits // 32, F), "int32"),
        "qzeros": Tensor((M // options.group, F * bits // 32), "int32"),
        "scales": Tensor((M // options.group, F), options.dtype),
        "g_idx": Tensor((M,), "int32", required=False),
    }


def _gptq(version: int) -> Format:
    def quantize(w, options: Options):
        found = gptq.quantize(w.T, options.bits, options.group, symmetric=version == 1, version=version)
        return _named("qweight", "qzeros", "scales", "g_idx")(found)

    return Format(
        what=f"GPTQ version {version}, 2, 3, 4 or 8 bits",
        tensors=_gptq_tensors,
        quantize=quantize,
        **_weight_only("gptq" if version == 1 else "gptq_v2", "qweight", "scales", zeros="qzeros", g_idx="g_idx"),
        multiple_inputs=lambda options: options.group,
        multiple_outputs=lambda options: 32 if options.bits == 3 else 32 // options.bits,
    )


def _awq_tensors(options: Options) -> dict[str, Tensor]:
    M, F, G = options.inputs, options.outputs, options.inputs // options.group
    return {
        "qweight": Tensor((M, F // 8), "int32"),
        "qzeros": Tensor((G, F // 8), "int32"),
        "scales": Tensor((G, F), options.dtype),
    }


def _marlin_tensors(options: Options) -> dict[str, Tensor]:
    M, F, bits = options.inputs, options.outputs, options.bits
    return {
        "qweight": Tensor((M // 16, F * bits // 2), "int32"),
        "scales": Tensor((M // options.group, F), options.dtype),
    }


def _rows(weight: str, scale: str, pack: int, group: int, dtypes: tuple[str, str], **more: Tensor):
    """`tensors` of a format with one row per output feature, `pack` codes a byte, and a scale for every `group`."""

    def tensors(options: Options) -> dict[str, Tensor]:
        F, M = options.outputs, options.inputs
        columns = M // group if group else 1
        return {weight: Tensor((F, M // pack), dtypes[0]), scale: Tensor((F, columns), dtypes[1]), **more}

    return tensors


def _nvfp4_quantize(w, options: Options):
    del options
    q, s, g = nvfp4.quantize(w)
    return {"weight": q, "weight_scale": s, "weight_scale_2": p.inverse(g)}


def _book(format: Any) -> Format:
    def tensors(options: Options) -> dict[str, Tensor]:
        numbers = options.outputs * options.inputs
        return {"weight": Tensor((numbers // 2,), "uint8"), "absmax": Tensor((numbers // nf4.BLOCK,), "float32")}

    return Format(
        what=f"bitsandbytes {format.upper()}, blocks of {nf4.BLOCK}",
        tensors=tensors,
        quantize=lambda w, options: _named("weight", "absmax")(nf4.quantize(w, format)),
        **_weight_only(format, "weight", "absmax"),
        multiple_inputs=lambda options: nf4.BLOCK,
        read=lambda given: names.bitsandbytes(given, format),
    )


def _wna16_tensors(options: Options) -> dict[str, Tensor]:
    F, G, pack = options.outputs, options.inputs // options.group, 8 // options.bits
    return {
        "weight": Tensor((F, options.inputs // pack), "uint8"),
        "weight_scale": Tensor((F, G), options.dtype),
        "weight_zero_point": Tensor((F // pack, G), "uint8", required=False),
    }


def _wna16_quantize(w, options: Options):
    q, s, _ = wna16.quantize(w, options.bits, options.group)
    return {"weight": q, "weight_scale": s}


FORMATS: dict[str, Format] = {
    "fp8": Format(
        what="E4M3, one scale for the weight; activations with a static scale or one per token",
        tensors=lambda options: _fp8_tensors(options, static=True),
        quantize=lambda w, options: _named("weight", "weight_scale")(fp8.quantize(w, "tensor")),
        apply=lambda x, t, options: _fp8_apply(x, t, options, "token"),
        matrix=_fp8_matrix("tensor"),
    ),
    "fp8_tensor": Format(
        what="E4M3, one scale for the weight; activations with a static scale or one for all tokens",
        tensors=lambda options: _fp8_tensors(options, static=True),
        quantize=lambda w, options: _named("weight", "weight_scale")(fp8.quantize(w, "tensor")),
        apply=lambda x, t, options: _fp8_apply(x, t, options, "tensor"),
        matrix=_fp8_matrix("tensor"),
    ),
    "fp8_channel": Format(
        what="E4M3, one scale per output feature; activations with one per token, FBGEMM's with an upper bound",
        tensors=lambda options: (
            _fp8_tensors(options, options.outputs, 1) | {"input_scale_ub": Tensor((), "float32", required=False)}
        ),
        quantize=lambda w, options: _named("weight", "weight_scale")(fp8.quantize(w, "channel")),
        apply=lambda x, t, options: _fp8_apply(x, t, options, "token"),
        matrix=_fp8_matrix("channel"),
    ),
    "fp8_block": Format(
        what="E4M3, one scale per 128 x 128 block; activations with one per 128",
        tensors=lambda options: _fp8_tensors(
            options, -(-options.outputs // BLOCK), -(-options.inputs // BLOCK), name="weight_scale_inv"
        ),
        quantize=lambda w, options: _named("weight", "weight_scale_inv")(fp8.quantize(w, "block", ue8m0=options.ue8m0)),
        apply=_fp8_block_apply,
        matrix=_fp8_matrix("block", "weight_scale_inv"),
    ),
    "int8": Format(
        what="INT8, one scale per output feature; activations symmetric, static or one scale per token",
        tensors=_int8_tensors,
        quantize=_int8_quantize,
        apply=lambda x, t, options: _int8_apply(x, t, options, True),
        matrix=_int8_matrix,
    ),
    "int8_azp": Format(
        what="INT8, one scale per output feature; activations with zero points, static or per token",
        tensors=lambda options: (
            _int8_tensors(options) | {"weight_sums": Tensor((options.outputs,), "int32", required=False)}
        ),
        derive=lambda tensors: {"weight_sums": jnp.sum(tensors["weight"], 1, dtype=jnp.int32)},
        quantize=_int8_quantize,
        apply=lambda x, t, options: _int8_apply(x, t, options, False),
        matrix=_int8_matrix,
    ),
    "gptq": _gptq(1),
    "gptq_v2": _gptq(2),
    "awq": Format(
        what="AWQ, 4 bits",
        tensors=_awq_tensors,
        quantize=lambda w, options: _named("qweight", "qzeros", "scales")(awq.quantize(w.T, options.group)),
        **_weight_only("awq", "qweight", "scales", zeros="qzeros"),
        multiple_inputs=lambda options: options.group,
        multiple_outputs=lambda options: 8,
    ),
    "marlin": Format(
        what="Marlin's order of 4 or 8 bits",
        tensors=_marlin_tensors,
        quantize=lambda w, options: _named("qweight", "scales")(marlin.quantize(w.T, options.group, bits=options.bits)),
        **_weight_only("marlin", "qweight", "scales"),
        multiple_inputs=lambda options: max(16, options.group),
        multiple_outputs=lambda options: 64,
    ),
    "wna16": Format(
        what="4 or 8 bits along the input features, as compressed-tensors packs them; zero points if stored",
        tensors=_wna16_tensors,
        quantize=_wna16_quantize,
        **_weight_only("wna16", "weight", "weight_scale", zeros="weight_zero_point"),
        multiple_inputs=lambda options: math.lcm(options.group, 32 // options.bits),
        multiple_outputs=lambda options: 8 // options.bits,
        read=names.packed_words,
    ),
    "int8_weight": Format(
        what="INT8 weight, one scale per output feature; activations as they are",
        tensors=_rows("weight", "weight_scale", 1, 0, ("int8", "float32")),
        quantize=_int8_quantize,
        **_weight_only("int8", "weight", "weight_scale"),
    ),
    "fp8_weight": Format(
        what="E4M3 weight, one scale per output feature; activations as they are",
        tensors=_rows("weight", "weight_scale", 1, 0, (fp8.E4M3, "float32")),
        quantize=lambda w, options: _named("weight", "weight_scale")(fp8.quantize(w, "channel")),
        **_weight_only("fp8", "weight", "weight_scale"),
    ),
    "mxfp8": Format(
        what="MXFP8 weight; activations as they are",
        tensors=_rows("weight", "weight_scale", 1, mx.GROUP, (fp8.E4M3, "uint8")),
        quantize=lambda w, options: _named("weight", "weight_scale")(mx.quantize(w, "mxfp8")),
        **_weight_only("mxfp8", "weight", "weight_scale"),
        multiple_inputs=lambda options: mx.GROUP,
    ),
    "mxfp4": Format(
        what="MXFP4 weight; activations as they are",
        tensors=_rows("weight", "weight_scale", 2, mx.GROUP, ("uint8", "uint8")),
        quantize=lambda w, options: _named("weight", "weight_scale")(mx.quantize(w, "mxfp4")),
        **_weight_only("mxfp4", "weight", "weight_scale"),
        multiple_inputs=lambda options: mx.GROUP,
        read=names.packed,
    ),
    "nvfp4": Format(
        what="NVFP4 weight; activations as they are",
        tensors=_rows(
            "weight",
            "weight_scale",
            2,
            nvfp4.GROUP,
            ("uint8", fp8.E4M3),
            weight_scale_2=Tensor((), "float32"),
        ),
        quantize=_nvfp4_quantize,
        **_weight_only("nvfp4", "weight", "weight_scale", global_scale="weight_scale_2"),
        multiple_inputs=lambda options: nvfp4.GROUP,
        read=names.packed,
    ),
    "nf4": _book("nf4"),
    "fp4": _book("fp4"),
}
WITH_GROUPS = ("gptq", "gptq_v2", "awq", "marlin", "wna16")
WIDTHS = {name: weights.WIDTHS[name] for name in ("gptq", "gptq_v2", "marlin", "wna16")}
