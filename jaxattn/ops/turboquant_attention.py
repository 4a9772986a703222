"""Attention over a packed TurboQuant cache: decode and continuation prefill."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32, UInt8

from jaxattn import _checks, _mechanism
from jaxattn._mechanism import Args, Kernel, Mechanism
from jaxattn.ops._turboquant_cases import ATTENTION_CASES, ATTENTION_SUPPORT, check_preset
from jaxattn.ops.paged_attention import check_paging
from jaxattn.quant import turboquant
from pallas_kernels import _exact, _mosaic
from pallas_kernels import turboquant_attention as mosaic

_OP = "turboquant_attention"
OPERAND = "float16"
"""What both products multiply for 16-bit queries."""

type Output = Float[Array, "N H D"] | tuple[Float[Array, "N H D"], Float[Array, "N H"]]


def turboquant_attention(
    q: Float[Array, "N H D"],
    pages: UInt8[Array, "P page K slot"],
    page_table: Int32[Array, "B pages"],
    lengths: Int32[Array, " B"],
    query_start: Int32[Array, " B+1"],
    *,
    preset: str,
    stored: Int32[Array, " B"] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    checked: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> Output:
    r"""Causal attention of each request's newest tokens over its packed keys and values, their own included.

    Query row `query_start[b] + i` is token `lengths[b] - T_b + i` of request b, as in `jaxattn.paged_attention`. With
    the slots' numbers (`jaxattn.quant.turboquant`) and `q' = H q / sqrt(D)`:

        s_j = scale * n_j * (q' . c_j) / |c_j|,   v_j = code_j * step_j + minimum_j,   o = softmax(s) v

    without the division for presets without norm correction; "k8v4" has `s_j = scale * q . k_j`.

    Args:
        q: packed queries in bfloat16, float16 or float32 (float64: reference only); H a multiple of K. For 16-bit
            queries q', c, v and P are rounded to float16 (q' after scaling by a power of two), sums are float32.
        pages: pool of packed slots, as `jaxattn.turboquant_write` fills it.
        page_table: page numbers of each request. Only the first `ceil(lengths[b] / page)` entries are read.
        lengths: valid keys per request, this step's tokens included. Slots beyond may hold anything.
        query_start: exclusive prefix sums of query lengths; rows from `query_start[B]` on are padding (zeros out).
        preset: "k8v4", "4bit_nc", "k3v4_nc" or "3bit_nc".
        stored: how many of a request's keys may be seen at all, None = `lengths`. With `lengths[b] - T_b` the newest
            tokens see only the keys before them, and their own can be attended elsewhere and merged
            (`jaxattn.merge_states`).
        scale: softmax scale, None = D**-0.5.
        return_lse: also return the log-sum-exp.
        checked: read the tables and raise if they contradict the pool, as in `jaxattn.paged_attention`.
        implementation: None (choose), "reference" or "mosaic".
        config: launch configuration of the named kernel.

    Returns:
        `o` in q's dtype; with `return_lse` also the natural-log `lse` in float32 (float64 for float64 queries). A row
        that sees no key has o = 0 and lse = -inf.

    Raises:
        TypeError: dtypes; ValueError: shapes, options, or values in checked mode;
        NotImplementedError: the named implementation cannot run this call.

    Source: vLLM 0.26.0 `triton_turboquant_decode.py`.
    """
    args = prepare(
        q,
        pages,
        page_table,
        lengths,
        query_start,
        preset=preset,
        stored=stored,
        scale=scale,
        return_lse=return_lse,
        checked=checked,
    )
    return _mechanism.run(MECHANISM, args, implementation, config)


def prepare(
    q, pages, page_table, lengths, query_start, *, preset, stored=None, scale=None, return_lse=False, checked=False
) -> Args:
    """Validate and complete the arguments of `turboquant_attention`; raises as it does."""
    dims = _checks.check_shapes(
        _OP,
        q=(q, "N H D"),
        pages=(pages, "P page K slot"),
        page_table=(page_table, "B pages"),
        lengths=(lengths, "B"),
        query_start=(query_start, "B+1"),
        **({} if stored is None else {"stored": (stored, "B")}),
    )
    H, K, D = dims["H"], dims["K"], dims["D"]
    if K == 0 or H == 0 or H % K:
        raise ValueError(f"{_OP}: query heads must be a multiple of kv heads, got H={H} (q) and K={K} (pages)")
    if dims["P"] == 0 or dims["page"] == 0:
        raise ValueError(f"{_OP}: the pool needs at least one page of one slot, got shape {tuple(pages.shape)}")
    how = check_preset(_OP, preset, D, dims["slot"])
    _checks.check_dtype(_OP, "q", q, _checks.FLOATS)
    _checks.check_dtype(_OP, "pages", pages, ("uint8",))
    tables = {"page_table": page_table, "lengths": lengths, "query_start": query_start, "stored": stored}
    for name, x in tables.items():
        if x is not None:
            _checks.check_dtype(_OP, name, x, ("int32",))
    _checks.check_positive(_OP, scale=scale)
    if checked:
        check_paging(page_table, lengths, query_start, tokens=dims["N"], pool=dims["P"], page=dims["page"])
    levels = () if how.key_bits == 8 else tuple(turboquant.centroids(D, how.key_bits).tolist())
    return {
        "q": q,
        "pages": pages,
        "page_table": page_table,
        "lengths": lengths,
        "query_start": query_start,
        "stored": stored,
        "preset": preset,
        "scale": float(D**-0.5 if scale is None else scale),
        "return_lse": bool(return_lse),
        "key_bits": how.key_bits,
        "value_bits": how.value_bits,
        "norm_correction": how.norm_correction,
        "levels": levels,
    }


def _reference(q, pages, page_table, lengths, query_start, *, stored, preset, scale, return_lse, key_bits, levels, **_):
    """Dequantise and attend, one request after the other; float64 queries give the truth."""
    del levels
    (N, H, D), (P, page, K, slot) = q.shape, pages.shape
    B, S, G = page_table.shape[0], page_table.shape[1] * page, H // K
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    half = q.dtype.itemsize == 2
    row, col = jnp.arange(N), jnp.arange(S)
    queries = q.astype(wide) if key_bits == 8 else turboquant.rotate(q.astype(wide))
    queries = (_scaled_rounding(queries) if half else queries).reshape(N, K, G, D)

    def rounded(x):
        return _exact.rounded(x, OPERAND) if half else x

    def request(b, carry):
        o, lse = carry
        mine = (row >= query_start[b]) & (row < query_start[b + 1])
        pos = lengths[b] - query_start[b + 1] + row
        seen = lengths[b] if stored is None else jnp.minimum(lengths[b], stored[b])
        visible = mine[:, None] & (col < seen) & (col <= pos[:, None])
        slots = pages[jnp.clip(page_table[b], 0, P - 1)].reshape(S, K, slot)
        read = visible.any(0)[:, None, None]
        k = turboquant.read_key(slots, D, preset, dtype=wide.__name__, level_dtype=OPERAND if half else None)
        v = rounded(turboquant.read_value(slots, D, preset, dtype=wide.__name__))
        k, v = jnp.where(read, k, 0), jnp.where(read, v, 0)
        s = jnp.einsum("nkgd,skd->nkgs", queries, k, precision="highest") * scale
        s = jnp.where(visible[:, None, None], s, -jnp.inf)
        m = jnp.max(s, -1)
        some = jnp.isfinite(m)
        m = jnp.where(some, m, 0)
        e = jnp.exp(s - m[..., None])
        total = e.sum(-1)
        new = jnp.einsum("nkgs,skd->nkgd", rounded(e), v, precision="highest") / jnp.where(some, total, 1)[..., None]
        o = jnp.where(mine[:, None, None], jnp.where(some[..., None], new, 0).reshape(N, H, D), o)
        plain = jnp.where(some, jnp.log(jnp.where(some, total, 1)) + m, -jnp.inf)
        return o, jnp.where(mine[:, None], plain.reshape(N, H), lse)

    start = jnp.zeros((N, H, D), wide), jnp.full((N, H), -jnp.inf, wide)
    o, lse = lax.fori_loop(0, B, request, start) if B and S else start
    return (o.astype(q.dtype), lse) if return_lse else o.astype(q.dtype)


def _scaled_rounding(x):
    """X rounded to the 11 bits of float16, whatever its range."""
    top = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0), -1, keepdims=True)
    factor = jnp.exp2(-jnp.floor(jnp.log2(jnp.maximum(top, 2.0**-100))))
    return _exact.rounded(x * factor, OPERAND) / factor


def _outputs(*, return_lse, **_):
    return ("o", "lse") if return_lse else ("o",)


def _cost(*, q, pages, lengths, query_start, stored, **_):
    """Visible score pairs x 4 D H flops; q, o and each request's visible slots once."""
    (_, H, D), K, slot = q.shape, pages.shape[2], pages.shape[3]
    pairs = keys = 0
    limits = np.minimum(lengths, lengths if stored is None else stored)
    for length, limit, queries in zip(lengths, limits, np.diff(query_start), strict=True):
        seen = np.minimum(np.arange(length - queries, length) + 1, limit)
        pairs += int(seen.sum())
        keys += int(seen.max(initial=0))
    return 4 * pairs * H * D, keys * K * slot + 2 * q.size * jnp.dtype(q.dtype).itemsize


MECHANISM = Mechanism(
    name=_OP,
    source="vLLM 0.26.0 vllm/v1/attention/ops/triton_turboquant_decode.py; https://arxiv.org/abs/2504.19874",
    op=turboquant_attention,
    prepare=prepare,
    reference=_reference,
    outputs=_outputs,
    kernels={
        "mosaic": Kernel(
            run=mosaic.turboquant_attention,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=ATTENTION_CASES,
    cost=_cost,
    module="jaxattn.nn.turboquant_cache:TurboQuantKVCache",
    captures=("turboquant/*",),
    support=ATTENTION_SUPPORT,
)
