"""The activation between an expert's two products: SiLU and product, clamped SwiGLU, gpt-oss' SwiGLU."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxattn import _checks, _mechanism
from jaxattn._mechanism import Args, Case, Kernel, Mechanism
from jaxattn.quant import primitives as p
from pallas_kernels import _exact, _mosaic
from pallas_kernels import gated_activation as mosaic

_OP = "gated_activation"
KINDS = ("silu", "swigluoai")

type Kind = Literal["silu", "swigluoai"]


def gated_activation(
    x: Float[Array, "N 2F"],
    *,
    kind: Kind = "silu",
    limit: float | None = None,
    alpha: float | None = None,
    beta: float | None = None,
    implementation: str | None = None,
    config: Any = None,
) -> Float[Array, "N F"]:
    r"""A gate times a value, from their projections side by side.

        silu:       gate, up = x[:, :F], x[:, F:]         o = round(gate * sigmoid(alpha * gate)) * (up + beta)
        swigluoai:  gate, up = x[:, 0::2], x[:, 1::2]     o = gate * sigmoid(alpha * gate) * (up + beta)

    after `gate = min(gate, limit)` (no lower bound) and `up = clip(up, -limit, limit)`. Computed in float32; `silu`
    rounds the gate's half to the dtype of x **before** the product, `swigluoai` rounds once at the end.

    Args:
        x: bfloat16, float16, float32 (float64: reference only).
        kind: "silu" (halves) or "swigluoai" (interleaved pairs, gpt-oss).
        limit: None = no clamp; DeepSeek-V4 has 10, gpt-oss 7.
        alpha: None = 1 for silu, 1.702 for swigluoai.
        beta: None = 0 for silu, 1 for swigluoai.
        implementation: None (choose), "reference" or "mosaic"; the kernels of `experts` compute it in their epilogue.
        config: launch configuration of the named kernel.

    Raises:
        TypeError: dtype; ValueError: an odd last dimension, or options; NotImplementedError: the named implementation
            cannot run this call.

    Source: vLLM 0.26.0 `csrc/activation_kernels.cu` (silu_and_mul, silu_and_mul_with_clamp, swigluoai_and_mul).
    """
    return _mechanism.run(MECHANISM, prepare(x, kind=kind, limit=limit, alpha=alpha, beta=beta), implementation, config)


def prepare(x, *, kind="silu", limit=None, alpha=None, beta=None) -> Args:
    """Validate and complete the arguments of `gated_activation`; raises as it does."""
    width = _checks.check_shapes(_OP, x=(x, "N 2F"))["2F"]
    _checks.check_dtype(_OP, "x", x, _checks.FLOATS)
    if width % 2:
        raise ValueError(f"{_OP}: the last dimension holds gates and values and must be even, got {width}")
    return {"x": x} | options(_OP, kind, limit, alpha, beta)


def options(op: str, kind: str, limit: Any, alpha: Any, beta: Any) -> Args:
    """The options with their defaults filled in.

    Raises:
        TypeError, ValueError: they are no numbers, or unknown.
    """
    if kind not in KINDS:
        raise ValueError(f"{op}: the activation must be one of {', '.join(KINDS)}, got {kind!r}")
    _checks.check_positive(op, limit=limit, alpha=alpha)
    oai = kind == "swigluoai"
    return {
        "kind": kind,
        "limit": None if limit is None else float(limit),
        "alpha": (1.702 if oai else 1.0) if alpha is None else float(alpha),
        "beta": (1.0 if oai else 0.0) if beta is None else float(beta),
    }


def split(x: Array, kind: str) -> tuple[Array, Array]:
    """Gates and values of `[..., 2F]`."""
    F = x.shape[-1] // 2
    return (x[..., ::2], x[..., 1::2]) if kind == "swigluoai" else (x[..., :F], x[..., F:])


def activate(
    x: Float[Array, "... 2F"], kind: str, limit: float | None, alpha: float, beta: float, *, fused: bool = False
) -> Float[Array, "... F"]:
    """The formula in the wide dtype; `fused` leaves out the rounding between gate and product."""
    gate, up = (p.wide(half) for half in split(x, kind))
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    gate = p.divide(gate, 1 + jnp.exp(-(gate * alpha)))
    if kind == "silu" and not fused and x.dtype != jnp.float64:
        gate = _exact.rounded(gate, x.dtype)
    return gate * (up + beta if beta else up)  # -0 + 0 would lose a sign


def _reference(x, *, kind, limit, alpha, beta):
    return activate(x, kind, limit, alpha, beta).astype(x.dtype)


def _outputs(**_):
    return ("o",)


def _cost(*, x, **_):
    """Some eight operations an output; read and written once."""
    N, F = x.shape[0], x.shape[1] // 2
    return 8 * N * F, 3 * N * F * jnp.dtype(x.dtype).itemsize


def make_inputs(rng: np.random.Generator, N: int, F: int, *, dtype: str = "bfloat16", **options) -> Args:
    """Random arguments of `gated_activation`, wide enough for every clamp."""
    return {"x": jnp.asarray(8 * rng.standard_normal((N, 2 * F)), dtype)} | options


def _case(name: str, N: int, F: int, *tags: str, **options) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, N, F, **options), tags=frozenset(tags or ("smoke",)))


MECHANISM = Mechanism(
    name=_OP,
    source="https://arxiv.org/abs/2002.05202; vLLM 0.26.0 csrc/activation_kernels.cu",
    op=gated_activation,
    prepare=prepare,
    reference=_reference,
    outputs=_outputs,
    kernels={
        "mosaic": Kernel(
            run=mosaic.gated_activation,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=(
        _case("silu-bf16", 5, 256),
        _case("silu-clamp-fp32", 7, 40, dtype="float32", limit=10.0),
        _case("swigluoai-bf16", 5, 256, kind="swigluoai", limit=7.0),
        _case("swigluoai-fp32", 7, 40, dtype="float32", kind="swigluoai", limit=7.0),
        _case("silu-fp16-clamp", 5, 64, dtype="float16", limit=10.0),
        _case("silu-N1-F18432-clamp", 1, 18432, limit=10.0),
        _case("silu-T4096-F2048", 4096, 2048, "full", "bench"),
    ),
    cost=_cost,
    captures=("moe/act_*",),
    support=tuple(
        (f"{dtype}, {kind}", {"x": jax.ShapeDtypeStruct((64, 512), jnp.dtype(dtype)), "kind": kind})
        for dtype in ("bfloat16", "float16", "float32")
        for kind in KINDS
    ),
)
