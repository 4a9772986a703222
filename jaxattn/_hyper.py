"""Hyper-connections: the formulas that `mhc_pre`, `mhc_post` and `mhc_head` share."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxattn import _rope
from jaxattn.quant import primitives as p

_BLOCK = 128


def normed_product(x: Float[Array, "N CM"], fn: Float[Array, "O SM"], rms_eps: float) -> Float[Array, "N O"]:
    """`(x fn^T) / sqrt(mean(x^2) + rms_eps)`, the norm after the product; `x` in the wide dtype.

    Sums run over blocks first: thousands of numbers added one by one would lose two more bits.
    """
    blocks = [
        jnp.pad(a, ((0, 0), (0, -a.shape[1] % _BLOCK))).reshape(len(a), -(-a.shape[1] // _BLOCK), _BLOCK)
        for a in (x, fn)
    ]
    parts = jnp.einsum("nbk,obk->nbo", *blocks, precision="highest")
    return parts.sum(1) * _rope.rms(x, rms_eps)


def coefficients(
    residual: Float[Array, "N streams M"],
    fn: Float[Array, "O SM"],
    scale: Float[Array, " 3"],
    base: Float[Array, " O"],
    *,
    iters: int,
    post_mult: float,
    eps: float,
    rms_eps: float,
) -> tuple[Float[Array, "N streams"], Float[Array, "N streams"], Float[Array, "N streams streams"]]:
    """`pre`, `post` and `comb` of `mhc_pre`."""
    N, C, M = residual.shape
    u = normed_product(p.wide(residual).reshape(N, C * M), fn, rms_eps)
    pre = jax.nn.sigmoid(u[:, :C] * scale[0] + base[:C]) + eps
    post = post_mult * jax.nn.sigmoid(u[:, C : 2 * C] * scale[1] + base[C : 2 * C])
    return pre, post, sinkhorn((u[:, 2 * C :] * scale[2] + base[2 * C :]).reshape(N, C, C), iters, eps)


def sinkhorn(logits: Float[Array, "N streams streams"], iters: int, eps: float) -> Float[Array, "N streams streams"]:
    """A softmax of the rows, then columns, rows, columns ... are divided by their sums; ends with the columns.

    A loop of the compiler's: written out, XLA for GPUs takes most of a minute to compile it, each time it occurs.
    """

    def rows_and_columns(_, a):
        a = a / (a.sum(2, keepdims=True) + eps)
        return a / (a.sum(1, keepdims=True) + eps)

    a = jax.nn.softmax(logits, -1) + eps
    return lax.fori_loop(0, iters - 1, rows_and_columns, a / (a.sum(1, keepdims=True) + eps))


def mix(
    residual: Float[Array, "N streams M"],
    y: Float[Array, "N M"],
    post: Float[Array, "N streams"],
    comb: Float[Array, "N streams streams"],
) -> Float[Array, "N streams M"]:
    """`sum_i comb[i, j] residual_i + post_j y`, rounded once."""
    # written out, because a GPU computes small batched products in TF32
    mixed = sum(comb[:, i, :, None] * p.wide(residual)[:, i, None] for i in range(residual.shape[1]))
    return (mixed + post[..., None] * p.wide(y)[:, None]).astype(residual.dtype)
