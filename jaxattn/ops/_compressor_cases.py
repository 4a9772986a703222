"""Inputs of the compressor: requests of several lengths, pages in any order, NaN wherever nothing is read."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn import _latent_cache, _rope
from jaxattn._mechanism import Args, Case


def make_inputs(
    rng: np.random.Generator,
    queries: tuple[int, ...],
    lengths: tuple[int, ...],
    *,
    ratio: int = 4,
    D: int = 512,
    Dr: int = 64,
    overlap: bool = True,
    format: str = "v4",
    page: int = 64,
    dtype: str = "float32",
    padding: int = 1,
    sizes: tuple[float, ...] = (1.0,),
) -> Args:
    """Random arguments of `compressor`; states of positions that no window reads are NaN.

    Args:
        rng: source of randomness.
        queries: tokens of this step of each request.
        lengths: tokens of each request, this step's included.
        ratio: tokens per entry.
        D: numbers of an entry.
        Dr: rotated numbers.
        overlap: windows of twice the ratio.
        format: of the cache.
        page: entries per page.
        dtype: of a plain cache.
        padding: rows behind the last request.
        sizes: factors of the norm's weight, each for as many numbers of an entry.
    """
    coff, spage = 2 if overlap else 1, 4 if ratio < 8 else 8
    W, N = coff * D, sum(queries) + padding
    pages = -(-max(lengths) // spage)
    SP = sum(-(-n // spage) for n in lengths) + 1
    numbers = iter(rng.permutation(SP).tolist())
    table = np.full((len(lengths), pages), -1, np.int32)
    state = np.full((SP, spage, 2 * W), np.nan, np.float32)
    positions, request = np.full(N, -1, np.int32), np.zeros(N, np.int32)
    slots, row, entry = np.full(N, -1, np.int32), 0, 0
    for b, (T, n) in enumerate(zip(queries, lengths, strict=True)):
        needed = max(n - T - coff * ratio + 1, 0)
        for i in range(needed // spage, -(-n // spage)):
            table[b, i] = next(numbers)
        for q in range(needed, n - T):
            state[table[b, q // spage], q % spage] = rng.standard_normal(2 * W)
        for q in range(n - T, n):
            positions[row], request[row] = q, b
            if (q + 1) % ratio == 0:
                slots[row], entry = entry, entry + 1
            row += 1
    P = -(-max(entry, 1) // page) + 1
    slots[slots >= 0] = rng.permutation(P * page)[:entry]
    if format == "plain":
        cache = jnp.asarray(rng.standard_normal((P, page, D)), dtype)
    else:
        least = _latent_cache.PAGED[format].least(page)
        width = _latent_cache.v4_page_bytes(page) if format == "v4" else least
        cache = jnp.asarray(rng.integers(0, 256, (P, width)).astype(np.uint8))

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    steps = _rope.frequencies(Dr, 160000.0)
    return {
        "kv": normal(N, W),
        "score": normal(N, W),
        "ape": normal(ratio, W),
        "weight": (normal(D) * np.repeat(np.array(sizes, np.float32), D // len(sizes))).astype(
            dtype if format == "plain" else "bfloat16"
        ),
        "positions": jnp.asarray(positions),
        "request": jnp.asarray(request),
        "cos_sin": _rope.table(jnp.asarray(steps), jnp.arange(max(lengths))),
        "state": jnp.asarray(state),
        "state_table": jnp.asarray(table),
        "cache": cache,
        "cache_slots": jnp.asarray(slots),
        "format": format,
    } | ({} if format == "plain" else {"page": page})


def _case(name: str, *sizes, tags: tuple[str, ...] = ("smoke",), **options) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, *sizes, **options), tags=frozenset(tags))


CASES = (
    _case("C4-v4", (9, 1, 3), (9, 12, 7)),
    _case("C4-plain-fp32", (9, 1, 4), (9, 40, 21), D=128, format="plain", page=8),
    _case("C4-indexer-fp8", (13, 1), (13, 24), D=128, format="indexer_fp8"),
    _case("C4-indexer-mxfp4", (5, 1), (5, 24), D=128, format="indexer_mxfp4", sizes=(0, 2.0**-100, 1, 2.0**100)),
    _case("C128-v4", (130, 1), (130, 256), ratio=128, overlap=False, page=2),
    _case("C4-v4-N4096", (4096,), (4096,), tags=("full", "bench"), padding=0),
    _case("C4-indexer-N4096", (4096,), (4096,), tags=("full", "bench"), padding=0, D=128, format="indexer_fp8"),
    _case("C8-plain-bf16-Dr32", (17, 8), (17, 24), ratio=8, D=64, Dr=32, format="plain", page=4, dtype="bfloat16"),
)


def _struct(format: str, ratio: int, D: int, page: int) -> Args:
    def array(*shape, dtype="float32"):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    W, whole = D * (2 if ratio == 4 else 1), {"dtype": "int32"}
    f = _latent_cache.PAGED[format]
    return {
        "kv": array(64, W),
        "score": array(64, W),
        "ape": array(ratio, W),
        "weight": array(D, dtype="bfloat16"),
        "positions": array(64, **whole),
        "request": array(64, **whole),
        "cos_sin": array(4096, 64),
        "state": array(64, 4 if ratio == 4 else 8, 2 * W),
        "state_table": array(8, 64, **whole),
        "cache": array(32, _latent_cache.v4_page_bytes(page) if format == "v4" else f.least(page), dtype="uint8"),
        "cache_slots": array(64, **whole),
        "format": format,
        "page": page,
    }


SUPPORT = (
    ("ratio 4, v4", _struct("v4", 4, 512, 64)),
    ("ratio 128, v4", _struct("v4", 128, 512, 2)),
    ("ratio 4, indexer_fp8", _struct("indexer_fp8", 4, 128, 64)),
    ("ratio 4, indexer_mxfp4", _struct("indexer_mxfp4", 4, 128, 64)),
)
