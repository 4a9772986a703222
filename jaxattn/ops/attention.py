"""Attention of contiguous or packed sequences: causal or full, with sinks, window, soft cap and any width of V."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxattn import _checks, _mechanism
from jaxattn._mechanism import Args, Kernel, Mechanism
from jaxattn.ops._attention_bench import BENCH, probe
from jaxattn.ops._attention_cases import CASES, SUPPORT
from pallas_kernels import _exact, _mosaic
from pallas_kernels import attention as mosaic

_OP = "attention"
_ROWS = 256
"""Query rows whose scores the reference holds at once."""

type Packed = Float[Array, "N H Dv"]
type Batch = Float[Array, "B T H Dv"]
type Lse = Float[Array, "N H"] | Float[Array, "B T H"]


def attention(
    q: Float[Array, "N H D"] | Float[Array, "B T H D"],
    k: Float[Array, "S K D"] | Float[Array, "B S K D"],
    v: Float[Array, "S K Dv"] | Float[Array, "B S K Dv"],
    query_start: Int32[Array, " B+1"] | None = None,
    key_start: Int32[Array, " B+1"] | None = None,
    *,
    sinks: Float[Array, " H"] | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    checked: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> Packed | Batch | tuple[Packed | Batch, Lse]:
    r"""Attention within each of B sequences, packed one behind the other or side by side in a batch.

    Row `query_start[b] + i` of q is query `i` of sequence `b`, at position `p = S_b - T_b + i` among its `S_b` keys,
    the rows of k and v from `key_start[b]` on; its head `h` sees keys `j` of KV head `h // (H / K)`:

        s_j = softcap * tanh(scale * q.k_j / softcap)        (softcap=None: scale * q.k_j)
        o   = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sinks_h)),   lse = log sum_j exp(s_j)

    over `0 <= j < S_b`, and `j <= p` if `causal`, and `p - j < window` (and `j - p < window` if not causal).

    Args:
        q: queries in bfloat16, float16 or float32 (float64: reference only), packed [N H D] or a batch [B T H D].
        k: keys, K heads that divide H, packed [S K D] or a batch [B S K D].
        v: values of any width Dv, as many rows and heads as `k`.
        query_start: exclusive prefix sums of the query lengths (`cu_seqlens_q`); needed if packed, absent in a batch.
            Rows from `query_start[B]` on are padding: not read, zeros out.
        key_start: the same for keys (`cu_seqlens_k`); None = `query_start`. Rows from `key_start[B]` on are not read.
        sinks: logits that enter each head's denominator only; not scaled. -inf = no sink, +inf = zero output.
        scale: softmax scale, None = D**-0.5.
        causal: bottom-right aligned causal mask: the last query sees every key.
        window: number of visible positions, the query's own included; None = all. Keys before every window are not
            read.
        softcap: bound of the scores, applied before the mask.
        return_lse: also return the log-sum-exp.
        checked: read `query_start` and `key_start` and raise unless they rise from 0 to at most the rows of q and k;
            needs concrete arrays. Without it such values give wrong rows, never an access outside the arrays.
        implementation: None (choose), "reference" or "mosaic".
        config: launch configuration of the named kernel.

    Returns:
        `o` in q's dtype, shaped as q with Dv columns; with `return_lse` also the natural-log `lse` in float32 (float64
        for float64 inputs) without the last axis, the sink **not** included. A row that sees no key has o = 0 and lse =
        -inf, whatever the sink.

    Raises:
        TypeError: dtypes; ValueError: shapes, options, or values in checked mode;
        NotImplementedError: the named implementation cannot run this call.

    Source: FlashAttention-3, https://arxiv.org/abs/2407.08608, and the conventions of `flash_attn_varlen_func`; sinks
    as in gpt-oss, https://arxiv.org/abs/2508.10925.
    """
    args = prepare(
        q,
        k,
        v,
        query_start,
        key_start,
        sinks=sinks,
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
    k,
    v,
    query_start=None,
    key_start=None,
    *,
    sinks=None,
    scale=None,
    causal=True,
    window=None,
    softcap=None,
    return_lse=False,
    checked=False,
) -> Args:
    """Validate and complete the arguments of `attention`; raises as it does."""
    packed = query_start is not None
    if not packed and key_start is not None:
        raise ValueError(f"{_OP}: key_start belongs to packed sequences and needs query_start; give both or none")
    if not packed and _checks.is_array(q) and len(q.shape) == 3:
        raise ValueError(
            f"{_OP}: packed q [N H D] needs query_start, got shape {tuple(q.shape)} alone; give query_start, or a "
            "batch [B T H D]"
        )
    starts = {} if not packed else {"query_start": (query_start, "B+1")}
    starts |= {} if key_start is None else {"key_start": (key_start, "B+1")}
    dims = _checks.check_shapes(
        _OP,
        q=(q, "N H D" if packed else "B T H D"),
        k=(k, "S K D" if packed else "B S K D"),
        v=(v, "S K Dv" if packed else "B S K Dv"),
        **starts,
        **({} if sinks is None else {"sinks": (sinks, "H")}),
    )
    H, K = dims["H"], dims["K"]
    if K == 0 or H == 0 or H % K:
        raise ValueError(f"{_OP}: query heads must be a multiple of kv heads, got H={H} (q) and K={K} (k)")
    if 0 in (dims["D"], dims["Dv"]):
        raise ValueError(f"{_OP}: head dims must be at least 1, got D={dims['D']} (q, k) and Dv={dims['Dv']} (v)")
    dtype = _checks.check_dtype(_OP, "q", q, _checks.FLOATS)
    for name, x in (("k", k), ("v", v)):
        _checks.check_dtype(_OP, name, x, (dtype,), "q, k and v need one dtype; cast them")
    for name, (x, _) in starts.items():
        _checks.check_dtype(_OP, name, x, ("int32",))
    if sinks is not None:
        _checks.check_dtype(_OP, "sinks", sinks, _checks.FLOATS)
    _checks.check_positive(_OP, scale=scale, softcap=softcap)
    if window is not None:
        _checks.check_count(_OP, window=window)
    if packed:
        key_start = query_start if key_start is None else key_start
        if checked:
            check_starts(query_start, key_start, tokens=dims["N"], keys=dims["S"])
    return {
        "q": q,
        "k": k,
        "v": v,
        "query_start": query_start,
        "key_start": key_start,
        "sinks": sinks,
        "scale": float(dims["D"] ** -0.5 if scale is None else scale),
        "causal": bool(causal),
        "window": None if window is None else int(window),
        "softcap": None if softcap is None else float(softcap),
        "return_lse": bool(return_lse),
    }


def check_starts(query_start, key_start, *, tokens: int, keys: int) -> None:
    """Raise `ValueError` unless both arrays rise from 0 to at most the rows they cut.

    Args:
        query_start: int32 [B+1].
        key_start: int32 [B+1].
        tokens: rows of q.
        keys: rows of k.

    Raises:
        ValueError: with the values, or if they cannot be read (under jit).
    """
    if not _checks.is_concrete(query_start, key_start):
        raise ValueError(
            f"{_OP}: checked=True reads query_start and key_start and needs concrete arrays; check them before jit "
            "with jaxattn.ops.attention.check_starts"
        )
    for name, start, rows, of in (("query_start", query_start, tokens, "q"), ("key_start", key_start, keys, "k")):
        start = np.asarray(start)
        if start[0] != 0 or (np.diff(start) < 0).any() or start[-1] > rows:
            raise ValueError(f"{_OP}: {name} must rise from 0 to at most {rows} (rows of {of}), got {start.tolist()}")


def _reference(q, k, v, query_start, key_start, *, sinks, scale, causal, window, softcap, return_lse):
    """Textbook softmax with one more logit per head, a block of rows at a time; float64 inputs give the truth.

    16-bit inputs are multiplied exactly, accumulated in float32, and P is rounded to their dtype before the second
    product, as every kernel does.
    """
    if query_start is None:
        (B, T, *_), S = q.shape, k.shape[1]
        starts = (jnp.arange(B + 1, dtype=jnp.int32) * n for n in (T, S))
        flat = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        options = {"scale": scale, "causal": causal, "window": window, "softcap": softcap, "return_lse": True}
        o, lse = _reference(*flat, *starts, sinks=sinks, **options)
        o, lse = o.reshape(B, T, *o.shape[1:]), lse.reshape(B, T, -1)
        return (o, lse) if return_lse else o
    (N, H, D), (S, K, Dv), B = q.shape, v.shape, query_start.size - 1
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    sink = jnp.full((H,), -jnp.inf, wide) if sinks is None else sinks.astype(wide)
    sink, key = sink.reshape(K, H // K), jnp.arange(S)
    kw, vw = k.astype(wide), v.astype(wide)

    def block(x):
        q, row = x
        q = q.astype(wide).reshape(-1, K, H // K, D)

        def request(b, carry):
            o, lse = carry
            mine = (row >= query_start[b]) & (row < query_start[b + 1])
            j, position = key - key_start[b], key_start[b + 1] - key_start[b] - query_start[b + 1] + row
            visible = (mine[:, None] & (key >= key_start[b]) & (key < key_start[b + 1])) & _band(
                position[:, None], j, causal, window
            )
            read = visible.any(0)[:, None, None]
            s = jnp.einsum("nkgd,skd->nkgs", q, jnp.where(read, kw, 0), precision="highest") * scale
            if softcap is not None:
                s = softcap * jnp.tanh(s / softcap)
            s = jnp.where(visible[:, None, None], s, -jnp.inf)
            m = jnp.max(s, -1)
            top = jnp.maximum(m, sink)
            safe = jnp.where(jnp.isfinite(top), top, 0)  # no key and no sink, or an infinite sink
            e = jnp.exp(s - safe[..., None])
            total = e.sum(-1) + jnp.exp(sink - safe)
            p = _exact.rounded(e, v.dtype)
            new = jnp.einsum("nkgs,skd->nkgd", p, jnp.where(read, vw, 0), precision="highest") / total[..., None]
            some = visible.any(1)[:, None, None]
            new = jnp.where((some & (sink < jnp.inf))[..., None], new, 0)
            own = jnp.where(jnp.isfinite(m), m, 0)
            plain = jnp.log(jnp.exp(s - own[..., None]).sum(-1)) + own
            return (
                jnp.where(mine[:, None, None], new.reshape(-1, H, Dv), o),
                jnp.where(mine[:, None], plain.reshape(-1, H), lse),
            )

        return lax.fori_loop(
            0, B, request, (jnp.zeros((len(row), H, Dv), wide), jnp.full((len(row), H), -jnp.inf, wide))
        )

    if 0 in (N, S, B):
        o, lse = jnp.zeros((N, H, Dv), wide), jnp.full((N, H), -jnp.inf, wide)
    else:
        o, lse = _by_blocks(block, q)
    return (o.astype(q.dtype), lse) if return_lse else o.astype(q.dtype)


def _by_blocks(block, q):
    """`block((rows of q, their numbers))` for all rows, `_ROWS` at a time."""
    N = q.shape[0]
    rows = min(N, _ROWS)
    count = -(-N // rows)
    padded = jnp.pad(q, ((0, count * rows - N), (0, 0), (0, 0)))
    number = jnp.arange(count * rows).reshape(count, rows)
    out = lax.map(block, (padded.reshape(count, rows, *q.shape[1:]), number))
    return tuple(x.reshape(-1, *x.shape[2:])[:N] for x in out)


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


def _cost(*, q, k, v, query_start, key_start, causal, window, **_):
    """Visible score pairs x 2 (D + Dv) H flops; q, o and each sequence's visible keys and values once."""
    (H, D), (K, Dv) = q.shape[-2:], v.shape[-2:]
    if query_start is None:
        queries, lengths = [q.shape[1]] * q.shape[0], [k.shape[1]] * q.shape[0]
    else:
        queries, lengths = (np.diff(np.asarray(x, np.int64)).tolist() for x in (query_start, key_start))
    pairs = keys = 0
    for T, S in zip(queries, lengths, strict=True):
        pos = np.arange(S - T, S)
        low = np.zeros_like(pos) if window is None else np.maximum(pos - window + 1, 0)
        high = np.maximum(pos + 1, 0) if causal else np.full_like(pos, S)
        if window is not None and not causal:
            high = np.minimum(pos + window, S)
        pairs += int(np.maximum(high - low, 0).sum())
        keys += int(max(high.max(initial=0) - low.min(initial=S), 0))
    width = jnp.dtype(q.dtype).itemsize
    return 2 * pairs * H * (D + Dv), width * (keys * K * (D + Dv) + sum(queries) * H * (D + Dv))


MECHANISM = Mechanism(
    name=_OP,
    source="FlashAttention-3, https://arxiv.org/abs/2407.08608; vLLM 0.26.0 vllm_flash_attn/flash_attn_interface.py",
    op=attention,
    prepare=prepare,
    reference=_reference,
    outputs=_outputs,
    kernels={
        "mosaic": Kernel(
            run=mosaic.attention,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=CASES + BENCH,
    cost=_cost,
    probe=probe,
    module="jaxattn.nn.self_attention:Attention",
    captures=("attention/fa3_*", "partial_attention/fa3_*"),
    support=SUPPORT,
)
