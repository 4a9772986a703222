"""DeepSeek-V4's stored tensors: which of them fill which variables, and how FP8 becomes plain numbers."""

import re
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array

from jaxattn.models.checkpoint import Piece, Rules
from jaxattn.nn.deepseek_v4 import Compressor, DeepseekV4Attention
from jaxattn.nn.deepseek_v4_layer import DeepseekV4DecoderLayer, MTPBlock
from jaxattn.nn.hyper import HyperHead
from jaxattn.nn.linear import make_linear, matrix
from jaxattn.nn.moe import FusedMoE
from jaxattn.nn.quantized_linear import QuantizedLinear
from jaxattn.quant import fp8
from jaxattn.quant import primitives as p

_SCALES = ("float8_e8m0fnu", "float32")
_RENAMED = (
    (re.compile(r"^(mtp\.\d+)\.layer\."), r"\1."),
    (re.compile(r"\.(attn|ffn)_hc\.(fn|base|scale)$"), r".hc_\1_\2"),
    (re.compile(r"^(mtp\.\d+)\.head\.(fn|base|scale)$"), r"\1.hc_head_\2"),
    (re.compile(r"^hc_head\.(fn|base|scale)$"), r"hc_head_\1"),
    (re.compile(r"\.shared_experts\.gate_proj\."), ".shared_experts.w1."),
    (re.compile(r"\.shared_experts\.down_proj\."), ".shared_experts.w2."),
    (re.compile(r"\.shared_experts\.up_proj\."), ".shared_experts.w3."),
)


def rename(name: str) -> str:
    """The stored name of what has this one in our tree: hyper-connections have no dot, shared experts have numbers."""
    for pattern, new in _RENAMED:
        name = pattern.sub(new, name)
    return name


def _vectors(module: Any, *names: str) -> dict[str, tuple[Piece, ...]]:
    """Pieces of norms, which are parameters here and modules in the checkpoint."""
    return {name: (Piece(name=f"{name}.weight", shape=tuple(getattr(module, name).shape)),) for name in names}


def _transposed(module: Any, *names: str) -> dict[str, tuple[Piece, ...]]:
    def piece(name: str) -> Piece:
        return Piece(name=f"{name}.weight", shape=tuple(getattr(module, name).shape)[::-1], convert=np.transpose)

    return {name: (piece(name),) for name in names}


def _attention(module: DeepseekV4Attention) -> dict[str, tuple[Piece, ...]]:
    found = _vectors(module, "q_norm", "kv_norm")
    G, R, W = module.wo_a.shape
    found["wo_a"] = (Piece(name="wo_a.weight", shape=(G * R, W)),)
    if module.wo_a_scale is not None:
        _, rows, columns = module.wo_a_scale.shape
        found["wo_a_scale"] = (Piece(name="wo_a.scale", shape=(G * rows, columns), dtypes=_SCALES, convert=_number),)
    return found


def _number(scale: np.ndarray) -> np.ndarray:
    return scale.astype(np.float32)


def _byte(codes: np.ndarray) -> np.ndarray:
    return codes.view(np.uint8)


def _quantized(module: QuantizedLinear) -> dict[str, tuple[Piece, ...]]:
    shape = module.tensors["weight_scale_inv"].shape
    return {"weight_scale_inv": (Piece(name="scale", shape=shape, dtypes=_SCALES, convert=_number),)}


def _experts(module: FusedMoE) -> dict[str, tuple[Piece, ...]]:
    """Experts one by one; gate and up projections are w1 and w3."""
    E, fp4 = module.config.experts, module.config.format == "mxfp4"
    found: dict[str, tuple[Piece, ...]] = {"gate": (Piece(name="gate.weight", shape=tuple(module.gate.shape)),)}
    if module.correction_bias is not None:
        found["correction_bias"] = (Piece(name="gate.bias", shape=tuple(module.correction_bias.shape)),)
    if module.table is not None:
        shape, integers = tuple(module.table.shape), ("int32", "int64")
        found["table"] = (Piece(name="gate.tid2eid", shape=shape, dtypes=integers, convert=_int32),)

    def stacked(variable: Any, suffix: str, parts: tuple[str, ...], **how: Any) -> tuple[Piece, ...]:
        rows = variable.shape[1] // len(parts)
        return tuple(
            Piece(
                name=f"experts.{e}.{part}.{suffix}",
                shape=(rows, *variable.shape[2:]),
                at=(e, slice(i * rows, (i + 1) * rows)),
                **how,
            )
            for e in range(E)
            for i, part in enumerate(parts)
        )

    codes: dict[str, Any] = {"dtypes": ("int8", "uint8"), "convert": _byte} if fp4 else {}
    scales = {"dtypes": ("float8_e8m0fnu",), "convert": _byte} if fp4 else {"dtypes": _SCALES, "convert": _number}
    for name, parts in (("w13", ("w1", "w3")), ("w2", ("w2",))):
        found[name] = stacked(getattr(module, name), "weight", parts, **codes)
        scale = getattr(module, f"{name}_scale")
        if scale is not None:
            found[f"{name}_scale"] = stacked(scale, "scale", parts, **scales)
    return found


def _int32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.int32)


def rules(model: type) -> Rules:
    """For `jaxattn.models.checkpoint.load`, with the type of the whole model."""
    return {
        model: lambda m: _vectors(m, "norm", "head"),
        DeepseekV4Attention: _attention,
        Compressor: lambda m: _vectors(m, "norm") | _transposed(m, "wkv", "wgate"),
        DeepseekV4DecoderLayer: lambda m: _vectors(m, "attn_norm", "ffn_norm"),
        MTPBlock: lambda m: _vectors(m, "enorm", "hnorm", "norm"),
        HyperHead: lambda m: {"scale": (Piece(name="scale", shape=(1,)),)},
        FusedMoE: _experts,
        QuantizedLinear: _quantized,
    }


def dequantize(model: nnx.Module, dtype: str) -> None:
    """Make plain numbers in `dtype` of all FP8 weights below a module, in place; activations are not quantized."""
    for _, module in list(nnx.iter_modules(model)):
        for name, stored in list(vars(module).items()):
            if isinstance(stored, QuantizedLinear):
                inputs, outputs = stored.options.inputs, stored.options.outputs
                plain = nnx.eval_shape(lambda i=inputs, o=outputs: make_linear(i, o, dtype=dtype, rngs=nnx.Rngs(0)))
                plain.kernel.set_value(matrix(stored, dtype))
                setattr(module, name, plain)
        if isinstance(module, DeepseekV4Attention) and module.wo_a_scale is not None:
            module.wo_a = nnx.Param(_expanded(module.wo_a[...], module.wo_a_scale[...], dtype))
            module.wo_a_scale = nnx.data(None)
        if isinstance(module, FusedMoE):
            _plain_experts(module, dtype)


def _expanded(codes: Array, scale: Array, dtype: str) -> Array:
    """Matrices of FP8 blocks, one after the other."""

    def one(pair):
        w, s = pair
        return (p.wide(w) * fp8.expand(s, w.shape, "block", 128)).astype(dtype)

    return jax.lax.map(one, (codes, scale))


def _plain_experts(module: FusedMoE, dtype: str) -> None:
    c = module.config
    if c.format == "fp8_block":
        for name in ("w13", "w2"):
            codes, scale = getattr(module, name)[...], getattr(module, f"{name}_scale")[...]
            setattr(module, name, nnx.Param(_expanded(codes, scale, dtype)))
            setattr(module, f"{name}_scale", nnx.data(None))
        c = replace(c, format="none")
    module.config = replace(c, act_group=None, weight_on="output")
