"""Inputs of the indexer: ranges of every kind, ties, shuffled pages, NaN in what no token may choose."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn import _latent_cache
from jaxattn._mechanism import Args, Case
from jaxattn.quant import mx


def cost(*, q, k, starts, ends, topk, page_table, page, return_logits, **_):
    """Visible pairs x H D products; codes read, indices and all logits written."""
    (N, H, D), S = q.shape, k.shape[0] if page is None else page_table.shape[1] * page
    D, row = (2 * D, D + 4) if q.dtype == jnp.uint8 else (D, D + 4)
    seen = np.clip(np.minimum(np.asarray(ends), S) - np.asarray(starts), 0, None)
    keys = row * (S if page is None else min(int(seen.sum()), k.shape[0] * page))
    moved = q.size * jnp.dtype(q.dtype).itemsize + keys + 4 * N * (H + (topk or 0) + S * return_logits)
    return 2 * int(seen.sum()) * H * D, moved


def probe(rng: np.random.Generator, **args) -> tuple[Args, np.ndarray]:
    """Sixteen tokens."""
    N = args["q"].shape[0]
    rows = rng.choice(N, min(N, 16), replace=False)
    names = ("q", "q_scale", "weights", "starts", "ends", "requests")
    return args | {name: args[name][rows] for name in names if args.get(name) is not None}, rows


def make_inputs(
    rng: np.random.Generator,
    N: int,
    H: int,
    S: int,
    *,
    D: int = 128,
    dtype: str = "float8_e4m3fn",
    causal: bool = False,
    whole: bool = False,
    spread: int = 0,
    **options,
) -> Args:
    """Random arguments of `indexer`; keys that no token may choose are NaN.

    Args:
        rng: source of randomness.
        N: tokens.
        H: heads.
        S: entries.
        D: head dim.
        dtype: of codes; "mxfp4" quantizes to those.
        causal: ends rise to S, starts are 0; else ranges are random, some empty.
        whole: small whole numbers, so that every order of summation gives the same logits, ties included.
        spread: MXFP4: groups of 32 numbers are multiplied by powers of two up to this one, or divided.
        **options: passed on to the op.
    """
    if causal:
        starts, ends = np.zeros(N, np.int32), np.linspace(1, S, N).astype(np.int32)
    else:
        starts = rng.integers(0, S, N).astype(np.int32)
        ends = np.minimum(starts + rng.integers(-2, S, N), S + 3).astype(np.int32)
    used = np.zeros(S, bool)
    for a, b in zip(starts, ends, strict=True):
        used[a : max(b, a)] = True

    def normal(*shape):
        return (rng.integers(-2, 3, shape) if whole else rng.standard_normal(shape)).astype(np.float32)

    k = normal(S, D)
    k[~used] = np.nan
    scale = np.exp2(rng.integers(-2, 2, S)).astype(np.float32)
    scale[~used] = np.nan
    weights = normal(N, H) if whole else normal(N, H) * np.float32(0.1)
    if dtype == "mxfp4":
        q, q_scale = _mxfp4(rng, normal(N, H, D), spread)
        k, scale = _mxfp4(rng, np.nan_to_num(k), spread)
        given = {"q": q, "q_scale": q_scale, "weights": weights, "k": np.where(used[:, None], k, 0xFF)}
        given |= {"k_scale": np.where(used[:, None], scale, 0xFF), "starts": starts, "ends": ends}
        return {name: jnp.asarray(x) for name, x in given.items()} | options
    return {
        "q": jnp.asarray(normal(N, H, D)).astype(dtype),
        "weights": jnp.asarray(weights),
        "k": jnp.asarray(k).astype(dtype),
        "k_scale": jnp.asarray(scale),
        "starts": jnp.asarray(starts),
        "ends": jnp.asarray(ends),
        **options,
    }


def _mxfp4(rng: np.random.Generator, x: np.ndarray, spread: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scale bytes of numbers whose groups are multiplied by powers of two of either sign."""
    groups = x.reshape(*x.shape[:-1], -1, mx.GROUP)
    x = (groups * np.exp2(rng.integers(-spread, spread + 1, (*groups.shape[:-1], 1)))).reshape(x.shape)
    codes, scale = _quantize(x.astype(np.float32))
    return np.asarray(codes), np.asarray(scale)


_quantize = jax.jit(functools.partial(mx.quantize, format="mxfp4"))


def make_paged_inputs(
    rng: np.random.Generator,
    lengths: tuple[int, ...],
    H: int,
    *,
    page: int = 64,
    whole: bool = False,
    ranges: bool = True,
    format: str = "indexer_fp8",
    spread: int = 0,
    **options,
) -> Args:
    """Random arguments of `indexer` with keys in shuffled pages; tokens see a part of their request, or all.

    Args:
        rng: source of randomness.
        lengths: entries of each request, which has one token, every other one two.
        H: heads.
        page: entries per page.
        whole: as in `make_inputs`.
        ranges: some tokens do not start with the first entry.
        format: of the cache, "indexer_fp8" or "indexer_mxfp4", queries alike.
        spread: as in `make_inputs`.
        **options: passed on to the op.
    """

    def normal(*shape):
        return (rng.integers(-2, 3, shape) if whole else rng.standard_normal(shape)).astype(np.float32)

    B, pages = len(lengths), -(-max(lengths) // page)
    needed = [-(-n // page) for n in lengths]
    P = sum(needed) + 2
    free = rng.permutation(P)
    table = np.full((B, pages), 2**31 - 1, np.int32)
    slots: list[int] = []
    for b, n in enumerate(lengths):
        table[b, : needed[b]], free = free[: needed[b]], free[needed[b] :]
        slots += [int(table[b, i // page]) * page + i % page for i in range(n)]
    size = -(-_latent_cache.PAGED[format].least(page) // 128) * 128

    @jax.jit
    def pack(keys):
        rows, scales = _latent_cache.encode_indexer(keys, format)
        cache = jnp.full((P, size), 0xFF, jnp.uint8)
        return _latent_cache.insert(cache, rows, scales, jnp.asarray(slots, jnp.int32), format, page)

    powers = np.exp2(rng.integers(-spread, spread + 1, (len(slots), 128 // mx.GROUP))).astype(np.float32)
    cache = pack(normal(len(slots), 128) * np.repeat(powers, mx.GROUP, 1))
    requests = np.concatenate([[b] * (1 + b % 2) for b in range(B)]).astype(np.int32)
    ends = np.asarray(lengths)[requests] - np.arange(len(requests)) % 2
    starts = np.where((np.arange(len(requests)) % 3 == 2) & ranges, ends // 3, 0)
    N = len(requests)
    weights = normal(N, H) if whole else normal(N, H) * np.float32(0.1)
    given = {"requests": requests, "page_table": table, "starts": starts, "ends": ends}
    queries: Any = {"q": jnp.asarray(normal(N, H, 128)).astype("float8_e4m3fn")}
    if format == "indexer_mxfp4":
        queries = dict(zip(("q", "q_scale"), map(jnp.asarray, _mxfp4(rng, normal(N, H, 128), spread)), strict=True))
    return {
        **queries,
        "weights": jnp.asarray(weights),
        "k": cache,
        "k_scale": None,
        **{name: jnp.asarray(x, jnp.int32) for name, x in given.items()},
        "page": page,
        "format": format,
        **options,
    }


def _paged(name: str, lengths: tuple[int, ...], H: int, *tags: str, **options) -> Case:
    make = functools.partial(make_paged_inputs, lengths=lengths, H=H, **options)
    return Case(name=name, make=make, tags=frozenset(tags or ("smoke",)))


def _paged_struct(dtype: str, **options) -> Args:
    shapes = {"page_table": (128, 64), "requests": (256,)}
    tables = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()}
    format = "indexer_mxfp4" if dtype == "mxfp4" else "indexer_fp8"
    cache = jax.ShapeDtypeStruct((8192, _latent_cache.PAGED[format].least(64)), jnp.uint8)
    return _struct(dtype, **options) | tables | {"k": cache, "k_scale": None, "page": 64, "format": format}


def _case(name: str, N: int, H: int, S: int, *tags: str, **options) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, N, H, S, **options), tags=frozenset(tags or ("smoke",)))


def _struct(dtype: str, topk: int | None = 512, **options) -> Args:
    def array(*shape, dtype="float32"):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    if dtype == "mxfp4":
        args = {"q": (256, 64, 64), "q_scale": (256, 64, 4), "k": (1024, 64), "k_scale": (1024, 4)}
        args = {name: array(*shape, dtype="uint8") for name, shape in args.items()}
    else:
        args = {"q": array(256, 64, 128, dtype=dtype), "k": array(1024, 128, dtype=dtype), "k_scale": array(1024)}
    args |= {"weights": array(256, 64), "starts": array(256, dtype="int32"), "ends": array(256, dtype="int32")}
    return args | {"topk": topk, **options}


CASES = (
    _case("N6-H64-S128-logits", 6, 64, 128, topk=None, causal=True, return_logits=True),
    _case("N5-H64-S200-ties-logits", 5, 64, 200, topk=16, whole=True, return_logits=True),
    _case("N5-H8-S70-fp32-logits", 5, 8, 70, dtype="float32", topk=20, return_logits=True),
    _case("N9-H4-S40-ties", 9, 4, 40, topk=8, whole=True),
    _case("N4-H64-S96-more-than-there-are-rising", 4, 64, 96, topk=128, whole=True, order="rising"),
    _paged("B2-H64-paged-ties-logits", (130, 70), 64, topk=12, whole=True, return_logits=True),
    _case("N5-H64-S200-mxfp4-ties-logits", 5, 64, 200, dtype="mxfp4", topk=16, whole=True, return_logits=True),
    _case(
        "N6-H32-S70-mxfp4-wide-logits", 6, 32, 70, dtype="mxfp4", topk=None, causal=True, spread=12, return_logits=True
    ),
    _paged(
        "B2-H64-paged-mxfp4-ties-logits",
        (130, 70),
        64,
        topk=12,
        whole=True,
        format="indexer_mxfp4",
        return_logits=True,
    ),
    _paged(
        "B40-H64-paged-mxfp4-logits",
        tuple(range(1, 2001, 50)),
        64,
        "full",
        topk=None,
        format="indexer_mxfp4",
        spread=3,
        return_logits=True,
    ),
    _paged("B40-H64-paged-logits", tuple(range(1, 2001, 50)), 64, "full", topk=None, return_logits=True),
    _paged(
        "B64-H64-S16384-paged-logits",
        (16384,) * 64,
        64,
        "bench",
        "eight_bit",
        ranges=False,
        topk=None,
        return_logits=True,
    ),
    _paged("B64-H64-S16384-paged-top512", (16384,) * 64, 64, "bench", "eight_bit", topk=512, whole=True),
    _case("N300-H64-S1000-logits", 300, 64, 1000, "full", topk=None, return_logits=True),
    _case("N4096-H64-S4096", 4096, 64, 4096, "bench", "eight_bit", topk=512, causal=True, whole=True),
    _case(
        "N4096-H64-S4096-logits",
        4096,
        64,
        4096,
        "bench",
        "eight_bit",
        topk=None,
        causal=True,
        return_logits=True,
    ),
    _case(
        "N4096-H64-S4096-mxfp4-logits",
        4096,
        64,
        4096,
        "bench",
        dtype="mxfp4",
        topk=None,
        causal=True,
        return_logits=True,
    ),
    _paged(
        "B64-H64-S16384-paged-mxfp4-logits",
        (16384,) * 64,
        64,
        "bench",
        ranges=False,
        topk=None,
        format="indexer_mxfp4",
        return_logits=True,
    ),
)

SUPPORT = (
    ("float8_e4m3fn, top 512", _struct("float8_e4m3fn")),
    ("float8_e4m3fn, top 2048, with logits", _struct("float8_e4m3fn", 2048, return_logits=True)),
    ("float8_e4m3fn, logits only", _struct("float8_e4m3fn", None, return_logits=True)),
    ("float8_e4m3fn, paged, top 512", _paged_struct("float8_e4m3fn")),
    ("MXFP4, top 512", _struct("mxfp4")),
    ("MXFP4, top 2048, with logits", _struct("mxfp4", 2048, return_logits=True)),
    ("MXFP4, paged, top 512", _paged_struct("mxfp4")),
    ("bfloat16, top 512", _struct("bfloat16")),
    ("float32, top 512", _struct("float32")),
)
