"""The second half of a hyper-connection: the streams are mixed and receive the layer's output."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxattn import _checks, _hyper, _mechanism
from jaxattn._mechanism import Args, Case, Kernel, Mechanism
from pallas_kernels import _mosaic
from pallas_kernels import mhc_post as mosaic

_OP = "mhc_post"


def mhc_post(
    residual: Float[Array, "N streams M"],
    y: Float[Array, "N M"],
    post: Float[Array, "N streams"],
    comb: Float[Array, "N streams streams"],
    *,
    implementation: str | None = None,
    config: Any = None,
) -> Float[Array, "N streams M"]:
    r"""New streams `R'_j = sum_i comb[i, j] R_i + post_j y`, in float32, rounded once.

    Args:
        residual: streams R, bfloat16, float16 or float32 (float64: reference only).
        y: the layer's output, the dtype of `residual`.
        post: float32 gates of `mhc_pre`.
        comb: float32 matrix of `mhc_pre`, `[source, destination]`.
        implementation: None (choose), "reference" or "mosaic".
        config: launch configuration of the named kernel.

    Returns:
        the streams, dtype of `residual`.

    Raises:
        TypeError: dtypes; ValueError: shapes; NotImplementedError: the named implementation cannot run this call.

    Source: https://arxiv.org/abs/2512.24880; vLLM 0.26.0 `model_executor/kernels/mhc/torch.py`.
    """
    return _mechanism.run(MECHANISM, prepare(residual, y, post, comb), implementation, config)


def prepare(residual, y, post, comb) -> Args:
    """Validate the arguments of `mhc_post`; raises as it does."""
    dims = _checks.check_shapes(
        _OP,
        residual=(residual, "N streams M"),
        y=(y, "N M"),
        post=(post, "N streams"),
        comb=(comb, "N streams streams"),
    )
    if not dims["streams"]:
        raise ValueError(f"{_OP}: residual must have at least one stream, got shape {tuple(residual.shape)}")
    dtype = _checks.check_dtype(_OP, "residual", residual, _checks.FLOATS)
    _checks.check_dtype(_OP, "y", y, (dtype,), "y and residual need one dtype; cast one of them")
    for name, x in (("post", post), ("comb", comb)):
        _checks.check_dtype(_OP, name, x, (_checks.F64,) if dtype == _checks.F64 else ("float32",))
    return {"residual": residual, "y": y, "post": post, "comb": comb}


def _cost(*, residual, **_):
    """Streams read and written once, the layer's output and the coefficients read once."""
    N, C, M = residual.shape
    return 2 * N * M * C * (C + 1), N * ((2 * C + 1) * M * jnp.dtype(residual.dtype).itemsize + 4 * C * (C + 1))


def make_inputs(rng: np.random.Generator, N: int, M: int, *, C: int = 4, dtype: str = "bfloat16") -> Args:
    """Random arguments of `mhc_post`: streams and outputs normal, gates in (0, 2), columns that sum to one."""
    comb = rng.random((N, C, C)).astype(np.float32) + np.float32(0.01)
    return {
        "residual": jnp.asarray(rng.standard_normal((N, C, M)), dtype),
        "y": jnp.asarray(rng.standard_normal((N, M)), dtype),
        "post": jnp.asarray(2 * rng.random((N, C)).astype(np.float32)),
        "comb": jnp.asarray(comb / comb.sum(1, keepdims=True)),
    }


def _case(name: str, N: int, M: int, *tags: str, **options) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, N, M, **options), tags=frozenset(tags or ("smoke",)))


_CASES = (
    _case("N5-C4-M512", 5, 512),
    _case("N3-C4-M1024-fp32", 3, 1024, dtype="float32"),
    _case("N7-C4-M256-fp32", 7, 256, dtype="float32"),
    _case("N3-C1-M128-fp16", 3, 128, C=1, dtype="float16"),
    _case("N2-C3-M100", 2, 100, C=3),
    _case("N130-C4-M4096", 130, 4096, "full"),
    _case("N4096-C4-M4096", 4096, 4096, "full", "bench"),
    _case("N4096-C4-M7168", 4096, 7168, "full", "bench"),
)


def _struct(dtype: str, M: int, C: int = 4) -> Args:
    def array(shape, dtype="float32"):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    streams = {"residual": array((256, C, M), dtype), "y": array((256, M), dtype)}
    return streams | {"post": array((256, C)), "comb": array((256, C, C))}


_SUPPORT = (
    *((f"{dtype}, 4 streams of {M}", _struct(dtype, M)) for dtype in ("bfloat16", "float32") for M in (4096, 7168)),
    ("float16, 4 streams of 4096", _struct("float16", 4096)),
    ("bfloat16, 2 streams of 4096", _struct("bfloat16", 4096, C=2)),
    ("bfloat16, 4 streams of 100", _struct("bfloat16", 100)),
)

MECHANISM = Mechanism(
    name=_OP,
    source="https://arxiv.org/abs/2512.24880; vLLM 0.26.0 vllm/model_executor/kernels/mhc/torch.py",
    op=mhc_post,
    prepare=prepare,
    reference=_hyper.mix,
    outputs=lambda **_: ("new_residual",),
    kernels={
        "mosaic": Kernel(
            run=mosaic.mhc_post,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=_CASES,
    cost=_cost,
    captures=("dsv4/mhc_*",),
    module="jaxattn.nn.hyper:HyperConnections",
    support=_SUPPORT,
)
