"""Shapes that paged attention is timed at, and the part of them that a float64 reference can afford."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn import _kv_quant
from jaxattn._mechanism import Args, Case
from jaxattn.ops._paged_attention_cases import FP8

PROBED = 4
"""Rows of a benchmark's output that are compared with the truth."""


def make_inputs(
    rng: np.random.Generator,
    query_lengths: np.ndarray,
    lengths: np.ndarray,
    *,
    H: int,
    K: int,
    D: int,
    page: int,
    cache_dtype: str | None = None,
    per_head: bool = False,
    sinks: bool = False,
    **options,
) -> Args:
    """Arguments of `paged_attention` in bfloat16 with shuffled pages, drawn on the device that holds them.

    Args:
        rng: source of randomness.
        query_lengths: new tokens of each request.
        lengths: valid keys of each request.
        H: query heads.
        K: kv heads.
        D: head dim.
        page: slots per page.
        cache_dtype: None = bfloat16, or "float8_e4m3fn" with scales.
        per_head: one scale per token and head, of "int8", "float8_e4m3fn" or "uint8" codes.
        sinks: draw sinks.
        **options: passed on to the op.
    """
    keys = jax.random.split(jax.random.key(int(rng.integers(2**31))), 4)
    counts = -(-lengths // page)
    table = np.zeros((len(lengths), int(counts.max())), np.int32)
    order = rng.permutation(int(counts.sum())).astype(np.int32)
    for row, pages in zip(table, np.split(order, np.cumsum(counts)[:-1]), strict=True):
        row[: pages.size] = pages
    start = np.concatenate([[0], np.cumsum(query_lengths)]).astype(np.int32)
    pool = (len(order), page, K, D)
    k, v = (jax.random.normal(key, pool, jnp.bfloat16) for key in keys[:2])
    args: Args = {}
    if per_head:
        quantize = _kv_quant.PER_HEAD[str(cache_dtype)]
        (k, k_scales), (v, v_scales) = (jax.jit(quantize)(x) for x in (k, v))
        args = {"k_scale_pages": k_scales, "v_scale_pages": v_scales}
    elif cache_dtype == FP8:
        args = {"k_scale": jnp.float32(0.02), "v_scale": jnp.float32(0.02)}
        k, v = ((x / 0.02).clip(-448, 448).astype(FP8) for x in (k, v))
    if sinks:
        args["sinks"] = jnp.asarray(rng.standard_normal(H), jnp.float32)
    return args | {
        "q": jax.random.normal(keys[2], (int(start[-1]), H, D), jnp.bfloat16),
        "k_pages": k,
        "v_pages": v,
        "page_table": jnp.asarray(table),
        "lengths": jnp.asarray(lengths, jnp.int32),
        "query_start": jnp.asarray(start),
        **options,
    }


def probe(
    rng: np.random.Generator, *, q, k_pages, v_pages, page_table, lengths, query_start, causal, window, **options
) -> tuple[Args, np.ndarray]:
    """Some rows of the batch as requests of one query each, over a pool of their own pages.

    The first and last rows are among them. A window without causality, which looks ahead, is not split this way: its
    rows keep all keys that their request has.
    """
    table, n, start = (np.asarray(x) for x in (page_table, lengths, query_start))
    page, total = k_pages.shape[1], int(start[-1])
    rows = np.unique(np.concatenate([[0, total - 1], rng.integers(0, total, PROBED)]))
    owner = np.searchsorted(start, rows, side="right") - 1
    seen = n[owner] - start[owner + 1] + rows + 1 if causal else n[owner]
    if not causal and window is not None:
        raise ValueError("probe: rows of a window without causality cannot be taken apart; time another case")
    pages = -(-seen // page)
    new_table = np.zeros((rows.size, int(pages.max())), np.int32)
    used: dict[int, int] = {}
    for i, (b, count) in enumerate(zip(owner, pages, strict=True)):
        new_table[i, :count] = [used.setdefault(int(p), len(used)) for p in table[b, :count]]
    pool = jnp.asarray(list(used), jnp.int32)
    options |= {name: x[pool] for name, x in options.items() if name.endswith("_scale_pages")}
    return {
        "q": q[rows],
        "k_pages": k_pages[pool],
        "v_pages": v_pages[pool],
        "page_table": jnp.asarray(new_table),
        "lengths": jnp.asarray(seen, jnp.int32),
        "query_start": jnp.arange(rows.size + 1, dtype=jnp.int32),
        "causal": causal,
        "window": window,
        **options,
    }, rows


def _decode(name: str, B: int, S: int, *, ragged: bool = False, queries: int = 1, **shape) -> Case:
    def make(rng):
        lengths = rng.integers(S // 8, S + 1, B) if ragged else np.full(B, S)
        return make_inputs(rng, np.full(B, queries), lengths, **shape)

    return Case(name=name, make=make, tags=frozenset({"bench"}))


def _short(rng: np.random.Generator) -> Args:
    lengths = np.clip(rng.integers(1, 513, 64), 1, 512)
    return make_inputs(rng, np.ones(64, np.int64), lengths, **_LLAMA)


def _mixed(rng: np.random.Generator) -> Args:
    queries = np.concatenate([np.ones(60, np.int64), np.full(4, 1024)])
    lengths = np.concatenate([rng.integers(512, 4097, 60), rng.integers(1024, 4097, 4)])
    return make_inputs(rng, queries, lengths, **_LLAMA)


_LLAMA: dict[str, Any] = {"H": 32, "K": 8, "D": 128, "page": 64}
_SMALL_PAGES: dict[str, Any] = _LLAMA | {"page": 16}
_LONG: dict[str, Any] = _LLAMA | {"H": 64}
_OSS: dict[str, Any] = {"H": 64, "K": 8, "D": 64, "page": 16, "sinks": True}

BENCH = (
    _decode("decode-B32-S8192-H32-K8-D128", 32, 8192, **_LLAMA),
    _decode("decode-B32-S8192-H32-K8-D128-ragged", 32, 8192, ragged=True, **_LLAMA),
    _decode("decode-B4-S32768-H64-K8-D128", 4, 32768, **_LONG),
    _decode("decode-B4-S32768-H64-K8-D128-ragged", 4, 32768, ragged=True, **_LONG),
    Case(name="decode-B64-lens-1-to-512", make=_short, tags=frozenset({"bench"})),
    _decode("decode-B64-S4096-H64-K8-D64-page16-sinks", 64, 4096, **_OSS),
    _decode("decode-B64-S4096-H64-K8-D64-page16-sinks-window128", 64, 4096, window=128, **_OSS),
    _decode("decode-B32-S8192-H32-K8-D128-fp8", 32, 8192, cache_dtype=FP8, **_LLAMA),
    *(
        _decode(f"decode-B32-S8192-H32-K8-D128-{name}-per-head", 32, 8192, cache_dtype=x, per_head=True, **_LLAMA)
        for name, x in (("int8", "int8"), ("fp8", FP8), ("int4", "uint8"))
    ),
    _decode("speculate4-B32-S8192-H32-K8-D128", 32, 8192, queries=4, **_LLAMA),
    _decode("prefill-B1-S8192-H32-K8-D128", 1, 8192, queries=8192, **_LLAMA),
    _decode("prefill-B1-S8192-H32-K8-D128-page16", 1, 8192, queries=8192, **_SMALL_PAGES),
    _decode("prefill-B4-S4096-H32-K8-D128", 4, 4096, queries=4096, **_LLAMA),
    _decode("prefill-B1-S16384-H64-K8-D64-page16-window128", 1, 16384, queries=16384, window=128, **_OSS),
    _decode("chunk-B2-T2048-S16384-H32-K8-D128", 2, 16384, queries=2048, **_LLAMA),
    Case(name="mixed-60-decodes-4-prefills", make=_mixed, tags=frozenset({"bench"})),
)
