"""Combination of the partial attention results of N ranks by their log-sum-exps."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxattn import _checks, _mechanism
from jaxattn._mechanism import Args, Case, Kernel, Mechanism
from pallas_kernels import _mosaic
from pallas_kernels import combine_partials as mosaic

_OP = "combine_partials"
BASES = ("e", "2")

type Output = tuple[Float[Array, "B H D"], Float[Array, "B H"]]
type Corrected = tuple[Float[Array, "B H D"], Float[Array, "B H"], Float[Array, "N B H D"]]


def combine_partials(
    o: Float[Array, "N B H D"],
    lse: Float[Array, "N B H"],
    *,
    base: str = "e",
    return_corrected: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> Output | Corrected:
    r"""Attention over keys that are spread over N ranks, from each rank's result (decode context parallelism).

        lse         = log(sum_r base^(lse_r - m)) / log(base) + m,   m = max_r lse_r
        corrected_r = o_r * base^(lse_r - lse)
        o           = sum_r corrected_r

    in float32, ranks in order, one rounding of each result. A `lse_r` of -inf, +inf or NaN says that the rank saw no
    key: its `o_r` is not used and may be NaN.

    Args:
        o: normalised results, bfloat16, float16 or float32 (float64: reference only).
        lse: their log-sum-exps in float32.
        base: "e" (natural logarithms) or "2", of the inputs and of the result alike.
        return_corrected: also return each rank's scaled result, what a reduce-scatter over ranks would add up.
        implementation: None (choose), "reference" or "mosaic".
        config: launch configuration of the named kernel.

    Returns:
        `o` in the dtype of the inputs and `lse` in float32; with `return_corrected` also `corrected`, rounded to the
        dtype of `o`. A factor of zero gives exactly +0. If no rank saw a key, `o` is 0 and `lse` is -inf.
        `o` adds the unrounded products; adding up `corrected` rounds once more for each rank.

    Raises:
        TypeError: dtypes; ValueError: shapes or options;
        NotImplementedError: the named implementation cannot run this call.

    Source: vLLM 0.26.0 `vllm/v1/attention/ops/common.py` (`correct_attn_out`), which returns one rank's `corrected`.
    """
    args = prepare(o, lse, base=base, return_corrected=return_corrected)
    return _mechanism.run(MECHANISM, args, implementation, config)


def prepare(o, lse, *, base="e", return_corrected=False) -> Args:
    """Validate and complete the arguments of `combine_partials`; raises as it does."""
    dims = _checks.check_shapes(_OP, o=(o, "N B H D"), lse=(lse, "N B H"))
    dtype = _checks.check_dtype(_OP, "o", o, _checks.FLOATS)
    _checks.check_dtype(_OP, "lse", lse, (_checks.F64,) if dtype == _checks.F64 else ("float32",))
    if dims["N"] == 0:
        raise ValueError(f"{_OP}: needs the result of at least one rank, got o of shape {tuple(o.shape)}")
    if base not in BASES:
        raise ValueError(f"{_OP}: base must be one of {', '.join(BASES)} (strings), got {base!r}")
    return {"o": o, "lse": lse, "base": base, "return_corrected": bool(return_corrected)}


def _reference(o, lse, *, base, return_corrected):
    """The formula; float64 inputs give the truth."""
    wide = jnp.float64 if o.dtype == jnp.float64 else jnp.float32
    exp, log = (jnp.exp, jnp.log) if base == "e" else (jnp.exp2, jnp.log2)
    lse = jnp.where(jnp.isfinite(lse), lse, -jnp.inf)
    top = lse.max(0)
    top = jnp.where(top == -jnp.inf, 0, top)
    total = log(exp(lse - top).sum(0)) + top
    factor = jnp.where(lse == -jnp.inf, 0, exp(lse - total))[..., None]
    corrected = jnp.where(factor == 0, 0, o.astype(wide) * factor)
    outputs = corrected.sum(0).astype(o.dtype), total
    return (*outputs, corrected.astype(o.dtype)) if return_corrected else outputs


def _outputs(*, return_corrected, **_):
    return ("o", "lse", "corrected") if return_corrected else ("o", "lse")


def _cost(*, o, return_corrected, **_):
    """Two operations an element; all inputs and outputs once."""
    N, B, H, D = o.shape
    width = jnp.dtype(o.dtype).itemsize
    copies = N + 1 + (N if return_corrected else 0)
    return 2 * N * B * H * D, B * H * (copies * D * width + 4 * (N + 1))


def make_inputs(
    rng: np.random.Generator,
    N: int,
    B: int,
    H: int,
    D: int,
    *,
    dtype: str = "bfloat16",
    spread: float = 2.0,
    empty: bool = True,
    **options,
) -> Args:
    """Random arguments of `combine_partials`.

    Args:
        rng: source of randomness.
        N: ranks.
        B: sequences.
        H: heads.
        D: head dim.
        dtype: of `o`.
        spread: standard deviation of the log-sum-exps.
        empty: mark a fifth of the entries empty (-inf, +inf, NaN) with NaN as their result, one row on every rank.
        **options: passed on to the op.
    """
    o = rng.standard_normal((N, B, H, D)).astype(np.float32)
    lse = (spread * rng.standard_normal((N, B, H))).astype(np.float32)
    if empty:
        gone = rng.random((N, B, H)) < 0.2
        gone[:, 0, 0] = True
        lse[gone] = rng.choice(np.array([-np.inf, np.inf, np.nan], np.float32), gone.sum())
        o[gone] = np.nan
    return {"o": jnp.asarray(o, dtype), "lse": jnp.asarray(lse), **options}


def _case(name: str, N: int, B: int, H: int, D: int, *tags: str, **options) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, N, B, H, D, **options), tags=frozenset(tags or ("smoke",)))


_CASES = (
    _case("N4-B3-H8-D128", 4, 3, 8, 128, return_corrected=True),
    _case("N1-B2-H8-D64", 1, 2, 8, 64),
    _case("N8-B2-H16-D64-base2", 8, 2, 16, 64, base="2"),
    _case("N2-B5-H3-D192-fp16", 2, 5, 3, 192, dtype="float16", return_corrected=True),
    _case("N3-B5-H5-D128-fp32", 3, 5, 5, 128, dtype="float32", return_corrected=True),
    _case("N4-B2-H8-D512-fp32-base2", 4, 2, 8, 512, dtype="float32", base="2"),
    _case("N2-B4-H8-D64-wide-spread", 2, 4, 8, 64, spread=80.0, return_corrected=True),
    _case("N8-B256-H64-D512", 8, 256, 64, 512, "full", "bench", empty=False),
    _case("N4-B127-H63-D128-fp32", 4, 127, 63, 128, "full", dtype="float32"),
)


def _struct(dtype: str, N: int, B: int, H: int, D: int, **options) -> Args:
    return {
        "o": jax.ShapeDtypeStruct((N, B, H, D), jnp.dtype(dtype)),
        "lse": jax.ShapeDtypeStruct((N, B, H), jnp.float32),
        **options,
    }


_SUPPORT = (
    *(
        (f"{dtype}, N {N}, D {D}", _struct(dtype, N, 64, 32, D))
        for dtype in ("bfloat16", "float16", "float32")
        for N, D in ((2, 64), (4, 128), (8, 512))
    ),
    ("bfloat16, N 32, D 128", _struct("bfloat16", 32, 64, 32, 128)),
    ("bfloat16, N 4, D 100", _struct("bfloat16", 4, 64, 32, 100)),
)

MECHANISM = Mechanism(
    name=_OP,
    source="vLLM 0.26.0 vllm/v1/attention/ops/common.py",
    op=combine_partials,
    prepare=prepare,
    reference=_reference,
    outputs=_outputs,
    kernels={
        "mosaic": Kernel(
            run=mosaic.combine_partials,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=_CASES,
    cost=_cost,
    captures=("attention/dcp_combine*", "partial_attention/dcp_combine*"),
    support=_SUPPORT,
)
