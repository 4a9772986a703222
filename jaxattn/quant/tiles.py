"""Tiles: the layout of weights that `weight_only_matmul`'s kernel loads, made once from a checkpoint's.

    args = tiles.pack(w, scales, format="gptq", M=4096, dtype="bfloat16", zeros=zeros)
    y = weight_only_matmul(x, **args)

Codes are only moved (2- and 3-bit ones into 4 bits), scales moved and repeated; no number is rounded, except that
float32 scales of blocks (`fp8` with 128 x 128 blocks, `nf4`, `fp4`) become sums of two bfloat16 numbers, 2^-17 off,
and that an output feature with a NaN among its float8 codes gets NaN scales, which makes its products NaN as well.
Tiles are 64 output by 128 input features, the last one filled up with zeros:

| | shape | |
|---|---|---|
| `w` | int32 [F / 64, ceil(M / 128), 1024 or 2048] | 4 or 8 bits, see `pallas_kernels._decode` |
| `scales` | [F / 64, ceil(M / 128), 64 * groups of a tile] | dtype of x, also in pairs; nvfp4: 2^64 times |
| | float32 [F, 1] | int8 and fp8 per output feature: multiplied at the end |
| `zeros` | like `scales` | zero points in the dtype of x |
| `g_idx` | int32 [M] | act-order: which input feature comes next |
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxattn import _checks
from jaxattn.quant import awq, gptq, marlin, nf4, nvfp4, weights, wna16
from jaxattn.quant import primitives as p
from pallas_kernels import _decode

FEATURES, INPUTS = _decode.FEATURES, _decode.INPUTS
LIFT = 2.0**64
"""Exact factor of nvfp4's block scales in bfloat16; `global_scale` is divided by it."""
_GROUPS = (1, 2, 4, 8)


def pack(
    w: Any,
    scales: Any,
    *,
    format: weights.Format,
    M: int,
    dtype: str,
    zeros: Any = None,
    g_idx: Any = None,
    global_scale: Any = None,
    bits: int = 4,
) -> dict[str, Any]:
    """Arguments of `weight_only_matmul` beside `x`, `tiled=True` among them, for a checkpoint's arrays.

    Args:
        w: codes as in the table of `jaxattn.quant.weights`; `scales`, `zeros`, `g_idx`, `global_scale`, `bits` too.
        scales: as in the table.
        format: one of `weights.FORMATS`.
        M: input features.
        dtype: of the activations, "bfloat16" or "float16".
        zeros: zero points.
        g_idx: group of each input feature; values are read, so not traced.
        global_scale: of nvfp4.
        bits: width of the codes.

    Raises:
        ValueError: what `why_not` says, or act-order groups of different sizes.
    """
    if reason := why_not(w, scales, format=format, M=M, dtype=dtype, bits=bits):
        raise ValueError(f"tiles.pack: {reason}")
    order = None if g_idx is None else _order(g_idx, scales.shape[0])
    zero = None
    if format in ("gptq", "gptq_v2"):
        q, zero = gptq.unpack(w, zeros, bits, version=1 if format == "gptq" else 2)
        codes, scale, zero = (q if order is None else q[order]).T, scales.T, zero.T
    elif format == "awq":
        codes, scale, zero = awq.unpack(w).T, scales.T, awq.unpack(zeros).T
    elif format == "marlin":
        codes = marlin.unpack(w, bits).T
        scale = marlin.unpermute_scales(scales, grouped=scales.shape[0] > 1).T
    elif format == "wna16":
        codes, zero = wna16.unpack(w, zeros, bits)
        scale = scales
    elif format in ("nf4", "fp4"):
        codes, scale = nf4.unpack(w).reshape(-1, M), scales.reshape(-1, M // nf4.BLOCK)
    elif w.dtype == jnp.uint8:
        codes, scale = p.unpack_nibbles(w), scales
    else:
        codes, scale = lax.bitcast_convert_type(w, jnp.uint8), scales
    if format == "fp8" and scales.shape[1] > 1:
        scale = jnp.repeat(scales, 128, axis=0)[: w.shape[0]]
    if format == "nvfp4":
        lift = LIFT if dtype == "bfloat16" else 1.0
        scale, global_scale = scales.astype(dtype) * lift, jnp.asarray(global_scale, jnp.float32) / lift
    if format in ("mxfp4", "mxfp8"):  # float32 would lose code 0, 2^-127, on a CPU
        raw = jnp.where(scales == 0, 0x40, scales.astype(jnp.uint16) << 7)
        scale = lax.bitcast_convert_type(jnp.where(scales == 255, 0x7FC0, raw).astype(jnp.uint16), jnp.bfloat16)
    if _kind(format, bits) == "e4m3":  # the kernel decodes NaN as 480; a product with one NaN is NaN anyway
        spoilt = (codes & 0x7F == 0x7F).any(1)[:, None]
        scale = jnp.where(spoilt, jnp.nan, scale).astype(scale.dtype)
    four = _kind(format, bits) in ("u4", "e2m1", "book")
    tiles = -(-M // INPUTS)
    codes = jnp.pad(codes, ((0, 0), (0, tiles * INPUTS - M)))
    args = {"w": _decode.pack(codes, 4 if four else 8), "format": format, "bits": 4 if four else 8, "tiled": True}
    if _by_feature(format, scales):
        return args | {"scales": scale}
    G = scale.shape[1]
    groups = _groups(M, G, format) or 1
    repeats = tiles if G == 1 else _size(M, G, format) * groups // INPUTS

    def spread(x):
        x = jnp.repeat(x, repeats, axis=1)[:, : tiles * groups]
        return jnp.pad(x, ((0, 0), (0, tiles * groups - x.shape[1]), *((0, 0),) * (x.ndim - 2)))

    if _paired(format):
        high = p.rounded(scale, dtype)
        scale = jnp.stack([high, (scale - high.astype(jnp.float32)).astype(dtype)], -1)
    elif format in weights.INTEGERS:
        scale = scale.astype(dtype)
    args["scales"] = _decode.tiled_scales(spread(scale), groups)
    if zero is not None:
        args["zeros"] = _decode.tiled_scales(spread(zero.astype(dtype)), groups)
    if format == "nvfp4":
        args["global_scale"] = global_scale
    return args | ({} if order is None else {"g_idx": order})


def why_not(w: Any, scales: Any, *, format: str, M: int, dtype: str, bits: int = 4) -> str | None:
    """None if a weight can be packed, else one sentence; shapes are enough."""
    F = features(w, format, M, bits)
    if dtype not in ("bfloat16", "float16"):
        return f"x must be bfloat16 or float16, got {dtype}"
    if F % FEATURES or not F or not M:
        return f"the output features must be a multiple of {FEATURES}, got {F}; pad the weight"
    if dtype == "float16" and (format in ("mxfp4", "mxfp8") or _paired(format, scales)):
        return f"scales of {format} have the range of float32, so x must be bfloat16, got float16"
    if format == "fp8" and _checks.dtype_name(w) == "float8_e5m2":
        return "fp8 codes must be float8_e4m3fn, got float8_e5m2"
    if format in ("nf4", "fp4") and M % nf4.BLOCK:
        return f"the input features of {format} must be a multiple of {nf4.BLOCK}, got {M}"
    if format in weights.INTEGERS:
        G = scales.shape[1 if format == "wna16" else 0]
        if G > 1 and _groups(M, G, format) is None:
            return f"scales must belong to multiples of 16 input features, got groups of {M // G}"
    return None


def dequantize(
    w: Any,
    scales: Any,
    format: weights.Format,
    *,
    M: int,
    dtype: str,
    zeros: Any = None,
    g_idx: Any = None,
    global_scale: Any = None,
    bits: int = 4,
) -> jax.Array:
    """The weight [M, F] of `pack`'s arguments in `dtype`."""
    code = code_of(scales, zeros, format, dtype, bits)
    wide = jnp.float64 if dtype == "float64" else jnp.float32
    scale = None if code.scale is None else _decode.untiled_scales(scales, code.groups, code.scale == "pair")
    zero = None if zeros is None else _decode.untiled_scales(zeros, code.groups)
    found = _decode.values(code, _decode.unpack(w, _decode.BITS[code.kind]), scale, zero, wide)[:, :M]
    found = found * scales.astype(wide) if code.scale is None else found
    found = found * p.wide(jnp.asarray(global_scale)) if format == "nvfp4" else found
    if g_idx is not None:
        found = jnp.zeros_like(found).at[:, g_idx].set(found)
    return p.rounded(found, dtype).T


def code_of(scales: Any, zeros: Any, format: str, dtype: Any, bits: int) -> _decode.Code:
    """How the kernel reads a packed weight."""
    kind, scale = _kind(format, bits), None if scales.ndim == 2 else "pair" if _paired(format) else "value"
    return _decode.Code(
        kind=kind,
        dtype=jnp.dtype(dtype),
        scale=scale,
        groups=1 if scale is None else scales.shape[2] // FEATURES // (2 if scale == "pair" else 1),
        zeros=zeros is not None,
        book=tuple(map(float, nf4.codebook(format))) if format in ("nf4", "fp4") else (),
    )


def features(w: Any, format: str, M: int, bits: int) -> int:
    """Output features of a checkpoint's codes."""
    if format in ("gptq", "gptq_v2"):
        return w.shape[1]
    if format in ("nf4", "fp4"):
        return 2 * w.shape[0] // M if M else 0
    return {"awq": 8 * w.shape[-1], "marlin": w.shape[-1] * 2 // bits}.get(format, w.shape[0])


def _kind(format: str, bits: int) -> str:
    known = {"int8": "s8", "fp8": "e4m3", "mxfp8": "e4m3", "mxfp4": "e2m1", "nvfp4": "e2m1"}
    if format in ("nf4", "fp4"):
        return "book"
    return known.get(format) or ("u8" if bits == 8 else "u4")


def _by_feature(format: str, scales: Any) -> bool:
    return format == "int8" or (format == "fp8" and scales.shape[1] == 1)


def _paired(format: str, scales: Any = None) -> bool:
    """Scales are pairs of numbers; `fp8` only where blocks have theirs."""
    return format in ("nf4", "fp4") or (format == "fp8" and (scales is None or scales.shape[1] > 1))


def _size(M: int, G: int, format: str) -> int:
    """Input features that share a scale."""
    known = {"mxfp4": 32, "mxfp8": 32, "nvfp4": nvfp4.GROUP, "nf4": nf4.BLOCK, "fp4": nf4.BLOCK, "fp8": INPUTS}
    return known.get(format, M // G)


def _groups(M: int, G: int, format: str) -> int | None:
    """Scales of an output feature in one tile: the fewest whose input features lie within one group."""
    if G == 1:
        return 1
    return next((n for n in _GROUPS if _size(M, G, format) % (INPUTS // n) == 0), None)


def _order(g_idx: Any, G: int) -> Any:
    """Input features sorted by group, None if they are."""
    if not _checks.is_concrete(g_idx):
        raise ValueError("tiles.pack: values of g_idx must be known, got a traced array; pack outside jit")
    groups = np.asarray(g_idx)
    sizes = np.bincount(groups, minlength=G)
    if len(sizes) != G or len(set(sizes.tolist())) > 1:
        raise ValueError(f"tiles.pack: the {G} groups of g_idx must have equal sizes, got {sizes.tolist()[:8]}")
    order = np.argsort(groups, kind="stable")
    return None if (order == np.arange(order.size)).all() else jnp.asarray(order, jnp.int32)
