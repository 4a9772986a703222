"""Quantizers of weights that look at activations: GPTQ and AWQ, beside rounding to nearest.

All three return the codes that `gptq.pack`, `awq.pack`, `marlin.pack` or `wna16.pack` store. A weight W is [M, F], x
[N, M] are activations that reach it; the aim is a small `|x W - x W'|`, not a small `|W - W'|`.

Sources: https://arxiv.org/abs/2210.17323 (GPTQ), https://arxiv.org/abs/2306.00978 (AWQ).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt8

from jaxattn.quant import integers
from jaxattn.quant import primitives as p

DAMPING = 0.01
"""Share of the Hessian's mean diagonal that GPTQ adds to it."""
_STEPS = 20
"""Exponents that AWQ tries: 0, 1/20, ... 19/20."""


class Quantized(NamedTuple):
    """Integer codes of a weight and what turns them back."""

    q: UInt8[Array, "M F"]
    scale: Float[Array, "G F"]
    zero: UInt8[Array, "G F"]
    g_idx: Int32[Array, " M"]
    """Group of each input feature."""

    def dequantize(self) -> Float[Array, "M F"]:
        """The weight that the codes stand for, in the dtype of the scales."""
        return integers.dequantize(self.q, self.scale, self.zero, rows=self.g_idx)


def nearest(w: Float[Array, "M F"], *, bits: int = 4, group: int = 128, symmetric: bool = True) -> Quantized:
    """Every number rounded to the nearest code.

    Raises:
        ValueError: the group does not divide M.
    """
    q, scale, zero = integers.quantize(w, bits, group, symmetric=symmetric)
    return Quantized(q, scale, zero, jnp.arange(w.shape[0], dtype=jnp.int32) // group)


def hessian(x: Float[Array, "N M"]) -> Float[Array, "M M"]:
    """`2/N sum_n x_n x_n^T` in float32: the curvature of the squared output error. Average it over batches."""
    x = x.astype(jnp.float32)
    return jnp.matmul(x.T, x, precision="highest") * (2 / x.shape[0])


def gptq(
    w: Float[Array, "M F"],
    curvature: Float[Array, "M M"],
    *,
    bits: int = 4,
    group: int = 128,
    symmetric: bool = True,
    act_order: bool = False,
    damping: float = DAMPING,
) -> Quantized:
    """Input features one after the other; the error of each is made up for by those that follow.

    With U the upper Cholesky factor of the inverse of the damped Hessian, feature i is rounded, and
    `(w_i - w'_i) / U_ii * U_ij` is subtracted from every later feature j. Scales are fitted group by group to the
    weight as it has become by then.

    Args:
        w: weight, input features first.
        curvature: `hessian` of the activations. A feature that never occurs (zero diagonal) is set to zero.
        bits: width of the codes.
        group: input features that share a scale.
        symmetric: zero point in the middle, else fitted.
        act_order: begin with the features of the largest curvature; their groups are then recorded in `g_idx`.
        damping: share of the mean diagonal that is added to the diagonal.

    Returns:
        Codes in the order of the input features of `w`.

    Raises:
        ValueError: shapes, or the group does not divide M.
    """
    M, F = w.shape
    if curvature.shape != (M, M):
        raise ValueError(f"the curvature of {M} input features must be [{M}, {M}], got {tuple(curvature.shape)}")
    if group < 1 or M % group:
        raise ValueError(f"the group must divide the {M} input features, got {group}")
    diagonal = jnp.diagonal(curvature).astype(jnp.float32)
    dead = diagonal == 0
    order = jnp.argsort(-diagonal, stable=True) if act_order else jnp.arange(M)
    H = curvature.astype(jnp.float32) + jnp.diag(jnp.where(dead, 1, 0) + damping * diagonal.mean())
    H = H[order][:, order]
    inverse = jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(H), True), jnp.eye(M))
    upper = jnp.linalg.cholesky(inverse).T
    work = jnp.where(dead[:, None], 0, w.astype(jnp.float32))[order]
    feature = jnp.arange(M)

    def start_group(g, work):
        part = jax.lax.dynamic_slice_in_dim(work, g * group, group)
        scale, zero = integers.grid(part.astype(w.dtype), bits, group, symmetric)
        return scale[0], zero[0]

    def step(carry, i):
        work, scale, zero = carry
        scale, zero = jax.lax.cond(i % group == 0, lambda: start_group(i // group, work), lambda: (scale, zero))
        row = work[i]
        q = integers.round_to(row[None].astype(w.dtype), scale[None], zero[None], bits)[0]
        back = (q.astype(jnp.float32) - zero.astype(jnp.float32)) * scale.astype(jnp.float32)
        error = (row - back) / upper[i, i]
        work = work - jnp.where(feature > i, upper[i], 0)[:, None] * error
        return (work, scale, zero), (q, scale, zero)

    begin = work, jnp.zeros(F, w.dtype), jnp.zeros(F, jnp.uint8)
    _, (q, scales, zeros) = jax.lax.scan(step, begin, feature)
    back = jnp.argsort(order)
    return Quantized(q[back], scales[::group], zeros[::group], (back // group).astype(jnp.int32))


class Awq(NamedTuple):
    """A quantized weight whose input features were scaled, and the factors that activations are divided by."""

    quantized: Quantized
    factor: Float[Array, " M"]
    """Divide the activations by it, or fold its reciprocal into what comes before (a norm's weight)."""

    def dequantize(self) -> Float[Array, "M F"]:
        """The weight that unscaled activations would see."""
        return p.divide(p.wide(self.quantized.dequantize()), self.factor[:, None]).astype(self.quantized.scale.dtype)


def awq(
    w: Float[Array, "M F"], x: Float[Array, "N M"], *, bits: int = 4, group: int = 128, symmetric: bool = False
) -> Awq:
    """Rounded to nearest after input features with large activations were scaled up.

    The factors are `(mean_n |x_n|)^a`, divided by the geometric mean of their largest and smallest; the exponent a is
    the one of 0, 1/20, ..., 19/20 with the smallest squared error of `x @ W`. a = 0 is plain rounding, so the error on
    `x` is never larger than that of `nearest`.

    Raises:
        ValueError: shapes, or the group does not divide M.
    """
    if x.ndim != 2 or x.shape[1] != w.shape[0]:
        raise ValueError(f"the activations of {w.shape[0]} input features must be [N, {w.shape[0]}], got {x.shape}")
    size = jnp.maximum(jnp.mean(jnp.abs(x.astype(jnp.float32)), 0), 1e-4)
    activations = x.astype(jnp.float32)
    wanted = jnp.matmul(activations, w.astype(jnp.float32), precision="highest")

    def attempt(exponent):
        factor = size**exponent
        factor = factor / jnp.sqrt(factor.max() * factor.min())
        scaled = (w.astype(jnp.float32) * factor[:, None]).astype(w.dtype)
        return Awq(nearest(scaled, bits=bits, group=group, symmetric=symmetric), factor)

    def loss(exponent):
        w_back = attempt(exponent).dequantize().astype(jnp.float32)
        got = jnp.matmul(activations, w_back, precision="highest")
        return jnp.mean(jnp.square(got - wanted))

    exponents = jnp.arange(_STEPS) / _STEPS
    return attempt(exponents[jnp.argmin(jax.lax.map(loss, exponents))])
