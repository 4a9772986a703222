"""Division and conversion that round to nearest even whatever the compiler makes of them.

XLA turns division by a constant or a broadcast number into a product with its reciprocal, and on GPUs `/` compiles to
`div.full`; both are off by up to two units in the last place. That is enough to move a number across the border between
two codes, or to change the bits of a scale. And XLA for GPUs leaves the rounding out where a value only passes through
a narrower type ("excess precision").
"""

import jax
import jax.numpy as jnp
from jax import lax

_SPLIT = 4097.0
"""2^12 + 1: Veltkamp's constant for 24-bit mantissas."""
_SMALL, _LARGE = 2.0**-60, 2.0**60


def rounded(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """`x` rounded to `dtype`, in the dtype of `x`."""
    return lax.optimization_barrier(x.astype(dtype)).astype(x.dtype)


def divide(x: jax.Array, y: jax.Array | float) -> jax.Array:
    """`x / y` for float32, correctly rounded where |x|, |y| and |x / y| lie between 2^-60 and 2^60, else plain.

    An approximate quotient q leaves the remainder x - q y, which is computed without error (Dekker's product) and
    divided in turn; q plus that is the quotient, rounded once. float64 is divided plainly.
    """
    y = jnp.asarray(y, x.dtype)
    q = x / y
    if x.dtype != jnp.float32:
        return q
    product = lax.optimization_barrier(q * y)  # else a GPU computes x - q y in one step, without the rounding
    q_high, y_high = _high(q), _high(y)
    q_low, y_low = q - q_high, y - y_high
    lost = ((q_high * y_high - product) + q_high * y_low + q_low * y_high) + q_low * y_low
    better = q + ((x - product) - lost) / y
    safe = [(jnp.abs(v) > _SMALL) & (jnp.abs(v) < _LARGE) for v in (x, y, q)]
    return jnp.where(safe[0] & safe[1] & safe[2], better, q)


def _high(x: jax.Array) -> jax.Array:
    """The upper half of the mantissa, so that products of halves are exact."""
    far = x * _SPLIT
    return far - (far - x)


def butterflies(x: jax.Array, group: int, first: int = 1) -> jax.Array:
    """`[..., M]` times Sylvester's matrix of +-1 in groups of `group`: sums of distance `first`, twice as much, ..."""
    y = x.reshape(*x.shape[:-1], x.shape[-1] // group, group)
    half = first
    while half < group:
        pairs = y.reshape(*y.shape[:-1], group // (2 * half), 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = jnp.stack([a + b, a - b], -2).reshape(y.shape)
        half *= 2
    return y.reshape(x.shape)
