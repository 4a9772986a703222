"""Test cases, benchmarks and support rows of cascade attention; what must not be read is poisoned."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn._mechanism import Args, Case
from jaxattn.ops import _paged_attention_bench as paged_bench
from jaxattn.ops._paged_attention_cases import FP8

type Tree = tuple[tuple[tuple[int, int, int], ...], ...]
"""For each level its groups: first request, the one after its last, and where its shared tokens end."""


def shared_table(
    rng: np.random.Generator, lengths: np.ndarray, tree: Tree, page: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """A page table with shuffled pages, `group_start`, `shared`, and the number of pages that are in use.

    Unused entries of the table are huge.
    """
    B = len(lengths)
    G = max((len(groups) for groups in tree), default=0)
    table = np.full((B, max(1, -(-int(max(lengths, default=0)) // page))), -1, np.int64)
    starts, ends = np.zeros((len(tree), G + 1), np.int32), np.zeros((len(tree), G), np.int32)
    done, used = np.zeros(B, np.int64), 0
    for level, groups in enumerate(tree):
        for g, (first, last, end) in enumerate(groups):
            fresh = np.arange(done[first] // page, end // page)
            table[first:last, fresh] = used + np.arange(fresh.size)
            used += fresh.size
            done[first:last] = end
            starts[level, g + 1 :], ends[level, g] = last, end
    for b, n in enumerate(lengths):
        own = np.arange(done[b] // page, -(-int(n) // page))
        table[b, own] = used + np.arange(own.size)
        used += own.size
    order = rng.permutation(used + 2)
    shuffled = np.where(table < 0, 2**31 - 1, order[np.maximum(table, 0)])
    return shuffled.astype(np.int32), starts, ends, used + 2


def make_inputs(
    rng: np.random.Generator,
    query_lengths: tuple[int, ...],
    lengths: tuple[int, ...],
    tree: Tree,
    *,
    H: int = 8,
    K: int = 2,
    D: int = 64,
    page: int = 16,
    dtype: str = "bfloat16",
    cache_dtype: str | None = None,
    sinks: bool = False,
    padding: int = 0,
    **options,
) -> Args:
    """Random arguments of `cascade_attention`; what must not be read is NaN or out of range.

    Args:
        rng: source of randomness.
        query_lengths: new tokens of each request.
        lengths: valid keys of each request, shared ones included.
        tree: who shares what.
        H: query heads.
        K: kv heads.
        D: head dim.
        page: slots per page.
        dtype: of q.
        cache_dtype: None = dtype, or "float8_e4m3fn" with random scales.
        sinks: draw sinks, with -inf, 0, 5 and +inf among them.
        padding: rows of q behind the last request.
        **options: passed on to the op.
    """
    table, starts, ends, pool = shared_table(rng, np.array(lengths), tree, page)
    k, v = (rng.standard_normal((pool, page, K, D)).astype(np.float32) for _ in range(2))
    owned = np.zeros((pool, page), bool)
    for b, n in enumerate(lengths):
        slots = np.arange(n)
        owned[table[b, slots // page], slots % page] = True
    k[~owned], v[~owned] = np.nan, np.nan
    args: Args = {}
    if cache_dtype == FP8:
        args = {name: np.float32(rng.uniform(0.01, 0.05)) for name in ("k_scale", "v_scale")}
        k, v = (np.clip(x / args[f"{name}_scale"], -448, 448) for x, name in ((k, "k"), (v, "v")))
    if sinks:
        s = rng.standard_normal(H).astype(np.float32)
        special = np.array([-np.inf, 0, 5, np.inf], np.float32)[: H - 1]
        s[: special.size] = special
        args["sinks"] = jnp.asarray(s)
    start = np.concatenate([[0], np.cumsum(query_lengths)]).astype(np.int32)
    q = rng.standard_normal((int(start[-1]) + padding, H, D)).astype(np.float32)
    q[int(start[-1]) :] = np.nan
    return args | {
        "q": jnp.asarray(q, dtype),
        "k_pages": jnp.asarray(k, cache_dtype or dtype),
        "v_pages": jnp.asarray(v, cache_dtype or dtype),
        "page_table": jnp.asarray(table),
        "lengths": jnp.asarray(lengths, jnp.int32),
        "query_start": jnp.asarray(start),
        "group_start": jnp.asarray(starts),
        "shared": jnp.asarray(ends),
        **options,
    }


def _case(name: str, query_lengths, lengths, tree: Tree, *tags: str, **options) -> Case:
    return Case(
        name=name,
        make=lambda rng: make_inputs(rng, query_lengths, lengths, tree, **options),
        tags=frozenset(tags or ("smoke",)),
    )


_TREE: Tree = (((0, 4, 16), (4, 5, 0)), ((0, 2, 48), (2, 4, 32)))

CASES = (
    _case("decode-shared32", (1, 1, 1), (40, 33, 50), (((0, 3, 32),),), return_lse=True),
    _case("mixed-sinks-softcap", (1, 3, 2), (49, 60, 51), (((0, 3, 48),),), sinks=True, softcap=3.0, return_lse=True),
    _case("tree-two-levels", (1, 1, 2, 1, 3), (50, 60, 40, 33, 20), _TREE, sinks=True, return_lse=True),
    _case("some-share-nothing", (1, 2, 1), (33, 40, 7), (((0, 2, 32),),), padding=3, return_lse=True),
    _case("empty-prefix-and-empty-request", (1, 0, 2), (20, 0, 5), (((0, 3, 0),),), sinks=True, return_lse=True),
    _case("fp16-D128-page64", (1, 1), (65, 70), (((0, 2, 64),),), dtype="float16", D=128, page=64, H=4, K=4),
    _case("fp32-tree", (1, 1, 1, 1), (50, 60, 40, 33), (_TREE[0][:1], _TREE[1]), dtype="float32", H=4, return_lse=True),
    _case("fp8-cache", (2, 1), (40, 33), (((0, 2, 32),),), cache_dtype=FP8, D=128, H=4),
    _case(
        "B32-shared1024",
        (1,) * 32,
        tuple(range(1040, 1040 + 32)),
        (((0, 32, 1024),),),
        "full",
        H=32,
        K=8,
        D=128,
        page=64,
        return_lse=True,
    ),
    _case(
        "tree-B16-T100",
        (100,) * 16,
        tuple(range(1300, 1300 + 16)),
        (((0, 16, 512),), ((0, 8, 1024), (8, 16, 1152))),
        "full",
        H=8,
        K=2,
        D=128,
        page=64,
        sinks=True,
        return_lse=True,
    ),
)


# ---------------------------------------------------------------- benchmarks
def _bench(name: str, B: int, own: int, tree: Tree, *, queries: int = 1, page: int = 64) -> Case:
    def make(rng: np.random.Generator) -> Args:
        lengths = np.full(B, max(end for *_, end in tree[-1]) + own)
        table, starts, ends, pool = shared_table(rng, lengths, tree, page)
        keys = jax.random.split(jax.random.key(int(rng.integers(2**31))), 3)
        k, v = (jax.random.normal(key, (pool, page, 8, 128), jnp.bfloat16) for key in keys[:2])
        return {
            "q": jax.random.normal(keys[2], (B * queries, 32, 128), jnp.bfloat16),
            "k_pages": k,
            "v_pages": v,
            "page_table": jnp.asarray(np.where(table == 2**31 - 1, 0, table)),
            "lengths": jnp.asarray(lengths, jnp.int32),
            "query_start": jnp.arange(0, B * queries + 1, queries, dtype=jnp.int32),
            "group_start": jnp.asarray(starts),
            "shared": jnp.asarray(ends),
        }

    return Case(name=name, make=make, tags=frozenset({"bench"}))


BENCH = (
    _bench("decode-B128-shared8192-own256", 128, 256, (((0, 128, 8192),),)),
    _bench("prefill-B8-T512-shared8192", 8, 512, (((0, 8, 8192),),), queries=512),
    _bench(
        "tree-B128-shared4096+4096-own256",
        128,
        256,
        (((0, 128, 4096),), tuple((i, i + 32, 8192) for i in range(0, 128, 32))),
    ),
)


def probe(rng: np.random.Generator, *, group_start, shared, **args) -> tuple[Args, np.ndarray]:
    """Some rows as requests of one query each, which share nothing: flat attention."""
    fewer, rows = paged_bench.probe(rng, **args, causal=True, window=None)
    del fewer["causal"], fewer["window"]
    one = {"group_start": jnp.asarray([[0, rows.size]], jnp.int32), "shared": jnp.zeros((1, 1), jnp.int32)}
    return fewer | one, rows


# ---------------------------------------------------------------- support rows
def _struct(dtype: str, D: int, page: int, *, levels: int = 1, groups: int = 1, B: int = 128, cache: str = "") -> Args:
    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    pool = array((256, page, 8, D), cache or dtype)
    return {
        "q": array((B, 32, D), dtype),
        "k_pages": pool,
        "v_pages": pool,
        "page_table": array((B, 128), "int32"),
        "lengths": array((B,), "int32"),
        "query_start": array((B + 1,), "int32"),
        "group_start": array((levels, groups + 1), "int32"),
        "shared": array((levels, groups), "int32"),
    }


SUPPORT = (
    *((f"{dtype}, D {D}, one prefix", _struct(dtype, D, 64)) for dtype in ("bfloat16", "float32") for D in (64, 128)),
    ("bfloat16, D 128, two levels of 8 groups", _struct("bfloat16", 128, 64, levels=2, groups=8)),
    ("bfloat16, float8_e4m3fn cache, D 128, one prefix", _struct("bfloat16", 128, 64, cache=FP8)),
    ("bfloat16, D 80, one prefix", _struct("bfloat16", 80, 64)),
    ("bfloat16, D 128, no level", _struct("bfloat16", 128, 64, levels=0)),
)
