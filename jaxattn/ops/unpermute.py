"""Weighted sum of the experts' rows of every token."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxattn import _checks, _mechanism
from jaxattn._mechanism import Args, Case, Kernel, Mechanism
from jaxattn.ops import permute
from jaxattn.quant import primitives as p
from pallas_kernels import _mosaic
from pallas_kernels import unpermute as mosaic

_OP = "unpermute"


def unpermute(
    y: Float[Array, "R M"],
    positions: Int32[Array, "T A"],
    weights: Float[Array, "T A"] | None = None,
    *,
    implementation: str | None = None,
    config: Any = None,
) -> Float[Array, "T M"]:
    """`o[t] = sum over slots a of weights[t, a] * y[positions[t, a]]`, float32, slots in order, one rounding.

    Args:
        y: rows sorted by expert, see `permute`.
        positions: row of each (token, slot); -1 = no row, which adds nothing, whatever its weight.
        weights: float32, None = 1 (the rows are weighted already).
        implementation: None (choose), "reference" or "mosaic".
        config: launch configuration of the named kernel.

    Raises:
        TypeError: dtypes; ValueError: shapes;
        NotImplementedError: the named implementation cannot run this call.

    Source: vLLM 0.26.0 `moe_permute_unpermute.py` (moe_unpermute), `csrc/moe/moe_align_sum_kernels.cu` (moe_sum).
    """
    return _mechanism.run(MECHANISM, prepare(y, positions, weights), implementation, config)


def moe_sum(y: Float[Array, "T A M"]) -> Float[Array, "T M"]:
    """Sum over the slots of every token in float32, in their order, one rounding."""
    T, A, M = _checks.check_shapes("moe_sum", y=(y, "T A M")).values()
    return unpermute(y.reshape(T * A, M), jnp.arange(T * A, dtype=jnp.int32).reshape(T, A))


def prepare(y, positions, weights=None) -> Args:
    """Validate and complete the arguments of `unpermute`; raises as it does."""
    named = {"y": (y, "R M"), "positions": (positions, "T A")}
    _checks.check_shapes(_OP, **named, **({} if weights is None else {"weights": (weights, "T A")}))
    dtype = _checks.check_dtype(_OP, "y", y, _checks.FLOATS)
    _checks.check_dtype(_OP, "positions", positions, ("int32",))
    if weights is not None:
        _checks.check_dtype(_OP, "weights", weights, (_checks.F64,) if dtype == _checks.F64 else ("float32",))
    return {"y": y, "positions": positions, "weights": weights}


def _reference(y, positions, weights):
    """Slots are added one after the other, as a kernel adds them."""
    T, A = positions.shape
    if not y.shape[0]:
        return jnp.zeros((T, y.shape[1]), y.dtype)
    wide = p.wide(y)
    total = jnp.zeros((T, y.shape[1]), wide.dtype)
    for a in range(A):
        at = positions[:, a, None]
        row = wide[jnp.maximum(positions[:, a], 0)]
        total = total + jnp.where(at >= 0, row if weights is None else row * weights[:, a, None], 0)
    return total.astype(y.dtype)


def _outputs(**_):
    return ("o",)


def _cost(*, y, positions, **_):
    """Every row read, every token written once."""
    (T, A), M = positions.shape, y.shape[1]
    return 2 * T * A * M, jnp.dtype(y.dtype).itemsize * T * M * (A + 1) + 8 * T * A


def make_inputs(
    rng: np.random.Generator,
    T: int,
    A: int,
    M: int,
    *,
    dtype: str = "bfloat16",
    weighted: bool = True,
    gone: float = 0.0,
) -> Args:
    """Random arguments of `unpermute`: rows in any order, a share `gone` of pairs without row, whose weight is NaN."""
    positions = rng.permutation(T * A).reshape(T, A)
    weights = rng.random((T, A)).astype(np.float32)
    none = rng.random((T, A)) < gone
    positions[none], weights[none] = -1, np.nan
    args: Args = {
        "y": jnp.asarray(rng.standard_normal((T * A, M)), dtype),
        "positions": jnp.asarray(positions, jnp.int32),
    }
    return args | ({"weights": jnp.asarray(weights)} if weighted else {})


def _case(name: str, *sizes: int, tags: tuple[str, ...] = ("smoke",), **options) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, *sizes, **options), tags=frozenset(tags))


def _struct(dtype: str, A: int, M: int) -> Args:
    wide = jnp.float64 if dtype == "float64" else jnp.float32
    arrays = {"y": ((2048 * A, M), jnp.dtype(dtype)), "positions": ((2048, A), jnp.int32), "weights": ((2048, A), wide)}
    return {name: jax.ShapeDtypeStruct(shape, kind) for name, (shape, kind) in arrays.items()}


MECHANISM = Mechanism(
    name=_OP,
    source=permute.MECHANISM.source,
    op=unpermute,
    prepare=prepare,
    reference=_reference,
    outputs=_outputs,
    kernels={
        "mosaic": Kernel(
            run=mosaic.unpermute,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=(
        _case("T9-A2-M128", 9, 2, 128),
        _case("T9-A3-M24-gone-fp32", 9, 3, 24, dtype="float32", gone=0.3),
        _case("T5-A8-M16-fp16-sum", 5, 8, 16, dtype="float16", weighted=False),
        _case("T9-A3-M136-gone-fp32", 9, 3, 136, dtype="float32", gone=0.3),
        _case("T5-A8-M256-fp16-sum", 5, 8, 256, dtype="float16", weighted=False),
        _case("T3-A10-M2048-gone", 3, 10, 2048, gone=0.3),
        _case("T300-A8-M7168", 300, 8, 7168, tags=("full",)),
        _case("T300-A4-M2880-gone", 300, 4, 2880, gone=0.3, tags=("full",)),
        _case("T4096-A6-M4096", 4096, 6, 4096, tags=("full", "bench")),
    ),
    cost=_cost,
    captures=("moe/permute_unpermute*",),
    support=tuple(
        (f"{dtype}, A {A}, M {M}", _struct(dtype, A, M))
        for dtype, A, M in (
            ("bfloat16", 6, 4096),
            ("bfloat16", 8, 7168),
            ("bfloat16", 4, 2880),
            ("float16", 8, 4096),
            ("float32", 8, 4096),
            ("bfloat16", 6, 64),
            ("float64", 6, 4096),
        )
    ),
)
