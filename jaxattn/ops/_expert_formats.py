"""Formats of expert weights: shapes, dtypes, dequantization, and how activations are quantized beside them."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxattn import _checks
from jaxattn.quant import fp8, int8, mx, nvfp4, wna16
from jaxattn.quant import primitives as p

FORMATS = ("none", "fp8_tensor", "fp8_block", "int8", "wna16", "mxfp4", "nvfp4")
PACKED = ("wna16", "mxfp4", "nvfp4")
BLOCK = 128
_GROUPS = {"mxfp4": mx.GROUP, "nvfp4": nvfp4.GROUP}
_CODES = {"fp8_tensor": "float8_e4m3fn", "fp8_block": "float8_e4m3fn", "int8": "int8"}
_SCALES = {"mxfp4": "uint8", "nvfp4": "float8_e4m3fn"}


def check(
    op: str,
    name: str,
    w: Any,
    scale: Any,
    zeros: Any,
    scale_2: Any,
    bias: Any,
    *,
    shape: tuple[int, ...],
    format: str,
    dtype: str,
) -> None:
    """Raise `TypeError` or `ValueError` unless one weight [E, N, K] and what belongs to it fit the format.

    Args:
        op: for messages.
        name: of the weight, "w13" or "w2"; the others are `{name}_scale` and so on.
        w: codes.
        scale: their scales.
        zeros: zero points of wna16.
        scale_2: the second scale of nvfp4.
        bias: [E, N].
        shape: (E, N, K) in values.
        format: one of FORMATS.
        dtype: of the activations.
    """
    E, N, K = shape
    wide = (_checks.F64,) if dtype == _checks.F64 else ()
    codes = "uint8" if format in PACKED else _CODES.get(format, dtype)
    _checks.check_dtype(op, name, w, (codes, *wide))
    width = K // 2 if format in PACKED else K
    expect(op, name, w, (E, N, width), format)
    given = {"scale": scale, "zeros": zeros, "scale_2": scale_2}
    needed = {"scale"} if format != "none" else set()
    needed |= {"scale_2"} if format == "nvfp4" else set()
    allowed = needed | ({"zeros"} if format == "wna16" else set())
    for part, x in given.items():
        if x is None and part in needed:
            raise ValueError(f"{op}: format {format!r} needs {name}_{part}; pass it")
        if x is not None and part not in allowed:
            raise ValueError(f"{op}: format {format!r} knows no {name}_{part}; leave it out")
    if scale is not None:
        kind = dtype if format == "wna16" else _SCALES.get(format, "float32")
        _checks.check_dtype(op, f"{name}_scale", scale, (kind, *wide))
        G = scale.shape[-1] if format == "wna16" and scale.ndim == 3 else 0
        if format == "wna16" and (not G or K % G or (K // G) % 8):
            raise ValueError(
                f"{op}: {name}_scale must be ({E}, {N}, groups) with groups of a multiple of 8 out of {K} numbers, got "
                f"shape {tuple(scale.shape)}"
            )
        if format in _GROUPS and K % _GROUPS[format]:
            raise ValueError(
                f"{op}: {name} of format {format!r} needs rows of a multiple of {_GROUPS[format]}, got {K}"
            )
        per_group = (E, N, K // _GROUPS.get(format, K))
        shapes = {"fp8_tensor": (E,), "fp8_block": (E, -(-N // BLOCK), -(-K // BLOCK)), "int8": (E, N, 1)}
        expect(op, f"{name}_scale", scale, shapes.get(format, (E, N, G) if G else per_group), format)
        if zeros is not None:
            _checks.check_dtype(op, f"{name}_zeros", zeros, ("uint8",))
            expect(op, f"{name}_zeros", zeros, (E, N // 2, G), format)
    if scale_2 is not None:
        _checks.check_dtype(op, f"{name}_scale_2", scale_2, ("float32", *wide))
        expect(op, f"{name}_scale_2", scale_2, (E,), format)
    if bias is not None:
        _checks.check_dtype(op, f"{name}_bias", bias, _checks.FLOATS)
        expect(op, f"{name}_bias", bias, (E, N), format)


def expect(op: str, name: str, x: Any, shape: tuple[int, ...], format: str) -> None:
    """Raise `ValueError` unless `x` has this shape."""
    if tuple(x.shape) != shape:
        raise ValueError(f"{op}: {name} of format {format!r} must be {shape}, got shape {tuple(x.shape)}")


def default_group(format: str, act_group: int | None) -> int | None:
    """Group of FP8 activations: 128 for fp8_block, None = not quantized for the FP4 formats."""
    return BLOCK if format == "fp8_block" and act_group is None else act_group


def check_group(op: str, format: str, act_group: int | None, width: int) -> None:
    """Raise `ValueError` for groups of activations that the format does not know or that do not divide rows."""
    allowed = {"fp8_block": (BLOCK,), "mxfp4": (None, 32, 128), "nvfp4": (None, 32, 128)}.get(format, (None,))
    if act_group not in allowed:
        known = " or ".join(map(str, allowed))
        raise ValueError(f"{op}: act_group of format {format!r} must be {known}, got {act_group}")
    if act_group and format != "fp8_block" and width % act_group:
        raise ValueError(f"{op}: with {act_group=} rows must be a multiple of it, got {width}")


def dequantize(w: Array, scale: Any, zeros: Any, scale_2: Any, *, format: str, dtype: Any) -> Float[Array, "N K"]:
    """One expert's weight in the wide dtype, for formats whose scales lie along K; else the codes alone.

    wna16 is rounded to `dtype`, as tensor cores take it; the FP4 formats are exact in bfloat16.
    """
    if format == "fp8_block":
        return p.wide(w) * fp8.expand(scale, w.shape, "block", BLOCK)
    if format == "wna16":
        return p.wide(wna16.dequantize(w, scale, zeros))
    if format == "mxfp4":
        return mx.dequantize(w, scale, dtype=dtype)
    if format == "nvfp4":
        return nvfp4.dequantize(w, scale, scale_2, dtype=dtype)
    return w if w.dtype == jnp.int8 else p.wide(w)


def quantize_weight(w: Float[Any, "E N K"], format: str, dtype: Any, zeros: bool = False) -> dict[str, Array]:
    """`w` and what else belongs to expert weights in a format (`scale`, `zeros`, `scale_2`), rounded to nearest."""
    x = jnp.asarray(w)
    if format == "none":
        return {"w": x.astype(dtype)}
    if format == "fp8_tensor":
        s = jnp.max(jnp.abs(x), (1, 2)) / p.E4M3_MAX
        return {"w": (x / s[:, None, None]).astype("float8_e4m3fn"), "scale": s}
    if format == "fp8_block":
        q, s = jax.lax.map(lambda e: fp8.quantize(e, "block"), x)
        return {"w": q, "scale": s}
    if format == "int8":
        q, s, _ = int8.quantize(x, "channel")
        return {"w": q, "scale": s}
    if format == "wna16":
        group = min(32, w.shape[2])
        parts = [wna16.quantize(e.astype(dtype), group=group, symmetric=not zeros) for e in x]
        found = {"w": jnp.stack([q for q, _, _ in parts]), "scale": jnp.stack([s.astype(dtype) for _, s, _ in parts])}
        return found | ({"zeros": jnp.stack([z for _, _, z in parts if z is not None])} if zeros else {})
    if format == "mxfp4":
        q, s = mx.quantize(x, "mxfp4")
        return {"w": q, "scale": s}
    q, s, g = nvfp4.quantize(x)
    return {"w": q, "scale": s, "scale_2": jnp.full((len(w),), 1 / g)}


def quantize(
    x: Float[Array, "R K"], format: str, act_group: int | None, ue8m0: bool
) -> tuple[Array, Float[Array, "..."] | None]:
    """Activations as a product of this format takes them, and what its sums are multiplied with (None = 1).

    Group scales are multiplied into the codes, which is exact for powers of two. float64, the type of truths, stays as
    it is: a truth does not quantize.
    """
    if x.dtype == jnp.float64:
        return x, None
    q, s = codes(x, format, act_group, ue8m0)
    if act_group is not None:
        return p.wide(q) * fp8.expand(s, x.shape, "group", act_group), None
    return q if q.dtype == jnp.int8 else p.wide(q), s


def codes(x: Float[Array, "R K"], format: str, act_group: int | None, ue8m0: bool) -> tuple[Array, Any]:
    """Activations as a format takes them: codes and scales [], [R, 1] or [R, K / act_group]; or as they are."""
    if format == "fp8_tensor":
        return fp8.quantize(x, "tensor")
    if format == "int8":
        return int8.quantize(x, "token", rule="triton")[:2]
    return (x, None) if act_group is None else quantize_groups(x, format, act_group, ue8m0)


def decode(args: dict[str, Any], name: str, format: str, dtype: Any) -> Float[Array, "E N K"]:
    """Weights of four bits in `dtype`; those of nvfp4 without their second scale, so that all FP4 is exact."""
    w, scale, zeros = (args[part] for part in (name, f"{name}_scale", f"{name}_zeros"))

    def one(w, scale, zeros):
        second = jnp.ones((), jnp.float32) if format == "nvfp4" else None
        return dequantize(w, scale, zeros, second, format=format, dtype=jnp.float32).astype(dtype)

    return jax.vmap(one)(w, scale, zeros)


def quantize_groups(x: Array, format: str, act_group: int, ue8m0: bool) -> tuple[Array, Array]:
    """FP8 codes and scales of groups: vLLM's rule beside FP8 weights, DeepGEMM's (MegaMoE's) beside FP4 weights."""
    rule = "cuda" if format == "fp8_block" else "deep_gemm"
    return fp8.quantize(x, "group", group=act_group, rule=rule, ue8m0=ue8m0)


def grouped_product(
    x: Array, weight: dict[str, Any], experts: Int32[Array, " R"], *, format: str, act_group: int | None, ue8m0: bool
) -> Float[Array, "R N"]:
    """`x[r] @ dequantized(w[experts[r]]).T + bias` for every row, in the wide dtype; rows of no expert are 0.

    Experts are taken one after the other, and each computes all rows: this is the definition, not the fast way.

    Args:
        x: rows in the activations' dtype, float32 (not yet rounded), or float64.
        weight: arrays `w`, `scale`, `zeros`, `scale_2`, `bias` with a leading dimension of experts, or None.
        experts: expert of every row; out of range = none.
        format: of the weight.
        act_group: group of FP8 activations.
        ue8m0: their scales are powers of two.
    """
    q, factor = quantize(x, format, act_group, ue8m0)
    work = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    given = {name: a for name, a in weight.items() if a is not None}
    E, N = given["w"].shape[:2]

    def step(total, item):
        e, parts = item
        w = dequantize(
            parts["w"], parts.get("scale"), parts.get("zeros"), parts.get("scale_2"), format=format, dtype=work
        )
        if q.dtype == jnp.int8:
            acc = int8.product(q, w).astype(work)
        else:
            acc = jnp.einsum("rk,nk->rn", q, w.astype(work), precision="highest")
        if factor is not None:
            acc = acc * factor
        if format == "int8":
            acc = acc * parts["scale"][:, 0]
        elif format == "fp8_tensor":
            acc = acc * parts["scale"]
        if "bias" in parts:
            acc = acc + parts["bias"].astype(work)
        return jnp.where((experts == e)[:, None], acc, total), None

    zero = jnp.zeros((x.shape[0], N), work)
    if not x.shape[0]:
        return zero
    return jax.lax.scan(step, zero, (jnp.arange(E, dtype=jnp.int32), given))[0]
