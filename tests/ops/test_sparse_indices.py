"""Index lists against brute force over masks."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import all_entries, entry_slots, sparse_indices, window_slots
from jaxattn.ops.sparse_indices import make_inputs


@pytest.mark.parametrize("window", [1, 4, 128])
@pytest.mark.parametrize("ratio", [4, 128])
def test_lists_hold_what_a_mask_allows(window, ratio, rng):
    queries, lengths = (1, 5, 300, 2), (1, 9, 300, 140)
    args = make_inputs(rng, queries, lengths, window=window, ratio=ratio, chosen=6, padding=3)
    indices, counts = (np.asarray(x) for x in sparse_indices(**args))
    assert indices.shape[1] % 128 == 0
    row = 0
    for b, (T, n) in enumerate(zip(queries, lengths, strict=True)):
        start, gathered = b * args["stride"], int(args["gathered"][b])
        for p in range(n - T, n):
            visible = [q for q in range(n) if q <= p and p - q < window]
            entries = min((p + 1) // ratio, 6)
            expected = [start + int(e) for e in args["topk"][row, :entries]]
            expected += [start + args["entries"] + q - (n - gathered) for q in visible]
            assert counts[row] == len(expected)
            assert indices[row, : len(expected)].tolist() == expected
            assert (indices[row, len(expected) :] == -1).all()
            assert all(start <= i < start + args["stride"] for i in expected)
            row += 1
    assert (counts[row:] == 0).all() and (indices[row:] == -1).all()


@pytest.mark.parametrize("page", [1, 3, 64])
@pytest.mark.parametrize("window", [1, 4, 128, 129])
def test_window_slots_against_brute_force(page, window, rng):
    positions = np.array([-1, 0, 1, 3, 4, 63, 64, 127, 128, 150], np.int32)
    request = (np.arange(len(positions)) % 2).astype(np.int32)
    table = rng.permutation(2 * 160).astype(np.int32).reshape(2, 160)
    slots, counts = window_slots(
        jnp.asarray(table), jnp.asarray(request), jnp.asarray(positions), window=window, page=page
    )
    assert slots.shape[1] == -(-window // 128) * 128
    for b, p, row, count in zip(request, positions, np.asarray(slots), counts.tolist(), strict=True):
        visible = [q for q in range(p + 1) if p - q < window]
        assert count == len(visible)
        assert row[:count].tolist() == [int(table[b, q // page]) * page + q % page for q in visible]
        assert (row[count:] == -1).all()


def test_bc13_visible_counts():
    positions = jnp.arange(6)
    table, request = jnp.zeros((1, 1), jnp.int32), jnp.zeros(6, jnp.int32)
    assert window_slots(table, request, positions, window=4, page=8)[1].tolist() == [1, 2, 3, 4, 4, 4]
    assert window_slots(table, request[:3], positions[:3], window=8, page=8)[1].tolist() == [1, 2, 3]


def test_entry_slots_keep_their_places():
    table = jnp.array([[7, 2], [4, -1]])
    chosen = jnp.array([[3, -1, 0], [1, 2, -1]])
    slots, counts = entry_slots(table, jnp.array([0, 1]), chosen, page=2)
    assert slots.tolist() == [[5, -1, 14], [9, -1, -1]]
    assert counts.tolist() == [2, 1]


def test_all_entries_rise_with_whole_windows():
    entries, counts = all_entries(jnp.array([-1, 0, 126, 127, 254, 255, 128 * 200]), ratio=128, most=130)
    assert counts.tolist() == [0, 0, 0, 1, 1, 2, 130]
    assert entries.shape == (7, 256)
    for row, count in zip(np.asarray(entries), counts.tolist(), strict=True):
        assert row.tolist() == [*range(count), *[-1] * (256 - count)]


def test_bc19_a_short_request_keeps_its_prefix():
    """Equal maxima of queries and lengths must not make request 1 lose the 4 tokens before its queries."""
    args = {"query_start": jnp.array([0, 8, 10]), "lengths": jnp.array([8, 6]), "gathered": jnp.array([8, 6])}
    _, counts = sparse_indices(jnp.zeros((10, 0), jnp.int32), **args, window=128, ratio=1, entries=0, stride=8)
    assert counts.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 5, 6]


WRONG = {
    "entries": ({"entries": 9}, "entries must lie between 0 and stride=8, got 9"),
    "ratio": ({"ratio": 1}, "with ratio 1 nothing is compressed, topk must be [N, 0], got (2, 3)"),
    "window": ({"window": 0}, "window must be at least 1, got 0"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_wrong_calls(changes, message):
    args = {"topk": jnp.zeros((2, 3), jnp.int32), "query_start": jnp.array([0, 2]), "lengths": jnp.array([2])}
    args |= {"gathered": jnp.array([2]), "window": 4, "ratio": 4, "entries": 1, "stride": 8}
    with pytest.raises(ValueError, match=f"^sparse_indices: {re.escape(message)}$"):
        sparse_indices(**args | changes)
