"""Attention of requests that share prefixes: each prefix once for all of them, then their own tokens, then a merge."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxattn import _checks, _mechanism
from jaxattn._mechanism import Args, Kernel, Mechanism
from jaxattn.ops import paged_attention as paged
from jaxattn.ops._cascade_cases import BENCH, CASES, SUPPORT, probe
from jaxattn.ops.combine_partials import combine_partials
from jaxattn.ops.merge_states import merge_states
from jaxattn.ops.paged_attention import Cache, Output
from pallas_kernels import _mosaic
from pallas_kernels import cascade_attention as mosaic

_OP = "cascade_attention"


def cascade_attention(
    q: Float[Array, "N H D"],
    k_pages: Cache,
    v_pages: Cache,
    page_table: Int32[Array, "B pages"],
    lengths: Int32[Array, " B"],
    query_start: Int32[Array, " B+1"],
    group_start: Int32[Array, "L G+1"],
    shared: Int32[Array, "L G"],
    *,
    sinks: Float[Array, " H"] | None = None,
    k_scale: Float[Array, ""] | None = None,
    v_scale: Float[Array, ""] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    checked: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> Output:
    r"""Causal paged attention whose shared prefixes are read once for all requests that share them.

    Mathematically `paged_attention(q, ..., query_start)`. At level l the requests `group_start[l, g]` to
    `group_start[l, g+1]` form a group that shares its first `shared[l, g]` tokens; a level continues where the one
    before ended, so that levels form a tree. With P_l the keys of a row's group at level l and S its request's others,

        o_X = sum_{j in X} exp(s_j) v_j / sum_{j in X} exp(s_j),   lse_X = log sum_{j in X} exp(s_j)
        o   = merge of (o_P1, lse_P1), ..., (o_PL, lse_PL), (o_S, lse_S)

    Prefixes need no causal mask: no query may lie inside one. Partial results are rounded to q's dtype.

    Args:
        q: packed queries, as for `paged_attention`.
        k_pages: key pool.
        v_pages: value pool.
        page_table: page numbers of whole requests, shared pages included. The first request of a group tells where the
            group's shared pages are.
        lengths: valid keys per request, shared ones and this step's tokens included.
        query_start: exclusive prefix sums of query lengths.
        group_start: for each level, the first request of each group, rising from 0; requests from the last entry on
            share nothing at this level. Unused groups repeat the last entry.
        shared: for each level and group, tokens from the requests' start to the end of what is shared, a multiple of
            the page; groups whose requests share nothing more than at the level before repeat its value (0 at first).
        sinks: logits that enter each head's denominator, once.
        k_scale: as for `paged_attention`.
        v_scale: as for `paged_attention`.
        scale: softmax scale, None = D**-0.5.
        softcap: bound of the scores.
        return_lse: also return the log-sum-exp, without the sink.
        checked: read the tables and raise if groups do not share what is said, or a query lies inside a prefix; needs
            concrete arrays.
        implementation: None (choose), "reference" or "mosaic".
        config: launch configuration of the named kernel.

    Returns:
        as `paged_attention`.

    Raises:
        TypeError: dtypes; ValueError: shapes, options, or values in checked mode;
        NotImplementedError: the named implementation cannot run this call.

    Source: vLLM 0.26.0 `vllm/v1/attention/backends/flash_attn.py` (`cascade_attention`, one level for all requests);
    trees as in FlashInfer's `MultiLevelCascadeAttentionWrapper`,
    https://flashinfer.ai/2024/02/02/cascade-inference.html.
    """
    args = prepare(
        q,
        k_pages,
        v_pages,
        page_table,
        lengths,
        query_start,
        group_start,
        shared,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        scale=scale,
        softcap=softcap,
        return_lse=return_lse,
        checked=checked,
    )
    return _mechanism.run(MECHANISM, args, implementation, config)


def prepare(
    q,
    k_pages,
    v_pages,
    page_table,
    lengths,
    query_start,
    group_start,
    shared,
    *,
    sinks=None,
    k_scale=None,
    v_scale=None,
    scale=None,
    softcap=None,
    return_lse=False,
    checked=False,
) -> Args:
    """Validate and complete the arguments of `cascade_attention`; raises as it does."""
    args = paged.prepare(
        q,
        k_pages,
        v_pages,
        page_table,
        lengths,
        query_start,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        scale=scale,
        softcap=softcap,
        return_lse=return_lse,
        checked=checked,
    )
    dims = _checks.check_shapes(_OP, group_start=(group_start, "L G+1"), shared=(shared, "L G"))
    for name, x in (("group_start", group_start), ("shared", shared)):
        _checks.check_dtype(_OP, name, x, ("int32",))
    if dims["G"] < 0:
        raise ValueError(f"{_OP}: group_start must be [L, G+1], got shape {tuple(group_start.shape)}")
    if checked:
        check_groups(page_table, lengths, query_start, group_start, shared, page=k_pages.shape[1])
    del args["causal"], args["window"]
    return args | {"group_start": group_start, "shared": shared}


def check_groups(page_table, lengths, query_start, group_start, shared, *, page: int) -> None:
    """Raise `ValueError` unless the groups share what they are said to share.

    Args:
        page_table: int32 [B, pages].
        lengths: int32 [B].
        query_start: int32 [B+1].
        group_start: int32 [L, G+1].
        shared: int32 [L, G].
        page: slots per page.

    Raises:
        ValueError: with the first level and group at fault, or if a value cannot be read (under jit).
    """
    if not _checks.is_concrete(page_table, lengths, query_start, group_start, shared):
        raise ValueError(
            f"{_OP}: checked=True reads the tables and needs concrete arrays; call check_groups before jit"
        )
    table, n, start, groups, ends = (np.asarray(x) for x in (page_table, lengths, query_start, group_start, shared))
    B = table.shape[0]
    computed = n - np.diff(start)
    done = np.zeros(B, np.int64)
    for level, (firsts, tokens) in enumerate(zip(groups, ends, strict=True)):
        if firsts.size and (firsts[0] != 0 or (np.diff(firsts) < 0).any() or firsts[-1] > B):
            raise ValueError(
                f"{_OP}: group_start[{level}] must rise from 0 to at most {B} requests, got {firsts.tolist()}"
            )
        for g, end in enumerate(tokens.tolist()):
            members = np.arange(firsts[g], firsts[g + 1])
            if not members.size:
                continue
            where = f"shared[{level}, {g}]"
            if end % page or end < done[members].max():
                raise ValueError(
                    f"{_OP}: {where} must be a multiple of the page, {page}, and not less than {done[members].max()}, "
                    f"where the level before ends; got {end}"
                )
            if end > computed[members].min():
                b = int(members[computed[members].argmin()])
                raise ValueError(
                    f"{_OP}: {where} is {end}, but request {b} has only {computed[b]} tokens before its first query; "
                    "a query must not lie inside a prefix (see prefix_length)"
                )
            pages = table[members, : end // page]
            if (pages != pages[0]).any():
                b = int(members[(pages != pages[0]).any(1)][0])
                raise ValueError(f"{_OP}: {where} is {end}, but requests {members[0]} and {b} differ in those pages")
            if (done[members] != done[members[0]]).any():
                raise ValueError(f"{_OP}: group {g} of level {level} joins requests that the level before keeps apart")
            done[members] = end


# ---------------------------------------------------------------- when and how much
def prefix_length(common_pages: int, page: int, computed: np.ndarray) -> int:
    """Tokens that a cascade may take as shared: a multiple of the page, and no query of any request inside.

    Args:
        common_pages: leading pages that all requests have in common.
        page: slots per page.
        computed: int [B], tokens of each request that were in the cache before this step.

    Raises:
        ValueError: a count is out of range.

    Source: vLLM 0.26.0 `vllm/v1/worker/gpu_model_runner.py`, `_compute_cascade_attn_prefix_len`.
    """
    if common_pages < 0 or page < 1:
        raise ValueError(f"prefix_length: needs common_pages >= 0 and page >= 1, got {common_pages} and {page}")
    most = int(np.min(computed, initial=np.iinfo(np.int64).max))
    return max(0, min(common_pages * page, most) // page * page)


def worthwhile(
    prefix: int,
    query_lengths: np.ndarray,
    heads: int,
    kv_heads: int,
    *,
    num_sms: int,
    alibi: bool = False,
    window: bool = False,
    local: bool = False,
    ranks: int = 1,
) -> bool:
    """Whether vLLM would take a cascade with one shared prefix: a rule of thumb, not a measurement.

    Args:
        prefix: its tokens.
        query_lengths: int [B], new tokens of each request.
        heads: query heads.
        kv_heads: kv heads.
        num_sms: streaming multiprocessors of the GPU.
        alibi: linear biases, which a cascade does not offer.
        window: a sliding window, which it does not either.
        local: chunked local attention, which it does not either.
        ranks: of decode context parallelism, which it does not work with.

    Source: vLLM 0.26.0 `vllm/v1/attention/backends/flash_attn.py`, `use_cascade_attention`.
    """
    lengths, tile = np.asarray(query_lengths), 128
    if prefix < 256 or lengths.size < 8 or alibi or window or local or ranks > 1:
        return False
    group = heads // kv_heads
    if group == 1 or (lengths != 1).any():
        return True  # flat attention would not split the keys
    steps = -(-prefix // tile)
    cascade = -(-heads * -(-lengths.size // tile) // num_sms) * steps
    flat = -(-lengths.size * kv_heads * -(-group // tile) * steps // num_sms)
    return cascade < flat


def prefix_tree(
    page_table: np.ndarray, computed: np.ndarray, page: int, *, levels: int = 2, min_pages: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """The `group_start` and `shared` of neighbouring requests whose leading pages are the same, level by level.

    At each level neighbours that agree in the next `min_pages` pages form a group, which shares as many pages as all of
    its requests have in common before their first query. Sort requests by their pages first to find more.

    Args:
        page_table: int [B, pages].
        computed: int [B], tokens of each request that were in the cache before this step.
        page: slots per page.
        levels: L, of the result.
        min_pages: pages that are worth a group.

    Returns:
        int32 [L, B+1] and [L, B]: groups for any batch of B requests, unused ones empty.
    """
    table = np.asarray(page_table)
    B, free = table.shape[0], np.minimum(np.asarray(computed) // page, table.shape[1])
    starts, ends = np.full((levels, B + 1), B, np.int32), np.zeros((levels, B), np.int32)
    done = np.zeros(B, np.int64)
    border = np.zeros(B, bool)  # a group must not reach over the border of one at the level before
    for level in range(levels):
        first = g = 0
        borders = border.copy()
        while first < B:
            depth, common, last = int(done[first]), int(free[first]), first + 1
            while last < B and not border[last]:
                limit = min(common, int(free[last]))
                differ = np.flatnonzero(table[first, depth:limit] != table[last, depth:limit])
                agreed = depth + int(differ[0]) if differ.size else limit
                if agreed < depth + min_pages:
                    break
                common, last = agreed, last + 1
            common = common if last > first + 1 else depth  # alone: nothing is shared
            starts[level, g], ends[level, g] = first, common * page
            done[first:last], borders[first] = common, True
            first, g = last, g + 1
        border = borders
    return starts, ends


# ---------------------------------------------------------------- reference
def _reference(
    q,
    k_pages,
    v_pages,
    page_table,
    lengths,
    query_start,
    *,
    group_start,
    shared,
    sinks,
    return_lse,
    **options,
):
    """The partial results of paged attention's reference, merged one after the other; float64 inputs give the truth."""
    page = k_pages.shape[1]
    prefixes, suffix = mosaic.levels(page_table, lengths, query_start, group_start, shared, page=page)
    attend = paged.MECHANISM.reference

    def partial(table, **more):
        named = dict(zip(_TABLES, table, strict=True)) | options | more
        return attend(q=q, k_pages=k_pages, v_pages=v_pages, window=None, return_lse=True, **named)

    o, lse = partial(suffix, causal=True, sinks=sinks)
    weight = mosaic.with_sink(lse, sinks)
    parts = [partial(table, causal=False, sinks=None) for table in prefixes]
    if len(parts) == 1:
        (part, part_lse), *_ = parts
        o = merge_states(part, part_lse, o, weight, return_lse=False, implementation="reference")
    elif parts:
        os, lses = map(jnp.stack, zip(*parts, (o, weight), strict=True))
        o = combine_partials(os, lses, implementation="reference")[0]
    for _, more in parts:
        lse = jnp.logaddexp(lse, more)
    return (o, lse) if return_lse else o


def _outputs(*, return_lse, **_):
    return ("o", "lse") if return_lse else ("o",)


def _cost(*, q, k_pages, page_table, lengths, query_start, group_start, shared, **_):
    """The products of flat attention; a prefix once for its group, a suffix once for its request, q and o once."""
    tables = dict(zip(_TABLES, (page_table, lengths, query_start), strict=True))
    flops, _ = paged._cost(q=q, k_pages=k_pages, **tables, causal=True, window=None)
    n, queries = np.asarray(lengths, np.int64), np.diff(np.asarray(query_start))
    done, keys = np.zeros(len(n), np.int64), 0
    for starts, ends in zip(np.asarray(group_start), np.asarray(shared), strict=True):
        for first, last, end in zip(starts[:-1], starts[1:], ends, strict=True):
            if first < last:
                keys += max(0, int(end - done[first])) * bool(queries[first:last].any())
                done[first:last] = np.maximum(done[first:last], end)
    keys += int((n - done)[queries > 0].sum())
    (_, _, K, D), width = k_pages.shape, jnp.dtype(k_pages.dtype).itemsize
    return flops, 2 * keys * K * D * width + 2 * q.size * jnp.dtype(q.dtype).itemsize


_TABLES = ("page_table", "lengths", "query_start")

MECHANISM = Mechanism(
    name=_OP,
    source="vLLM 0.26.0 vllm/v1/attention/backends/flash_attn.py; https://flashinfer.ai/2024/02/02/cascade-inference.html",
    op=cascade_attention,
    prepare=prepare,
    reference=_reference,
    outputs=_outputs,
    kernels={
        "mosaic": Kernel(
            run=mosaic.cascade_attention,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=CASES + BENCH,
    cost=_cost,
    probe=probe,
    module="jaxattn.nn.cascade:CascadeAttention",
    captures=("attention/cascade*", "partial_attention/cascade_*"),
    support=SUPPORT,
)
