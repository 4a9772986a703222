"""Attention of every token over its own list of latent rows: DeepSeek-V3.2's and V4's sparse attention."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxattn import _checks, _latent_cache, _mechanism
from jaxattn._mechanism import Args, Kernel, Mechanism
from jaxattn.ops import _sparse_mla_cases as cases
from jaxattn.ops.latent_cache_gather import at_slots
from jaxattn.quant import primitives as p
from pallas_kernels import _exact, _mosaic
from pallas_kernels import sparse_mla as mosaic

_OP = "sparse_mla"
FORMATS = ("plain", "fp8_ds_mla", "v4")
_AT_ONCE = 16
"""Tokens whose rows the reference gathers at once."""


def sparse_mla(
    q: Float[Array, "N H D"],
    cache: Array,
    indices: Int32[Array, "N width"],
    *,
    counts: Int32[Array, " N"] | None = None,
    sinks: Float[Array, " H"] | None = None,
    extra_cache: Array | None = None,
    extra_indices: Int32[Array, "N more"] | None = None,
    extra_counts: Int32[Array, " N"] | None = None,
    scale: float | None = None,
    value_dim: int | None = None,
    format: str = "plain",
    page: int | None = None,
    extra_page: int | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> Any:
    r"""`o = softmax(scale q . k) v` over listed rows, each of which is key and value at once (v = its first numbers).

    Entry j of a token's list counts iff `0 <= indices[n, j] < rows of the cache` and `j < counts[n]`; an index that
    appears twice counts twice. With a second cache (V4: window and compressed entries) one softmax spans both lists.

        o = sum_j exp(s_j - m) v_j / (sum_j exp(s_j - m) + exp(sink - m)),   lse = log sum_j exp(s_j)

    Args:
        q: absorbed queries, bfloat16, float16 or float32 (float64: reference only).
        cache: "plain" [S, D] in the dtype of `q`; "fp8_ds_mla" uint8 [P, page, 656], D 576; "v4" uint8 [P, bytes], D
            512. Packed rows are dequantized to bfloat16 numbers. Rows that are not listed are not read and may be
            NaN.
        indices: int32 rows or slots (page * page size + row); other integers are ignored.
        counts: int32 entries of each list; None = all.
        sinks: one logit per head for the denominator, float32; -inf = none, +inf gives o = 0.
        extra_cache: a second cache of the same format (pages may be of another number).
        extra_indices: its lists.
        extra_counts: their entries.
        scale: softmax scale, None = `D^-0.5`.
        value_dim: width of v, None = 512 (D if smaller).
        format: of both caches.
        page: rows of a page, format "v4" only.
        extra_page: rows of a page of the second cache, None = `page`.
        return_lse: also return the log-sum-exp and the largest score.
        implementation: None (choose), "reference" or "mosaic".
        config: launch configuration of the named kernel.

    Returns:
        `o` [N, H, value_dim] in the dtype of `q`; with `return_lse` then float32 `lse` and `max_logits` [N, H], scaled,
        natural, without the sink. A token without any valid entry gets o = 0, lse = max_logits = -inf.

    Raises:
        TypeError: dtypes; ValueError: shapes or options; NotImplementedError: the named implementation cannot run this.

    Source: DeepSeek-V3.2; FlashMLA (flash_mla_sparse_fwd, sparse decode), whose empty rows have lse = +inf.
    """
    args = prepare(
        q,
        cache,
        indices,
        counts=counts,
        sinks=sinks,
        extra_cache=extra_cache,
        extra_indices=extra_indices,
        extra_counts=extra_counts,
        scale=scale,
        value_dim=value_dim,
        format=format,
        page=page,
        extra_page=extra_page,
        return_lse=return_lse,
    )
    return _mechanism.run(MECHANISM, args, implementation, config)


def prepare(
    q,
    cache,
    indices,
    *,
    counts=None,
    sinks=None,
    extra_cache=None,
    extra_indices=None,
    extra_counts=None,
    scale=None,
    value_dim=None,
    format="plain",
    page=None,
    extra_page=None,
    return_lse=False,
) -> Args:
    """Validate and complete the arguments of `sparse_mla`; raises as it does."""
    if format not in FORMATS:
        raise ValueError(f"{_OP}: format must be one of {', '.join(FORMATS)}, got {format!r}")
    if (page is not None) != (format == "v4"):
        given = "none" if page is None else page
        raise ValueError(f"{_OP}: page belongs to format v4, and only there, got format {format} and page {given}")
    if (extra_cache is None) != (extra_indices is None) or (extra_indices is None and extra_counts is not None):
        raise ValueError(f"{_OP}: extra_cache and extra_indices belong together; give both or none")
    if extra_page is not None and (format != "v4" or extra_cache is None):
        raise ValueError(f"{_OP}: extra_page belongs to a second cache of format v4; leave it out")
    layout = {"plain": "S D", "fp8_ds_mla": "P page row", "v4": "P bytes"}[format]
    second = {"plain": "S2 D", "fp8_ds_mla": "P2 page2 row", "v4": "P2 bytes2"}[format]
    named: dict[str, tuple[Any, str]] = {"q": (q, "N H D"), "cache": (cache, layout), "indices": (indices, "N width")}
    optional = {
        "counts": (counts, "N"),
        "sinks": (sinks, "H"),
        "extra_cache": (extra_cache, second),
        "extra_indices": (extra_indices, "N more"),
        "extra_counts": (extra_counts, "N"),
    }
    named |= {name: pair for name, pair in optional.items() if pair[0] is not None}
    dims = _checks.check_shapes(_OP, **named)
    dtype, D = _checks.check_dtype(_OP, "q", q, _checks.FLOATS), dims["D"]
    for name in ("indices", "counts", "extra_indices", "extra_counts"):
        if name in named:
            _checks.check_dtype(_OP, name, named[name][0], ("int32",))
    if sinks is not None:
        _checks.check_dtype(_OP, "sinks", sinks, _checks.FLOATS)
    extra_page = page if extra_page is None else extra_page
    for name, x, rows in (("cache", cache, page), ("extra_cache", extra_cache, extra_page)):
        if x is not None:
            _checks.check_dtype(_OP, name, x, (dtype,) if format == "plain" else ("uint8",), f"format {format}")
            _check_cache(name, x, D, format, rows)
    _checks.check_positive(_OP, scale=scale)
    value_dim = min(D, _latent_cache.LATENT) if value_dim is None else value_dim
    _checks.check_count(_OP, value_dim=value_dim)
    if value_dim > D:
        raise ValueError(f"{_OP}: value_dim must be at most D={D}, got {value_dim}")
    return {
        "q": q,
        "cache": cache,
        "indices": indices,
        "counts": counts,
        "sinks": sinks,
        "extra_cache": extra_cache,
        "extra_indices": extra_indices,
        "extra_counts": extra_counts,
        "scale": float(D**-0.5 if scale is None else scale),
        "value_dim": int(value_dim),
        "format": format,
        "page": None if page is None else int(page),
        "extra_page": None if extra_page is None else int(extra_page),
        "return_lse": bool(return_lse),
    }


def _check_cache(name: str, x: Any, D: int, format: str, page: Any) -> None:
    widths = {"v4": _latent_cache.LATENT, "fp8_ds_mla": _latent_cache.LATENT + _latent_cache.ROTARY}
    if widths.get(format, D) != D:
        raise ValueError(f"{_OP}: format {format} holds rows of {widths[format]} numbers, got D={D} from q")
    if format == "v4":
        _checks.check_count(_OP, page=page)
        _latent_cache.check_pages(_OP, x, "v4", page)
    elif format == "fp8_ds_mla" and x.shape[2] != _latent_cache.DS_MLA_BYTES:
        raise ValueError(f"{_OP}: a row of format fp8_ds_mla has 656 bytes, got {name} {list(x.shape)}")
    if not x.shape[0]:
        raise ValueError(f"{_OP}: {name} must hold at least one {'row' if format == 'plain' else 'page'}, got none")


def _reference(
    q,
    cache,
    indices,
    *,
    counts,
    sinks,
    extra_cache,
    extra_indices,
    extra_counts,
    scale,
    value_dim,
    format,
    page,
    extra_page,
    return_lse,
):
    """Gather, textbook softmax with one more logit, a few tokens at a time.

    16-bit inputs are multiplied exactly, accumulated in float32, and P is rounded to their dtype before the second
    product, as every kernel does.
    """
    H, wide = q.shape[1], p.wide(q).dtype
    lists = [_valid(cache, indices, counts, format, page)]
    if extra_cache is not None:
        lists.append(_valid(extra_cache, extra_indices, extra_counts, format, extra_page))
    sink = jnp.full(H, -jnp.inf, wide) if sinks is None else sinks.astype(wide)
    caches = [(cache, page), (extra_cache, extra_page)]

    def token(x):
        qn, parts = x
        rows, there = [], []
        for (source, size), (slots, valid) in zip(caches, parts, strict=False):
            row = source[slots] if format == "plain" else at_slots(source, slots, format=format, page=size)
            rows.append(jnp.where(valid[:, None], row.astype(wide), 0))
            there.append(valid)
        k, valid = jnp.concatenate(rows), jnp.concatenate(there)
        s = jnp.einsum("hd,kd->hk", qn.astype(wide), k, precision="highest") * scale
        s = jnp.where(valid, s, -jnp.inf)
        m = jnp.max(s, -1, initial=-jnp.inf)
        top = jnp.maximum(m, sink)
        safe = jnp.where(jnp.isfinite(top), top, 0)
        e = jnp.exp(s - safe[:, None])
        total = e.sum(-1) + jnp.exp(sink - safe)
        o = jnp.einsum("hk,kd->hd", _exact.rounded(e, q.dtype), k[:, :value_dim], precision="highest")
        some = jnp.isfinite(m)
        o = jnp.where((some & (sink < jnp.inf))[:, None], o / total[:, None], 0)
        own = jnp.where(some, m, 0)
        lse = jnp.log(jnp.exp(s - own[:, None]).sum(-1)) + own
        return o.astype(q.dtype), lse, m

    if not q.shape[0]:
        empty = jnp.zeros((0, H), wide)
        o, lse, m = jnp.zeros((0, H, value_dim), q.dtype), empty, empty
    else:
        o, lse, m = lax.map(token, (q, lists), batch_size=_AT_ONCE)
    return (o, lse, m) if return_lse else o


def _valid(cache, indices, counts, format, page):
    """Row numbers that may be read, and which of them count."""
    rows = cache.shape[0] if format == "plain" else cache.shape[0] * (cache.shape[1] if page is None else page)
    valid = (indices >= 0) & (indices < rows)
    if counts is not None:
        valid &= jnp.arange(indices.shape[1]) < counts[:, None]
    return jnp.where(valid, indices, 0), valid


MECHANISM = Mechanism(
    name=_OP,
    source="DeepSeek-V3.2; https://github.com/deepseek-ai/FlashMLA (sparse prefill and decode)",
    op=sparse_mla,
    prepare=prepare,
    reference=_reference,
    outputs=lambda *, return_lse, **_: ("o", "lse", "max_logits") if return_lse else ("o",),
    kernels={
        "mosaic": Kernel(
            run=mosaic.sparse_mla,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=cases.CASES,
    cost=cases.cost,
    probe=cases.probe,
    captures=("mla/sparse_prefill_*", "dsv4/sparse_decode_*"),
    module="jaxattn.nn.deepseek_v4:DeepseekV4Attention",
    support=cases.SUPPORT,
)
