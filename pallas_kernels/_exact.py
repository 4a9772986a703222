"""Division, roots and conversion that round to nearest even whatever the compiler makes of them.

XLA turns division by a constant or a broadcast number into a product with its reciprocal, and on GPUs `/` compiles to
`div.full` and a square root to `sqrt.approx`; they are off by up to two units in the last place. That is enough to move
a number across the border between two codes, or to change the bits of a scale. And XLA for GPUs leaves the rounding out
where a value only passes through a narrower type ("excess precision").
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
    better = q + _remainder(x, q, y) / y
    return jnp.where(_moderate(x) & _moderate(y) & _moderate(q), better, q)


def root(x: jax.Array) -> jax.Array:
    """`sqrt(x)` for float32, correctly rounded where x lies between 2^-60 and 2^60, else plain; plain for float64.

    A Newton step on an approximate root leaves a neighbour of the right number at worst. Its remainder is known without
    error and, in units of the last place squared, a whole number: it says on which side of the border to the next
    number, half a unit away, the root lies (Tuckerman's test).
    """
    s = jnp.sqrt(x)
    if x.dtype != jnp.float32:
        return s
    near = s + _remainder(x, s, s) / (s + s)
    bits = lax.bitcast_convert_type(near, jnp.int32)
    above, below = (lax.bitcast_convert_type(bits + step, jnp.float32) for step in (1, -1))
    rest = _remainder(x, near, near)
    better = jnp.where(rest > near * (above - near), above, near)
    better = jnp.where(rest <= near * (below - near), below, better)
    return jnp.where(_moderate(x) & (x > 0), better, s)


def _remainder(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """`x - a b`, rounded once, for a product close to x."""
    product = lax.optimization_barrier(a * b)  # else a GPU computes x - a b in one step, without the rounding
    a_high, b_high = _high(a), _high(b)
    a_low, b_low = a - a_high, b - b_high
    lost = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    return (x - product) - lost


def _moderate(x: jax.Array) -> jax.Array:
    return (jnp.abs(x) > _SMALL) & (jnp.abs(x) < _LARGE)


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
