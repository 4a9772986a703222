"""Device code of attention kernels: the online softmax of a tile, and float32 operands as sums of bfloat16 terms.

A state (m, total, o) belongs to the rows seen so far: running maximum in base 2, sum of exp2(score - m), and the
unnormalised output as a tuple of column chunks, all float32 in registers.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic

LOG2E = math.log2(math.e)
FLOOR = -1e30
"""Start of the running maximum: finite, so that masked scores of -inf never meet another infinity."""
ACC = plgpu.Layout.WGMMA
"""Layout of accumulators."""
ROW = ACC.reduce(1)
"""Layout of one value per row."""
PRODUCTS = ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0))
"""Products of the bfloat16 terms of two float32 operands that are kept, smallest first."""

type State = tuple[Any, Any, tuple[Any, ...]]


def start(rows: int, chunks: tuple[int, ...]) -> State:
    """State before the first key; `chunks` are the column counts of o."""
    return (
        plgpu.layout_cast(jnp.full((rows,), FLOOR, jnp.float32), ROW),
        plgpu.layout_cast(jnp.zeros((rows,), jnp.float32), ROW),
        tuple(plgpu.layout_cast(jnp.zeros((rows, columns), jnp.float32), ACC) for columns in chunks),
    )


def update(state: State, s, sharp: float) -> tuple[State, Any]:
    """Take in scores [rows, keys], in base 2 `s * sharp`, masked -inf; returns the state before P V is added, and P."""
    m, total, o = state
    m_new = jnp.maximum(m, jnp.max(s, axis=1) * sharp)
    alpha = jnp.exp2(m - m_new)
    p = jnp.exp2(s * sharp - across(m_new, s))
    return (m_new, total * alpha + jnp.sum(p, axis=1), scaled(o, alpha)), p


def with_sink(state: State, sink) -> State:
    """Add a key without a value; `sink` is its score per row in base 2, within +-FLOOR."""
    m, total, o = state
    m_new = jnp.maximum(m, sink)
    alpha = jnp.exp2(m - m_new)
    return m_new, total * alpha + jnp.exp2(sink - m_new), scaled(o, alpha)


def output(state: State) -> tuple[Any, ...]:
    """The normalised chunks of o; zeros in rows that saw no key."""
    _, total, o = state
    return scaled(o, _mosaic.divide(jnp.ones_like(total), jnp.where(total > 0, total, 1.0), ROW))


def scaled(o: tuple[Any, ...], factor) -> tuple[Any, ...]:
    return tuple(chunk * across(factor, chunk) for chunk in o)


def across(row, like):
    """A value per row, repeated over the columns of `like`."""
    return plgpu.layout_cast(lax.broadcast_in_dim(row, like.shape, [0]), ACC)


def split(value, terms: int, dtype) -> list[Any]:
    """Terms in `dtype` whose sum is the value, largest first."""
    parts = []
    for _ in range(terms - 1):
        parts.append(value.astype(dtype))
        value = value - parts[-1].astype(value.dtype)
    return [*parts, value.astype(dtype)]


def lookup(digits: tuple[int, ...], n):
    """digits[n] for an index known on the device only; every digit is less than 4, at most 15 of them."""
    packed = sum(digit << 2 * i for i, digit in enumerate(digits))
    return lax.shift_right_logical(jnp.int32(packed), 2 * n) & 3
