"""SwiGLU's product `silu(gate) * up`, with optional clamp, whose result may leave quantized to FP8."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxattn import _checks, _mechanism
from jaxattn._mechanism import Args, Case, Kernel, Mechanism
from jaxattn.ops import rms_norm_quant as rows
from jaxattn.quant import primitives as p
from pallas_kernels import _mosaic
from pallas_kernels import silu_mul_quant as mosaic

_OP = "silu_mul_quant"


def silu_mul_quant(
    x: Float[Array, "N 2*F"],
    *,
    limit: float | None = None,
    mode: rows.Mode = "none",
    scale: Float[Array, ""] | float | None = None,
    upper_bound: Float[Array, ""] | float | None = None,
    group: int = 128,
    implementation: str | None = None,
    config: Any = None,
) -> Any:
    """`y = T(T(silu(gate)) * up)` of rows `[gate | up]`, quantized as `mode` says; T is the dtype of `x`.

    `silu(g) = g / (1 + exp(-g))` in float32; it is rounded before the product. With `limit`, first
    `gate = min(gate, limit)` and `up = clip(up, -limit, limit)`. Modes, scales and codes are those of `rms_norm_quant`.

    Args:
        x: bfloat16, float16 or float32 (float64: reference only, codes are not rounded); gates first.
        limit: bound of the clamp, None = no clamp; gates have no lower bound.
        mode: "none", "static", "token" or "group".
        scale: of mode "static".
        upper_bound: largest amax that counts, mode "token" only.
        group: size of a group of mode "group".
        implementation: None (choose), "reference" or "mosaic".
        config: launch configuration of the named kernel.

    Returns:
        `o` [N, F] (mode none), `q` (static), or `(q, scale)`.

    Raises:
        TypeError: dtypes; ValueError: shapes or options that do not belong together;
        NotImplementedError: the named implementation cannot run this call.

    Source: vLLM 0.26.0 csrc/activation_kernels.cu, csrc/quantization/activation_kernels.cu.
    """
    args = prepare(x, limit=limit, mode=mode, scale=scale, upper_bound=upper_bound, group=group)
    return _mechanism.run(MECHANISM, args, implementation, config)


def prepare(x, *, limit=None, mode="none", scale=None, upper_bound=None, group=128) -> Args:
    """Validate and complete the arguments of `silu_mul_quant`; raises as it does."""
    width = _checks.check_shapes(_OP, x=(x, "N W"))["W"]
    if width % 2:
        raise ValueError(f"{_OP}: x must hold gates and as many ups, got an odd last dimension of {width}")
    _checks.check_dtype(_OP, "x", x, _checks.FLOATS)
    _checks.check_positive(_OP, limit=limit)
    _checks.check_count(_OP, group=group)
    rows.check_mode(_OP, mode, scale, upper_bound)
    return {
        "x": x,
        "limit": None if limit is None else float(limit),
        "mode": mode,
        "scale": _checks.number(_OP, "scale", scale),
        "upper_bound": _checks.number(_OP, "upper_bound", upper_bound),
        "group": int(group),
    }


def _reference(x, *, limit, mode, scale, upper_bound, group):
    """The formula of the docstring."""
    gate, up = jnp.split(p.wide(x), 2, -1)
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    silu = p.wide(p.rounded(p.divide(gate, 1 + jnp.exp(-gate)), x.dtype))
    out: tuple[Any, ...] = rows.quantize_rows(
        p.rounded(silu * up, x.dtype), mode=mode, scale=scale, upper_bound=upper_bound, group=group
    )
    return out[0] if len(out) == 1 else out


def _outputs(*, mode, **_):
    return {"none": ("o",), "static": ("q",)}.get(mode, ("q", "scale"))


def _cost(*, x, mode, **_):
    """Read once, half as many numbers written; about five operations each."""
    item = jnp.dtype(x.dtype).itemsize
    return 5 * x.size // 2, x.size * item + x.size // 2 * (item if mode == "none" else 1)


def make_inputs(rng: np.random.Generator, N: int, F: int, *, dtype: str = "bfloat16", **options) -> Args:
    """Arguments of `silu_mul_quant`: gates far on both sides among normal numbers."""
    x = rng.standard_normal((N, 2 * F)).astype(np.float32) * 4
    x[:, : min(4, F)] = np.array([-90, -20, 30, 0], np.float32)[: min(4, F)]
    return {"x": jnp.asarray(x, dtype), **options}


def _case(name: str, N: int, F: int, *tags: str, **options) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, N, F, **options), tags=frozenset(tags or ("smoke",)))


_STATIC = {"mode": "static", "scale": np.float32(0.02)}
_CASES = (
    _case("static", 5, 256, **_STATIC),
    _case("none-fp32", 5, 200, dtype="float32"),
    _case("static-fp32", 5, 256, dtype="float32", **_STATIC),
    _case("clamp10-fp32", 5, 256, dtype="float32", limit=10.0),
    _case("none-clamp10", 5, 256, limit=10.0),
    _case("token-clamp10", 5, 256, limit=10.0, mode="token"),
    _case("group-fp32", 5, 256, dtype="float32", mode="group"),
    _case("group-fp16", 5, 200, dtype="float16", mode="group"),
    _case("none-fp32-whole", 5, 256, dtype="float32"),
    _case("token-2880-fp32", 3, 2880, dtype="float32", mode="token", limit=10.0),
    _case("none-4104", 2, 4104, limit=10.0),
    _case("group-1536-fp32", 3, 1536, dtype="float32", mode="group"),
    _case("group-1536", 3, 1536, mode="group", limit=10.0),
    _case("group-2880", 2, 2880, mode="group", limit=10.0),
    _case("group-18432", 2, 18432, "full", mode="group", limit=10.0),
    _case("clamp-16384x2048", 16384, 2048, "full", "bench", limit=10.0),
    _case("static-16384x4096", 16384, 4096, "full", "bench", **_STATIC),
    _case("group-16384x4096", 16384, 4096, "full", "bench", mode="group"),
    _case("clamp-16384x4096", 16384, 4096, "full", "bench", limit=10.0),
)


_SUPPORT = tuple(
    (f"{dtype}, {mode}", {"x": jax.ShapeDtypeStruct((64, 1024), jnp.dtype(dtype)), "mode": mode, **more})
    for dtype in ("bfloat16", "float16", "float32")
    for mode, more in (("none", {}), ("static", {"scale": 0.03}), ("token", {}), ("group", {}))
)

MECHANISM = Mechanism(
    name=_OP,
    source="https://arxiv.org/abs/2002.05202; vLLM 0.26.0 csrc/quantization/activation_kernels.cu",
    op=silu_mul_quant,
    prepare=prepare,
    reference=_reference,
    outputs=_outputs,
    kernels={
        "mosaic": Kernel(
            run=mosaic.silu_mul_quant,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=_CASES,
    cost=_cost,
    captures=("quant/silu_mul_*",),
    support=_SUPPORT,
)
