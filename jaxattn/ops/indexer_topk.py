"""The choice of the lightning indexer: the entries with the largest logits of every token."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxattn import _checks, _mechanism
from jaxattn._mechanism import Args, Case, Kernel, Mechanism
from pallas_kernels import _mosaic
from pallas_kernels import indexer_topk as mosaic

_OP = "indexer_topk"


def indexer_topk(
    logits: Float[Array, "N S"],
    starts: Int32[Array, " N"],
    ends: Int32[Array, " N"],
    *,
    topk: int,
    implementation: str | None = None,
    config: Any = None,
) -> Int32[Array, "N topk"]:
    """The `topk` entries with the largest logits among `starts[n]` to `ends[n] - 1`, in rising order.

    The set is exact: of equal logits the lowest entries are taken, -0 equals 0, NaN counts as -inf, and entries in the
    range with -inf come last, but before none. `jaxattn.indexer` chooses by this op.

    Args:
        logits: float32 (float64: reference only). What lies outside a token's range is not used and may be NaN.
        starts: int32, the token's first entry, not negative.
        ends: int32, behind the token's last entry; clipped to S. `ends <= starts`: no entry.
        topk: entries to choose.
        implementation: None (choose), "reference" or "mosaic".
        config: launch configuration of the named kernel.

    Returns:
        int32, counted from `starts[n]`, -1 behind the last where fewer entries exist.

    Raises:
        TypeError: dtypes; ValueError: shapes or options; NotImplementedError: the named implementation cannot run this.

    Source: DeepSeek-V3.2; vLLM 0.26.0 csrc `top_k_per_row` (whose order is undefined).
    """
    return _mechanism.run(MECHANISM, prepare(logits, starts, ends, topk=topk), implementation, config)


def prepare(logits, starts, ends, *, topk) -> Args:
    """Validate the arguments of `indexer_topk`; raises as it does."""
    _checks.check_shapes(_OP, logits=(logits, "N S"), starts=(starts, "N"), ends=(ends, "N"))
    _checks.check_dtype(_OP, "logits", logits, ("float32", _checks.F64))
    for name, x in (("starts", starts), ("ends", ends)):
        _checks.check_dtype(_OP, name, x, ("int32",))
    _checks.check_count(_OP, topk=topk)
    return {"logits": logits, "starts": starts, "ends": ends, "topk": int(topk)}


def rising(logits, starts, ends, topk: int) -> Int32[Array, "N topk"]:
    """The reference: the best entries, sorted by entry."""
    best = best_first(logits, starts, ends, topk)
    last = jnp.iinfo(jnp.int32).max
    chosen = jnp.sort(jnp.where(best < 0, last, best), 1)
    return jnp.where(chosen == last, -1, chosen)


def best_first(logits, starts, ends, topk: int) -> Int32[Array, "N topk"]:
    """The same entries by falling logits, the lowest first of equals."""
    S = logits.shape[1]
    if not S:
        return jnp.full((len(logits), topk), -1, jnp.int32)
    entry = jnp.arange(S, dtype=jnp.int32)
    visible = (entry >= starts[:, None]) & (entry < ends[:, None])
    _, best = lax.top_k(jnp.where(visible, _keys(logits), jnp.iinfo(_kind(logits)).min), min(topk, S))
    there = jnp.take_along_axis(visible, best, 1)
    chosen = jnp.where(there, best - starts[:, None], -1).astype(jnp.int32)
    return jnp.pad(chosen, ((0, 0), (0, topk - chosen.shape[1])), constant_values=-1)


def sort_by_logit(logits, starts, chosen: Int32[Array, "N topk"]) -> Int32[Array, "N topk"]:
    """Chosen entries in the order of `best_first`, of which a sort of them alone is enough."""
    if not logits.shape[1]:
        return chosen
    found = jnp.take_along_axis(logits, jnp.where(chosen < 0, 0, chosen + starts[:, None]), 1)
    low = jnp.iinfo(_kind(logits)).min
    return lax.sort((~jnp.where(chosen < 0, low, _keys(found)), chosen), dimension=1, is_stable=False, num_keys=2)[1]


def _kind(x):
    return jnp.int64 if x.dtype == jnp.float64 else jnp.int32


def _keys(x):
    """Integers in the order of floats, denormals included: NaN as -inf, both zeros alike; none is the lowest."""
    kind = _kind(x)
    width, low, magnitude = jnp.iinfo(kind).bits, jnp.iinfo(kind).min, jnp.iinfo(kind).max
    infinite = lax.bitcast_convert_type(jnp.asarray(jnp.inf, x.dtype), kind)
    bits = lax.bitcast_convert_type(x, kind)
    size = bits & magnitude
    bits = jnp.where(size > infinite, infinite | low, jnp.where(size == 0, 0, bits))
    return bits ^ ((bits >> (width - 1)) & magnitude)


def _cost(*, logits, topk, **_):
    """Read once, indices written; a comparison for each bit of a key."""
    return 32 * logits.size, 4 * (logits.size + logits.shape[0] * (topk + 2))


def make_inputs(
    rng: np.random.Generator, N: int, S: int, *, topk: int, kind: str = "normal", causal: bool = False
) -> Args:
    """Random arguments of `indexer_topk`: NaN outside of every range.

    Args:
        rng: source of randomness.
        N: tokens.
        S: entries.
        topk: entries to choose.
        kind: "normal", "ties" (few different numbers, both zeros) or "edges" (infinities, NaN, denormals inside).
        causal: ends rise to S, starts are 0; else ranges are random, one is empty and one behind the end.
    """
    if kind == "normal":
        x = rng.standard_normal((N, S)).astype(np.float32)
    elif kind == "ties":
        x = rng.integers(-1, 3, (N, S)).astype(np.float32) * rng.choice(np.array([-1, 1], np.float32), (N, S))
    else:
        some = np.array([np.inf, -np.inf, np.nan, -np.nan, 0, -0.0, 1e-40, -1e-40, 3e38, -3e38, 1, -1], np.float32)
        x = rng.choice(some, (N, S))
    starts, ends = np.zeros(N, np.int32), np.linspace(1, S, N).astype(np.int32)
    if not causal:
        starts = rng.integers(0, S, N).astype(np.int32)
        starts[0] = 0
        ends = (starts + rng.integers(1, S, N)).astype(np.int32)
        ends[-1:] = starts[-1:]
    entry = np.arange(S)
    x[(entry < starts[:, None]) | (entry >= ends[:, None])] = np.nan
    return {"logits": jnp.asarray(x), "starts": jnp.asarray(starts), "ends": jnp.asarray(ends), "topk": topk}


def _case(name: str, N: int, S: int, *tags: str, **options) -> Case:
    return Case(
        name=name,
        make=lambda rng: make_inputs(rng, N, S, **options),
        tags=frozenset(tags or ("smoke",)),
        shapes=lambda: _struct(N, S, options["topk"]),
    )


def _struct(N: int, S: int, topk: int) -> Args:
    def array(*shape, dtype="int32"):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    return {"logits": array(N, S, dtype="float32"), "starts": array(N), "ends": array(N), "topk": topk}


MECHANISM = Mechanism(
    name=_OP,
    source="DeepSeek-V3.2; vLLM 0.26.0 csrc/sampler.cu (top_k_per_row_prefill)",
    op=indexer_topk,
    prepare=prepare,
    reference=rising,
    outputs=lambda **_: ("chosen",),
    kernels={
        "mosaic": Kernel(
            run=mosaic.indexer_topk,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=(
        _case("N6-S512-top64", 6, 512, topk=64),
        _case("N4-S700-ties", 4, 700, topk=100, kind="ties"),
        _case("N5-S300-edges", 5, 300, topk=40, kind="edges"),
        _case("N3-S200-more-than-there-are", 3, 200, topk=256, kind="edges"),
        _case("N130-S4096-top512", 130, 4096, "full", topk=512, causal=True),
        _case("N20-S40000-top2048", 20, 40000, "full", topk=2048),
        _case("N4096-S4096-top512", 4096, 4096, "full", "bench", topk=512),
        _case("N4096-S4096-top512-causal", 4096, 4096, "full", "bench", topk=512, causal=True),
        _case("N512-S32768-top2048", 512, 32768, "full", "bench", topk=2048),
    ),
    cost=_cost,
    captures=("dsv4/indexer_logits_and_topk*",),
    support=(
        ("top 512 of 4096", _struct(256, 4096, 512)),
        ("top 2048 of 32768", _struct(256, 32768, 2048)),
        ("top 512 of 1000", _struct(256, 1000, 512)),
        ("top 8192 of 32768", _struct(256, 32768, 8192)),
    ),
)
