"""Hadamard rotation of the last axis, whole or in groups."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxattn import _checks, _mechanism
from jaxattn._mechanism import Args, Case, Kernel, Mechanism
from jaxattn.quant import hadamard
from pallas_kernels import _mosaic
from pallas_kernels import hadamard_transform as mosaic

_OP = "hadamard_transform"


def hadamard_transform(
    x: Float[Array, "N M"],
    *,
    group: int | None = None,
    implementation: str | None = None,
    config: Any = None,
) -> Float[Array, "N M"]:
    """`x H / sqrt(group)` in every group of `group` numbers of a row, H Sylvester's matrix of +-1; its own inverse.

    Sums are float32 (float64 for float64), the result is rounded to the dtype of `x` once.

    Args:
        x: bfloat16, float16 or float32 (float64: reference only).
        group: a power of two that divides M; None = M.
        implementation: None (choose), "reference" or "mosaic".
        config: launch configuration of the named kernel.

    Raises:
        TypeError: dtypes; ValueError: shapes or group;
        NotImplementedError: the named implementation cannot run this call.

    Source: vLLM 0.26.0 `_C.hadacore_transform`.
    """
    return _mechanism.run(MECHANISM, prepare(x, group=group), implementation, config)


def prepare(x, *, group=None) -> Args:
    """Validate and complete the arguments of `hadamard_transform`; raises as it does."""
    M = _checks.check_shapes(_OP, x=(x, "N M"))["M"]
    _checks.check_dtype(_OP, "x", x, _checks.FLOATS)
    group = M if group is None else group
    _checks.check_count(_OP, group=group)
    try:
        hadamard.check(M, group)
    except ValueError as e:
        raise ValueError(f"{_OP}: {e}") from e
    return {"x": x, "group": int(group)}


def _outputs(**_):
    return ("o",)


def _cost(*, x, group, **_):
    """log2(group) additions a number; read and written once."""
    return x.size * (group.bit_length() - 1), 2 * x.size * jnp.dtype(x.dtype).itemsize


def _case(name: str, N: int, M: int, *tags: str, dtype: str = "bfloat16", **options) -> Case:
    def make(rng):
        return {"x": jnp.asarray(rng.standard_normal((N, M)), dtype), **options}

    return Case(name=name, make=make, tags=frozenset(tags or ("smoke",)))


_CASES = (
    _case("M128", 6, 128),
    _case("M128-fp32", 6, 128, dtype="float32"),
    _case("groups-of-32", 5, 96, group=32),
    _case("M1024-fp16", 3, 1024, dtype="float16"),
    _case("M1-fp32", 3, 1, dtype="float32"),
    _case("M4096-fp32", 3, 4096, dtype="float32"),
    _case("M512", 9, 512),
    _case("groups-of-128-16384x7168", 16384, 7168, "full", "bench", group=128),
    _case("16384x4096", 16384, 4096, "full", "bench"),
)
_SUPPORT = tuple(
    (f"{dtype}, groups of {group}", {"x": jax.ShapeDtypeStruct((64, 512), jnp.dtype(dtype)), "group": group})
    for dtype in ("bfloat16", "float16", "float32")
    for group in (32, 128, 512)
)

MECHANISM = Mechanism(
    name=_OP,
    source="vLLM 0.26.0 csrc/quantization/hadamard/hadacore",
    op=hadamard_transform,
    prepare=prepare,
    reference=hadamard.rotate,
    outputs=_outputs,
    kernels={
        "mosaic": Kernel(
            run=mosaic.hadamard_transform,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=_CASES,
    cost=_cost,
    captures=("quant/hadamard*",),
    support=_SUPPORT,
)
