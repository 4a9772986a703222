"""Cases and support rows of contiguous and packed attention."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn._mechanism import Args, Case


def make_inputs(
    rng: np.random.Generator,
    queries: tuple[int, ...],
    keys: tuple[int, ...] | None = None,
    *,
    H: int = 8,
    K: int = 2,
    D: int = 64,
    Dv: int | None = None,
    dtype: str = "bfloat16",
    sinks: bool = False,
    padding: int = 0,
    batch: bool = False,
    poison: bool = True,
    **options,
) -> Args:
    """Random arguments of `attention`; what must not be read is NaN.

    Args:
        rng: source of randomness.
        queries: query length of each sequence.
        keys: key length of each sequence, None = `queries`.
        H: query heads.
        K: kv heads.
        D: head dim of q and k.
        Dv: head dim of v, None = D.
        dtype: of q, k and v.
        sinks: draw sinks, with -inf, 0, +inf and 5 among them.
        padding: rows of q, k and v behind the last sequence.
        batch: sequences of equal length as a batch, without starts.
        poison: NaN in padding and in keys that no query sees.
        **options: passed on to the op.
    """
    given, keys = keys is not None, keys or queries
    starts = [np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (queries, keys)]
    N, S = (int(x[-1]) + padding for x in starts)
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((N, H, D), (S, K, D), (S, K, Dv or D)))
    if poison:
        read, window, causal = np.zeros(S, bool), options.get("window"), options.get("causal", True)
        for T, length, start in zip(queries, keys, starts[1], strict=False):
            first = length - T
            low = max(0, first - window + 1) if window else 0
            high = min(length, length + window - 1) if window and not causal else length
            read[start + low : start + high] = bool(T)
        k[~read], v[~read] = np.nan, np.nan
        q[int(starts[0][-1]) :] = np.nan
    args: Args = {name: jnp.asarray(x, dtype) for name, x in (("q", q), ("k", k), ("v", v))}
    if sinks:
        s = rng.standard_normal(H).astype(np.float32)
        special = np.array([-np.inf, 0, 5, np.inf], np.float32)[: H - 1]
        s[: special.size] = special
        args["sinks"] = jnp.asarray(s)
    if batch:
        args |= {name: args[name].reshape(len(queries), -1, *args[name].shape[1:]) for name in ("q", "k", "v")}
    else:
        args["query_start"] = jnp.asarray(starts[0])
        args |= {"key_start": jnp.asarray(starts[1])} if given else {}
    return args | options


def _case(name: str, queries, keys, *tags: str, **options) -> Case:
    return Case(
        name=name,
        make=lambda rng: make_inputs(rng, queries, keys, **options),
        tags=frozenset(tags or ("smoke",)),
    )


CASES = (
    _case("causal-lens-1-to-150", (1, 20, 150), None, H=2, K=1, return_lse=True),
    _case("causal-more-keys-D128", (1, 130), (50, 200), H=2, K=2, D=128, return_lse=True),
    _case("full-D128", (70, 5), (33, 140), H=2, K=1, D=128, causal=False, return_lse=True),
    _case("window24-sinks", (33, 77), (33, 90), H=4, window=24, sinks=True, return_lse=True),
    _case("window9-full", (30, 20), (40, 21), causal=False, window=9, H=2, return_lse=True),
    _case("more-queries-than-keys", (90, 3), (40, 0), H=2, K=1, sinks=True, return_lse=True),
    _case("empty-and-padding", (0, 70, 0, 2), (7, 70, 0, 2), H=2, padding=3, sinks=True, return_lse=True),
    _case("softcap", (40, 9), None, softcap=2.0, H=2, K=1, return_lse=True),
    _case("batch-of-two", (66, 66), (80, 80), batch=True, H=2, K=1, return_lse=True),
    _case("mla-192-128", (20, 33), (20, 64), H=2, K=2, D=192, Dv=128, return_lse=True),
    _case("D256", (20, 33), (20, 90), H=2, K=1, D=256),
    _case("gqa3-fp16", (9, 70), None, H=3, K=1, dtype="float16", sinks=True, return_lse=True),
    _case("fp32", (1, 40), (50, 40), dtype="float32", sinks=True, return_lse=True),
    _case("fp32-window-full", (30, 20), (40, 21), dtype="float32", causal=False, window=9, return_lse=True),
    _case("fp32-softcap", (1, 20), (30, 20), dtype="float32", softcap=2.0, return_lse=True),
    _case("causal-1000", (1000, 63, 127, 1), (1000, 1063, 127, 500), "full", H=16, D=128, return_lse=True),
    _case("window128-2000", (2000, 100), None, "full", H=16, K=2, window=128, sinks=True, return_lse=True),
    _case("full-700", (700, 129), (600, 900), "full", causal=False, D=128, return_lse=True),
    _case("mla-1000", (1000, 300), (1000, 700), "full", K=8, D=192, Dv=128, return_lse=True),
    _case("D256-700", (700,), None, "full", D=256, return_lse=True),
    _case("fp16-batch-500", (500, 500), None, "full", batch=True, D=128, dtype="float16", return_lse=True),
)


def _struct(dtype: str, D: int, Dv: int | None = None, H: int = 32, K: int = 8, N: int = 512, **options) -> Args:
    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    q, k, v = (array((N, *s), dtype) for s in ((H, D), (K, D), (K, Dv or D)))
    return {"q": q, "k": k, "v": v, "query_start": array((5,), "int32"), **options}


SUPPORT = (
    *((f"{dtype}, D {D}", _struct(dtype, D)) for dtype in ("bfloat16", "float16") for D in (64, 128, 192, 256)),
    ("bfloat16, D 192, Dv 128", _struct("bfloat16", 192, 128)),
    ("bfloat16, D 128, softcap", _struct("bfloat16", 128, softcap=30.0)),
    ("bfloat16, D 64, window 128", _struct("bfloat16", 64, H=64, window=128)),
    ("bfloat16, D 128, full", _struct("bfloat16", 128, causal=False)),
    ("bfloat16, D 80", _struct("bfloat16", 80)),
    ("bfloat16, D 128, Dv 512", _struct("bfloat16", 128, 512)),
    ("float32, D 128", _struct("float32", 128)),
    ("float64, D 128", _struct("float64", 128)),
)
