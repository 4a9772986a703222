"""The end of hyper-connections: the streams become one vector for the language model's head."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxattn import _checks, _hyper, _mechanism
from jaxattn._mechanism import Args, Case, Kernel, Mechanism
from jaxattn.quant import primitives as p
from pallas_kernels import _mosaic
from pallas_kernels import mhc_head as mosaic

_OP = "mhc_head"


def mhc_head(
    residual: Float[Array, "N streams M"],
    fn: Float[Array, "streams SM"],
    scale: Float[Array, ""],
    base: Float[Array, " streams"],
    *,
    eps: float = 1e-6,
    rms_eps: float = 1e-6,
    implementation: str | None = None,
    config: Any = None,
) -> Float[Array, "N M"]:
    r"""`h = sum_i g_i R_i` with `g = sigmoid((x fn^T) / sqrt(mean(x^2) + rms_eps) * scale + base) + eps`.

    x is the C M numbers of a token; float32 throughout, rounded once.

    Args:
        residual: streams R, bfloat16, float16 or float32 (float64: reference only).
        fn: float32.
        scale: one float32 number.
        base: float32.
        eps: added to the gates.
        rms_eps: added to the mean of squares.
        implementation: None (choose), "reference" or "mosaic".
        config: launch configuration of the named kernel.

    Returns:
        `h`, dtype of `residual`.

    Raises:
        TypeError: dtypes; ValueError: shapes or options; NotImplementedError: the named implementation cannot run this.

    Source: https://arxiv.org/abs/2512.24880; vLLM 0.26.0 `model_executor/kernels/mhc` (hc_head; its Triton form rounds
    the normed streams first, its TileLang form does not).
    """
    args = prepare(residual, fn, scale, base, eps=eps, rms_eps=rms_eps)
    return _mechanism.run(MECHANISM, args, implementation, config)


def prepare(residual, fn, scale, base, *, eps=1e-6, rms_eps=1e-6) -> Args:
    """Validate and complete the arguments of `mhc_head`; raises as it does."""
    dims = _checks.check_shapes(_OP, residual=(residual, "N streams M"), fn=(fn, "streams SM"), base=(base, "streams"))
    if not dims["streams"] or dims["SM"] != dims["streams"] * dims["M"]:
        raise ValueError(
            f"{_OP}: fn must be [C, C M] with C={dims['streams']} streams of M={dims['M']} numbers, got shape "
            f"{tuple(fn.shape)}"
        )
    dtype = _checks.check_dtype(_OP, "residual", residual, _checks.FLOATS)
    for name, x in (("fn", fn), ("base", base)):
        _checks.check_dtype(_OP, name, x, (_checks.F64,) if dtype == _checks.F64 else ("float32",))
    _checks.check_positive(_OP, eps=eps, rms_eps=rms_eps)
    return {
        "residual": residual,
        "fn": fn,
        "scale": _checks.number(_OP, "scale", scale),
        "base": base,
        "eps": float(eps),
        "rms_eps": float(rms_eps),
    }


def _reference(residual, fn, scale, base, *, eps, rms_eps):
    """The formula."""
    x = p.wide(residual)
    u = _hyper.normed_product(x.reshape(x.shape[0], fn.shape[1]), fn, rms_eps)
    gates = jax.nn.sigmoid(u * scale.astype(x.dtype).reshape(()) + base) + eps
    return jnp.sum(gates[..., None] * x, 1).astype(residual.dtype)


def _cost(*, residual, fn, **_):
    """Streams read once, the result written."""
    N, C, M = residual.shape
    return N * (2 * fn.size + 2 * C * M), N * (C + 1) * M * jnp.dtype(residual.dtype).itemsize + 4 * fn.size


def make_inputs(rng: np.random.Generator, N: int, M: int, *, C: int = 4, dtype: str = "bfloat16") -> Args:
    """Random arguments of `mhc_head`."""
    return {
        "residual": jnp.asarray(rng.standard_normal((N, C, M)), dtype),
        "fn": jnp.asarray(rng.standard_normal((C, C * M)).astype(np.float32) * np.float32((C * M) ** -0.5)),
        "scale": jnp.float32(0.8),
        "base": jnp.asarray(rng.standard_normal(C), jnp.float32),
    }


def _case(name: str, N: int, M: int, *tags: str, **options) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, N, M, **options), tags=frozenset(tags or ("smoke",)))


def _struct(dtype: str, M: int, C: int = 4) -> Args:
    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    args: Args = {"residual": jax.ShapeDtypeStruct((256, C, M), jnp.dtype(dtype)), "fn": array(C, C * M)}
    return args | {"scale": array(), "base": array(C)}


MECHANISM = Mechanism(
    name=_OP,
    source="https://arxiv.org/abs/2512.24880; vLLM 0.26.0 vllm/model_executor/kernels/mhc",
    op=mhc_head,
    prepare=prepare,
    reference=_reference,
    outputs=lambda **_: ("h",),
    kernels={
        "mosaic": Kernel(
            run=mosaic.mhc_head,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=(
        _case("N5-C4-M512", 5, 512),
        _case("N11-C4-M256", 11, 256),
        _case("N3-C4-M256-fp32", 3, 256, dtype="float32"),
        _case("N3-C1-M128-fp16", 3, 128, C=1, dtype="float16"),
        _case("N4096-C4-M4096", 4096, 4096, "full", "bench"),
    ),
    cost=_cost,
    captures=("dsv4/mhc_*",),
    module="jaxattn.nn.hyper:HyperHead",
    support=(
        *((f"{dtype}, 4 streams of {M}", _struct(dtype, M)) for dtype in ("bfloat16", "float32") for M in (4096, 7168)),
        ("bfloat16, 2 streams of 4096", _struct("bfloat16", 4096, C=2)),
    ),
)
