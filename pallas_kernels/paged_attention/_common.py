"""What the kernels of paged attention share: their legal operands, and which keys a tile of queries sees."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _mosaic
from pallas_kernels._online_softmax import LOG2E

ROWS = 64
"""Rows of a tile: the M of one wgmma."""
PAGES = (16, 32, 64, 128)
HEAD_DIMS = (64, 128, 256)
FP8 = "float8_e4m3fn"
FAR = 2**30
"""A window that no request fills."""
PIECE = 64
"""Columns of one buffer of rows; compiled, loads from a second swizzle span of 128 bytes are wrong (0.11.2)."""

i32 = jnp.int32


@dataclasses.dataclass(frozen=True)
class Config:
    """Base of the launch configurations; its type chooses the kernel."""


def facts(config: Config, *, q, k_pages, page_table, scale, causal, window, softcap, **more) -> dict[str, Any]:
    """What a kernel's plan holds of a call, all known when it is compiled; shapes under the letters of the op."""
    letters = ("N", "H", "D", "pool", "page", "K", "B", "pages")
    return {
        **dict(zip(letters, (*q.shape, *k_pages.shape[:3], *page_table.shape), strict=True)),
        "dtype": jnp.dtype(q.dtype),
        "out_dtype": jnp.dtype(more.get("out_dtype", q.dtype)),
        "cache_dtype": jnp.dtype(k_pages.dtype),
        "per_head": more.get("k_scale_pages") is not None,
        "scale": scale,
        "causal": causal,
        "window": None if window is None else min(window, FAR),
        "softcap": softcap,
        "interpreted": _mosaic.interpreting(),
        **dataclasses.asdict(config),
    }


def key_range(*, causal: bool, window: int | None, position: Any, count: Any, length: Any):
    """Keys [low, high) that some row of a tile sees, and a range [full_low, full_high) that every row sees.

    Args:
        causal: of the call.
        window: of the call.
        position: of the tile's first query among its request's keys.
        count: queries of the tile.
        length: keys of the request.
    """
    final = position + count - 1
    low, full_low, high, full_high = i32(0), i32(0), length, length
    if window is not None:
        low = jnp.maximum(position - (window - 1), 0)
        full_low = jnp.maximum(final - (window - 1), 0)
    if causal:
        high, full_high = jnp.minimum(final + 1, length), jnp.minimum(position + 1, length)
    elif window is not None:
        high, full_high = jnp.minimum(final + window, length), jnp.minimum(position + window, length)
    return low, jnp.maximum(high, 0), full_low, jnp.maximum(full_high, 0)


def visible(*, causal: bool, window: int | None, position: Any, key: Any, length: Any):
    """Pairs of a query position and a key that attend."""
    seen = key <= position if causal else key < length
    if window is not None:
        seen &= position - key < window
        if not causal:
            seen &= key - position < window
    return seen


@functools.partial(jax.jit, static_argnums=0)
def lse(x: Any, sums, query_start):
    """Log-sum-exp [N, H] from maximum and sum of the rows of all tiles [slots, chunks, 2, ROWS]; `x` is a plan."""
    token, head = jnp.arange(x.N)[:, None], jnp.arange(x.H)[None]
    start = jnp.clip(query_start, 0, x.N)
    b = jnp.searchsorted(start[1:], token, side="right", method="compare_all")
    first = start[b]
    slot = first // x.block_q + b + (token - first) // x.block_q
    row = x.row_of((token - first) % x.block_q, head)
    m, total = (sums[slot, head // x.block_g, i, row] for i in range(2))
    return jnp.where((b < x.B) & (total > 0), m * (1 / LOG2E) + jnp.log(total), -jnp.inf)
