"""Inputs of sparse attention: lists with invalid, huge and repeated entries, NaN in every row that nobody lists."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn import _latent_cache
from jaxattn._mechanism import Args, Case
from jaxattn.ops.latent_cache_gather import packed_v4

_WILD = np.array([-1, -2, 2**31 - 1, -(2**31), 114514], np.int32)


def make_inputs(
    rng: np.random.Generator,
    N: int,
    H: int,
    D: int,
    rows: int,
    width: int,
    *,
    dtype: str = "bfloat16",
    format: str = "plain",
    page: int = 64,
    sinks: str = "none",
    lengths: bool = True,
    wild: float = 0.2,
    more: tuple[int, int] | None = None,
    **options: Any,
) -> Args:
    """Random arguments of `sparse_mla`; the lists of the last token are empty if there is more than one.

    Args:
        rng: source of randomness.
        N: tokens.
        H: heads.
        D: width of a row.
        rows: of the cache; a multiple of the page for packed formats.
        width: of the lists.
        dtype: of q, and of a plain cache.
        format: of the caches.
        page: rows of a page.
        sinks: "none", "finite" or "mixed" (with infinities).
        lengths: give `counts`; entries behind them are valid numbers that must not count.
        wild: share of entries that are no row's number.
        more: (rows, width) of a second cache and its lists.
        **options: passed on to the op.
    """
    args: Args = {"q": jnp.asarray(rng.standard_normal((N, H, D)), dtype), "format": format}
    args |= {"page": page} if format == "v4" else {}
    for prefix, (R, K) in {"": (rows, width), "extra_": more or (0, 0)}.items():
        if not R:
            continue
        indices = rng.integers(0, R, (N, K)).astype(np.int32)
        bad = rng.random((N, K)) < wild
        odd = np.append(_WILD, np.int32(R))
        indices[bad] = rng.choice(odd[(odd < 0) | (odd >= R)], bad.sum())
        counts = rng.integers(1, K + 1, N).astype(np.int32)
        counts[0] = K
        if N > 1:
            indices[-1] = -1
        valid = (indices >= 0) & (indices < R)
        valid &= (np.arange(K) < counts[:, None]) | (not lengths)
        read = np.zeros(R, bool)
        read[indices[valid]] = True
        size = options.get("extra_page", page) if prefix else page
        args |= {
            f"{prefix}cache": _cache(rng, R, D, read, dtype, format, size),
            f"{prefix}indices": jnp.asarray(indices),
        }
        args |= {f"{prefix}counts": jnp.asarray(counts)} if lengths else {}
    if sinks != "none":
        s = rng.standard_normal(H).astype(np.float32)
        s[:3] = (-np.inf, np.inf, 5.0)[:H] if sinks == "mixed" else s[:3]
        args["sinks"] = jnp.asarray(s)
    return args | options


def _cache(rng, R: int, D: int, read: np.ndarray, dtype: str, format: str, page: int) -> Any:
    x = rng.standard_normal((R, D)).astype(np.float32)
    if format == "plain":
        x[~read] = np.nan
        return jnp.asarray(x, dtype)
    if format == "fp8_ds_mla":
        raw = np.array(jax.jit(_latent_cache.encode_ds_mla)(x[:, :512], x[:, 512:]))
        raw[~read] = 0xFF
        return jnp.asarray(raw.reshape(-1, page, raw.shape[1]))
    return jnp.asarray(packed_v4(jnp.asarray(x), page, read.reshape(-1, page)))


def cost(*, q, cache, indices, counts, extra_indices, extra_counts, value_dim, format, **_) -> tuple[int, int]:
    """Valid entries x 2 H (D + Dv) operations; q and o once, each listed row once (from memory or the cache)."""
    N, H, D = q.shape
    entries = 0
    for lists, lengths in ((indices, counts), (extra_indices, extra_counts)):
        if lists is not None:
            entries += int(np.sum(np.asarray(lengths))) if lengths is not None else lists.size
    width = jnp.dtype(q.dtype).itemsize
    row = {"plain": D * width, "v4": 584, "fp8_ds_mla": 656}[format]
    moved = min(entries * row, cache.size * jnp.dtype(cache.dtype).itemsize) if format == "plain" else entries * row
    return 2 * entries * H * (D + value_dim), moved + N * H * (D + value_dim) * width + 4 * indices.size


def shapes(
    N: int,
    H: int,
    D: int,
    rows: int,
    width: int,
    *,
    dtype: str = "bfloat16",
    format: str = "plain",
    page: int = 64,
    sinks: str = "none",
    lengths: bool = True,
    wild: float = 0.2,
    more: tuple[int, int] | None = None,
    **options: Any,
) -> Args:
    """The arguments of `make_inputs` as shapes."""
    del wild

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    args: Args = {"q": array((N, H, D), dtype), "format": format} | ({"page": page} if format == "v4" else {})
    for prefix, (R, K) in {"": (rows, width), "extra_": more or (0, 0)}.items():
        if not R:
            continue
        size = options.get("extra_page", page) if prefix else page
        packed = {"v4": (R // size, _latent_cache.v4_page_bytes(size)), "fp8_ds_mla": (R // size, size, 656)}
        args[f"{prefix}cache"] = array((R, D), dtype) if format == "plain" else array(packed[format], "uint8")
        args[f"{prefix}indices"] = array((N, K), "int32")
        args |= {f"{prefix}counts": array((N,), "int32")} if lengths else {}
    return args | ({} if sinks == "none" else {"sinks": array((H,), "float32")}) | options


def _case(name: str, *sizes: int, tags: tuple[str, ...] = ("smoke",), **options: Any) -> Case:
    return Case(
        name=name,
        make=lambda rng: make_inputs(rng, *sizes, **options),
        tags=frozenset(tags),
        shapes=functools.partial(shapes, *sizes, **options),
    )


def probe(rng: np.random.Generator, **args: Any) -> tuple[Args, np.ndarray]:
    """Sixteen tokens."""
    names = ("q", "indices", "counts", "extra_indices", "extra_counts")
    N = args["q"].shape[0]
    rows = rng.choice(N, min(N, 16), replace=False)
    return args | {name: args[name][rows] for name in names if args[name] is not None}, rows


_BENCH = {"tags": ("bench",), "lengths": False, "wild": 0.0}
CASES = (
    _case("N3-H64-D576-K128", 3, 64, 576, 200, 128, return_lse=True),
    _case("N2-H64-D512-K64-fp32", 2, 64, 512, 90, 64, dtype="float32", sinks="mixed", return_lse=True),
    _case("N2-H64-v4-two-caches", 2, 64, 512, 128, 128, format="v4", more=(64, 64), sinks="mixed", return_lse=True),
    _case("N2-H128-D512-K128-no-counts", 2, 128, 512, 150, 128, lengths=False, sinks="finite"),
    _case("N2-H16-D96-K7-fp32", 2, 16, 96, 40, 7, dtype="float32", value_dim=64, return_lse=True),
    _case("N2-H64-ds-mla-K64", 2, 64, 576, 64, 64, format="fp8_ds_mla", return_lse=True),
    _case("N2-H3-D64-fp16", 2, 3, 64, 40, 9, dtype="float16", sinks="finite", more=(20, 5)),
    _case("N2-H64-v4-page2", 2, 64, 512, 64, 64, format="v4", more=(10, 64), extra_page=2),
    _case("N64-H64-D576-K512", 64, 64, 576, 3000, 512, tags=("full",), sinks="mixed", return_lse=True),
    _case("N200-H128-D512-K100", 200, 128, 512, 300, 100, tags=("full",), sinks="mixed"),
    _case("N150-H64-v4", 150, 64, 512, 128, 70, tags=("full",), format="v4", more=(192, 100), sinks="mixed"),
    _case("N4096-H64-D512-K640", 4096, 64, 512, 4096, 640, sinks="finite", **_BENCH),
    _case("N4096-H128-D576-K2048", 4096, 128, 576, 4096, 2048, **_BENCH),
    _case("N128-H64-v4-128+512", 128, 64, 512, 16384, 128, format="v4", more=(65536, 512), sinks="finite", **_BENCH),
    _case("N32-H128-v4-128+1024", 32, 128, 512, 4096, 128, format="v4", more=(65536, 1024), sinks="finite", **_BENCH),
)


def _struct(dtype: str, H: int, D: int, width: int, format: str = "plain") -> Args:
    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    shapes = {"plain": (4096, D), "v4": (64, 37440), "fp8_ds_mla": (64, 64, 656)}
    cache = array(shapes[format], dtype if format == "plain" else "uint8")
    args: Args = {"q": array((128, H, D), dtype), "cache": cache, "indices": array((128, width), "int32")}
    return args | {"format": format} | ({"page": 64} if format == "v4" else {})


SUPPORT = (
    *(
        (f"{dtype}, H {H}, D {D}, plain rows", _struct(dtype, H, D, 640))
        for dtype in ("bfloat16", "float32")
        for H in (64, 128)
        for D in (512, 576)
    ),
    ("bfloat16, H 64, v4 cache", _struct("bfloat16", 64, 512, 128, "v4")),
    ("bfloat16, H 128, v4 cache", _struct("bfloat16", 128, 512, 128, "v4")),
    ("bfloat16, H 128, fp8_ds_mla cache", _struct("bfloat16", 128, 576, 2048, "fp8_ds_mla")),
    ("bfloat16, H 16, D 576, plain rows", _struct("bfloat16", 16, 576, 640)),
)
