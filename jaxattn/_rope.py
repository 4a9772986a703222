"""Rotary position embedding: frequencies, tables of cosines and sines, rotation.

Frequencies and tables are built in vLLM's order of operations. It matters: at position 60000 the float32 product
`position * frequency` is off by 1e-3 whatever one does, and another order is off by another 1e-3.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels import _exact


def yarn_range(
    dim: int, base: float, original: int, *, beta_fast: float = 32.0, beta_slow: float = 1.0, truncate: bool = True
) -> tuple[float, float]:
    """First and last pair of the ramp between kept and stretched frequencies, `(low, high)`.

    `d(n) = dim log(original / (2 pi n)) / (2 log base)` is the pair that turns n times over the original context;
    `low = max(floor(d(beta_fast)), 0)`, `high = min(ceil(d(beta_slow)), dim - 1)`; without `truncate` (gpt-oss) the
    ramp begins and ends between pairs.
    """

    def pair(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair(beta_fast), pair(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, dim - 1)


def frequencies(
    dim: int,
    base: float,
    *,
    factor: float = 1.0,
    original: int | None = None,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    dtype: Any = np.float32,
) -> np.ndarray:
    """Inverse frequencies `base^(-2i / dim)`, [dim / 2] in `dtype`, stretched by YaRN if `factor` is not 1."""
    one = np.dtype(dtype).type
    powers = one(base) ** (np.arange(0, dim, 2, dtype=dtype) / one(dim))
    kept = one(1) / powers
    if factor == 1.0 or original is None:
        return kept
    stretched = one(1) / (one(factor) * powers)
    low, high = yarn_range(dim, base, original, beta_fast=beta_fast, beta_slow=beta_slow, truncate=truncate)
    top = high + 0.001 if low == high else high
    ramp = (np.arange(dim // 2, dtype=dtype) - one(low)) / one(top - low)
    keep = one(1) - np.clip(ramp, 0, 1)
    return stretched * (1 - keep) + kept * keep


def table(inverse: Float[Array, " Dr/2"], positions: Int[Array, " N"], magnitude: float = 1.0) -> Float[Array, "N Dr"]:
    """Rows `cos(p f) * magnitude || sin(p f) * magnitude`, in float32 (float64 for float64 frequencies)."""
    wide = jnp.float64 if inverse.dtype == jnp.float64 else jnp.float32
    angle = positions.astype(wide)[:, None] * inverse.astype(wide)
    return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], -1) * jnp.asarray(magnitude, wide)


def rows(cos_sin: Float[Array, "P Dr"], positions: Int[Array, " N"]) -> Float[Array, "N Dr"]:
    """Rows of a table; positions outside of it take its first or last row."""
    return cos_sin[jnp.clip(positions, 0, cos_sin.shape[0] - 1)]


def rotate(
    x: Float[Array, "... Dr"], cos_sin: Float[Array, "... Dr"], *, interleaved: bool = True, inverse: bool = False
) -> Float[Array, "... Dr"]:
    """Pairs (a, b) of `x` turned to (a cos - b sin, b cos + a sin), in the wide dtype, unrounded.

    Args:
        x: numbers, already float32 or float64.
        cos_sin: `cos || sin`, broadcastable to `x`.
        interleaved: pairs are neighbours (2i, 2i + 1), else (i, i + Dr / 2).
        inverse: turn back.
    """
    half = x.shape[-1] // 2
    cos_sin = cos_sin.astype(x.dtype)
    cos, sin = cos_sin[..., :half], cos_sin[..., half:]
    sin = -sin if inverse else sin
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    # the barriers keep a GPU from fusing a product into the sum, which would skip its rounding
    ac, bs, bc, as_ = jax.lax.optimization_barrier((a * cos, b * sin, b * cos, a * sin))
    first, second = ac - bs, bc + as_
    if interleaved:
        return jnp.stack([first, second], -1).reshape(x.shape)
    return jnp.concatenate([first, second], -1)


def split(x: Array, width: int, first: bool) -> tuple[Array, Array]:
    """(kept, rotary part) of the last axis."""
    return (x[..., width:], x[..., :width]) if first else (x[..., :-width], x[..., -width:])


def join(kept: Array, turned: Array, first: bool) -> Array:
    """The inverse of `split`."""
    return jnp.concatenate([turned, kept] if first else [kept, turned], -1)


def rms(x: Float[Array, "... D"], eps: float) -> Float[Array, "... 1"]:
    """`1 / sqrt(mean(x^2) + eps)` of the last axis."""
    return jax.lax.rsqrt(_exact.divide(jnp.sum(x * x, -1, keepdims=True), float(x.shape[-1])) + eps)
