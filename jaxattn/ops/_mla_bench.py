"""Shapes that latent attention is timed at, and the part of them that a float64 reference can afford."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn import _latent_cache
from jaxattn._mechanism import Args, Case

PROBED = 3
"""Rows of a benchmark's output that are compared with the truth, beside the first and the last one."""


def make_inputs(
    rng: np.random.Generator,
    B: int,
    S: int,
    H: int,
    *,
    queries: int = 1,
    ragged: bool = False,
    format: str = "plain",
    **options: Any,
) -> Args:
    """Arguments of `mla` in bfloat16 with 512 + 64 numbers a row and shuffled pages of 64, drawn on the device.

    Args:
        rng: source of randomness.
        B: requests.
        S: rows of each, or with `ragged` the most of them; the fewest are an eighth.
        H: heads.
        queries: query tokens of each request.
        ragged: see `S`.
        format: of the cache.
        **options: passed on to the op.
    """
    keys = jax.random.split(jax.random.key(int(rng.integers(2**31))), 2)
    lengths = rng.integers(S // 8, S + 1, B) if ragged else np.full(B, S)
    counts = -(-lengths // 64)
    table = np.zeros((B, int(counts.max())), np.int32)
    order = rng.permutation(int(counts.sum())).astype(np.int32)
    for row, pages in zip(table, np.split(order, np.cumsum(counts)[:-1]), strict=True):
        row[: pages.size] = pages
    cache = jax.random.normal(keys[1], (len(order), 64, 576), jnp.bfloat16)
    if format == "fp8":
        cache = (2 * cache).astype(jnp.float8_e4m3fn)
        options |= {"cache_scale": jnp.float32(0.5)}
    elif format == "fp8_ds_mla":
        latent, rotary = jnp.split(cache.reshape(-1, 576), (512,), -1)
        cache = jax.jit(_latent_cache.encode_ds_mla)(latent, rotary).reshape(len(order), 64, -1)
    return {
        "q": jax.random.normal(keys[0], (B * queries, H, 576), jnp.bfloat16),
        "cache": cache,
        "page_table": jnp.asarray(table),
        "lengths": jnp.asarray(lengths, jnp.int32),
        "query_start": jnp.arange(B + 1, dtype=jnp.int32) * queries,
        "scale": 192**-0.5,
        "format": format,
        **options,
    }


def probe(
    rng: np.random.Generator, *, q, cache, page_table, lengths, query_start, causal, **options: Any
) -> tuple[Args, np.ndarray]:
    """Some rows of the batch, the first and last among them, as requests of one query over a pool of their own."""
    table, n, start = (np.asarray(x) for x in (page_table, lengths, query_start))
    page, total = cache.shape[1], int(start[-1])
    rows = np.unique(np.concatenate([[0, total - 1], rng.integers(0, total, PROBED)]))
    owner = np.searchsorted(start, rows, side="right") - 1
    seen = n[owner] - start[owner + 1] + rows + 1 if causal else n[owner]
    pages = -(-seen // page)
    new_table = np.zeros((rows.size, int(pages.max())), np.int32)
    used: dict[int, int] = {}
    for i, (b, count) in enumerate(zip(owner, pages, strict=True)):
        new_table[i, :count] = [used.setdefault(int(p), len(used)) for p in table[b, :count]]
    return {
        "q": q[rows],
        "cache": cache[jnp.asarray(list(used), jnp.int32)],
        "page_table": jnp.asarray(new_table),
        "lengths": jnp.asarray(seen, jnp.int32),
        "query_start": jnp.arange(rows.size + 1, dtype=jnp.int32),
        "causal": causal,
        **options,
    }, rows


def _case(name: str, *sizes: int, **options: Any) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, *sizes, **options), tags=frozenset({"bench"}))


BENCH = (
    _case("B64-S8192-H128", 64, 8192, 128),
    _case("B64-S8192-H128-ragged", 64, 8192, 128, ragged=True),
    _case("B128-S4096-H16", 128, 4096, 16),
    _case("B128-S4096-H16-ragged", 128, 4096, 16, ragged=True),
    _case("B1-S65536-H128", 1, 65536, 128),
    _case("B32-S8192-H128-speculate2", 32, 8192, 128, queries=2),
    _case("B128-S4096-H16-speculate4", 128, 4096, 16, queries=4),
    _case("B128-S4096-H16-fp8", 128, 4096, 16, format="fp8"),
    _case("B128-S4096-H16-ds-mla", 128, 4096, 16, format="fp8_ds_mla"),
)
