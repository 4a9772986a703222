"""Inputs of latent attention: requests of several lengths, shuffled pages, NaN where nothing is read."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn import _latent_cache
from jaxattn._mechanism import Args, Case
from jaxattn.ops._mla_bench import BENCH

_WILD, _HALVES = 2**31 - 1, ("bfloat16", "float16")


def make_inputs(
    rng: np.random.Generator,
    queries: tuple[int, ...],
    lengths: tuple[int, ...],
    H: int,
    *,
    D: int = 576,
    page: int = 64,
    dtype: str = "bfloat16",
    format: str = "plain",
    padding: int = 0,
    scale: float = 192**-0.5,
    **options: Any,
) -> Args:
    """Random arguments of `mla`.

    Args:
        rng: source of randomness.
        queries: query tokens of each request.
        lengths: rows of each request.
        H: heads.
        D: width of a row.
        page: rows of a page.
        dtype: of q and of a plain cache.
        format: of the cache.
        padding: rows of q behind the last request.
        scale: softmax scale.
        **options: passed on to the op.
    """
    pages = max((-(-n // page) for n in lengths), default=1) + 1
    P = sum(-(-n // page) for n in lengths) + 2
    numbers = iter(rng.permutation(P).tolist())
    table = np.full((len(lengths), pages), _WILD, np.int32)
    x = rng.standard_normal((P, page, D)).astype(np.float32)
    read = np.zeros((P, page), bool)
    for b, n in enumerate(lengths):
        for i in range(-(-n // page)):
            table[b, i] = next(numbers)
            read[table[b, i], : min(page, n - i * page)] = True
    if format == "fp8_ds_mla":
        flat = jnp.asarray(x.reshape(-1, D))
        cache = np.array(_latent_cache.encode_ds_mla(flat[:, :512], flat[:, 512:])).reshape(P, page, -1)
        cache[~read] = 0xFF
        stored = jnp.asarray(cache)
    else:
        x[~read] = np.nan
        stored = jnp.asarray(x).astype("float8_e4m3fn" if format == "fp8" else dtype)
    N = sum(queries) + padding
    q = rng.standard_normal((N, H, D)).astype(np.float32)
    q[N - padding :] = np.nan
    args: Args = {
        "q": jnp.asarray(q, dtype),
        "cache": stored,
        "page_table": jnp.asarray(table),
        "lengths": jnp.asarray(np.array(lengths, np.int32)),
        "query_start": jnp.asarray(np.cumsum([0, *queries]).astype(np.int32)),
        "scale": scale,
        "format": format,
        **options,
    }
    return args | ({"cache_scale": np.float32(0.7)} if format == "fp8" else {})


def cost(*, q, cache, lengths, query_start, value_dim, causal, **_) -> tuple[int, int]:
    """Visible pairs x 2 H (D + Dv) operations; q and o once, each request's rows once."""
    _, H, D = q.shape
    n, T = np.asarray(lengths, np.int64), np.diff(np.asarray(query_start, np.int64))
    hidden = T * (T - 1) // 2 if causal else 0 * T
    pairs = int((T * n - hidden).sum())
    row = cache.shape[2] * jnp.dtype(cache.dtype).itemsize
    width = jnp.dtype(q.dtype).itemsize
    return 2 * pairs * H * (D + value_dim), int(n[T > 0].sum()) * row + int(T.sum()) * H * (D + value_dim) * width


def _case(name: str, *sizes: Any, tags: tuple[str, ...] = ("smoke",), **options: Any) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, *sizes, **options), tags=frozenset(tags))


CASES = (
    _case("B3-H16-lse", (1, 1, 1), (1, 64, 150), 16, return_lse=True),
    _case("B2-H16-fp32-lse", (1, 1), (70, 129), 16, dtype="float32", return_lse=True),
    _case("B2-H128", (1, 1), (130, 3), 128),
    _case(
        "B3-H8-D96-page16-mixed-padding",
        (5, 1, 0),
        (20, 33, 4),
        8,
        D=96,
        value_dim=64,
        page=16,
        padding=2,
        return_lse=True,
    ),
    _case("B2-H4-D96-fp32-full", (3, 2), (3, 20), 4, D=96, value_dim=64, page=16, dtype="float32", causal=False),
    _case("B2-H16-fp8", (1, 2), (70, 40), 16, format="fp8"),
    _case("B1-H16-page32-ds-mla", (2,), (70,), 16, page=32, format="fp8_ds_mla", return_lse=True),
    _case("B2-H64-empty", (1, 1), (0, 65), 64, return_lse=True),
    _case("B8-H128-long", (1,) * 8, (1, 64, 65, 1000, 4097, 777, 2048, 3000), 128, tags=("full",), return_lse=True),
    _case("B4-H16-speculate-long", (4, 2, 1, 3), (5000, 1300, 64, 3), 16, tags=("full",), padding=5, return_lse=True),
    _case("B3-H128-speculate-long-fp8", (2, 1, 3), (3000, 129, 2049), 128, tags=("full",), format="fp8"),
    _case(
        "B3-H128-speculate-long-ds-mla",
        *((2, 1, 3), (3000, 129, 2049), 128),
        tags=("full",),
        page=16,
        format="fp8_ds_mla",
        return_lse=True,
    ),
    *BENCH,
)


def _struct(dtype: str, H: int, page: int = 64, D: int = 576, format: str = "plain") -> Args:
    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    stored = {"plain": dtype, "fp8": "float8_e4m3fn", "fp8_ds_mla": "uint8"}[format]
    return {
        "q": array((32, H, D), dtype),
        "cache": array((512, page, 656 if format == "fp8_ds_mla" else D), stored),
        "page_table": array((32, 64), "int32"),
        "lengths": array((32,), "int32"),
        "query_start": array((33,), "int32"),
        "scale": 192**-0.5,
        "format": format,
    }


SUPPORT = (
    *(
        (f"{dtype}, H {H}, D 576, page {page}", _struct(dtype, H, page))
        for dtype in ("bfloat16", "float32")
        for H in (16, 64, 128)
        for page in (16, 64)
    ),
    ("bfloat16, H 128, page 64, fp8", _struct("bfloat16", 128, format="fp8")),
    *((f"{dtype}, H 128, page 64, fp8_ds_mla", _struct(dtype, 128, format="fp8_ds_mla")) for dtype in _HALVES),
    ("float16, H 128, page 64", _struct("float16", 128)),
)
