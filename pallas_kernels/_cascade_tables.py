"""Where the keys of shared prefixes and of own suffixes lie, for the kernels of cascade attention.

Arguments everywhere: int32 `page_table` [B, pages], `lengths` [B] and `query_start` [B+1] of whole requests; at level l
group g holds requests `group_start[l, g]` to `group_start[l, g+1]` of [L, G+1], which share tokens up to `shared[l, g]`
of [L, G]. N are the rows of q.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

type Table = tuple[jax.Array, jax.Array, jax.Array]
"""`page_table`, `lengths` and `query_start` of paged attention."""
type Span = tuple[Any, Any, Any, Any]
"""Of each group of a level: its first request, where its tokens begin and end, and (one more) its first row."""

_FEW = 32
"""Numbers whose sums are written out, so that XLA fuses them with what follows."""


def spans(lengths, query_start, group_start, shared, *, page: int) -> tuple[list[Span], Any]:
    """Spans of each level, and how many tokens of each request the levels hold, [B]."""
    B = lengths.shape[0]
    request = jnp.arange(B, dtype=jnp.int32)
    done = jnp.zeros(B, jnp.int32)  # tokens of each request that the levels so far have covered
    found = []
    for starts, ends in zip(group_start, shared, strict=True):
        first = jnp.clip(starts[:-1], 0, B - 1)
        begin = _at(done, first) if found else jnp.zeros_like(first)
        end = jnp.maximum(ends // page * page, begin)
        found.append((first, begin, end, _at(query_start, jnp.clip(starts, 0, B))))
        member = (request[:, None] >= starts[:-1]) & (request[:, None] < starts[1:])
        done = jnp.where(_any(member), _any(jnp.where(member, end, 0)), done)
    return found, done


def levels(page_table, lengths, query_start, group_start, shared, *, page: int) -> tuple[list[Table], Table]:
    """For each level a table of G requests (to attend to without causality), then that of the B suffixes (causal)."""
    tables = page_table, lengths, query_start, group_start, shared
    page_table, lengths, query_start, group_start, shared = map(jnp.asarray, tables)
    B = page_table.shape[0]
    if not B:
        return [], (page_table, lengths, query_start)
    found, done = spans(lengths, query_start, group_start, shared, page=page)
    prefixes = [(_shifted(page_table, first, begin // page), end - begin, rows) for first, begin, end, rows in found]
    request = jnp.arange(B, dtype=jnp.int32)
    return prefixes, (_shifted(page_table, request, done // page), lengths - done, query_start)


def stacked(prefixes: list[Table], splits: int, N: int, page: int) -> Table:
    """One table for all levels and segments, each with rows of its own; a request without keys takes spare rows."""
    part = jnp.arange(splits, dtype=jnp.int32)[:, None]
    tables, counts, starts = [], [], []
    for level, (table, length, rows) in enumerate(prefixes):
        G = table.shape[0]
        pages = pl.cdiv(pl.cdiv(length, page), splits)
        segment = jnp.pad(pages, (0, 1))  # the last request has none
        length = jnp.pad(length, (0, 1))
        skipped = part * segment
        group = jnp.minimum(jnp.arange(G + 1, dtype=jnp.int32), G - 1)
        tables.append(_shifted(table, jnp.tile(group, splits), skipped.reshape(-1)))
        counts.append(jnp.clip(length - skipped * page, 0, segment * page).reshape(-1))
        starts.append(((level * splits + part) * N + rows).reshape(-1))
    end = jnp.full(1, len(prefixes) * splits * N, jnp.int32)
    return jnp.concatenate(tables), jnp.concatenate(counts), jnp.concatenate([*starts, end])


def segments(query_start, group_start, found: list[Span], *, splits: int, N: int, page: int, block_q: int):
    """The requests of `stacked` for tiles of `block_q` rows, as `attention._tiles.SEGMENTS` wants them.

    Written with numbers of requests instead of pieces put together, so that XLA makes it one small kernel.

    Returns:
        int32 [L splits (G + 1) + 2, 5].
    """
    B, (L, G) = query_start.shape[0] - 1, (group_start.shape[0], group_start.shape[1] - 1)
    R = L * splits * (G + 1)
    starts = group_start.reshape(-1)

    def start_of(r):
        piece, g = r // (G + 1), r % (G + 1)
        inside = jnp.minimum(piece // splits, L - 1) * (G + 1) + g
        row = piece * N + _at(query_start, jnp.clip(_at(starts, inside), 0, B))
        return jnp.where(r < R, row, L * splits * N)

    def tiles_of(r):
        return -(-jnp.maximum(start_of(r + 1) - start_of(r), 0) // block_q)

    r = jnp.arange(R + 2, dtype=jnp.int32)
    piece, g = r // (G + 1), r % (G + 1)
    level, real = jnp.minimum(piece // splits, L - 1), (r < R) & (g < G)
    at = level * G + jnp.minimum(g, G - 1)
    first, begin, end = (_at(x, at) for x in map(_joined, *[span[:3] for span in found]))
    pages = pl.cdiv(pl.cdiv(end - begin, page), splits)
    skipped = piece % splits * pages
    length = jnp.where(real, jnp.clip(end - begin - skipped * page, 0, pages * page), 0)
    tiles = jnp.zeros_like(r)
    if R <= _FEW:
        for k in range(R):
            tiles = tiles + jnp.where(k < r, tiles_of(jnp.int32(k)), 0)
    else:
        tiles = jnp.cumsum(jnp.where(r < R, tiles_of(r), 0)) - jnp.where(r < R, tiles_of(r), 0)
    columns = first, begin // page + skipped, length, start_of(r), tiles
    return _beside(columns)


def own(query_start, group_start, done, *, B: int):
    """Tokens of each request that its prefixes hold; for each level its group (G if none) and that group's first row.

    Returns:
        int32 [B, 1 + 2 L].
    """
    request, columns = jnp.arange(B, dtype=jnp.int32), [done]
    for starts in group_start:
        group = _any((request[:, None] >= starts[1:]).astype(jnp.int32), most=_FEW, add=True)
        columns += [group, _at(query_start, jnp.clip(_at(starts, group), 0, B))]
    return _beside(columns)


def _joined(first, *others):
    return jnp.concatenate([first, *others]) if others else first


def _beside(columns):
    """Columns [n] as [n, columns], chosen by number: a concatenation might not be fused."""
    first, *others = columns
    at = jnp.arange(len(columns), dtype=jnp.int32)
    out = jnp.broadcast_to(first[:, None], (first.shape[0], len(columns)))
    for i, column in enumerate(others, 1):
        out = jnp.where(at == i, column[:, None], out)
    return out


def _at(x, index):
    """`x[index]` of indices that lie inside."""
    return x.at[index].get(mode="promise_in_bounds")


def _any(columns, most: int = 8, add: bool = False):
    """The last axis, of which at most one entry is not zero, or with `add` any, added up; if short, XLA can fuse it."""
    if columns.shape[-1] > most:
        return columns.any(-1) if columns.dtype == bool else columns.sum(-1)
    out = columns[..., 0]
    for g in range(1, columns.shape[-1]):
        out = out + columns[..., g] if add else out | columns[..., g]
    return out


def _shifted(table, rows, columns):
    """Rows `rows` of a table without their first `columns` entries; what is beyond the end repeats the last."""
    at = jnp.arange(table.shape[1], dtype=jnp.int32) + columns[:, None]
    return table.at[rows[:, None], jnp.minimum(at, table.shape[1] - 1)].get(mode="promise_in_bounds")
