"""Multi-head latent attention in its absorbed form: all heads share one latent key, whose first part is the value."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxattn import _checks, _latent_cache, _mechanism
from jaxattn._mechanism import Args, Kernel, Mechanism
from jaxattn.ops import _mla_cases as cases
from jaxattn.ops._mla_bench import probe
from jaxattn.ops.paged_attention import check_paging
from jaxattn.quant import primitives as p
from pallas_kernels import _exact, _mosaic
from pallas_kernels import mla as mosaic

_OP = "mla"
FORMATS = ("plain", "fp8", "fp8_ds_mla")


def mla(
    q: Float[Array, "N H D"],
    cache: Array,
    page_table: Int32[Array, "B pages"],
    lengths: Int32[Array, " B"],
    query_start: Int32[Array, " B+1"],
    *,
    scale: float,
    value_dim: int = 512,
    causal: bool = True,
    format: str = "plain",
    cache_scale: Float[Array, ""] | float | None = None,
    return_lse: bool = False,
    checked: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> Any:
    r"""`o = softmax(scale q . k) v` for a ragged batch over paged latents: k is a row, v its first `value_dim` numbers.

    With absorbed projections this is the attention of DeepSeek-V2 and V3: `q = [q_nope W_UK | q_rope]` (512 + 64), a
    row is `[latent | rotated key]`, and the result times `W_UV` is what expanded heads give. The scale is that of the
    expanded heads, `softmax_scale(192, ...)`, not `576^-0.5`.

    Query i of T of a request stands at position `lengths - T + i` and sees the rows up to it (`causal`), or all.

    Args:
        q: absorbed queries of packed tokens, bfloat16, float16 or float32 (float64: reference only).
        cache: rows as `latent_cache_write` leaves them: "plain" [P, page, D] in the dtype of `q`, "fp8" float8_e4m3fn
            [P, page, D], "fp8_ds_mla" uint8 [P, page, 656]. Rows beyond the lengths are not read and may be NaN.
        page_table: int32; only the first `ceil(lengths / page)` entries of a row are read.
        lengths: int32 rows of each request, this step's included.
        query_start: int32 exclusive prefix sums of query tokens; rows of `q` from `query_start[B]` on are padding.
        scale: softmax scale.
        value_dim: width of v.
        causal: see above.
        format: of the cache. Codes are dequantized to the dtype of `q`, `T(code * scale)`, "fp8_ds_mla" to bfloat16.
        cache_scale: one number, format "fp8" only; None = 1.
        return_lse: also return the natural log-sum-exp.
        checked: read the tables and raise unless they fit; needs concrete arrays.
        implementation: None (choose), "reference" or "mosaic".
        config: launch configuration of the named kernel.

    Returns:
        `o` [N, H, value_dim] in the dtype of `q`; with `return_lse` also float32 `lse` [N, H]. A row that sees nothing,
        and padding, have o = 0 and lse = -inf.

    Raises:
        TypeError: dtypes; ValueError: shapes, options, or tables in checked mode;
        NotImplementedError: the named implementation cannot run this call.

    Source: https://arxiv.org/abs/2405.04434, section 2.1; vLLM 0.26.0 `mla_attention.py` (forward_mqa).
    """
    args = prepare(
        q,
        cache,
        page_table,
        lengths,
        query_start,
        scale=scale,
        value_dim=value_dim,
        causal=causal,
        format=format,
        cache_scale=cache_scale,
        return_lse=return_lse,
        checked=checked,
    )
    return _mechanism.run(MECHANISM, args, implementation, config)


def prepare(
    q,
    cache,
    page_table,
    lengths,
    query_start,
    *,
    scale,
    value_dim=512,
    causal=True,
    format="plain",
    cache_scale=None,
    return_lse=False,
    checked=False,
) -> Args:
    """Validate and complete the arguments of `mla`; raises as it does."""
    if format not in FORMATS:
        raise ValueError(f"{_OP}: format must be one of {', '.join(FORMATS)}, got {format!r}")
    if cache_scale is not None and format != "fp8":
        raise ValueError(f"{_OP}: cache_scale belongs to format fp8, got format {format}; leave it out")
    packed = format == "fp8_ds_mla"
    dims = _checks.check_shapes(
        _OP,
        q=(q, "N H D"),
        cache=(cache, "P page row" if packed else "P page D"),
        page_table=(page_table, "B pages"),
        lengths=(lengths, "B"),
        query_start=(query_start, "B+1"),
    )
    dtype = _checks.check_dtype(_OP, "q", q, _checks.FLOATS)
    stored = "uint8" if packed else dtype if format == "plain" or dtype == _checks.F64 else "float8_e4m3fn"
    _checks.check_dtype(_OP, "cache", cache, (stored,), f"format {format}")
    for name, x in (("page_table", page_table), ("lengths", lengths), ("query_start", query_start)):
        _checks.check_dtype(_OP, name, x, ("int32",))
    if packed and (dims["row"], dims["D"]) != (_latent_cache.DS_MLA_BYTES, 576):
        raise ValueError(
            f"{_OP}: format fp8_ds_mla has rows of 656 bytes for D=576, got {dims['row']} and D={dims['D']}"
        )
    if not dims["P"] or not dims["page"]:
        raise ValueError(f"{_OP}: the cache needs at least one page of one row, got shape {tuple(cache.shape)}")
    _checks.check_positive(_OP, scale=scale)
    if scale is None:
        raise ValueError(f"{_OP}: scale is that of the expanded heads and must be given; see softmax_scale")
    _checks.check_count(_OP, value_dim=value_dim)
    if value_dim > dims["D"]:
        raise ValueError(f"{_OP}: value_dim must be at most D={dims['D']}, got {value_dim}")
    if checked:
        check_paging(page_table, lengths, query_start, tokens=dims["N"], pool=dims["P"], page=dims["page"])
    return {
        "q": q,
        "cache": cache,
        "page_table": page_table,
        "lengths": lengths,
        "query_start": query_start,
        "scale": float(scale),
        "value_dim": int(value_dim),
        "causal": bool(causal),
        "format": format,
        "cache_scale": _checks.number(
            _OP, "cache_scale", 1.0 if format == "fp8" and cache_scale is None else cache_scale
        ),
        "return_lse": bool(return_lse),
    }


def _reference(
    q,
    cache,
    page_table,
    lengths,
    query_start,
    *,
    scale,
    value_dim,
    causal,
    format,
    cache_scale,
    return_lse,
):
    """Textbook softmax, one request after the other; roundings as in `paged_attention`."""
    (N, H, _), (P, page, _) = q.shape, cache.shape
    B, S = page_table.shape[0], page_table.shape[1] * page
    wide = p.wide(q).dtype
    row, col = jnp.arange(N), jnp.arange(S)

    def request(b, carry):
        o, lse = carry
        mine = (row >= query_start[b]) & (row < query_start[b + 1])
        position = lengths[b] - query_start[b + 1] + row
        visible = mine[:, None] & (col < lengths[b])
        visible &= (col <= position[:, None]) | (not causal)
        rows = cache[jnp.clip(page_table[b], 0, P - 1)].reshape(S, -1)
        if format == "fp8_ds_mla":
            k = _latent_cache.decode_ds_mla(rows).astype(wide)
        elif format == "fp8":
            k = _exact.rounded(rows.astype(wide) * cache_scale.astype(wide).reshape(()), q.dtype)
        else:
            k = rows.astype(wide)
        k = jnp.where(visible.any(0)[:, None], k, 0)
        s = jnp.einsum("nhd,sd->nhs", q.astype(wide), k, precision="highest") * scale
        s = jnp.where(visible[:, None], s, -jnp.inf)
        m = jnp.max(s, -1)
        some = jnp.isfinite(m)
        top = jnp.where(some, m, 0)
        e = jnp.exp(s - top[..., None])
        total = e.sum(-1)
        new = jnp.einsum("nhs,sd->nhd", _exact.rounded(e, q.dtype), k[:, :value_dim], precision="highest")
        new = jnp.where(some[..., None], new / jnp.where(some, total, 1)[..., None], 0)
        o = jnp.where(mine[:, None, None], new, o)
        return o, jnp.where(mine[:, None], jnp.log(total) + top, lse)

    start = jnp.zeros((N, H, value_dim), wide), jnp.full((N, H), -jnp.inf, wide)
    o, lse = lax.fori_loop(0, B, request, start) if B and S else start
    return (o.astype(q.dtype), lse) if return_lse else o.astype(q.dtype)


MECHANISM = Mechanism(
    name=_OP,
    source="https://arxiv.org/abs/2405.04434, section 2.1; vLLM 0.26.0 triton_decode_attention.py",
    op=mla,
    prepare=prepare,
    reference=_reference,
    outputs=lambda *, return_lse, **_: ("o", "lse") if return_lse else ("o",),
    kernels={
        "mosaic": Kernel(
            run=mosaic.mla,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=cases.CASES,
    cost=cases.cost,
    probe=probe,
    captures=("mla/decode_*",),
    module="jaxattn.nn.latent:MLAttention",
    support=cases.SUPPORT,
)
