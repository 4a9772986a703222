"""Quantization to FP8 with the scales, floors and roundings of vLLM's paths."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxattn import _checks, _mechanism
from jaxattn._mechanism import Args, Case, Kernel, Mechanism
from jaxattn.quant import _inputs, fp8
from pallas_kernels import _mosaic
from pallas_kernels import quantize_fp8 as mosaic

_OP = "quantize_fp8"


def quantize_fp8(
    x: Float[Array, "N M"],
    *,
    granularity: fp8.Granularity = "token",
    scale: Float[Array, ""] | float | None = None,
    upper_bound: Float[Array, ""] | float | None = None,
    dtype: str = fp8.E4M3,
    group: int = 128,
    rule: fp8.Rule = "cuda",
    ue8m0: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> tuple[Float[Array, "N M"], Float[Array, "..."]]:
    """FP8 codes `q` and scales of the rows, groups, blocks or the whole of `x`, so that `x ~ q * scale`.

    The table of `jaxattn.quant.fp8` gives scale and code of every granularity and rule. Codes are rounded to nearest
    even and saturate; NaN becomes 0x7f and leaves its neighbours alone; no finite input gives NaN.

    Args:
        x: bfloat16, float16 or float32 (float64: reference only, codes are not rounded).
        granularity: "tensor", "token" (rows), "channel" (rows of a weight [F, M]), "group" (1 x group) or "block"
            (group x group).
        scale: a static scale for "tensor".
        upper_bound: largest amax that counts, for "token" and "channel".
        dtype: of the codes, float8_e4m3fn or float8_e5m2.
        group: size of groups and blocks.
        rule: arithmetic of groups: "cuda", "triton" or "deep_gemm".
        ue8m0: scales of groups and blocks are rounded up to powers of two.
        implementation: None (choose), "reference" or "mosaic".
        config: launch configuration of the named kernel.

    Returns:
        `q` [N, M] and float32 `scale`: [], [N, 1], [N, ceil(M / group)] or [ceil(N / group), ceil(M / group)].

    Raises:
        TypeError: dtypes; ValueError: shapes or options that do not belong together;
        NotImplementedError: the named implementation cannot run this call.

    Source: vLLM 0.26.0 `scaled_fp8_quant`, `per_token_group_quant_fp8`, `per_block_cast_to_fp8`.
    """
    args = prepare(
        x,
        granularity=granularity,
        scale=scale,
        upper_bound=upper_bound,
        dtype=dtype,
        group=group,
        rule=rule,
        ue8m0=ue8m0,
    )
    return _mechanism.run(MECHANISM, args, implementation, config)


def prepare(
    x,
    *,
    granularity="token",
    scale=None,
    upper_bound=None,
    dtype=fp8.E4M3,
    group=128,
    rule="cuda",
    ue8m0=False,
) -> Args:
    """Validate and complete the arguments of `quantize_fp8`; raises as it does."""
    _checks.check_shapes(_OP, x=(x, "N M"))
    _checks.check_dtype(_OP, "x", x, _checks.FLOATS)
    _checks.check_count(_OP, group=group)
    try:
        fp8.check(granularity, 2, scale is not None, upper_bound is not None, dtype, group, rule, ue8m0)
    except ValueError as e:
        raise ValueError(f"{_OP}: {e}") from e
    return {
        "x": x,
        "granularity": granularity,
        "scale": _checks.number(_OP, "scale", scale),
        "upper_bound": _checks.number(_OP, "upper_bound", upper_bound),
        "dtype": dtype,
        "group": int(group),
        "rule": rule,
        "ue8m0": bool(ue8m0),
    }


def _outputs(**_):
    return ("q", "scale")


def _cost(*, x, granularity, group, **_):
    """Read once, one byte a code written; three operations a number."""
    (N, M), scales = x.shape, {"tensor": 1, "group": x.shape[0] * -(-x.shape[1] // group)}
    return 3 * N * M, N * M * (jnp.dtype(x.dtype).itemsize + 1) + 4 * scales.get(granularity, N)


def make_inputs(rng: np.random.Generator, N: int, M: int, *, dtype: str = "bfloat16", kind="mixed", **options) -> Args:
    """Adversarial (or, with kind="plain", normal) arguments of `quantize_fp8`; `dtype` is of x, `to` of the codes."""
    to = {"dtype": options.pop("to")} if "to" in options else {}
    return {"x": _inputs.adversarial(rng, N, M, dtype, kind), **to, **options}


def _case(name: str, N: int, M: int, *tags: str, **options) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, N, M, **options), tags=frozenset(tags or ("smoke",)))


_CASES = (
    _case("token", 12, 256),
    _case("token-fp32", 12, 256, dtype="float32"),
    _case("group-fp32", 12, 512, dtype="float32", granularity="group"),
    _case("group-ue8m0-fp32", 12, 512, dtype="float32", granularity="group", ue8m0=True),
    _case("group-ue8m0", 12, 512, granularity="group", ue8m0=True),
    _case("group-triton-ue8m0-fp32", 12, 256, dtype="float32", granularity="group", rule="triton", ue8m0=True),
    _case("group-deep-gemm-fp32", 12, 256, dtype="float32", granularity="group", rule="deep_gemm", ue8m0=True),
    _case("group-odd", 7, 200, granularity="group"),
    _case("token-bound-fp32", 12, 256, dtype="float32", upper_bound=np.float32(10)),
    _case("channel-fp16", 12, 256, dtype="float16", granularity="channel"),
    _case("tensor-static-fp32", 12, 256, dtype="float32", granularity="tensor", scale=np.float32(0.0123)),
    _case("tensor-dynamic-fp32", 12, 256, dtype="float32", granularity="tensor"),
    _case("tensor-dynamic", 1, 63, kind="plain", granularity="tensor"),
    _case("block-fp32", 200, 130, dtype="float32", granularity="block"),
    _case("block-ue8m0", 128, 256, granularity="block", ue8m0=True),
    _case("e5m2-fp32", 12, 256, dtype="float32", to="float8_e5m2"),
    _case("token-short-rows-fp32", 5, 128, dtype="float32"),
    _case("token-2880", 3, 2880),
    _case("token-2880-fp32-bound", 3, 2880, dtype="float32", upper_bound=np.float32(10)),
    _case("token-4104-fp16", 1, 4104, dtype="float16"),
    _case("token-one-row", 1, 7168),
    _case("tensor-64", 5, 64, granularity="tensor", scale=np.float32(0.0123)),
    _case("block-fp32-whole", 128, 256, dtype="float32", granularity="block"),
    _case("token-16384x7168", 16384, 7168, "full", "bench", kind="plain"),
    _case("group-16384x7168", 16384, 7168, "full", "bench", kind="plain", granularity="group"),
)


def _struct(dtype: str, **options) -> Args:
    return {"x": jax.ShapeDtypeStruct((64, 512), jnp.dtype(dtype)), **options}


_SUPPORT = tuple(
    (f"{dtype}, {granularity}{', UE8M0' if more else ''}", _struct(dtype, granularity=granularity, **more))
    for dtype in ("bfloat16", "float16", "float32")
    for granularity, more in (
        ("tensor", {}),
        ("token", {}),
        ("channel", {}),
        ("group", {}),
        ("group", {"ue8m0": True}),
        ("block", {}),
    )
)

MECHANISM = Mechanism(
    name=_OP,
    source="vLLM 0.26.0 csrc/quantization/w8a8/fp8, vllm/model_executor/layers/quantization/utils/fp8_utils.py",
    op=quantize_fp8,
    prepare=prepare,
    reference=fp8.quantize,
    outputs=_outputs,
    kernels={
        "mosaic": Kernel(
            run=mosaic.quantize_fp8,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=_CASES,
    cost=_cost,
    captures=("quant/fp8_*",),
    support=_SUPPORT,
)
