"""Attention of a ragged batch of queries over a paged key/value cache, with sinks, window and soft cap."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32, Num

from jaxattn import _checks, _mechanism
from jaxattn._mechanism import Args, Kernel, Mechanism
from jaxattn.ops import _paged_attention_cache as _cache
from jaxattn.ops._paged_attention_bench import BENCH, probe
from jaxattn.ops._paged_attention_cases import CASES, FP8, SUPPORT
from pallas_kernels import _exact, _mosaic
from pallas_kernels import paged_attention as mosaic

_OP = "paged_attention"

type Cache = Num[Array, "P page K D"]
type ScalePages = Float[Array, "P page K"]
type Output = Float[Array, "N H D"] | tuple[Float[Array, "N H D"], Float[Array, "N H"]]


def paged_attention(
    q: Float[Array, "N H D"],
    k_pages: Cache,
    v_pages: Cache,
    page_table: Int32[Array, "B pages"],
    lengths: Int32[Array, " B"],
    query_start: Int32[Array, " B+1"],
    *,
    sinks: Float[Array, " H"] | None = None,
    k_scale: Float[Array, ""] | None = None,
    v_scale: Float[Array, ""] | None = None,
    k_scale_pages: ScalePages | None = None,
    v_scale_pages: ScalePages | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    checked: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> Output:
    r"""Attention of each request's newest tokens over its pages, decode and chunked prefill mixed.

    Query row `query_start[b] + i` is token `p = lengths[b] - T_b + i` of request `b`, with
    `T_b = query_start[b+1] - query_start[b]`; its head `h` sees keys `j` of KV head `h // (H / K)`:

        s_j = softcap * tanh(scale * q.k_j / softcap)        (softcap=None: scale * q.k_j)
        o   = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sinks_h)),   lse = log sum_j exp(s_j)

    over `0 <= j < lengths[b]`, and `j <= p` if `causal`, and `p - j < window` (and `j - p < window` if not causal).

    Args:
        q: packed queries in bfloat16, float16 or float32 (float64: reference only); H a multiple of K.
        k_pages: key pool in q's dtype, or float8_e4m3fn codes; with scale pages int8, float8_e4m3fn or uint8 codes (two
            of 4 bits in a byte, [P, page, K, D/2]) as `jaxattn.cache_write` stores them.
        v_pages: value pool, same dtype and shape as `k_pages`.
        page_table: page numbers of each request. Only the first `ceil(lengths[b] / page)` entries are read.
        lengths: valid keys per request, this step's tokens included. Slots beyond are not read: they may hold NaN.
        query_start: exclusive prefix sums of query lengths; rows from `query_start[B]` on are padding (zeros out).
        sinks: logits that enter each head's denominator only; not scaled. -inf = no sink, +inf = zero output.
        k_scale: what the key codes are multiplied with; float8 caches only, None = 1.
        v_scale: the same for values.
        k_scale_pages: float32 scales of the key cache per token and head.
        v_scale_pages: the same for values.
        scale: softmax scale, None = D**-0.5.
        causal: bottom-right aligned causal mask.
        window: number of visible positions, the token itself included; None = all.
        softcap: bound of the scores, applied before the mask.
        return_lse: also return the log-sum-exp.
        checked: read `page_table`, `lengths` and `query_start` and raise if they contradict the pool; needs concrete
            arrays. Without it such values give wrong rows, never an access outside the arrays.
        implementation: None (choose), "reference" or "mosaic".
        config: launch configuration of the named kernel.

    Returns:
        `o` in q's dtype; with `return_lse` also the natural-log `lse` in float32 (float64 for float64 inputs), the sink
        **not** included. A row that sees no key has o = 0 and lse = -inf, whatever the sink.

    Raises:
        TypeError: dtypes; ValueError: shapes, options, or values in checked mode;
        NotImplementedError: the named implementation cannot run this call.

    Source: vLLM 0.26.0 `triton_unified_attention.py` for the batch layout; sinks as in gpt-oss,
    https://arxiv.org/abs/2508.10925.
    """
    args = prepare(
        q,
        k_pages,
        v_pages,
        page_table,
        lengths,
        query_start,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        k_scale_pages=k_scale_pages,
        v_scale_pages=v_scale_pages,
        scale=scale,
        causal=causal,
        window=window,
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
    *,
    sinks=None,
    k_scale=None,
    v_scale=None,
    k_scale_pages=None,
    v_scale_pages=None,
    scale=None,
    causal=True,
    window=None,
    softcap=None,
    return_lse=False,
    checked=False,
) -> Args:
    """Validate and complete the arguments of `paged_attention`; raises as it does."""
    scale_pages = {"k_scale_pages": k_scale_pages, "v_scale_pages": v_scale_pages}
    scale_pages = {name: x for name, x in scale_pages.items() if x is not None}
    head = "C" if scale_pages and _cache.packed(k_pages) else "D"
    dims = _checks.check_shapes(
        _OP,
        q=(q, "N H D"),
        k_pages=(k_pages, f"P page K {head}"),
        v_pages=(v_pages, f"P page K {head}"),
        page_table=(page_table, "B pages"),
        lengths=(lengths, "B"),
        query_start=(query_start, "B+1"),
        **({} if sinks is None else {"sinks": (sinks, "H")}),
        **{name: (x, "P page K") for name, x in scale_pages.items()},
    )
    H, K, P = dims["H"], dims["K"], dims["P"]
    if K == 0 or H == 0 or H % K:
        raise ValueError(f"{_OP}: query heads must be a multiple of kv heads, got H={H} (q) and K={K} (k_pages)")
    if dims["D"] == 0:
        raise ValueError(f"{_OP}: the head dim must be at least 1, got shape {tuple(q.shape)} (q)")
    if P == 0 or dims["page"] == 0:
        raise ValueError(f"{_OP}: the pool needs at least one page of one slot, got shape {tuple(k_pages.shape)}")
    dtype = _checks.check_dtype(_OP, "q", q, _checks.FLOATS)
    for name, x in (("k_pages", k_pages), ("v_pages", v_pages)):
        if not scale_pages:
            _checks.check_dtype(_OP, name, x, (dtype, FP8), "cast q or the cache")
    _cache.check(_OP, q, k_pages, k_scale, v_scale, **scale_pages)
    if _checks.dtype_name(k_pages) != _checks.dtype_name(v_pages):
        raise TypeError(
            f"{_OP}: k_pages and v_pages must have the same dtype, got "
            f"{_checks.dtype_name(k_pages)} and {_checks.dtype_name(v_pages)}"
        )
    for name, x in (("page_table", page_table), ("lengths", lengths), ("query_start", query_start)):
        _checks.check_dtype(_OP, name, x, ("int32",))
    if sinks is not None:
        _checks.check_dtype(_OP, "sinks", sinks, _checks.FLOATS)
    fp8 = _checks.dtype_name(k_pages) == FP8
    for name, x in (("k_scale", k_scale), ("v_scale", v_scale)):
        # float64 codes are an upcast float8 cache: the truth of such a case
        if x is not None and not fp8 and dtype != _checks.F64:
            raise ValueError(
                f"{_OP}: {name} belongs to a {FP8} cache, but the cache is {_checks.dtype_name(k_pages)}; leave it out"
            )
        if x is None or not _checks.is_array(x):
            _checks.check_positive(_OP, **{name: x})
        elif x.size != 1:
            raise ValueError(f"{_OP}: {name} must be one number, got shape {tuple(x.shape)}")
        else:
            _checks.check_dtype(_OP, name, x, _checks.FLOATS)
    _checks.check_positive(_OP, scale=scale, softcap=softcap)
    if window is not None:
        _checks.check_count(_OP, window=window)
    if checked:
        check_paging(page_table, lengths, query_start, tokens=dims["N"], pool=P, page=dims["page"])
    return {
        "q": q,
        "k_pages": k_pages,
        "v_pages": v_pages,
        "page_table": page_table,
        "lengths": lengths,
        "query_start": query_start,
        "sinks": sinks,
        "k_scale": k_scale if k_scale is None or _checks.is_array(k_scale) else jnp.float32(k_scale),
        "v_scale": v_scale if v_scale is None or _checks.is_array(v_scale) else jnp.float32(v_scale),
        "scale": float(dims["D"] ** -0.5 if scale is None else scale),
        "causal": bool(causal),
        "window": None if window is None else int(window),
        "softcap": None if softcap is None else float(softcap),
        "return_lse": bool(return_lse),
        **scale_pages,
    }


def check_paging(page_table, lengths, query_start, *, tokens: int, pool: int, page: int) -> None:
    """Raise `ValueError` unless the tables describe requests that fit the pool.

    Args:
        page_table: int32 [B, pages].
        lengths: int32 [B].
        query_start: int32 [B+1].
        tokens: rows of q.
        pool: pages in the pool.
        page: slots per page.

    Raises:
        ValueError: with the first request that does not fit, or if a value cannot be read (under jit).
    """
    if not _checks.is_concrete(page_table, lengths, query_start):
        raise ValueError(
            f"{_OP}: checked=True reads page_table, lengths and query_start and needs concrete arrays; check them "
            "before jit with jaxattn.ops.paged_attention.check_paging"
        )
    table, n, start = (np.asarray(x) for x in (page_table, lengths, query_start))
    if start[0] != 0 or (np.diff(start) < 0).any() or start[-1] > tokens:
        raise ValueError(f"{_OP}: query_start must rise from 0 to at most {tokens} (rows of q), got {start.tolist()}")
    for b, length in enumerate(n.tolist()):
        capacity = table.shape[1] * page
        queries = int(start[b + 1] - start[b])
        if not queries <= length <= capacity:
            raise ValueError(
                f"{_OP}: lengths[{b}] must lie between the request's {queries} query tokens and the table's "
                f"{table.shape[1]} pages x {page} = {capacity} slots, got {length}"
            )
        used = table[b, : -(-length // page)]
        bad = np.flatnonzero((used < 0) | (used >= pool))
        if bad.size:
            i = int(bad[0])
            raise ValueError(f"{_OP}: page_table[{b}, {i}] must be a page of the pool, 0 to {pool - 1}, got {used[i]}")


def _reference(**args):
    """Over the numbers of the cache, or those that its codes stand for."""
    return _cache.attend(_plain, **args) if "k_scale_pages" in args else _plain(**args)


def _plain(
    q,
    k_pages,
    v_pages,
    page_table,
    lengths,
    query_start,
    *,
    sinks,
    k_scale,
    v_scale,
    scale,
    causal,
    window,
    softcap,
    return_lse,
):
    """Textbook softmax with one more logit per head, one request after the other; float64 inputs give the truth.

    16-bit inputs are multiplied exactly, accumulated in float32, and P is rounded to the dtype of V before the second
    product, as every kernel does.
    """
    (N, H, D), (P, page, K, _) = q.shape, k_pages.shape
    B, S, G = page_table.shape[0], page_table.shape[1] * page, H // K
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    row, col = jnp.arange(N), jnp.arange(S)
    qw = q.astype(wide).reshape(N, K, G, D)

    def request(b, carry):
        o, lse = carry
        mine = (row >= query_start[b]) & (row < query_start[b + 1])
        pos = lengths[b] - query_start[b + 1] + row
        visible = mine[:, None] & (col < lengths[b]) & _band(pos[:, None], col, causal, window)
        read = visible.any(0)
        pages = jnp.clip(page_table[b], 0, P - 1)

        def gather(pool, pool_scale):
            x = pool[pages].reshape(S, K, D).astype(wide)
            if pool_scale is not None:
                x = _exact.rounded(x * pool_scale.astype(wide).reshape(()), q.dtype)
            return jnp.where(read[:, None, None], x, 0)

        k, v = gather(k_pages, k_scale), gather(v_pages, v_scale)
        s = jnp.einsum("nkgd,skd->nkgs", qw, k, precision="highest") * scale
        if softcap is not None:
            s = softcap * jnp.tanh(s / softcap)
        s = jnp.where(visible[:, None, None], s, -jnp.inf)
        sink = jnp.full((K, G), -jnp.inf, wide) if sinks is None else sinks.astype(wide).reshape(K, G)
        m = jnp.max(s, -1)
        top = jnp.maximum(m, sink)
        safe = jnp.where(jnp.isfinite(top), top, 0)  # no key and no sink, or an infinite sink
        e = jnp.exp(s - safe[..., None])
        total = e.sum(-1) + jnp.exp(sink - safe)
        p = _exact.rounded(e, q.dtype)
        new = jnp.einsum("nkgs,skd->nkgd", p, v, precision="highest") / total[..., None]
        some = jnp.isfinite(m)
        new = jnp.where((some & (sink < jnp.inf))[..., None], new, 0)
        own_max = jnp.where(some, m, 0)
        plain = jnp.log(jnp.exp(s - own_max[..., None]).sum(-1)) + own_max
        o = jnp.where(mine[:, None, None], new.reshape(N, H, D), o)
        return o, jnp.where(mine[:, None], plain.reshape(N, H), lse)

    start = jnp.zeros((N, H, D), wide), jnp.full((N, H), -jnp.inf, wide)
    o, lse = lax.fori_loop(0, B, request, start) if B and S else start
    return (o.astype(q.dtype), lse) if return_lse else o.astype(q.dtype)


def _band(pos, col, causal, window):
    """Visible pairs of query and key position, the length apart."""
    visible = jnp.broadcast_to(True, jnp.broadcast_shapes(pos.shape, col.shape))
    if causal:
        visible &= col <= pos
    if window is not None:
        visible &= pos - col < window
        if not causal:
            visible &= col - pos < window
    return visible


def _outputs(*, return_lse, **_):
    return ("o", "lse") if return_lse else ("o",)


def _cost(*, q, k_pages, page_table, lengths, query_start, causal, window, **_):
    """Visible score pairs x 4 D H flops; q, o and each request's visible keys and values once."""
    (_, H, D), K = q.shape, k_pages.shape[2]
    n, start = np.asarray(lengths, np.int64), np.asarray(query_start, np.int64)
    pairs = keys = 0
    for length, queries in zip(n.tolist(), np.diff(start).tolist(), strict=True):
        if queries == 0:
            continue
        pos = np.arange(length - queries, length)
        low = np.zeros_like(pos) if window is None else np.maximum(pos - window + 1, 0)
        high = pos + 1 if causal else np.full_like(pos, length)
        if window is not None and not causal:
            high = np.minimum(pos + window, length)
        pairs += int((high - low).sum())
        keys += int(high.max() - low.min())
    flops = 4 * pairs * H * D
    cache = 2 * keys * K * k_pages.shape[3] * jnp.dtype(k_pages.dtype).itemsize
    return flops, cache + 2 * q.size * jnp.dtype(q.dtype).itemsize


MECHANISM = Mechanism(
    name=_OP,
    source="vLLM 0.26.0 vllm/v1/attention/ops/triton_unified_attention.py; sinks: https://arxiv.org/abs/2508.10925",
    op=paged_attention,
    prepare=prepare,
    reference=_reference,
    outputs=_outputs,
    kernels={
        "mosaic": Kernel(
            run=functools.partial(_cache.launch, mosaic.paged_attention),
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=CASES + _cache.CASES + BENCH,
    cost=_cost,
    probe=probe,
    module="jaxattn.nn.attention:PagedAttention",
    captures=("attention/paged_*", "kv_cache/paged_*"),
    support=SUPPORT + _cache.SUPPORT,
)
