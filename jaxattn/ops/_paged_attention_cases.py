"""Test cases and support rows of paged attention; what must not be read is poisoned."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn._mechanism import Args, Case

FP8 = "float8_e4m3fn"


def make_inputs(
    rng: np.random.Generator,
    query_lengths: tuple[int, ...],
    lengths: tuple[int, ...],
    *,
    H: int = 8,
    K: int = 2,
    D: int = 64,
    page: int = 16,
    dtype: str = "bfloat16",
    cache_dtype: str | None = None,
    sinks: bool = False,
    padding: int = 0,
    table_width: int = 0,
    poison: bool = True,
    **options,
) -> Args:
    """Random arguments of `paged_attention` with shuffled pages; what must not be read is NaN or out of range.

    Args:
        rng: source of randomness.
        query_lengths: new tokens of each request.
        lengths: valid keys of each request.
        H: query heads.
        K: kv heads.
        D: head dim.
        page: slots per page.
        dtype: of q.
        cache_dtype: None = dtype, or "float8_e4m3fn" with random scales.
        sinks: draw sinks, with -inf, 0, +inf and 5 among them.
        padding: rows of q behind the last request.
        table_width: least number of columns of the page table.
        poison: NaN in free slots and pages, huge numbers in unused table entries.
        **options: passed on to the op.
    """
    B, pages = len(lengths), max(1, max(-(-n // page) for n in lengths))
    pool = B * pages + 3
    start = np.concatenate([[0], np.cumsum(query_lengths)]).astype(np.int32)
    k, v = (rng.standard_normal((pool, page, K, D)).astype(np.float32) for _ in range(2))
    table = rng.permutation(pool)[: B * pages].reshape(B, pages).astype(np.int32)
    unused = max(0, table_width - pages)
    table = np.pad(table, ((0, 0), (0, unused)), constant_values=2**31 - 1 if poison else 0)
    if poison:
        owned = np.zeros((pool, page), bool)
        for b, n in enumerate(lengths):
            window = options.get("window")
            queries = query_lengths[b]
            low = max(0, n - queries - window + 1) if window and queries else 0
            slots = np.arange(low, n)
            owned[table[b, slots // page], slots % page] = True
            table[b, -(-n // page) :] = 2**31 - 1
        k[~owned], v[~owned] = np.nan, np.nan
    args: Args = {}
    if cache_dtype == FP8:
        args = {
            "k_scale": np.float32(rng.uniform(0.01, 0.05)),
            "v_scale": np.float32(rng.uniform(0.01, 0.05)),
        }
        k, v = k / args["k_scale"], v / args["v_scale"]
        k, v = (np.clip(x, -448, 448) for x in (k, v))
    if sinks:
        s = rng.standard_normal(H).astype(np.float32)
        special = np.array([-np.inf, 0, 5, np.inf], np.float32)[: H - 1]
        s[: special.size] = special
        args["sinks"] = jnp.asarray(s)
    q = rng.standard_normal((int(start[-1]) + padding, H, D)).astype(np.float32)
    q[int(start[-1]) :] = np.nan if poison else 0
    return args | {
        "q": jnp.asarray(q.astype(dtype)),  # in numpy, where nothing is compiled for it
        "k_pages": jnp.asarray(k.astype(cache_dtype or dtype)),
        "v_pages": jnp.asarray(v.astype(cache_dtype or dtype)),
        "page_table": jnp.asarray(table),
        "lengths": jnp.asarray(lengths, jnp.int32),
        "query_start": jnp.asarray(start),
        **options,
    }


def _case(name: str, query_lengths, lengths, *tags: str, **options) -> Case:
    return Case(
        name=name,
        make=lambda rng: make_inputs(rng, query_lengths, lengths, **options),
        tags=frozenset(tags or ("smoke",)),
    )


CASES = (
    _case("decode-lens-1-to-full", (1, 1, 1, 1), (1, 17, 64, 70), return_lse=True),
    _case("decode-sinks", (1, 1, 1), (1, 31, 65), sinks=True, return_lse=True),
    _case("decode-window31-sinks", (1, 1), (32, 90), sinks=True, window=31, return_lse=True),
    _case("mixed-prefill", (1, 5, 33), (40, 5, 50), return_lse=True),
    _case("mixed-window16-sinks", (1, 5, 20), (40, 5, 60), window=16, sinks=True, return_lse=True),
    _case("noncausal-window9", (3, 20), (20, 41), causal=False, window=9, return_lse=True),
    _case("softcap", (1, 7), (33, 50), softcap=2.0, H=4, K=4, return_lse=True),
    _case(
        "empty-requests-and-padding",
        (0, 1, 0, 2),
        (0, 20, 5, 2),
        padding=3,
        sinks=True,
        return_lse=True,
    ),
    _case("gqa1-page64-D128", (2, 1), (70, 3), H=2, K=2, D=128, page=64),
    _case("gqa6", (1, 9), (77, 30), H=6, K=1),
    _case("gqa7-page32", (9, 1), (40, 33), H=7, K=1, page=32),
    _case("gqa24", (2, 3), (20, 40), H=48, K=2),
    _case("page128", (1, 3), (130, 200), page=128),
    _case("D256", (1, 3), (50, 33), H=4, K=2, D=256),
    _case("fp16", (1, 5), (65, 30), dtype="float16", sinks=True, return_lse=True),
    _case("fp32", (1, 5), (65, 30), dtype="float32", sinks=True, return_lse=True),
    _case("fp32-D128-window", (1, 9), (90, 30), dtype="float32", D=128, window=20, return_lse=True),
    _case("fp32-D256", (1, 3), (40, 20), dtype="float32", D=256, H=4, K=2, return_lse=True),
    _case("fp8-cache", (1, 4), (70, 33), cache_dtype=FP8, D=128, return_lse=True),
    _case("speculative", (8, 1, 4), (70, 20, 4), sinks=True, return_lse=True),
    _case("speculative-window-softcap", (2, 3), (50, 33), window=20, softcap=5.0, return_lse=True),
    _case("shared-out", (1, 1, 1), (300, 1, 90), sinks=True, table_width=72, return_lse=True),
    _case("shared-out-speculative", (3, 0, 5), (140, 9, 70), padding=2, page=32, table_width=36, return_lse=True),
    _case("shared-out-fp8", (1, 2), (150, 40), cache_dtype=FP8, D=128, page=64, table_width=18, return_lse=True),
    _case(
        "fp8-window-fp16", (1, 3), (90, 20), cache_dtype=FP8, dtype="float16", window=40, sinks=True, return_lse=True
    ),
    _case("batch64", (1,) * 64, tuple(range(1, 1025, 16)), "full", H=32, K=8, D=128, return_lse=True),
    _case("decode-long", (1,) * 9, (9000, *range(1, 8001, 1000)), "full", H=64, K=8, D=128, page=64, return_lse=True),
    _case("decode-long-fp8", (1, 4, 2), (9000, 5000, 70), "full", H=32, K=8, D=128, page=64, cache_dtype=FP8),
    _case(
        "prefill-1000",
        (1000, 63, 127),
        (1000, 1063, 127),
        "full",
        H=16,
        K=2,
        D=128,
        page=64,
        sinks=True,
    ),
    _case(
        "prefill-window128",
        (900, 63),
        (900, 1063),
        "full",
        H=16,
        K=2,
        window=128,
        sinks=True,
        return_lse=True,
    ),
    _case("fp32-long", (1, 64), (3000, 1111), "full", dtype="float32", D=128, page=64, return_lse=True),
    _case("D256-long", (1, 65), (2000, 300), "full", H=8, K=2, D=256, page=64, return_lse=True),
)


def _struct(dtype: str, D: int, page: int, H: int = 32, K: int = 8, cache_dtype: str | None = None) -> Args:
    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    pool = array((128, page, K, D), cache_dtype or dtype)
    return {
        "q": array((64, H, D), dtype),
        "k_pages": pool,
        "v_pages": pool,
        "page_table": array((8, 16), "int32"),
        "lengths": array((8,), "int32"),
        "query_start": array((9,), "int32"),
    }


SUPPORT = (
    *(
        (f"{dtype}, D {D}, page {page}", _struct(dtype, D, page))
        for dtype in ("bfloat16", "float16", "float32")
        for D in (64, 128, 256)
        for page in (16, 32, 64, 128)
        if D == 128 or page == 64
    ),
    (
        "bfloat16, float8_e4m3fn cache, D 128, page 64",
        _struct("bfloat16", 128, 64, cache_dtype=FP8),
    ),
    ("bfloat16, D 80, page 64", _struct("bfloat16", 80, 64)),
    ("bfloat16, D 128, page 8", _struct("bfloat16", 128, 8)),
    ("float64, D 128, page 64", _struct("float64", 128, 64)),
)
