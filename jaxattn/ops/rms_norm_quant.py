"""RMSNorm, with an optional residual, whose result may leave quantized to FP8."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxattn import _checks, _mechanism
from jaxattn._mechanism import Args, Case, Kernel, Mechanism
from jaxattn.quant import fp8
from jaxattn.quant import primitives as p
from pallas_kernels import _mosaic
from pallas_kernels import rms_norm_quant as mosaic

_OP = "rms_norm_quant"

type Mode = Literal["none", "static", "token", "group"]
MODES = ("none", "static", "token", "group")


def rms_norm_quant(
    x: Float[Array, "N M"],
    weight: Float[Array, " M"],
    *,
    residual: Float[Array, "N M"] | None = None,
    eps: float = 1e-6,
    mode: Mode = "none",
    scale: Float[Array, ""] | float | None = None,
    upper_bound: Float[Array, ""] | float | None = None,
    group: int = 128,
    implementation: str | None = None,
    config: Any = None,
) -> Any:
    """`y = z * r * weight` with `z = x + residual`, `r = 1 / sqrt(mean(z^2) + eps)`, quantized as `mode` says.

    T is the dtype of `x`, everything else is float32. vLLM's four kernels round differently, and so does this:

    | mode | y | residual joins | scale | code |
    |---|---|---|---|---|
    | none | `T(z * r * w)` | `z = T(x + residual)` | | |
    | static | `T(z * r * w)` | `z = T(x + residual)` | as given | `e4m3(y * (1 / s))` |
    | token | `T(T(z * r) * w)` | z stays float32 | `max(min(amax, bound) / 448, 1 / (448 * 512))` | `e4m3(y / s)` |
    | group | `T(T(z * r) * w)` | z stays float32 | `max(amax / 448, 1 / (448 * 512))` per group | `e4m3(y / s)` |

    Args:
        x: bfloat16, float16 or float32 (float64: reference only, codes are not rounded).
        weight: the dtype of `x`.
        residual: the dtype of `x`.
        eps: added to the mean of squares.
        mode: what leaves: "none" gives `y` itself.
        scale: of mode "static".
        upper_bound: largest amax that counts, mode "token" only.
        group: size of a group of mode "group".
        implementation: None (choose), "reference" or "mosaic".
        config: launch configuration of the named kernel.

    Returns:
        `o` (mode none) or float8_e4m3fn `q`, then float32 `scale` [N, 1] (token) or [N, ceil(M / group)] (group), then
        with a residual `T(x + residual)`; a single output comes alone, several as a tuple.

    Raises:
        TypeError: dtypes; ValueError: shapes or options that do not belong together;
        NotImplementedError: the named implementation cannot run this call.

    Source: vLLM 0.26.0 csrc/layernorm_kernels.cu, layernorm_quant_kernels.cu, quantization/fused_kernels.
    """
    args = prepare(
        x,
        weight,
        residual=residual,
        eps=eps,
        mode=mode,
        scale=scale,
        upper_bound=upper_bound,
        group=group,
    )
    return _mechanism.run(MECHANISM, args, implementation, config)


def prepare(x, weight, *, residual=None, eps=1e-6, mode="none", scale=None, upper_bound=None, group=128) -> Args:
    """Validate and complete the arguments of `rms_norm_quant`; raises as it does."""
    named = {"x": (x, "N M"), "weight": (weight, "M")} | ({} if residual is None else {"residual": (residual, "N M")})
    _checks.check_shapes(_OP, **named)
    dtype = _checks.check_dtype(_OP, "x", x, _checks.FLOATS)
    for name in list(named)[1:]:
        _checks.check_dtype(_OP, name, named[name][0], (dtype,), "cast one of them")
    _checks.check_positive(_OP, eps=eps)
    _checks.check_count(_OP, group=group)
    check_mode(_OP, mode, scale, upper_bound)
    return {
        "x": x,
        "weight": weight,
        "residual": residual,
        "eps": float(eps),
        "mode": mode,
        "scale": _checks.number(_OP, "scale", scale),
        "upper_bound": _checks.number(_OP, "upper_bound", upper_bound),
        "group": int(group),
    }


def check_mode(op: str, mode: str, scale: Any, upper_bound: Any) -> None:
    """Raise `ValueError` unless scale and bound belong to the mode."""
    if mode not in MODES:
        raise ValueError(f"{op}: mode must be one of {', '.join(MODES)}, got {mode!r}")
    if (scale is not None) != (mode == "static"):
        given = "without" if scale is None else "with"
        raise ValueError(f"{op}: a scale belongs to mode 'static', and only there, got mode {mode!r} {given} scale")
    if upper_bound is not None and mode != "token":
        raise ValueError(f"{op}: upper_bound belongs to mode 'token', got mode {mode!r}; leave it out")


def quantize_rows(y: Array, *, mode: str, scale: Any, upper_bound: Any, group: int) -> tuple[Array, ...]:
    """`(o,)`, `(q,)` or `(q, scale)` of finished rows; groups have the floor of tokens here."""
    if mode == "none":
        return (y,)
    if mode == "static":
        return (fp8.quantize(y, "tensor", scale=scale)[0],)
    if mode == "token":
        return fp8.quantize(y, "token", upper_bound=upper_bound)
    q, s = fp8.quantize(p.grouped(y, group), "token")
    return p.ungrouped(q, y.shape[-1]), s[..., 0]


def _reference(x, weight, *, residual, eps, mode, scale, upper_bound, group):
    """As the table says."""
    dtype, z, w = x.dtype, p.wide(x), p.wide(weight)
    stored = z
    if residual is not None:
        z = z + p.wide(residual)
        stored = p.rounded(z, dtype)
        z = p.wide(stored) if mode in ("none", "static") else z
    root = jnp.sqrt(jnp.mean(z * z, -1, keepdims=True) + eps)
    y = z * p.divide(jnp.ones_like(root), root)
    y = y if mode in ("none", "static") else p.wide(p.rounded(y, dtype))
    out: tuple[Any, ...] = quantize_rows(
        p.rounded(y * w, dtype), mode=mode, scale=scale, upper_bound=upper_bound, group=group
    )
    out = out if residual is None else (*out, stored)
    return out[0] if len(out) == 1 else out


def _outputs(*, mode, residual, **_):
    names = {"none": ("o",), "static": ("q",)}.get(mode, ("q", "scale"))
    return names if residual is None else (*names, "residual")


def _cost(*, x, residual, mode, **_):
    """Each array read and written once; about six operations a number."""
    item = jnp.dtype(x.dtype).itemsize
    return 6 * x.size, x.size * (item * (1 if residual is None else 3) + (item if mode == "none" else 1))


def make_inputs(
    rng: np.random.Generator, N: int, M: int, *, dtype: str = "bfloat16", residual: bool = False, **options
) -> Args:
    """Arguments of `rms_norm_quant`: normal rows, one of zeros, one tiny, one with an outlier."""
    x = rng.standard_normal((N, M)).astype(np.float32)
    x[1:2], x[2:3] = 0, x[2:3] * np.float32(1e-6)
    x[3:4, 0] = 1000
    args: Args = {"x": jnp.asarray(x, dtype), "weight": jnp.asarray(rng.standard_normal(M), dtype)}
    if residual:
        args["residual"] = jnp.asarray(rng.standard_normal((N, M)), dtype)
    return args | options


def _case(name: str, N: int, M: int, *tags: str, **options) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, N, M, **options), tags=frozenset(tags or ("smoke",)))


_STATIC = {"mode": "static", "scale": np.float32(0.03)}
_CASES = (
    _case("none", 5, 256),
    _case("static-fp32", 5, 256, dtype="float32", **_STATIC),
    _case("token-fp32", 5, 256, dtype="float32", mode="token"),
    _case("none-residual-fp32", 5, 256, dtype="float32", residual=True),
    _case("none-residual", 5, 256, residual=True),
    _case("token", 5, 256, mode="token"),
    _case("token-residual-bound", 5, 256, mode="token", residual=True, upper_bound=np.float32(2)),
    _case("group-fp32", 5, 256, dtype="float32", mode="group"),
    _case("group-residual", 5, 256, mode="group", residual=True),
    _case("group-odd-fp16", 5, 200, dtype="float16", mode="group"),
    _case("static-residual", 5, 256, residual=True, **_STATIC),
    _case("token-2880-fp32", 3, 2880, dtype="float32", mode="token"),
    _case("token-2880-residual", 3, 2880, mode="token", residual=True),
    _case("none-4104-fp32", 2, 4104, dtype="float32", residual=True),
    _case("static-7168", 1, 7168, **_STATIC),
    _case("group-1536-fp32", 3, 1536, dtype="float32", mode="group"),
    _case("group-1536-residual", 3, 1536, mode="group", residual=True),
    _case("group-2880-residual", 2, 2880, mode="group", residual=True),
    _case("token-residual-16384x7168", 16384, 7168, "full", "bench", mode="token", residual=True),
    _case("group-16384x7168", 16384, 7168, "full", "bench", mode="group"),
    _case("static-16384x7168", 16384, 7168, "full", "bench", **_STATIC),
    _case("token-16384x7168", 16384, 7168, "full", "bench", mode="token"),
    _case("none-16384x7168", 16384, 7168, "full", "bench"),
)


def _struct(dtype: str, residual: bool, **options) -> Args:
    x = jax.ShapeDtypeStruct((64, 512), jnp.dtype(dtype))
    args = {"x": x, "weight": jax.ShapeDtypeStruct((512,), jnp.dtype(dtype)), **options}
    return args | ({"residual": x} if residual else {})


_SUPPORT = tuple(
    (f"{dtype}, {mode}{', residual' if residual else ''}", _struct(dtype, residual, mode=mode, **more))
    for dtype in ("bfloat16", "float16", "float32")
    for mode, more in (("none", {}), ("static", {"scale": 0.03}), ("token", {}), ("group", {}))
    for residual in (False, True)
)

MECHANISM = Mechanism(
    name=_OP,
    source="https://arxiv.org/abs/1910.07467; vLLM 0.26.0 csrc/layernorm_kernels.cu, quantization/fused_kernels",
    op=rms_norm_quant,
    prepare=prepare,
    reference=_reference,
    outputs=_outputs,
    kernels={
        "mosaic": Kernel(
            run=mosaic.rms_norm_quant,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=_CASES,
    cost=_cost,
    captures=("quant/norm_*",),
    support=_SUPPORT,
)
