"""INT8, symmetric or with a zero point ("azp"), in the three roundings that vLLM has.

`x ~ (q - azp) * scale`. s is the scale; all divisions are IEEE float32.

| granularity | rule | scale | code |
|---|---|---|---|
| tensor, scale given | cuda | as given | `sat(even(x / s))` |
| tensor, scale and azp given | cuda | as given | `sat(even(x * (1 / s)) + azp)` |
| token | cuda | `amax / 127` | `even(x * (127 / amax))`; a zero row: scale 0, codes 0 |
| token, asymmetric | cuda | `(max - min) / 255`, `azp = even(-128 - min / s)` | `sat(even(x * (1 / s)) + azp)` |
| token | triton | `max(amax, 1e-10) / 127` | `away(x * (127 / max(amax, 1e-10)))` |
| group | triton | `max(amax, 1e-10) / 127` | `zero(sat(x / s))` |
| channel | | `amax / 127` | `even(x / s)` in +-127; a zero row: scale 0, codes 0 |
| block | | `max(amax, 1e-10) / 127` | `even(x / s)` |

even, away: halves go to the even integer or away from zero; zero: the fraction is cut off. A constant row has no range
to divide by 255. vLLM returns scale 0 and an arbitrary zero point for it; here the codes are 0, the scale is |c| (1 if
c is 0) and the zero point is -sign(c), so that the row comes back exactly. Scales below 2^-126 count as 0.
Sources: vLLM 0.26.0 csrc/quantization/w8a8/int8/scaled_quant.cu, `int8_utils.py`, `experts_int8.py`.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, Int32

from jaxattn.quant import fp8
from jaxattn.quant import primitives as p

type Granularity = Literal["tensor", "token", "channel", "group", "block"]
type Rule = Literal["cuda", "triton"]
FLOOR = 1e-10
EXACT = 1024
"""Products of two codes, 2^14 at most, whose sum is an exact float32 in any order."""
_FAR = 2.0**30
"""Zero points and unbounded codes stop here, so that their sum cannot wrap around."""


def quantize(
    x: Float[Array, "... M"],
    granularity: Granularity = "token",
    *,
    scale: Float[Array, ""] | None = None,
    azp: Int32[Array, ""] | None = None,
    symmetric: bool = True,
    group: int = 128,
    rule: Rule = "cuda",
) -> tuple[Int8[Array, "... M"], Float[Array, "..."], Int32[Array, "..."] | None]:
    """Codes, scales and zero points (None if symmetric) of `x`; see the module's table.

    Args:
        x: activations, or a weight [F, M] with one row per output channel.
        granularity: shapes of scales as in `jaxattn.quant.fp8.quantize`.
        scale: a static scale, tensor only.
        azp: a static zero point beside it.
        symmetric: False gives each token its own zero point.
        group: size of a group, and of a block's both sides.
        rule: "cuda" or "triton", for tokens; groups exist in Triton only.

    Raises:
        ValueError: options that do not belong together.
    """
    check(granularity, x.ndim, scale is not None, azp is not None, symmetric, group, rule)
    x = p.wide(x)
    if granularity == "tensor":
        s = jnp.asarray(scale).astype(x.dtype).reshape(())
        if azp is None:
            return p.to_int8(_or_zero(p.divide(x, s), s)), s, None
        azp = jnp.asarray(azp, jnp.int32).reshape(())
        return _shifted(x * p.inverse(s), azp), s, azp
    if not symmetric:
        return _asymmetric(x)
    if granularity == "token":
        top = p.amax(x, -1)
        top = jnp.maximum(top, FLOOR) if rule == "triton" else top
        s = p.divide(top, p.INT8_MAX)
        factor = p.divide(jnp.full_like(top, p.INT8_MAX), jnp.maximum(top, p.INT8_MAX * p.TINY))
        codes = p.to_int8(x * jnp.where(s >= p.TINY, factor, 0), "away" if rule == "triton" else "even")
        return codes, s, None
    if granularity == "channel":
        s = p.divide(p.amax(x, -1), p.INT8_MAX)
        return jnp.maximum(p.to_int8(_or_zero(p.divide(x, s), s)), -127), s, None
    if granularity == "group":
        parts = p.grouped(x, group)
        s = p.divide(jnp.maximum(p.amax(parts, -1), FLOOR), p.INT8_MAX)
        return p.ungrouped(p.to_int8(p.divide(parts, s), "zero"), x.shape[-1]), s[..., 0], None
    tiles = fp8.tiles(x, group)
    s = p.divide(jnp.maximum(p.amax(tiles, (-3, -1)), FLOOR), p.INT8_MAX)
    return fp8.untiled(p.to_int8(p.divide(tiles, s)), x.shape), s[..., 0, :, 0], None


def experts_int8(w: Float[Array, "*E F M"]) -> tuple[Int8[Array, "*E F M"], Float[Array, "*E F 1"]]:
    """Codes and float32 scales of 16-bit expert weights, as vLLM's `experts_int8` makes them while it loads.

    The rule of "channel", computed in torch in the weight's own dtype: scale and quotient are rounded to it before the
    quotient is rounded to an integer. In bfloat16 that moves about one code in ten; `quantize(w, "channel")` is nearer.
    """
    s = p.rounded(p.divide(p.amax(w, -1), p.INT8_MAX), w.dtype)
    wide = p.wide(s)
    quotient = p.rounded(_or_zero(p.divide(p.wide(w), wide), wide), w.dtype)
    return jnp.maximum(p.to_int8(p.wide(quotient)), -127), wide


def dequantize(
    q: Int8[Array, "... M"],
    scale: Float[Array, "..."],
    azp: Int32[Array, "..."] | None = None,
    granularity: Granularity = "token",
    *,
    group: int = 128,
    dtype: str = "float32",
) -> Float[Array, "... M"]:
    """`(q - azp) * scale`, rounded to `dtype` once."""
    whole = q.astype(jnp.int32) if azp is None else q.astype(jnp.int32) - azp
    return (whole.astype(scale.dtype) * fp8.expand(scale, q.shape, granularity, group)).astype(dtype)


def product(a: Int8[Array, "N M"], b: Int8[Array, "F M"]) -> Int32[Array, "N F"]:
    """`a @ b.T`, exact on every backend.

    Not a product of integers for XLA: untuned, its matrix kernels for Hopper take 16 codes a step where the instruction
    multiplies 32, and return twice the sum. So parts that float32 holds exactly are added up as int32.
    """
    total = jnp.zeros((a.shape[0], b.shape[0]), jnp.int32)
    for start in range(0, a.shape[1], EXACT):
        x, y = (codes[:, start : start + EXACT].astype(jnp.float32) for codes in (a, b))
        total = total + jnp.einsum("nm,fm->nf", x, y, precision="highest").astype(jnp.int32)
    return total


def check(granularity, ndim, static, zero_point, symmetric, group, rule) -> None:
    """Raise `ValueError` for options of `quantize` that do not belong together."""
    if granularity not in fp8.GRANULARITIES:
        raise ValueError(f"granularity must be one of {', '.join(fp8.GRANULARITIES)}, got {granularity!r}")
    if static != (granularity == "tensor"):
        raise ValueError(
            f"int8 codes with one scale for the tensor need a static one, and only those, got {granularity=} "
            f"{'with' if static else 'without'} scale"
        )
    if zero_point and not static:
        raise ValueError("a static azp belongs to a static scale; leave it out or give both")
    if not symmetric and granularity != "token":
        raise ValueError(f"symmetric=False belongs to granularity 'token', got {granularity!r}; give azp instead")
    if rule not in ("cuda", "triton"):
        raise ValueError(f"rule must be one of cuda, triton, got {rule!r}")
    if rule == "triton" and (granularity not in ("token", "group") or not symmetric):
        raise ValueError(f"rule 'triton' belongs to symmetric tokens and groups, got {granularity=}, {symmetric=}")
    if granularity == "block" and ndim != 2:
        raise ValueError(f"granularity 'block' needs a matrix [F, M], got {ndim} dimensions")
    if group < 1:
        raise ValueError(f"group must be at least 1, got {group}")


def _asymmetric(x):
    known = jnp.where(jnp.isnan(x), 0, x)
    low, high = known.min(-1, keepdims=True), known.max(-1, keepdims=True)
    s = p.divide(high - low, 255.0)
    azp = jnp.round(jnp.clip(-128 - p.divide(low, jnp.where(s >= p.TINY, s, 1)), -_FAR, _FAR)).astype(jnp.int32)
    constant = s < p.TINY
    azp = jnp.where(constant, -jnp.sign(low).astype(jnp.int32), azp)
    codes = jnp.where(constant, jnp.int8(0), _shifted(x * p.inverse(s), azp))
    return codes, jnp.where(constant, jnp.where(low == 0, 1, jnp.abs(low)), s), azp


def _shifted(x, azp):
    """`sat(even(x) + azp)` without overflow of the sum."""
    whole = jnp.round(jnp.clip(jnp.where(jnp.isnan(x), 0, x), -_FAR, _FAR)).astype(jnp.int32)
    return jnp.clip(whole + jnp.clip(azp, -int(_FAR), int(_FAR)), -128, 127).astype(jnp.int8)


def _or_zero(quotient, scale):
    return jnp.where(scale >= p.TINY, quotient, 0)
