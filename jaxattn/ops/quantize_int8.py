"""Quantization to INT8, symmetric or with zero points, with the roundings of vLLM's paths."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8, Int32

from jaxattn import _checks, _mechanism
from jaxattn._mechanism import Args, Case, Kernel, Mechanism
from jaxattn.quant import _inputs, int8
from pallas_kernels import _mosaic
from pallas_kernels import quantize_int8 as mosaic

_OP = "quantize_int8"

type Output = (
    tuple[Int8[Array, "N M"], Float[Array, "..."]] | tuple[Int8[Array, "N M"], Float[Array, "..."], Int32[Array, "..."]]
)


def quantize_int8(
    x: Float[Array, "N M"],
    *,
    granularity: int8.Granularity = "token",
    scale: Float[Array, ""] | float | None = None,
    azp: Int32[Array, ""] | int | None = None,
    symmetric: bool = True,
    group: int = 128,
    rule: int8.Rule = "cuda",
    implementation: str | None = None,
    config: Any = None,
) -> Output:
    """INT8 codes `q` and scales of `x`, with `symmetric=False` or `azp` also zero points: `x ~ (q - azp) * scale`.

    The table of `jaxattn.quant.int8` gives scale, code and rounding of every granularity and rule. Codes saturate; NaN
    becomes 0 and leaves its neighbours alone.

    Args:
        x: bfloat16, float16 or float32 (float64: reference only).
        granularity: "tensor" (needs `scale`), "token" (rows), "channel" (rows of a weight [F, M]), "group" or "block".
        scale: a static scale for "tensor".
        azp: a static zero point beside it.
        symmetric: False: every token has its own zero point.
        group: size of groups and blocks.
        rule: "cuda" (halves to even) or "triton" (tokens: halves away from zero; groups, which have no other: cut off).
        implementation: None (choose), "reference" or "mosaic".
        config: launch configuration of the named kernel.

    Returns:
        `q` int8 [N, M], float32 `scale` shaped as by `quantize_fp8`, and with zero points int32 `azp` [N, 1] or [].

    Raises:
        TypeError: dtypes; ValueError: shapes or options that do not belong together;
        NotImplementedError: the named implementation cannot run this call.

    Source: vLLM 0.26.0 `scaled_int8_quant`, `per_token_quant_int8`, `per_token_group_quant_int8`.
    """
    args = prepare(x, granularity=granularity, scale=scale, azp=azp, symmetric=symmetric, group=group, rule=rule)
    return _mechanism.run(MECHANISM, args, implementation, config)


def prepare(x, *, granularity="token", scale=None, azp=None, symmetric=True, group=128, rule="cuda") -> Args:
    """Validate and complete the arguments of `quantize_int8`; raises as it does."""
    _checks.check_shapes(_OP, x=(x, "N M"))
    _checks.check_dtype(_OP, "x", x, _checks.FLOATS)
    _checks.check_count(_OP, group=group)
    try:
        int8.check(granularity, 2, scale is not None, azp is not None, symmetric, group, rule)
    except ValueError as e:
        raise ValueError(f"{_OP}: {e}") from e
    if azp is not None:
        azp = _checks.number(_OP, "azp", azp if _checks.is_array(azp) else jnp.int32(azp))
        _checks.check_dtype(_OP, "azp", azp, ("int32",))
    return {
        "x": x,
        "granularity": granularity,
        "scale": _checks.number(_OP, "scale", scale),
        "azp": azp,
        "symmetric": bool(symmetric),
        "group": int(group),
        "rule": rule,
    }


def _reference(x, **options):
    """The format's quantizer; outputs that do not exist are left out."""
    q, scale, azp = int8.quantize(x, **options)
    return (q, scale) if azp is None else (q, scale, azp)


def _outputs(*, azp, symmetric, **_):
    return ("q", "scale") if symmetric and azp is None else ("q", "scale", "azp")


def _cost(*, x, **_):
    """Read once, one byte a code written; three operations a number."""
    N, M = x.shape
    return 3 * N * M, N * M * (jnp.dtype(x.dtype).itemsize + 1) + 4 * N


def make_inputs(rng: np.random.Generator, N: int, M: int, *, dtype: str = "bfloat16", kind="mixed", **options) -> Args:
    """Adversarial (or, with kind="plain", normal) arguments of `quantize_int8`."""
    return {"x": _inputs.adversarial(rng, N, M, dtype, kind), **options}


def _case(name: str, N: int, M: int, *tags: str, **options) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, N, M, **options), tags=frozenset(tags or ("smoke",)))


_STATIC = {"granularity": "tensor", "scale": np.float32(0.05)}
_CASES = (
    _case("token", 12, 256),
    _case("token-fp32", 12, 256, dtype="float32"),
    _case("asymmetric-fp32", 12, 256, dtype="float32", symmetric=False),
    _case("asymmetric", 12, 256, symmetric=False),
    _case("static-fp32", 12, 256, dtype="float32", **_STATIC),
    _case("static-azp-fp32", 12, 256, dtype="float32", azp=np.int32(3), **_STATIC),
    _case("triton-token-fp32", 12, 256, dtype="float32", rule="triton"),
    _case("triton-group-fp32", 12, 256, dtype="float32", rule="triton", granularity="group"),
    _case("group-odd", 7, 200, granularity="group"),
    _case("channel-fp16", 12, 256, dtype="float16", granularity="channel"),
    _case("block-fp32", 200, 130, dtype="float32", granularity="block"),
    _case("channel-fp32", 5, 256, dtype="float32", granularity="channel"),
    _case("group", 5, 256, rule="triton", granularity="group"),
    _case("block", 128, 256, granularity="block"),
    _case("token-2880", 3, 2880),
    _case("token-2880-fp32", 3, 2880, dtype="float32", rule="triton"),
    _case("asymmetric-4104-fp16", 3, 4104, dtype="float16", symmetric=False),
    _case("static-one-row", 1, 7168, **_STATIC),
    _case("asymmetric-16384x7168", 16384, 7168, "full", "bench", kind="plain", symmetric=False),
    _case("token-16384x7168", 16384, 7168, "full", "bench", kind="plain"),
)


def _struct(dtype: str, **options) -> Args:
    return {"x": jax.ShapeDtypeStruct((64, 512), jnp.dtype(dtype)), **options}


_SUPPORT = tuple(
    (f"{dtype}, {label}", _struct(dtype, **options))
    for dtype in ("bfloat16", "float16", "float32")
    for label, options in (
        ("static", {"granularity": "tensor", "scale": 0.05}),
        ("token", {}),
        ("token with zero points", {"symmetric": False}),
        ("channel", {"granularity": "channel"}),
        ("group", {"granularity": "group"}),
        ("block", {"granularity": "block"}),
    )
)

MECHANISM = Mechanism(
    name=_OP,
    source="vLLM 0.26.0 csrc/quantization/w8a8/int8/scaled_quant.cu, int8_utils.py",
    op=quantize_int8,
    prepare=prepare,
    reference=_reference,
    outputs=_outputs,
    kernels={
        "mosaic": Kernel(
            run=mosaic.quantize_int8,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=_CASES,
    cost=_cost,
    captures=("quant/int8_*",),
    support=_SUPPORT,
)
