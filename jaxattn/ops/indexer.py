"""The lightning indexer: scores of all entries by a small multi-query product, and the best of them per token."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, UInt8

from jaxattn import _checks, _latent_cache, _mechanism
from jaxattn._mechanism import Args, Kernel, Mechanism
from jaxattn.ops import _indexer_cases as cases
from jaxattn.ops import indexer_topk as choice
from jaxattn.quant import mx
from jaxattn.quant import primitives as p
from pallas_kernels import _mosaic
from pallas_kernels import indexer as mosaic

_OP = "indexer"
_CODES = ("float8_e4m3fn", *_checks.FLOATS)
_AT_ONCE = 16
"""Tokens whose keys the reference takes out of pages at once."""
FORMATS = ("indexer_fp8", "indexer_mxfp4", "plain")
"""Of paged caches."""
type Order = Literal["best", "rising"]


def indexer(
    q: Array,
    weights: Float[Array, "N H"],
    k: Array,
    k_scale: Array | None,
    starts: Int32[Array, " N"],
    ends: Int32[Array, " N"],
    *,
    topk: int | None,
    q_scale: UInt8[Array, "N H D/32"] | None = None,
    page_table: Int32[Array, "B pages"] | None = None,
    requests: Int32[Array, " N"] | None = None,
    page: int | None = None,
    format: str = "indexer_fp8",
    order: Order = "best",
    return_logits: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> Any:
    r"""The `topk` entries with the largest scores among `starts[n]` to `ends[n] - 1`, for every token n.

        logit[n, e] = k_scale[e] * sum_h weights[n, h] * relu(q[n, h] . k[e])

    in float32: products of codes are exact, sums are accumulated in float32 or wider. MXFP4 has a scale for every 32
    numbers of q and of k instead, which belongs into their product:

        logit[n, e] = sum_h weights[n, h] * relu(sum_d (q_scale[n, h, d / 32] q[n, h, d]) (k_scale[e, d / 32] k[e, d]))

    Args:
        q: [N, H, D] codes of `indexer_q`, float8_e4m3fn or any float dtype (float64: reference only), or uint8
            [N, H, D / 2], its MXFP4 codes.
        weights: float32, scales of heads folded in, and those of q but for MXFP4.
        k: codes of keys, [S, D] in the dtype of `q`, or uint8 [S, D / 2]; with `page_table` the paged cache, see
            `format`. Rows that no token may choose are not used and may be NaN.
        k_scale: float32 [S], MXFP4 uint8 [S, D / 32]; None with `page_table`: the cache holds the scales.
        starts: int32, the token's first entry.
        ends: int32, behind the token's last entry; clipped to S. `ends <= starts`: no entry.
        page_table: int32, pages of each request, whose entries are then counted from its first: S = pages * page. Pages
            without an entry that counts are not read, and their numbers may be anything.
        requests: int32, the request of each token, clipped to those that exist.
        page: entries per page.
        format: of the paged cache, as `jaxattn.compressor` leaves it: uint8 [P, bytes] "indexer_fp8" or "indexer_mxfp4"
            with D 128, or "plain", [P, page, D] in the dtype of `q`. Queries of "indexer_mxfp4" are MXFP4 codes, or any
            numbers, which the reference alone takes.
        topk: entries to choose; None = none, only with `return_logits`.
        q_scale: UE8M0 bytes of `q` in uint8, and only then; 255 is NaN.
        order: of the chosen: "best" first, the lower entry first of equals, or "rising" entries, which saves a sort
            where order does not matter, as in attention.
        return_logits: also return the logits, -inf outside [start, end).
        implementation: None (choose), "reference" or "mosaic".
        config: launch configuration of the named kernel.

    Returns:
        `indices` int32 [N, topk], the set of `indexer_topk`, counted from `starts[n]`, -1 behind the last where fewer
        entries exist; with `return_logits` then float32 `logits` [N, S], alone if `topk` is None. The kernel's products
        are summed by FP8 tensor cores, whose sums keep 13 bits below the largest of 32 products, those of MXFP4 by
        bfloat16 tensor cores in float32; "mosaic" chooses by the kernel of `indexer_topk`, and cannot run where that
        cannot.

    Raises:
        TypeError: dtypes; ValueError: shapes or options; NotImplementedError: the named implementation cannot run this.

    Source: DeepSeek-V3.2; vLLM 0.26.0 `layers/sparse_attn_indexer.py`, DeepGEMM `fp8_mqa_logits`, `top_k_per_row`
    (whose order is undefined).
    """
    args = prepare(
        q,
        weights,
        k,
        k_scale,
        starts,
        ends,
        topk=topk,
        q_scale=q_scale,
        page_table=page_table,
        requests=requests,
        page=page,
        format=format,
        order=order,
        return_logits=return_logits,
    )
    return _mechanism.run(MECHANISM, args, implementation, config)


def prepare(
    q,
    weights,
    k,
    k_scale,
    starts,
    ends,
    *,
    topk,
    q_scale=None,
    page_table=None,
    requests=None,
    page=None,
    format="indexer_fp8",
    order="best",
    return_logits=False,
) -> Args:
    """Validate the arguments of `indexer`; raises as it does."""
    paged = page_table is not None
    if any((x is not None) != paged for x in (requests, page)):
        raise ValueError(f"{_OP}: page_table, requests and page belong together; give all or none")
    if (k_scale is None) != paged:
        raise ValueError(f"{_OP}: k_scale belongs to keys outside of pages, and a paged cache holds its own")
    _check_format(_OP, format)
    if order not in ("best", "rising"):
        raise ValueError(f"{_OP}: order must be best or rising, got {order!r}")
    fp4 = _checks.is_array(q) and _checks.dtype_name(q) == "uint8"
    if fp4 != (q_scale is not None):
        raise ValueError(f"{_OP}: q_scale belongs to MXFP4 codes, q in uint8; give both or none")
    width = "half" if fp4 else "D"
    keys: dict[str, Any] = {"q_scale": (q_scale, "N H groups")} if fp4 else {}
    keys["k"] = (k, f"S {width}" if not paged else f"P page {width}" if format == "plain" else "P bytes")
    if paged:
        keys |= {"page_table": (page_table, "B pages"), "requests": (requests, "N")}
    else:
        keys |= {"k_scale": (k_scale, "S groups" if fp4 else "S")}
    dims = _checks.check_shapes(
        _OP,
        q=(q, f"N H {width}"),
        weights=(weights, "N H"),
        **keys,
        starts=(starts, "N"),
        ends=(ends, "N"),
    )
    dtype = _checks.check_dtype(_OP, "q", q, (*_CODES, "uint8"))
    if fp4:
        _check_mxfp4(q_scale, dims, format if paged else None)
    if paged:
        _check_cache(k, dtype, format, page, dims)
        _checks.check_dtype(_OP, "page_table", page_table, ("int32",))
        _checks.check_dtype(_OP, "requests", requests, ("int32",))
    else:
        _checks.check_dtype(_OP, "k", k, (dtype,), "q and k need one dtype; cast one of them")
    wide = ("float32", _checks.F64) if fp4 else (_checks.F64,) if dtype == _checks.F64 else ("float32",)
    _checks.check_dtype(_OP, "weights", weights, wide)
    if k_scale is not None:
        _checks.check_dtype(_OP, "k_scale", k_scale, ("uint8",) if fp4 else wide)
    for name, x in (("starts", starts), ("ends", ends)):
        _checks.check_dtype(_OP, name, x, ("int32",))
    if topk is None:
        if not return_logits:
            raise ValueError(f"{_OP}: nothing is asked for: give topk, or return_logits=True")
    else:
        _checks.check_count(_OP, topk=topk)
    return {
        "q": q,
        "weights": weights,
        "q_scale": q_scale,
        "k": k,
        "k_scale": k_scale,
        "starts": starts,
        "ends": ends,
        "topk": None if topk is None else int(topk),
        "page_table": page_table,
        "requests": requests,
        "page": None if page is None else int(page),
        "format": format,
        "order": order,
        "return_logits": bool(return_logits),
    }


def _check_format(op: str, format: str) -> None:
    if format not in FORMATS:
        raise ValueError(f"{op}: format must be indexer_fp8, indexer_mxfp4 or plain, got {format!r}")


def _check_mxfp4(q_scale, dims: dict[str, int], format: str | None) -> None:
    """Raise `TypeError` or `ValueError` unless queries are MXFP4, for keys of the same kind; D goes to `dims`."""
    _checks.check_dtype(_OP, "q_scale", q_scale, ("uint8",))
    if 2 * dims["half"] != mx.GROUP * dims["groups"]:
        raise ValueError(
            f"{_OP}: MXFP4 has 16 bytes of codes for every scale, got {dims['half']} bytes and {dims['groups']} scales "
            "of a head in q and q_scale"
        )
    if format not in (None, "indexer_mxfp4"):
        raise ValueError(f"{_OP}: MXFP4 queries need a cache of format indexer_mxfp4, got {format}")
    dims["D"] = 2 * dims["half"]


def _check_cache(k, dtype: str, format: str, page, dims: dict[str, int]) -> None:
    """Raise `TypeError` or `ValueError` unless a paged cache is of its format and fits the queries."""
    _checks.check_count(_OP, page=page)
    if format == "plain":
        _checks.check_dtype(_OP, "k", k, (dtype,), "a plain cache has the dtype of q")
        _check_page(_OP, k, page)
    else:
        _checks.check_dtype(_OP, "k", k, ("uint8",), "a paged cache")
        _latent_cache.check_pages(_OP, k, format, page)
        if dims["D"] != _latent_cache.PAGED[format].width:
            raise ValueError(f"{_OP}: a paged cache holds keys of 128 numbers, got D={dims['D']} from q")
    if not (dims["P"] and dims["B"]):
        raise ValueError(f"{_OP}: needs at least one page and one request, got P={dims['P']} and B={dims['B']}")


def _check_page(op: str, cache, page: int) -> None:
    if cache.shape[1] != page:
        raise ValueError(f"{op}: page must be that of the plain cache, {cache.shape[1]}, got {page}")


def _reference(
    q, weights, k, k_scale, starts, ends, *, topk, q_scale, page_table, requests, page, format, order, return_logits
):
    """All logits, then the best by a sort; MXFP4 as the numbers that it stands for."""
    if q_scale is not None:
        q = mx.dequantize(q, q_scale).astype(weights.dtype)
        if page is None:
            k, k_scale = mx.dequantize(k, k_scale).astype(weights.dtype), jnp.ones(k.shape[0], weights.dtype)
    S = k.shape[0] if page is None else page_table.shape[1] * page
    entry = jnp.arange(S, dtype=jnp.int32)
    visible = (entry >= starts[:, None]) & (entry < ends[:, None])
    if page is None:
        used = visible.any(0)
        k, k_scale = jnp.where(used[:, None], p.wide(k), 0), jnp.where(used, k_scale, 0)
        scores = jnp.einsum("nhd,sd->nhs", p.wide(q), k, precision="highest")
        logits = jnp.sum(weights[..., None] * jnp.maximum(scores, 0), 1) * k_scale
    else:
        logits = _paged_logits(p.wide(q), weights, k, visible, page_table, requests, page, format)
    logits = jnp.where(visible, logits, -jnp.inf)
    if topk is None:
        return logits
    indices = (choice.best_first if order == "best" else choice.rising)(logits, starts, ends, topk)
    return (indices, logits) if return_logits else indices


def _paged_logits(q, weights, cache, visible, page_table, requests, page, format):
    """Logits [N, S] of each token and the entries of its request, token by token."""
    tables = page_table[jnp.clip(requests, 0, page_table.shape[0] - 1)]

    def token(x):
        q, weights, visible, table = x
        keys, scale = indexer_keys(cache, table[None], format=format, page=page)
        keys, scale = keys[0].astype(q.dtype), scale[0].astype(q.dtype)
        keys, scale = jnp.where(visible[:, None], keys, 0), jnp.where(visible, scale, 0)
        scores = jnp.einsum("hd,sd->hs", q, keys, precision="highest")
        return jnp.sum(weights[:, None] * jnp.maximum(scores, 0), 0) * scale

    return lax.map(token, (q, weights, visible, tables), batch_size=_AT_ONCE)


def indexer_keys(
    cache: Array, page_table: Int32[Array, "B pages"], *, format: str = "indexer_fp8", page: int
) -> tuple[Float[Array, "B pages*page D"], Float[Array, "B pages*page"]]:
    """Keys and scales of each request, copied out of the indexer's paged cache, to look at or to score elsewhere.

    Args:
        cache: as `jaxattn.compressor` leaves it: uint8 [P, bytes], or [P, page, D] of format "plain".
        page_table: int32 pages; entries outside the cache give any row, which `ends` must leave out.
        format: "indexer_fp8": float8_e4m3fn keys; "indexer_mxfp4": float32 keys, scales multiplied in; "plain": as they
            are, scales are one.
        page: entries per page.

    Raises:
        TypeError: dtypes; ValueError: shapes or an unknown format.
    """
    op = "indexer_keys"
    _check_format(op, format)
    plain = format == "plain"
    _checks.check_shapes(op, cache=(cache, "P page D" if plain else "P bytes"), page_table=(page_table, "B pages"))
    _checks.check_dtype(op, "page_table", page_table, ("int32",))
    B, S = page_table.shape[0], page_table.shape[1] * page
    pages = jnp.clip(page_table, 0, cache.shape[0] - 1)
    if plain:
        _check_page(op, cache, page)
        keys = cache[pages].reshape(B, S, cache.shape[2])
        return keys, jnp.ones((B, S), jnp.promote_types(keys.dtype, jnp.float32))
    _checks.check_dtype(op, "cache", cache, ("uint8",))
    _latent_cache.check_pages(op, cache, format, page)
    # pages first: `split_pages` of the whole cache would be a copy of it
    rows, scales = _latent_cache.split_pages(cache[pages.reshape(-1)], format, page)
    rows, scales = (x.reshape(B, S, x.shape[-1]) for x in (rows, scales))
    if format == "indexer_fp8":
        keys = lax.bitcast_convert_type(rows, jnp.float8_e4m3fn)
        return keys, _latent_cache.decode_indexer(rows, scales)[1][..., 0]
    values, scale = _latent_cache.decode_indexer(rows, scales)
    values = p.grouped(values, 32) * scale[..., None]
    return p.ungrouped(values, 128), jnp.ones(values.shape[:2], jnp.float32)


def _kernel(*, config, order, **args):
    """Both kernels: logits, and the choice from them."""

    def select(logits, starts, ends, topk):
        chosen = choice.indexer_topk(logits, starts, ends, topk=topk, implementation="mosaic")
        return chosen if order == "rising" else choice.sort_by_logit(logits, starts, chosen)

    return mosaic.indexer(config=config, select=select, **args)


def _why_not(*, q, k, page, page_table, topk, **args) -> str | None:
    """The kernel's sentence, or that of the choice if something is chosen."""
    reason = mosaic.why_not(q=q, k=k, page=page, page_table=page_table, **args)
    if reason is None and topk is not None:
        S = k.shape[0] if page is None else page_table.shape[1] * page
        reason = choice.mosaic.why_not(logits=jax.ShapeDtypeStruct((q.shape[0], S), jnp.float32), topk=topk)
    return reason


def _outputs(*, topk, return_logits, **_):
    return (("indices",) if topk else ()) + (("logits",) if return_logits else ())


MECHANISM = Mechanism(
    name=_OP,
    source="DeepSeek-V3.2; vLLM 0.26.0 vllm/model_executor/layers/sparse_attn_indexer.py, DeepGEMM fp8_mqa_logits",
    op=indexer,
    prepare=prepare,
    reference=_reference,
    outputs=_outputs,
    kernels={
        "mosaic": Kernel(
            run=_kernel,
            why_not=_why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=cases.CASES,
    cost=cases.cost,
    probe=cases.probe,
    captures=("dsv4/indexer_logits_and_topk*",),
    module="jaxattn.nn.deepseek_v4:DeepseekV4Attention",
    support=cases.SUPPORT,
)
