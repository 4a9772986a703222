"""Suffixes whose shared prefixes were attended to before: partial results join the decoding kernel's softmax first.

A partial result is a key like any other, whose score is its log-sum-exp and whose value is its output. Those of a tile
are a block of `ROWS` keys, key `piece * rows + row` seen by row `row` alone, which the online softmax takes in before
the tile's own keys, while these are on their way: no launch adds anything up afterwards. Weights are multiplied as two
terms of q's dtype, so that nothing is rounded that other kernels leave alone. A NaN in the output of one head's prefix
reaches the other heads of its 8.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic
from pallas_kernels._online_softmax import ACC, LOG2E, ROW
from pallas_kernels.paged_attention._common import ROWS

OPTIONAL = ("own", "prefix_o", "prefix_lse", "prefix_rows")
"""References of this form only."""

f32, i32 = jnp.float32, jnp.int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Joined:
    """How the partial results lie that prefill's kernel left.

    Segment `splits * level + part` of the prefixes has rows of its own, one for each of q's, in `groups + 1` requests,
    the last of which shares nothing. `prefix_lse` is as that kernel leaves it, for tiles of `block_q` tokens and
    `block_g` heads. `own` is int32 [B, 1 + 2 L]: tokens of each request that its prefixes hold, then for each level
    which request of a segment it belongs to and that request's first row.
    """

    levels: int
    splits: int
    groups: int
    block_q: int
    block_g: int

    @property
    def pieces(self) -> int:
        """Partial results of a row."""
        return self.levels * self.splits


def illegal(x) -> str | None:
    """Why partial results cannot join these shapes."""
    if x.joined is None:
        return None
    if x.restage:
        return f"prefixes join caches in q's dtype only, got {x.cache_dtype.name}"
    if x.H > 8 and x.H % 8:
        return f"prefixes join heads in groups of 8, got {x.H}"
    if x.block_kv != ROWS or x.at_once:
        return f"prefixes join blocks of {ROWS} keys one after the other, got {x.block_kv}"
    if x.joined.pieces * x.rows > ROWS:
        return f"at most {ROWS // x.rows} partial results may join a tile of {x.rows} rows, got {x.joined.pieces}"
    return None


def scratch(x, *lead: int) -> dict[str, Any]:
    """Where outputs of prefixes go, as blocks of values do."""
    if x.joined is None:
        return {}
    transforms = _mosaic.swizzled(128, bytes_per_value=2)
    return {"prefix_rows": plgpu.SMEM((*lead, ROWS, x.D), x.operand, transforms=transforms)}


def copies(x) -> int:
    """TMA copies of a tile."""
    return ROWS // x.slab


# ---------------------------------------------------------------- device code
def length(x, r: Any, request: Any) -> Any:
    """Keys of a request without those that its prefixes hold."""
    keys = jnp.clip(r.lengths[request], 0, x.pages * x.page)
    return keys if x.joined is None else jnp.maximum(keys - r.own[request, 0], 0)


def pages(x, r: Any, request: Any) -> Any:
    """Pages that a request's prefixes hold."""
    return 0 if x.joined is None else lax.div(r.own[request, 0], i32(x.page))


def fetch(x, r: Any, t: Any) -> None:
    """Start the copies of the outputs; what is left of the block is filled with repetitions, which nobody sees."""
    base = lax.div(t.chunk * x.block_g, i32(8)) * 8
    for n in range(copies(x)):
        piece, i = n // x.block_q % x.joined.pieces, n % x.block_q
        source = r.prefix_o.at[piece * x.N + jnp.minimum(t.token0 + i, x.N - 1), pl.ds(base, x.slab)]
        place = r.prefix_rows.at[pl.ds(n * x.slab, x.slab)]
        plgpu.copy_gmem_to_smem(source, place, r.prefix_bar)


def scores(x, r: Any, t: Any, whole: Any):
    """Log-sum-exps in base 2 as scores, [ROWS, ROWS] or, swapped, [ROWS, rows]; -inf unless `whole` is true."""
    j, layout = x.joined, ROW if x.swapped else ACC.reduce(0)
    key = plgpu.broadcasted_iota(i32, (ROWS,), 0, layout=layout)
    out = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, f32), layout)
    head0 = t.chunk * x.block_g
    real = whole & (t.token0 < jnp.clip(r.query_start[x.B], 0, x.N))  # rows of padding belong to no request
    for level in range(j.levels):
        group, first = (r.own[t.request, 1 + 2 * level + i] for i in range(2))
        for i in range(x.block_q):
            token = jnp.minimum(t.token0 + i, x.N - 1) - first
            for part in range(j.splits):
                piece = level * j.splits + part
                request = piece * (j.groups + 1) + group
                slot = lax.div(piece * x.N + first, i32(j.block_q)) + request + lax.div(token, i32(j.block_q))
                for g in range(x.block_g):
                    head = head0 + g
                    row = lax.rem(head, i32(j.block_g)) * j.block_q + lax.rem(token, i32(j.block_q))
                    place = jnp.clip(slot, 0, r.prefix_lse.shape[0] - 1), lax.div(head, i32(j.block_g))
                    value = r.prefix_lse[*place, lax.div(row, i32(ROWS)), lax.rem(row, i32(ROWS))] * LOG2E
                    at = piece * x.rows + i * x.slab + lax.rem(head0, i32(8)) + g
                    out = jnp.where(key == at, jnp.where(real, value, -jnp.inf), out)
    shape, axis = ((ROWS, x.rows), 0) if x.swapped else ((ROWS, ROWS), 1)
    out = plgpu.layout_cast(lax.broadcast_in_dim(out, shape, [axis]), ACC)
    mine = plgpu.broadcasted_iota(i32, shape, 1 - axis, layout=ACC)
    keys = plgpu.broadcasted_iota(i32, shape, axis, layout=ACC)
    return jnp.where(lax.rem(keys, i32(x.rows)) == mine, out, -jnp.inf)
