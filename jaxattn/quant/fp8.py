"""FP8 (E4M3, E5M2) with a scale per tensor, token, output channel, 1xg group or gxg block.

`x ~ q * scale`. Which floor and which arithmetic a path of vLLM has is part of the format:

| granularity | rule | scale | code |
|---|---|---|---|
| tensor, scale given | | as given | `x * (1 / s)` |
| tensor | | `amax / 448` | `x * (1 / s)` |
| token, channel | | `max(min(amax, upper_bound) / 448, 1 / (448 * 512))` | `x / s` |
| group | cuda | `max(amax, 1e-10) / 448`; UE8M0: of `max(s, 1e-10)`, rounded up | `x / s` |
| group | triton | `max(amax, 1e-10) * (1 / 448)`; UE8M0: of s, rounded up | `x / s` |
| group, block | deep_gemm | `max(amax, 1e-4) / 448`; UE8M0: of s, rounded up | `x * (1 / s)` |

448 stands for the largest number of the codes' type. Sources: vLLM 0.26.0 csrc/quantization/w8a8/fp8,
`fp8_utils.py`; https://github.com/deepseek-ai/DeepGEMM (per_block_cast_to_fp8).
"""

from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxattn.quant import primitives as p

type Granularity = Literal["tensor", "token", "channel", "group", "block"]
type Rule = Literal["cuda", "triton", "deep_gemm"]
E4M3 = "float8_e4m3fn"
GRANULARITIES: tuple[str, ...] = ("tensor", "token", "channel", "group", "block")
RULES: tuple[str, ...] = ("cuda", "triton", "deep_gemm")
GROUP_FLOOR, BLOCK_FLOOR, TOKEN_FLOOR = 1e-10, 1e-4, 1 / 512


def quantize(
    x: Float[Array, "... M"],
    granularity: Granularity = "token",
    *,
    scale: Float[Array, ""] | None = None,
    upper_bound: Float[Array, ""] | float | None = None,
    dtype: str = E4M3,
    group: int = 128,
    rule: Rule = "cuda",
    ue8m0: bool = False,
) -> tuple[Float[Array, "... M"], Float[Array, "..."]]:
    """Codes and scales of `x`; see the module's table.

    Args:
        x: activations, or a weight [F, M] with one row per output channel. float64 gives unrounded codes.
        granularity: "tensor": scale []; "token" (rows of activations) and "channel" (rows of a weight): [..., 1];
            "group": [..., ceil(M / group)]; "block": x is [F, M], scale [ceil(F / group), ceil(M / group)].
        scale: a static scale, tensor only.
        upper_bound: largest amax that counts, token and channel only; larger numbers saturate.
        dtype: of the codes, "float8_e4m3fn" or "float8_e5m2".
        group: size of a group, and of a block's both sides; the last may be incomplete.
        rule: floor and arithmetic of groups; blocks always follow "deep_gemm".
        ue8m0: round the scales of groups and blocks up to powers of two.

    Returns:
        codes and float32 scales. Of an all-zero tensor the scale is 0 and the codes are 0.

    Raises:
        ValueError: options that do not belong together.
    """
    check(granularity, x.ndim, scale is not None, upper_bound is not None, dtype, group, rule, ue8m0)
    x, limit = p.wide(x), p.float8_max(dtype)
    if granularity == "tensor":
        s = p.divide(p.amax(x, None), limit) if scale is None else jnp.asarray(scale).astype(x.dtype).reshape(())
        return p.to_float8(x * p.inverse(s), dtype), s
    if granularity in ("token", "channel"):
        top = p.amax(x, -1)
        top = top if upper_bound is None else jnp.minimum(top, jnp.asarray(upper_bound).astype(x.dtype).reshape(()))
        s = jnp.maximum(p.divide(top, limit), p.divide(jnp.asarray(TOKEN_FLOOR, x.dtype), limit))
        return p.to_float8(p.divide(x, s), dtype), s
    if granularity == "block":
        codes, s = _grouped(tiles(x, group), (-3, -1), limit, "deep_gemm", ue8m0, dtype)
        return untiled(codes, x.shape), s[..., 0, :, 0]
    codes, s = _grouped(p.grouped(x, group), (-1,), limit, rule, ue8m0, dtype)
    return p.ungrouped(codes, x.shape[-1]), s[..., 0]


def dequantize(
    q: Float[Array, "... M"],
    scale: Float[Array, "..."],
    granularity: Granularity = "token",
    *,
    group: int = 128,
    dtype: str = "float32",
) -> Float[Array, "... M"]:
    """`q * scale`, rounded to `dtype` once."""
    x = p.wide(q) * expand(scale.astype(p.wide(q).dtype), q.shape, granularity, group)
    return x.astype(dtype)


def expand(scale: Array, shape: tuple[int, ...], granularity: Granularity, group: int = 128) -> Array:
    """The scale of every element, broadcastable against codes of `shape`."""
    if granularity == "group":
        return jnp.repeat(scale, group, axis=-1)[..., : shape[-1]]
    if granularity == "block":
        return jnp.repeat(jnp.repeat(scale, group, axis=-2), group, axis=-1)[..., : shape[-2], : shape[-1]]
    return scale


def pack(scale: Float[Array, "N G"]) -> Int32[Array, "G/4 N+pad"]:
    """Power-of-two group scales as tensor cores of compute capability 10 read them.

    Four exponent bytes of a row in one little-endian word, columns of words contiguous, rows padded with zeros to a
    multiple of 4 (16 bytes). A power of two is its exponent byte: no value is converted.
    """
    bits = lax.bitcast_convert_type(scale.astype(jnp.float32), jnp.int32) >> 23
    N, G = bits.shape
    codes = jnp.pad(bits, ((0, -N % 4), (0, -G % 4))).astype(jnp.uint8)
    return p.pack_words(codes, 8).T


def unpack(packed: Int32[Array, "G/4 N+pad"], N: int, G: int) -> Float[Array, "N G"]:
    """The scales of `pack`."""
    return p.ue8m0_value(p.unpack_words(packed.T, 8)[:N, :G])


def check(granularity, ndim, static, bounded, dtype, group, rule, ue8m0) -> None:
    """Raise `ValueError` for options of `quantize` that do not belong together."""
    p.float8_max(dtype)
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity must be one of {', '.join(GRANULARITIES)}, got {granularity!r}")
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}, got {rule!r}")
    if static and granularity != "tensor":
        raise ValueError(f"a static scale belongs to granularity 'tensor', got {granularity!r}; leave one of them out")
    if bounded and granularity not in ("token", "channel"):
        raise ValueError(f"upper_bound belongs to granularity 'token' or 'channel', got {granularity!r}")
    if ue8m0 and granularity not in ("group", "block"):
        raise ValueError(f"UE8M0 scales belong to granularity 'group' or 'block', got {granularity!r}")
    if granularity == "block" and ndim != 2:
        raise ValueError(f"granularity 'block' needs a matrix [F, M], got {ndim} dimensions")
    if group < 1:
        raise ValueError(f"group must be at least 1, got {group}")


def _grouped(x, axes, limit, rule, ue8m0, dtype):
    floor = BLOCK_FLOOR if rule == "deep_gemm" else GROUP_FLOOR
    top = jnp.maximum(p.amax(x, axes), floor)
    if rule == "triton":
        s = top * lax.optimization_barrier(jnp.asarray(1 / limit, x.dtype))
    else:
        s = p.divide(top, limit)
    if ue8m0:
        s = p.ue8m0_value(p.ue8m0_ceil(jnp.maximum(s, GROUP_FLOOR) if rule == "cuda" else s)).astype(x.dtype)
    return p.to_float8(x * p.inverse(s) if rule == "deep_gemm" else p.divide(x, s), dtype), s


def tiles(x: Array, group: int) -> Array:
    """A matrix [F, M] as [rows, group, columns, group] of blocks, filled up with zeros."""
    F, M = x.shape
    x = jnp.pad(x, ((0, -F % group), (0, -M % group)))
    return x.reshape(-(-F // group), group, -(-M // group), group)


def untiled(x: Array, shape: tuple[int, ...]) -> Array:
    """The inverse of `tiles`."""
    rows, group, columns, _ = x.shape
    return x.reshape(rows * group, columns * group)[: shape[0], : shape[1]]
