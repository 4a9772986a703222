"""Quantization to block formats with small scales: MXFP8, MXFP4 and NVFP4, with or without a Hadamard rotation."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxattn import _checks, _mechanism
from jaxattn._mechanism import Args, Case, Kernel, Mechanism
from jaxattn.quant import _inputs, hadamard, mx, nvfp4
from jaxattn.quant import primitives as p
from pallas_kernels import _mosaic
from pallas_kernels import quantize_mx as mosaic

_OP = "quantize_mx"

type Format = Literal["mxfp8", "mxfp4", "nvfp4"]
FORMATS = ("mxfp8", "mxfp4", "nvfp4")


def quantize_mx(
    x: Float[Array, "N M"],
    *,
    format: Format = "mxfp4",
    rule: mx.Rule | None = None,
    ties: p.Ties = "even",
    floor: float = mx.MXFP4_FLOOR,
    global_scale: Float[Array, ""] | float | None = None,
    swizzled: bool = False,
    rotation: int | None = None,
    implementation: str | None = None,
    config: Any = None,
) -> tuple[Array, Array] | tuple[Array, Array, Float[Array, ""]]:
    """Codes and block scales of `x` along its last axis; formulas in `jaxattn.quant.mx` and `jaxattn.quant.nvfp4`.

    Args:
        x: bfloat16, float16 or float32 (float64: reference only); M a multiple of 32 (NVFP4: 16).
        format: "mxfp8", "mxfp4" or "nvfp4".
        rule: of an MXFP4 scale: "ceil" (default; never saturates) or "floor" (OCP); MXFP8 has "floor".
        ties: of MXFP4 codes, "even" or "zero" (DeepGEMM's caster).
        floor: smallest amax of MXFP4's rule "ceil".
        global_scale: of NVFP4, None = `448 * 6 / amax(x)`.
        swizzled: NVFP4 block scales in the tiles of `nvfp4.swizzle`.
        rotation: rotate groups of so many numbers first (fp_quant: 32), None = none; the 4-bit formats only.
        implementation: None (choose), "reference" or "mosaic".
        config: launch configuration of the named kernel.

    Returns:
        `q`: float8_e4m3fn [N, M] (mxfp8) or uint8 [N, M / 2]; `scale`: uint8 exponents [N, M / 32], or for nvfp4
        float8_e4m3fn [N, M / 16] and, third, the float32 `global_scale`.

    Raises:
        TypeError: dtypes; ValueError: shapes or options that do not belong together;
        NotImplementedError: the named implementation cannot run this call.

    Source: vLLM 0.26.0 `mxfp8_utils.py`, `nvfp4_emulation_utils.py`, `fp_quant.py`.
    """
    args = prepare(
        x,
        format=format,
        rule=rule,
        ties=ties,
        floor=floor,
        global_scale=global_scale,
        swizzled=swizzled,
        rotation=rotation,
    )
    return _mechanism.run(MECHANISM, args, implementation, config)


def prepare(
    x,
    *,
    format="mxfp4",
    rule=None,
    ties="even",
    floor=mx.MXFP4_FLOOR,
    global_scale=None,
    swizzled=False,
    rotation=None,
) -> Args:
    """Validate and complete the arguments of `quantize_mx`; raises as it does."""
    M = _checks.check_shapes(_OP, x=(x, "N M"))["M"]
    _checks.check_dtype(_OP, "x", x, _checks.FLOATS)
    _checks.check_positive(_OP, floor=floor)
    if format not in FORMATS:
        raise ValueError(f"{_OP}: format must be one of {', '.join(FORMATS)}, got {format!r}")
    try:
        if format == "nvfp4":
            nvfp4.check(M)
        else:
            mx.check(M, format, rule, ties)
        if rotation is not None:
            hadamard.check(M, rotation)
    except ValueError as e:
        raise ValueError(f"{_OP}: {e}") from e
    if format == "nvfp4" and (rule is not None or ties != "even"):
        raise ValueError(f"{_OP}: NVFP4 has no rule and even ties, got {rule=}, {ties=}; leave them out")
    if format != "nvfp4" and (global_scale is not None or swizzled):
        raise ValueError(f"{_OP}: global_scale and swizzled belong to nvfp4, got format {format!r}; leave them out")
    if format == "mxfp8" and rotation is not None:
        raise ValueError(f"{_OP}: a rotation belongs to the 4-bit formats, got format 'mxfp8'; leave it out")
    return {
        "x": x,
        "format": format,
        "rule": rule,
        "ties": ties,
        "floor": float(floor),
        "global_scale": _checks.number(_OP, "global_scale", global_scale),
        "swizzled": bool(swizzled),
        "rotation": None if rotation is None else int(rotation),
    }


def _reference(x, *, format, rule, ties, floor, global_scale, swizzled, rotation):
    """The format's quantizer, after the rotation."""
    x = x if rotation is None else hadamard.rotate(x, rotation)
    if format != "nvfp4":
        return mx.quantize(x, format, rule=rule, ties=ties, floor=floor)
    q, scale, g = nvfp4.quantize(x, global_scale)
    return q, nvfp4.swizzle(scale) if swizzled else scale, g


def _mosaic_run(*, swizzled, **args):
    """The kernel, then the permutation of its scales, a sixteenth of the bytes."""
    out = mosaic.quantize_mx(swizzled=False, **args)
    return (out[0], nvfp4.swizzle(out[1]), *out[2:]) if swizzled else out


def _outputs(*, format, **_):
    return ("q", "scale", "global_scale") if format == "nvfp4" else ("q", "scale")


def _cost(*, x, format, **_):
    """Read once (NVFP4's global scale reads again), codes and scales written."""
    N, M = x.shape
    written = {"mxfp8": N * M + N * M // 32, "mxfp4": N * M // 2 + N * M // 32, "nvfp4": N * M // 2 + N * M // 16}
    return 4 * N * M, N * M * jnp.dtype(x.dtype).itemsize + written[format]


def make_inputs(rng: np.random.Generator, N: int, M: int, *, dtype: str = "bfloat16", kind="mixed", **options) -> Args:
    """Adversarial (or, with kind="plain", normal) arguments of `quantize_mx`."""
    return {"x": _inputs.adversarial(rng, N, M, dtype, kind), **options}


def _case(name: str, N: int, M: int, *tags: str, **options) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, N, M, **options), tags=frozenset(tags or ("smoke",)))


_CASES = (
    _case("mxfp8-fp32", 12, 256, dtype="float32", format="mxfp8"),
    _case("mxfp4-fp32", 12, 256, dtype="float32"),
    _case("nvfp4-fp32", 12, 256, dtype="float32", format="nvfp4"),
    _case("mxfp8", 12, 256, format="mxfp8"),
    _case("mxfp4", 12, 256),
    _case("mxfp4-ocp-fp32", 12, 256, dtype="float32", rule="floor"),
    _case("mxfp4-deep-gemm-fp32", 12, 256, dtype="float32", ties="zero", floor=mx.DEEP_GEMM_FLOOR),
    _case("nvfp4", 12, 256, format="nvfp4"),
    _case("nvfp4-swizzled-odd", 130, 80, format="nvfp4", swizzled=True, global_scale=np.float32(5)),
    _case("mxfp4-rotated-fp32", 12, 256, dtype="float32", rotation=hadamard.GROUP),
    _case("nvfp4-rotated", 12, 256, format="nvfp4", rotation=hadamard.GROUP),
    _case("mxfp8-fp16", 3, 32, dtype="float16", format="mxfp8"),
    _case("mxfp8-bf16-odd", 5, 96, format="mxfp8"),
    _case("mxfp4-one-row", 1, 64),
    _case("nvfp4-given-fp32", 3, 80, dtype="float32", format="nvfp4", global_scale=np.float32(5)),
    _case("nvfp4-rotated-fp32", 5, 96, dtype="float32", format="nvfp4", rotation=hadamard.GROUP),
    _case("mxfp4-rotated-128", 5, 256, rotation=128),
    _case("mxfp8-16384x7168", 16384, 7168, "full", "bench", kind="plain", format="mxfp8"),
    _case("nvfp4-16384x7168", 16384, 7168, "full", "bench", kind="plain", format="nvfp4", global_scale=np.float32(500)),
    _case("mxfp4-16384x7168", 16384, 7168, "full", "bench", kind="plain"),
)


def _struct(dtype: str, **options) -> Args:
    return {"x": jax.ShapeDtypeStruct((64, 512), jnp.dtype(dtype)), **options}


_SUPPORT = tuple(
    (f"{dtype}, {format}", _struct(dtype, format=format))
    for dtype in ("bfloat16", "float16", "float32")
    for format in FORMATS
)

MECHANISM = Mechanism(
    name=_OP,
    source="OCP Microscaling Formats (MX) Specification 1.0; vLLM 0.26.0 mxfp8_utils.py, nvfp4_emulation_utils.py",
    op=quantize_mx,
    prepare=prepare,
    reference=_reference,
    outputs=_outputs,
    kernels={
        "mosaic": Kernel(
            run=_mosaic_run,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=_CASES,
    cost=_cost,
    captures=("quant/mxfp8*", "quant/nvfp4_*"),
    support=_SUPPORT,
)
