"""Which rows belong to which expert, beside a loop over the pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _routing


def draw(rng, T, A, E):
    which = rng.integers(0, E + 1, (T, A))
    return which, rng.integers(1, 64, (T, A)).astype(np.float32)  # whose sums are exact


def made(make, which, weights, *more):
    tiles = make(jnp.asarray(which, jnp.int32), jnp.asarray(weights), *more)
    return tiles, int(tiles.count[0]), np.asarray(tiles.experts), np.asarray(tiles.starts), np.asarray(tiles.filled)


@pytest.mark.parametrize(
    ("T", "A", "E", "groups", "block"),
    [
        (16, 6, 256, 1, 8),
        (16, 6, 8, 2, 8),
        (1, 1, 1, 1, 8),
        (64, 6, 5, 3, 16),
        (400, 6, 40, 16, 8),
        (9, 3, 5, 2, 8),
        (350, 6, 5, 2, 64),
        (30, 6, 40, 2, 8),
    ],
)
def test_sorted_tiles_hold_the_pairs_of_every_expert_in_order(T, A, E, groups, block, rng):
    which, weights = draw(rng, T, A, E)
    tiles, count, experts, starts, filled = made(_routing.sorted_tiles, which, weights, E, groups, block)
    row, at = 0, 0
    position, source, weight = np.full(T * A, -1), np.full(tiles.size, -1), np.zeros(tiles.size)
    for expert in range(E):
        pairs = np.flatnonzero(which == expert)
        rows = row + np.arange(len(pairs))
        position[pairs], source[rows], weight[rows] = rows, pairs // A, weights.reshape(-1)[pairs]
        blocks = -(-len(pairs) // block)
        for first in range(0, blocks, groups):
            assert (experts[at], starts[at] * block) == (expert, row + first * block)
            assert filled[at] == min(groups, blocks - first)
            at += 1
        row += blocks * block
    assert count == at <= len(experts)
    assert row + (groups - 1) * block <= tiles.size
    np.testing.assert_array_equal(tiles.positions, position.reshape(T, A))
    np.testing.assert_array_equal(tiles.real, source >= 0)
    np.testing.assert_array_equal(np.asarray(tiles.source)[source >= 0], source[source >= 0])
    np.testing.assert_array_equal(tiles.weights[: tiles.size], weight.astype(np.float32))
    assert tiles.weights.shape[0] >= tiles.size + groups * block


@pytest.mark.parametrize(("T", "A", "E"), [(1, 1, 1), (9, 3, 4), (64, 6, 256), (5, 2, 40)])
def test_shared_tiles_hold_all_tokens_of_every_expert_that_is_hit(T, A, E, rng):
    which, weights = draw(rng, T, A, E)
    tiles, count, experts, starts, _ = made(_routing.shared_tiles, which, weights, E)
    unit = -(-T // 8) * 8
    hit = [expert for expert in range(E) if (which == expert).any()]
    assert count == len(hit)
    assert experts[:count].tolist() == hit
    assert starts[:count].tolist() == [*range(count)]
    position, weight = np.full((T, A), -1), np.zeros((len(experts), unit))
    for token, slot in np.ndindex(T, A):
        if (expert := which[token, slot]) < E:
            tile = hit.index(expert)
            weight[tile, token] += weights[token, slot]
            if expert not in which[token, :slot]:
                position[token, slot] = tile * unit + token
    np.testing.assert_array_equal(tiles.positions, position)
    np.testing.assert_array_equal(np.asarray(tiles.weights)[: tiles.size], weight.reshape(-1).astype(np.float32))
    chosen = np.array([[t < T and (which[t] == e).any() for t in range(unit)] for e in hit], bool).reshape(-1)
    np.testing.assert_array_equal(np.asarray(tiles.real)[: chosen.size], chosen)


@pytest.mark.parametrize(("pairs", "E"), [(2048, 30), (2049, 3), (10_000, 384), (_routing._COUNTED + 1, 384)])
def test_ranks_count_the_pairs_before(pairs, E, rng):
    """However many they are: compared with each other, chunk by chunk, or sorted."""
    flat = rng.integers(0, E + 1, pairs)
    rank, counts = jax.jit(_routing._ranks, static_argnums=1)(jnp.asarray(flat, jnp.int32), E)
    seen, wanted = np.zeros(E + 1, int), np.zeros(pairs, int)
    for i, expert in enumerate(flat):
        wanted[i] = seen[expert]
        seen[expert] += 1
    inside = flat < E
    np.testing.assert_array_equal(np.asarray(rank)[inside], wanted[inside])
    np.testing.assert_array_equal(counts, seen[:E])
