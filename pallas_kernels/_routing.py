"""Index work of grouped products, in XLA: which rows belong to which expert, without a host and with static sizes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _row_copies

BLOCK = 64
"""Rows to which every expert is filled up."""
_MOST = 2**31 - 1
_COMPARED = 2048
"""Pairs up to which all are compared with each other."""
_CHUNK = 256
"""Pairs that are compared with each other where there are more."""
_COUNTED = 1 << 15
"""Pairs up to which chunks are added up; more are sorted."""


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
    """int32: tiles in use, the first number."""
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
    hit = jnp.any(which.reshape(-1) == expert[:, None], 1)
    upto = _upto(num_experts)
    ends = jnp.sum(hit & (expert <= upto[:, None]), 1, dtype=jnp.int32)  # all hit experts, then those up to each
    last, tile = ends[1:], np.arange(most, dtype=np.int32)
    experts = jnp.sum(last[:-1] <= tile[:, None], 1, dtype=jnp.int32)
    at = jnp.where(which < num_experts, last[jnp.minimum(which, num_experts - 1)] - 1, -1)
    own = at == tile[:, None, None]
    rows = jnp.sum(jnp.where(own, weights, 0), -1)
    again = jnp.any((at[:, :, None] == at[:, None, :]) & jnp.tri(A, k=-1, dtype=bool), -1)
    token = jnp.arange(T, dtype=jnp.int32)[:, None]
    return Tiles(
        count=ends,
        experts=experts,
        starts=jnp.asarray(tile),
        filled=jnp.asarray(np.ones_like(tile)),
        weights=jnp.pad(jnp.pad(rows, ((0, 0), (0, unit - T))).reshape(-1), (0, BLOCK)),
        positions=jnp.where((at < 0) | again, -1, at * unit + token),
        real=jnp.pad(jnp.any(own, -1), ((0, 0), (0, unit - T))).reshape(-1),
        source=None,
        unit=unit,
        size=most * unit,
    )


def _upto(num_experts: int) -> np.ndarray:
    """The last expert, then every expert: sums up to them are the total, then running ones."""
    return np.concatenate([[num_experts - 1], np.arange(num_experts)]).astype(np.int32)


def _ranks(flat: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """How many pairs before each have its expert, and how many pairs every expert has, without a sort if few.

    Many pairs are cut into chunks: inside one all are compared with each other, what lies in those before is counted.
    That takes N * (256 + E) + (N / 256)^2 * E comparisons, summed as they are made, and N / 256 * E numbers of memory;
    beyond `_COUNTED` pairs the square would matter, and one sort gives the ranks.
    """
    (pairs,), expert = flat.shape, np.arange(num_experts, dtype=np.int32)
    if pairs > _COUNTED:
        order = order_by_expert(flat, num_experts)
        place = jnp.zeros(pairs, jnp.int32).at[order].set(jnp.arange(pairs, dtype=jnp.int32), unique_indices=True)
        ends = jnp.searchsorted(flat[order], jnp.arange(num_experts, dtype=jnp.int32), side="right").astype(jnp.int32)
        starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
        return place - starts[flat], ends - starts[:-1]
    if pairs <= _COMPARED:
        number = np.arange(pairs, dtype=np.int32)
        rank = jnp.sum((flat[:, None] == flat) & (number < number[:, None]), 1, dtype=jnp.int32)
        return rank, jnp.sum(flat == expert[:, None], 1, dtype=jnp.int32)
    chunk = jnp.pad(flat, (0, -pairs % _CHUNK), constant_values=num_experts).reshape(-1, _CHUNK)
    place, number = np.arange(_CHUNK, dtype=np.int32), np.arange(chunk.shape[0], dtype=np.int32)
    inside = jnp.sum((chunk[:, :, None] == chunk[:, None]) & (place < place[:, None]), 2, dtype=jnp.int32)
    counts = jnp.sum(chunk[:, None] == expert[:, None], 2, dtype=jnp.int32)
    bound = np.arange(len(number) + 1, dtype=np.int32)
    before = jnp.sum(jnp.where(number[:, None] < bound[:, None, None], counts, 0), 1, dtype=jnp.int32)
    own = before[number[:, None], jnp.minimum(chunk, num_experts - 1)]
    return (own + inside).reshape(-1)[:pairs], before[-1]


def _ends(x: jax.Array, num_experts: int) -> jax.Array:
    """The sum of a number of every expert, then its running sums."""
    upto = jnp.arange(num_experts, dtype=jnp.int32) <= _upto(num_experts)[:, None]
    return jnp.sum(jnp.where(upto, x, 0), 1, dtype=jnp.int32)


def _placed(flat: jax.Array, num_experts: int, block: int, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The pair of every row, the row of every pair, -1 = none, and the blocks of every expert."""
    (pairs,), E = flat.shape, num_experts
    number = jnp.arange(pairs, dtype=jnp.int32)
    rank, counts = _ranks(flat, E)
    blocks = -(-counts // block)
    first = _ends(blocks, E)[1:] - blocks
    positions = jnp.where(flat < E, first[jnp.minimum(flat, E - 1)] * block + rank, -1)
    if pairs * size <= 4 * _COMPARED**2:
        rows = np.arange(size, dtype=np.int32)
        return jnp.max(jnp.where(positions == rows[:, None], number, -1), 1), positions, blocks
    to = jnp.where(flat < E, positions, size)
    return jnp.full((size,), -1, jnp.int32).at[to].set(number, mode="drop"), positions, blocks


def sorted_tiles(which: jax.Array, weights: jax.Array, num_experts: int, groups: int, block: int = BLOCK) -> Tiles:
    """Rows in the order of their experts, each filled up to a multiple of `block`, in tiles of up to `groups` blocks.

    Args:
        which: int32 [T, A], E = none.
        weights: float32 [T, A].
        num_experts: E.
        groups: of `block` rows in a tile.
        block: rows, a multiple of 8.
    """
    (T, A), E = which.shape, num_experts
    pairs, rows = T * A, capacity(T * A, block, E)
    size = -(-(rows + (groups - 1) * block) // BLOCK) * BLOCK
    pair, positions, blocks = _placed(which.reshape(pairs), E, block, size)
    block_ends, tile_ends = (_ends(x, E) for x in (blocks, -(-blocks // groups)))
    first = block_ends[1:] - blocks
    real, pair = pair >= 0, jnp.maximum(pair, 0)
    tile = np.arange(-(-rows // (block * groups)) + (min(E, pairs) if groups > 1 else 0))
    tile = tile.astype(np.int32)
    of = jnp.sum(tile[:, None] >= tile_ends[1:-1], 1, dtype=jnp.int32)
    inside = tile - (tile_ends[1:] + (-blocks // groups))[of]
    return Tiles(
        count=tile_ends,
        experts=of,
        starts=first[of] + inside * groups,
        filled=jnp.minimum(blocks[of] - inside * groups, groups),
        weights=jnp.pad(jnp.where(real, weights.reshape(pairs)[pair], 0), (0, groups * block)),
        positions=positions.reshape(T, A),
        real=real,
        source=pair // A,
        unit=block,
        size=size,
    )
