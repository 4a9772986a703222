"""RMSNorm of two low-rank projections at once: DeepSeek's q latent and kv latent."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxattn import _checks, _mechanism, _rope
from jaxattn._mechanism import Args, Case, Kernel, Mechanism
from jaxattn.quant import primitives as p
from pallas_kernels import _mosaic
from pallas_kernels import q_kv_rms_norm as mosaic

_OP = "q_kv_rms_norm"


def q_kv_rms_norm(
    q: Float[Array, "N Rq"],
    kv: Float[Array, "N R"],
    q_weight: Float[Array, " Rq"],
    kv_weight: Float[Array, " R"],
    *,
    eps: float = 1e-6,
    implementation: str | None = None,
    config: Any = None,
) -> tuple[Float[Array, "N Rq"], Float[Array, "N R"]]:
    """`x / sqrt(mean(x^2) + eps) * weight` of `q` and of `kv`, in float32 with one rounding.

    Args:
        q: bfloat16, float16 or float32 (float64: reference only).
        kv: the dtype of `q`.
        q_weight: the dtype of `q`.
        kv_weight: the dtype of `q`.
        eps: added to the mean of squares.
        implementation: None (choose), "reference" or "mosaic".
        config: launch configuration of the named kernel.

    Returns:
        both, in the dtype of `q`.

    Raises:
        TypeError: dtypes; ValueError: shapes or options; NotImplementedError: the named implementation cannot run this.

    Source: vLLM 0.26.0 `models/deepseek_v4/common/ops/fused_qk_rmsnorm.py`.
    """
    return _mechanism.run(MECHANISM, prepare(q, kv, q_weight, kv_weight, eps=eps), implementation, config)


def prepare(q, kv, q_weight, kv_weight, *, eps=1e-6) -> Args:
    """Validate and complete the arguments of `q_kv_rms_norm`; raises as it does."""
    _checks.check_shapes(_OP, q=(q, "N Rq"), kv=(kv, "N R"), q_weight=(q_weight, "Rq"), kv_weight=(kv_weight, "R"))
    dtype = _checks.check_dtype(_OP, "q", q, _checks.FLOATS)
    for name, x in (("kv", kv), ("q_weight", q_weight), ("kv_weight", kv_weight)):
        _checks.check_dtype(_OP, name, x, (dtype,), "cast one of them")
    _checks.check_positive(_OP, eps=eps)
    return {"q": q, "kv": kv, "q_weight": q_weight, "kv_weight": kv_weight, "eps": float(eps)}


def _reference(q, kv, q_weight, kv_weight, *, eps):
    """The formula, twice."""

    def norm(x, weight):
        y = p.wide(x)
        return (y * _rope.rms(y, eps) * weight.astype(y.dtype)).astype(x.dtype)

    return norm(q, q_weight), norm(kv, kv_weight)


def _cost(*, q, kv, **_):
    """Read and written once."""
    return 4 * (q.size + kv.size), 2 * (q.size + kv.size) * jnp.dtype(q.dtype).itemsize


def make_inputs(rng: np.random.Generator, N: int, Rq: int, R: int, *, dtype: str = "bfloat16") -> Args:
    """Random arguments of `q_kv_rms_norm`; row 1 is zero and row 2 tiny."""

    def rows(width):
        x = rng.standard_normal((N, width)).astype(np.float32)
        x[1:2], x[2:3] = 0, x[2:3] * np.float32(1e-4)
        return jnp.asarray(x, dtype)

    weights = {f"{name}_weight": jnp.asarray(rng.standard_normal(n), dtype) for name, n in (("q", Rq), ("kv", R))}
    return {"q": rows(Rq), "kv": rows(R), **weights}


def _case(name: str, N: int, Rq: int, R: int, *tags: str, **options) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, N, Rq, R, **options), tags=frozenset(tags or ("smoke",)))


def _struct(dtype: str, Rq: int = 1024, R: int = 512) -> Args:
    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    return {"q": array(128, Rq), "kv": array(128, R), "q_weight": array(Rq), "kv_weight": array(R)}


MECHANISM = Mechanism(
    name=_OP,
    source="vLLM 0.26.0 vllm/models/deepseek_v4/common/ops/fused_qk_rmsnorm.py",
    op=q_kv_rms_norm,
    prepare=prepare,
    reference=_reference,
    outputs=lambda **_: ("q", "kv"),
    kernels={
        "mosaic": Kernel(
            run=mosaic.q_kv_rms_norm,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=(
        _case("N5-1024-512", 5, 1024, 512),
        _case("N4-256-128-fp32", 4, 256, 128, dtype="float32"),
        _case("N3-96-80-fp16", 3, 96, 80, dtype="float16"),
        _case("N4096-1024-512", 4096, 1024, 512, "full", "bench"),
    ),
    cost=_cost,
    captures=("dsv4/q_kv_rmsnorm*",),
    support=tuple((f"{dtype}, 1024 and 512", _struct(dtype)) for dtype in ("bfloat16", "float16", "float32")),
)
