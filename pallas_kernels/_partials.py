"""What attention kernels share whose keys are cut among thread blocks: the options, and adding up partial results."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels._online_softmax import FLOOR


def check_cut(*, split_pages: int | None, num_shares: int | None) -> None:
    """Raise a ValueError unless at most one way to cut keys is given, and makes at least one part."""
    for name, value in (("split_pages", split_pages), ("num_shares", num_shares)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1 or None, got {value}")
    if split_pages is not None and num_shares is not None:
        given = f"split_pages={split_pages} and num_shares={num_shares}"
        raise ValueError(f"split_pages and num_shares exclude each other, got {given}; leave one out")


def add(state, part, real):
    """One more partial result (maximum, sum, output); a second reading of the last one (not `real`) weighs nothing."""
    m, total, o = state
    m_part, total_part, o_part = part
    m_part = m_part + jnp.where(real, 0.0, 2 * FLOOR)
    m_new = jnp.maximum(m, m_part)
    old, new = jnp.exp2(m - m_new), jnp.exp2(m_part - m_new)
    return m_new, total * old + total_part * new, o * spread(old, o) + o_part * spread(new, o)


def spread(value, like):
    """A number per row, repeated over its columns."""
    return lax.broadcast_in_dim(value, like.shape, [0])
