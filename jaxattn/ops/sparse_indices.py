"""Index lists of sparse attention: which rows of a gathered buffer, or slots of a cache, each token attends to."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jaxattn import _checks, _mechanism
from jaxattn._mechanism import Args, Case, Mechanism
from jaxattn.ops.window_cache import slot_mapping

_OP = "sparse_indices"
WIDTH = 128
"""Index lists are padded to a multiple of so many entries: what the attention kernels want."""

type Lists = tuple[Int32[Array, "N width"], Int32[Array, " N"]]


def sparse_indices(
    topk: Int32[Array, "N chosen"],
    query_start: Int32[Array, " B+1"],
    lengths: Int32[Array, " B"],
    gathered: Int32[Array, " B"],
    *,
    window: int,
    ratio: int,
    entries: int,
    stride: int,
    implementation: str | None = None,
    config: Any = None,
) -> Lists:
    """A prefill token's rows of the gathered buffer: its chosen compressed entries, then its window.

    Request b owns rows `b * stride` to `(b + 1) * stride - 1` of the buffer: `entries` compressed entries, then the
    last `gathered[b]` tokens of the request. The token at position p of request b gets

        n = min((p + 1) // ratio, chosen) compressed: b * stride + topk[token, j], j < n
        w = min(p + 1, window) of the window: b * stride + entries + (p - w + 1 + j) - (lengths[b] - gathered[b]), j < w

    and -1 behind them.

    Args:
        topk: the indexer's choice, entries of the token's own request; [N, 0] on window-only layers. Entries from
            n on are not read; a negative one among the first n stays -1.
        query_start: exclusive prefix sums of the requests' query tokens. Rows from `query_start[B]` on are padding.
        lengths: tokens of each request, this step's included; query i of T stands at position `lengths - T + i`.
        gathered: tokens of each request in the buffer: its queries and up to `window - 1` before them.
        window: visible positions, the token itself included.
        ratio: tokens per compressed entry; 1 = none are compressed, `chosen` must be 0.
        entries: rows for compressed entries.
        stride: rows of a request.
        implementation: None or "reference", there is no kernel.
        config: None, for the same reason.

    Returns:
        `indices` int32 [N, ceil((chosen + window) / 128) * 128] and `counts` int32 [N], n + w; padding has counts 0.

    Raises:
        TypeError: dtypes; ValueError: shapes or options.

    Source: vLLM 0.26.0 `models/deepseek_v4/common/ops/cache_utils.py` (combine_topk_swa_indices).
    """
    args = prepare(topk, query_start, lengths, gathered, window=window, ratio=ratio, entries=entries, stride=stride)
    return _mechanism.run(MECHANISM, args, implementation, config)


def prepare(topk, query_start, lengths, gathered, *, window, ratio, entries, stride) -> Args:
    """Validate the arguments of `sparse_indices`; raises as it does."""
    named = {"topk": topk, "query_start": query_start, "lengths": lengths, "gathered": gathered}
    shapes = {"topk": "N chosen", "query_start": "B+1", "lengths": "B", "gathered": "B"}
    dims = _checks.check_shapes(_OP, **{name: (x, shapes[name]) for name, x in named.items()})
    for name, x in named.items():
        _checks.check_dtype(_OP, name, x, ("int32",))
    _checks.check_count(_OP, window=window, ratio=ratio, stride=stride)
    if entries < 0 or entries > stride:
        raise ValueError(f"{_OP}: entries must lie between 0 and stride={stride}, got {entries}")
    if ratio == 1 and dims["chosen"]:
        raise ValueError(f"{_OP}: with ratio 1 nothing is compressed, topk must be [N, 0], got {tuple(topk.shape)}")
    return {**named, "window": int(window), "ratio": int(ratio), "entries": int(entries), "stride": int(stride)}


def _reference(topk, query_start, lengths, gathered, *, window, ratio, entries, stride):
    """The formulas, column by column of the result."""
    N, chosen = topk.shape
    width = -(-(chosen + window) // WIDTH) * WIDTH
    if not lengths.shape[0]:
        return jnp.full((N, width), -1, jnp.int32), jnp.zeros(N, jnp.int32)
    request, position, live = places(query_start, lengths, N)
    n = jnp.minimum((position + 1) // ratio, chosen)[:, None]
    w = jnp.minimum(position + 1, window)[:, None]
    start = (request * stride)[:, None]
    column = jnp.arange(width, dtype=jnp.int32)
    picked = jnp.pad(topk, ((0, 0), (0, width - chosen)), constant_values=-1)
    picked = jnp.where(picked >= 0, start + picked, -1)
    seen = position[:, None] - w + 1 + (column - n)
    seen = start + entries + seen - (lengths - gathered)[request][:, None]
    out = jnp.where(column < n, picked, jnp.where(column < n + w, seen, -1))
    counts = jnp.where(live, (n + w)[:, 0], 0)
    return jnp.where(live[:, None], out, -1).astype(jnp.int32), counts.astype(jnp.int32)


def places(
    query_start: Int32[Array, " B+1"], lengths: Int32[Array, " B"], N: int
) -> tuple[Int32[Array, " N"], Int32[Array, " N"], Array]:
    """Request and position of each packed row, and whether the row is a token at all."""
    row = jnp.arange(N, dtype=jnp.int32)
    request = jnp.searchsorted(query_start, row, side="right", method="compare_all").astype(jnp.int32) - 1
    live = (request >= 0) & (request < lengths.shape[0])
    request = jnp.clip(request, 0, lengths.shape[0] - 1)
    position = lengths[request] - query_start[request + 1] + row
    live &= position >= 0
    return request, jnp.where(live, position, 0), live


def window_slots(
    page_table: Int32[Array, "B pages"],
    request: Int32[Array, " N"],
    position: Int32[Array, " N"],
    *,
    window: int,
    page: int,
) -> Lists:
    """Cache slots of the positions `max(p - window + 1, 0)` to p that a token at position p sees.

    Args:
        page_table: int32 pages of the window cache.
        request: int32 row of the table for each token.
        position: int32, negative = padding, which sees nothing.
        window: visible positions, the token itself included.
        page: slots per page.

    Returns:
        `slots` int32 [N, ceil(window / 128) * 128], oldest first, -1 behind the last, and their `counts`.

    Raises:
        TypeError: dtypes; ValueError: shapes or sizes.

    Source: vLLM 0.26.0 `v1/attention/backends/mla/sparse_swa.py`.
    """
    _checks.check_count("window_slots", window=window, page=page)
    width = -(-window // WIDTH) * WIDTH
    counts = jnp.clip(position + 1, 0, window)
    column = jnp.arange(width, dtype=jnp.int32)
    seen = jnp.where(column < counts[:, None], (position - counts + 1)[:, None] + column, -1)
    return _table_slots(page_table, request, seen, page), counts


def entry_slots(
    page_table: Int32[Array, "B pages"], request: Int32[Array, " N"], chosen: Int32[Array, "N width"], *, page: int
) -> Lists:
    """Cache slots of a request's own entries (the indexer's choice), and how many there are.

    Args:
        page_table: int32 pages of the compressed cache.
        request: int32 row of the table for each token.
        chosen: int32 entries counted from the request's first; negative = none.
        page: entries per page: 256 // ratio.

    Returns:
        `slots` int32 [N, width], -1 for none, each where its entry stood, and `counts` of entries.

    Raises:
        TypeError: dtypes; ValueError: shapes or sizes.

    Source: vLLM 0.26.0 `cache_utils.py` (compute_global_topk_indices_and_lens).
    """
    slots = _table_slots(page_table, request, chosen, page)
    return slots, jnp.sum(slots >= 0, -1, dtype=jnp.int32)


def all_entries(position: Int32[Array, " N"], *, ratio: int, most: int) -> Lists:
    """All compressed entries that a token at position p sees, 0 to `(p + 1) // ratio - 1`: layers with ratio 128.

    Args:
        position: int32, negative = padding.
        ratio: tokens per entry.
        most: longest list.

    Returns:
        `entries` int32 [N, ceil(most / 128) * 128], -1 behind the last, and their `counts`.

    Raises:
        TypeError: sizes that are no integers; ValueError: a size below 1.
    """
    _checks.check_count("all_entries", ratio=ratio, most=most)
    column = jnp.arange(-(-most // WIDTH) * WIDTH, dtype=jnp.int32)
    counts = jnp.clip((position + 1) // ratio, 0, most)
    return jnp.where(column < counts[:, None], column, -1), counts


def _table_slots(page_table, request, position, page):
    N, width = position.shape
    flat = slot_mapping(page_table, jnp.repeat(request, width), position.reshape(-1), page=page)
    return flat.reshape(N, width)


def make_inputs(
    rng: np.random.Generator,
    queries: tuple[int, ...],
    lengths: tuple[int, ...],
    *,
    chosen: int = 16,
    window: int = 128,
    ratio: int = 4,
    padding: int = 0,
) -> Args:
    """Random arguments of `sparse_indices`; entries that are not read are 2^31 - 1.

    Args:
        rng: source of randomness.
        queries: query tokens of each request.
        lengths: tokens of each request.
        chosen: width of the indexer's choice.
        window: visible positions.
        ratio: tokens per entry.
        padding: rows behind the last request.
    """
    topk = np.full((sum(queries) + padding, chosen), 2**31 - 1, np.int32)
    row = 0
    for T, length in zip(queries, lengths, strict=True):
        for i in range(T):
            visible = (length - T + i + 1) // ratio
            n = min(visible, chosen)
            topk[row, :n] = rng.permutation(visible)[:n]
            row += 1
    gathered = [T + min(length - T, window - 1) for T, length in zip(queries, lengths, strict=True)]
    entries = max((length // ratio for length in lengths), default=0) if chosen else 0
    return {
        "topk": jnp.asarray(topk),
        "query_start": jnp.asarray(np.cumsum([0, *queries]).astype(np.int32)),
        "lengths": jnp.asarray(np.array(lengths, np.int32)),
        "gathered": jnp.asarray(np.array(gathered, np.int32)),
        "window": window,
        "ratio": ratio,
        "entries": entries,
        "stride": entries + max(gathered, default=1),
    }


def _case(name: str, *sizes, **options) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, *sizes, **options), tags=frozenset({"smoke"}))


MECHANISM = Mechanism(
    name=_OP,
    source="vLLM 0.26.0 vllm/models/deepseek_v4/common/ops/cache_utils.py (combine_topk_swa_indices)",
    op=sparse_indices,
    prepare=prepare,
    reference=_reference,
    outputs=lambda **_: ("indices", "counts"),
    kernels={},
    cases=(
        _case("window128-ratio4", (3, 5, 1), (10, 200, 129)),
        _case("window4-ratio2-padding", (7, 1, 2), (7, 9, 2), window=4, ratio=2, chosen=3, padding=2),
        _case("window-only", (4, 6), (4, 300), window=128, ratio=1, chosen=0),
        _case("all-of-ratio128", (2, 130), (128, 400), window=128, ratio=128, chosen=5),
    ),
    cost=lambda *, topk, window, **_: (0, 4 * topk.size + 4 * topk.shape[0] * (topk.shape[1] + window)),
    captures=("dsv4/combine_topk_swa_indices*",),
    support=(
        (
            "any batch",
            {
                "topk": jax.ShapeDtypeStruct((64, 512), jnp.int32),
                "query_start": jax.ShapeDtypeStruct((5,), jnp.int32),
                "lengths": jax.ShapeDtypeStruct((4,), jnp.int32),
                "gathered": jax.ShapeDtypeStruct((4,), jnp.int32),
                "window": 128,
                "ratio": 4,
                "entries": 1024,
                "stride": 2048,
            },
        ),
    ),
)
