"""Index work of grouped products, in XLA: which rows belong to which expert, without a host and with static sizes."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import _row_copies

BLOCK = 64
"""Rows to which every expert is filled up."""
_MOST = 2**31 - 1


def local_experts(ids: jax.Array, num_experts: int, expert_map: jax.Array | None) -> jax.Array:
    """The expert of every pair in 0..E-1; E for pairs that take no part."""
    if expert_map is not None:
        known = (ids >= 0) & (ids < expert_map.shape[0])
        ids = jnp.where(known, expert_map[jnp.where(known, ids, 0)], -1)
    return jnp.where((ids >= 0) & (ids < num_experts), ids, num_experts)


def order_by_expert(experts: jax.Array, num_experts: int) -> jax.Array:
    """Stable order of pairs by expert (0..E): one sort of single keys where expert and pair fit 31 bits."""
    pairs = experts.size
    bits = max(pairs - 1, 1).bit_length()
    if (num_experts + 1) << bits > _MOST:
        return jnp.argsort(experts, stable=True).astype(jnp.int32)
    keys = (experts << bits) | jnp.arange(pairs, dtype=jnp.int32)
    return jax.lax.sort(keys, is_stable=False) & ((1 << bits) - 1)


def capacity(pairs: int, block: int, num_experts: int) -> int:
    """Rows that suffice for any routing: every pair, and a partial block of every expert that can have one."""
    return -(-(pairs + min(pairs, num_experts) * (block - 1)) // block) * block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """What a grouped product does: tile s has rows `starts[s] * unit` on, all of one expert."""

    count: jax.Array
    """int32 [1]: tiles in use."""
    experts: jax.Array
    """int32 [S]."""
    starts: jax.Array
    """int32 [S], in units."""
    filled: jax.Array
    """int32 [S]: blocks of rows that hold anything."""
    weights: jax.Array
    """float32: routing weight of every row, and as many more entries as a tile has rows, at least."""
    positions: jax.Array
    """int32 [T, A]: row of every pair, -1 = none."""
    real: jax.Array
    """bool: rows of a token that chose the expert."""
    source: jax.Array | None
    """int32: token of every row, None = all tokens lie in each tile."""
    unit: int
    size: int
    """Rows."""

    def rows(self, x: jax.Array) -> jax.Array:
        """The rows that tiles multiply."""
        if self.source is None:
            return jnp.pad(x, ((0, self.unit - x.shape[0]), (0, 0)))
        return _row_copies.take(x, self.source) if _row_copies.fits(x.shape[1]) else x[self.source]

    def scales(self, s: jax.Array) -> jax.Array:
        """The numbers [K, T] of every row, [K, rows], and 64 more."""
        if self.source is None:
            return jnp.pad(s, ((0, 0), (0, self.unit - s.shape[1] + BLOCK)))
        return jnp.pad(s[:, self.source], ((0, 0), (0, BLOCK)))

    def combine(self, y: jax.Array) -> jax.Array:
        """Sum over the slots of every token in float32, in order; [T, M]."""
        if _row_copies.fits(y.shape[1]):
            return _row_copies.add(y, self.positions)
        total = jnp.zeros((self.positions.shape[0], y.shape[1]), jnp.float32)
        for at in self.positions.T:
            total = total + jnp.where((at >= 0)[:, None], y[at].astype(jnp.float32), 0)
        return total.astype(y.dtype)


def shared_tiles(which: jax.Array, weights: jax.Array, num_experts: int) -> Tiles:
    """One tile for each expert that is hit, with all tokens in it.

    A token that chose an expert twice counts once, with both weights.

    Args:
        which: int32 [T, A], E = none.
        weights: float32 [T, A].
        num_experts: E.
    """
    T, A = which.shape
    unit, most = -(-T // 8) * 8, min(num_experts, T * A)
    expert = jnp.arange(num_experts, dtype=jnp.int32)
    hit = jnp.any(which.reshape(-1, 1) == expert, 0)
    last = jnp.sum(hit & (expert <= expert[:, None]), 1, dtype=jnp.int32)  # hit experts up to each
    tile = jnp.arange(most, dtype=jnp.int32)
    experts = jnp.minimum(jnp.sum(last <= tile[:, None], 1, dtype=jnp.int32), num_experts - 1)
    at = jnp.where(which < num_experts, last[jnp.minimum(which, num_experts - 1)] - 1, -1)
    own = at[None] == tile[:, None, None]
    rows = jnp.sum(jnp.where(own, weights, 0), -1)
    again = jnp.any((at[:, :, None] == at[:, None, :]) & jnp.tri(A, k=-1, dtype=bool), -1)
    token = jnp.arange(T, dtype=jnp.int32)[:, None]
    return Tiles(
        count=last[-1:],
        experts=experts,
        starts=tile,
        filled=jnp.ones_like(tile),
        weights=jnp.pad(jnp.pad(rows, ((0, 0), (0, unit - T))).reshape(-1), (0, BLOCK)),
        positions=jnp.where((at < 0) | again, -1, at * unit + token),
        real=jnp.pad(jnp.any(own, -1), ((0, 0), (0, unit - T))).reshape(-1),
        source=None,
        unit=unit,
        size=most * unit,
    )


def sorted_tiles(which: jax.Array, weights: jax.Array, num_experts: int, groups: int, block: int = BLOCK) -> Tiles:
    """Rows sorted by expert, each expert filled up to a multiple of `block`, in tiles of up to `groups` such blocks.

    Args:
        which: int32 [T, A], E = none.
        weights: float32 [T, A].
        num_experts: E.
        groups: of `block` rows in a tile.
        block: rows, a multiple of 8.
    """
    (T, A), E = which.shape, num_experts
    pairs, size = T * A, capacity(T * A, block, num_experts)
    flat = which.reshape(pairs)
    order = order_by_expert(flat, E)
    counts = jnp.sum(flat[:, None] == jnp.arange(E, dtype=jnp.int32), 0, dtype=jnp.int32)
    ends, blocks = jnp.cumsum(counts, dtype=jnp.int32), -(-counts // block)
    block_ends = jnp.cumsum(blocks, dtype=jnp.int32)
    first_block, first = block_ends - blocks, ends - counts
    # rows -> pairs
    row = jnp.arange(size + (groups - 1) * block, dtype=jnp.int32)
    expert = jnp.minimum(jnp.sum((row // block)[:, None] >= block_ends, 1, dtype=jnp.int32), E - 1)
    rank = row - first_block[expert] * block
    real = rank < counts[expert]
    pair = jnp.where(real, order[jnp.minimum(first[expert] + rank, pairs - 1)], 0)
    # pairs -> rows
    sorted_at = jnp.zeros((pairs,), jnp.int32).at[order].set(jnp.arange(pairs, dtype=jnp.int32), unique_indices=True)
    own = jnp.minimum(flat, E - 1)
    positions = jnp.where(flat < E, sorted_at + first_block[own] * block - first[own], -1)
    tile_ends = jnp.cumsum(-(-blocks // groups), dtype=jnp.int32)
    return _tiles(weights, positions, pair, real, blocks, first_block, tile_ends, groups, block)


def ranked_tiles(which: jax.Array, weights: jax.Array, num_experts: int, groups: int, block: int = BLOCK) -> Tiles:
    """`sorted_tiles` of few pairs, which are compared with each other: a few reductions instead of a sort and sums."""
    (T, A), E = which.shape, num_experts
    pairs, size = T * A, capacity(T * A, block, num_experts)
    flat, number = which.reshape(pairs), jnp.arange(T * A, dtype=jnp.int32)
    expert, none = jnp.arange(E, dtype=jnp.int32), flat >= E
    rank = jnp.sum((flat[:, None] == flat) & (number < number[:, None]), 1, dtype=jnp.int32)
    blocks = -(-jnp.sum(flat == expert[:, None], 1, dtype=jnp.int32) // block)
    tiles = -(-blocks // groups)
    upto = expert <= expert[:, None]
    block_ends, tile_ends = (jnp.sum(jnp.where(upto, x, 0), 1, dtype=jnp.int32) for x in (blocks, tiles))
    first = block_ends - blocks
    positions = jnp.where(none, -1, first[jnp.minimum(flat, E - 1)] * block + rank)
    row = jnp.arange(size + (groups - 1) * block, dtype=jnp.int32)
    pair = jnp.max(jnp.where(positions == row[:, None], number, -1), 1)
    real, pair = pair >= 0, jnp.maximum(pair, 0)
    return _tiles(weights, positions, pair, real, blocks, first, tile_ends, groups, block)


def _tiles(weights, positions, pair, real, blocks, first, tile_ends, groups: int, block: int) -> Tiles:
    """Tiles of rows that hold `pair` where `real`; an expert has `blocks` from `first`, and tiles up to `tile_ends`."""
    (T, A), E, pairs = weights.shape, blocks.size, weights.size
    size = capacity(pairs, block, E)
    tile = jnp.arange(-(-size // (block * groups)) + (min(E, pairs) if groups > 1 else 0), dtype=jnp.int32)
    of = jnp.minimum(jnp.sum(tile[:, None] >= tile_ends, 1, dtype=jnp.int32), E - 1)
    inside = tile - (tile_ends + (-blocks // groups))[of]
    return Tiles(
        count=tile_ends[-1:],
        experts=of,
        starts=first[of] + inside * groups,
        filled=jnp.minimum(blocks[of] - inside * groups, groups),
        weights=jnp.pad(jnp.where(real, weights.reshape(pairs)[pair], 0), (0, groups * block)),
        positions=positions.reshape(T, A),
        real=real,
        source=pair // A,
        unit=block,
        size=real.size,
    )
