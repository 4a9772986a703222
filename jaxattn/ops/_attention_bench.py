"""Shapes that attention is timed at, and the part of them that a float64 reference can afford."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn._mechanism import Args, Case

PROBED = 2
"""Rows of a benchmark's output that are compared with the truth, besides the first and last."""


def make_inputs(
    rng: np.random.Generator, B: int, T: int, *, H: int, K: int, D: int, Dv: int | None = None, **options
) -> Args:
    """Arguments of `attention` in bfloat16: B sequences of T queries and keys, drawn on the device that holds them."""
    keys = jax.random.split(jax.random.key(int(rng.integers(2**31))), 3)
    shapes = {"q": (B * T, H, D), "k": (B * T, K, D), "v": (B * T, K, Dv or D)}
    arrays = {n: jax.random.normal(key, s, jnp.bfloat16) for key, (n, s) in zip(keys, shapes.items(), strict=True)}
    return arrays | {"query_start": jnp.arange(B + 1, dtype=jnp.int32) * T} | options


def probe(
    rng: np.random.Generator, *, q, k, v, query_start, key_start, causal, window, **options
) -> tuple[Args, np.ndarray]:
    """Some rows as sequences of one query each, over copies of the keys that they see.

    Raises:
        ValueError: of a batch without starts, or a window that looks ahead.
    """
    if query_start is None or (window is not None and not causal):
        given = "a batch" if query_start is None else "a window without causality"
        raise ValueError(f"probe: rows of {given} cannot be taken apart; time packed sequences")
    start, first = np.asarray(query_start), np.asarray(key_start)
    total = int(start[-1])
    rows = np.unique(np.concatenate([[0, total - 1], rng.integers(0, total, PROBED)]))
    owner = np.searchsorted(start, rows, side="right") - 1
    end = first[owner + 1] - start[owner + 1] + rows + 1 if causal else first[owner + 1]
    low = first[owner] if window is None else np.maximum(first[owner], end - window)
    seen = jnp.asarray(np.concatenate([np.arange(a, b) for a, b in zip(low, end, strict=True)]), jnp.int32)
    return {
        "q": q[rows],
        "k": k[seen],
        "v": v[seen],
        "query_start": jnp.arange(rows.size + 1, dtype=jnp.int32),
        "key_start": jnp.asarray(np.concatenate([[0], np.cumsum(end - low)]), jnp.int32),
        "causal": causal,
        "window": window,
        **options,
    }, rows


def _case(name: str, B: int, T: int, **shape) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, B, T, **shape), tags=frozenset({"bench"}))


_LLAMA = {"H": 32, "K": 8, "D": 128}
_OSS = {"H": 64, "K": 8, "D": 64}

BENCH = (
    _case("varlen-B4-S4096-H32-K8-D128", 4, 4096, **_LLAMA),
    _case("B1-S8192-H32-K8-D128", 1, 8192, **_LLAMA),
    _case("full-B1-S8192-H32-K8-D128", 1, 8192, causal=False, **_LLAMA),
    _case("mla-B1-S8192-H128-D192-Dv128", 1, 8192, H=128, K=128, D=192, Dv=128),
    _case("window128-B1-S16384-H64-K8-D64", 1, 16384, window=128, **_OSS),
)
