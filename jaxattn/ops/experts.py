"""The experts of a mixture: gate/up product, activation, down product and weighted sum, in every precision."""

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, UInt8

from jaxattn import _checks, _mechanism
from jaxattn._mechanism import Args, Kernel, Mechanism
from jaxattn.ops import _expert_cases as cases
from jaxattn.ops import _expert_formats as formats
from jaxattn.ops import align_block_size, gated_activation, unpermute
from jaxattn.quant import primitives as p
from pallas_kernels import _exact, _expert_codes, _mosaic, _requantize, _row_copies
from pallas_kernels import _experts_decoded as decoded
from pallas_kernels import experts as mosaic

_OP = "experts"
PLACES = ("output", "activation")

type Format = Literal["none", "fp8_tensor", "fp8_block", "int8", "wna16", "mxfp4", "nvfp4"]
type Place = Literal["output", "activation"]


def experts(
    x: Float[Array, "T M"],
    w13: Array,
    w2: Array,
    weights: Float[Array, "T A"],
    ids: Int32[Array, "T A"],
    *,
    format: Format = "none",
    w13_scale: Array | None = None,
    w2_scale: Array | None = None,
    w13_zeros: UInt8[Array, "E F G"] | None = None,
    w2_zeros: UInt8[Array, "E M/2 G"] | None = None,
    w13_scale_2: Float[Array, " E"] | None = None,
    w2_scale_2: Float[Array, " E"] | None = None,
    w13_bias: Float[Array, "E 2F"] | None = None,
    w2_bias: Float[Array, "E M"] | None = None,
    act_group: int | None = None,
    ue8m0: bool = True,
    activation: gated_activation.Kind = "silu",
    limit: float | None = None,
    alpha: float | None = None,
    beta: float | None = None,
    weight_on: Place = "output",
    expert_map: Int32[Array, " global"] | None = None,
    implementation: str | None = None,
    config: Any = None,
) -> Float[Array, "T M"]:
    r"""`o[t] = sum_a weights[t, a] * (act(x[t] @ w13[e].T + b13[e]) @ w2[e].T + b2[e])` with `e = ids[t, a]`.

    Roundings, to the dtype of x, with `weight_on="output"` (vLLM's `fused_experts`):

        h = round(quantize(x) @ w13[e].T + b13[e])
        a = round(round(gate * sigmoid(gate)) * up)            see `gated_activation`
        y = round((quantize(a) @ w2[e].T + b2[e]) * weight)
        o = round(sum of y in float32, slots in order)

    With `weight_on="activation"` (MegaMoE) the weight comes before the second quantization, in float32:
    `a = gate * sigmoid(gate) * up * weight` is rounded once, or quantized as it is, and y is not weighted again.

    | format | `w13` [E, 2F, M] (`w2` [E, M, F] alike) | `w13_scale` | activations |
    |---|---|---|---|
    | none | dtype of x | | as they are |
    | fp8_tensor | float8_e4m3fn | [E] | e4m3, one dynamic scale over all rows |
    | fp8_block | float8_e4m3fn | [E, ceil(2F/128), ceil(M/128)] | e4m3 per 128, `ue8m0` scales |
    | int8 | int8 | [E, 2F, 1] | int8 per row |
    | wna16 | uint8 [E, 2F, M/2] | [E, 2F, groups], dtype of x; zeros [E, F, groups] | as they are |
    | mxfp4 | uint8 [E, 2F, M/2] | uint8 [E, 2F, M/32] | as they are, or e4m3 per `act_group` |
    | nvfp4 | uint8 [E, 2F, M/2] | float8_e4m3fn [E, 2F, M/16]; scale_2 [E] | likewise |

    Args:
        x: bfloat16, float16 or float32 (float64: reference only).
        w13: gate rows, then up rows (activation "silu"), or gate and up in turn ("swigluoai").
        w2: down projections.
        weights: float32 routing weights.
        ids: int32 experts; ids outside 0..E-1 (or of the map) add nothing, whatever their weight.
        format: of both weights.
        w13_scale: see the table; so `w2_scale`, `w13_zeros`, `w2_zeros`, `w13_scale_2`, `w2_scale_2`.
        w2_scale: likewise.
        w13_zeros: wna16 only, None = 8.
        w2_zeros: likewise.
        w13_scale_2: nvfp4 only, what weights are multiplied with besides ("weight_scale_2").
        w2_scale_2: likewise.
        w13_bias: any float.
        w2_bias: likewise.
        act_group: group of FP8 activations: 128 for fp8_block; None, 32 (MegaMoE) or 128 (DeepGEMM) for FP4 weights.
        ue8m0: group scales are powers of two, as in vLLM wherever DeepGEMM is importable; False = float32.
        activation: "silu" or "swigluoai"; `limit`, `alpha` and `beta` as for `gated_activation`.
        limit: DeepSeek-V4 has 10, gpt-oss 7.
        alpha: None = the activation's own.
        beta: likewise.
        weight_on: "output" or "activation".
        expert_map: for every id the local expert, or -1 = held by another rank.
        implementation: None (choose), "reference" or "mosaic".
        config: launch configuration of the named kernel.

    Raises:
        TypeError: dtypes; ValueError: shapes or options that do not belong together;
        NotImplementedError: the named implementation cannot run this call.

    Source: vLLM 0.26.0 `fused_moe/fused_moe.py`; https://github.com/deepseek-ai/DeepGEMM (MegaMoE).
    """
    args = prepare(
        x,
        w13,
        w2,
        weights,
        ids,
        format=format,
        w13_scale=w13_scale,
        w2_scale=w2_scale,
        w13_zeros=w13_zeros,
        w2_zeros=w2_zeros,
        w13_scale_2=w13_scale_2,
        w2_scale_2=w2_scale_2,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        act_group=act_group,
        ue8m0=ue8m0,
        activation=activation,
        limit=limit,
        alpha=alpha,
        beta=beta,
        weight_on=weight_on,
        expert_map=expert_map,
    )
    return _mechanism.run(MECHANISM, args, implementation, config)


def prepare(
    x,
    w13,
    w2,
    weights,
    ids,
    *,
    format="none",
    w13_scale=None,
    w2_scale=None,
    w13_zeros=None,
    w2_zeros=None,
    w13_scale_2=None,
    w2_scale_2=None,
    w13_bias=None,
    w2_bias=None,
    act_group=None,
    ue8m0=True,
    activation="silu",
    limit=None,
    alpha=None,
    beta=None,
    weight_on="output",
    expert_map=None,
) -> Args:
    """Validate and complete the arguments of `experts`; raises as it does."""
    named = {
        "x": (x, "T M"),
        "weights": (weights, "T A"),
        "ids": (ids, "T A"),
        "w13": (w13, "E 2F K"),
        "w2": (w2, "E N L"),
    }
    dims = _checks.check_shapes(_OP, **named, **({} if expert_map is None else {"expert_map": (expert_map, "global")}))
    dtype = _checks.check_dtype(_OP, "x", x, _checks.FLOATS)
    _checks.check_dtype(_OP, "weights", weights, (_checks.F64,) if dtype == _checks.F64 else ("float32",))
    for name, array in (("ids", ids), ("expert_map", expert_map)):
        if array is not None:
            _checks.check_dtype(_OP, name, array, ("int32",))
    if format not in formats.FORMATS:
        raise ValueError(f"{_OP}: format must be one of {', '.join(formats.FORMATS)}, got {format!r}")
    if weight_on not in PLACES:
        raise ValueError(f"{_OP}: weight_on must be one of {', '.join(PLACES)}, got {weight_on!r}")
    E, M, F = dims["E"], dims["M"], dims["2F"] // 2
    if dims["2F"] % 2 or not E:
        raise ValueError(f"{_OP}: w13 must hold gate and up rows of at least one expert, got shape {tuple(w13.shape)}")
    act_group = formats.default_group(format, act_group)
    for name, shape, parts in (
        ("w13", (E, 2 * F, M), (w13, w13_scale, w13_zeros, w13_scale_2, w13_bias)),
        ("w2", (E, M, F), (w2, w2_scale, w2_zeros, w2_scale_2, w2_bias)),
    ):
        formats.check(_OP, name, *parts, shape=shape, format=format, dtype=dtype)
        formats.check_group(_OP, format, act_group, shape[2])
    act = gated_activation.options(_OP, activation, limit, alpha, beta)
    return {
        "x": x,
        "w13": w13,
        "w2": w2,
        "weights": weights,
        "ids": ids,
        "format": format,
        "w13_scale": w13_scale,
        "w2_scale": w2_scale,
        "w13_zeros": w13_zeros,
        "w2_zeros": w2_zeros,
        "w13_scale_2": w13_scale_2,
        "w2_scale_2": w2_scale_2,
        "w13_bias": w13_bias,
        "w2_bias": w2_bias,
        "act_group": act_group,
        "ue8m0": bool(ue8m0),
        "activation": act.pop("kind"),
        **act,
        "weight_on": weight_on,
        "expert_map": expert_map,
    }


def _reference(
    x,
    w13,
    w2,
    weights,
    ids,
    *,
    format,
    w13_scale,
    w2_scale,
    w13_zeros,
    w2_zeros,
    w13_scale_2,
    w2_scale_2,
    w13_bias,
    w2_bias,
    act_group,
    ue8m0,
    activation,
    limit,
    alpha,
    beta,
    weight_on,
    expert_map,
):
    """Every (token, slot) is a row; the roundings of the docstring, which float64 does without."""
    (T, A), E = ids.shape, w13.shape[0]
    which = align_block_size.local_experts(ids, E, expert_map).reshape(T * A)
    none = (which == E)[:, None]
    weight = jnp.where(none, 0, p.wide(weights).reshape(T * A, 1))
    how = {"format": format, "act_group": act_group, "ue8m0": ue8m0}
    first = {"w": w13, "scale": w13_scale, "zeros": w13_zeros, "scale_2": w13_scale_2, "bias": w13_bias}
    second = {"w": w2, "scale": w2_scale, "zeros": w2_zeros, "scale_2": w2_scale_2, "bias": w2_bias}
    rows = jnp.repeat(x, A, axis=0)
    h = round_to(formats.grouped_product(rows, first, which, **how), x.dtype).astype(x.dtype)
    if weight_on == "output":
        a = gated_activation.activate(h, activation, limit, alpha, beta).astype(x.dtype)
        y = formats.grouped_product(a, second, which, **how) * weight
    else:
        a = gated_activation.activate(h, activation, limit, alpha, beta, fused=True) * weight
        a = a if act_group else a.astype(x.dtype)
        bias = second.pop("bias")
        y = formats.grouped_product(a, second, which, **how)
        if bias is not None:
            y = y + bias[jnp.minimum(which, E - 1)].astype(y.dtype) * weight
    y = jnp.where(none, 0, round_to(y, x.dtype)).astype(x.dtype)
    return unpermute.moe_sum(y.reshape(T, A, w2.shape[1]))


def round_to(x, dtype):
    """`x` rounded to `dtype`, in its own; float64 stays."""
    return x if x.dtype == jnp.float64 else _exact.rounded(x, dtype)


def _run_mosaic(*, config, format, act_group, ue8m0, **args):
    """The kernel; weights of four bits are decoded first, by XLA, which FP4 survives to the bit."""
    dtype, wide = args["x"].dtype, args["weight_on"] == "activation" and act_group is not None
    if format not in mosaic.DECODED:

        def quantize(x):
            if format == "fp8_block" and ue8m0:
                return _row_copies.encode(x, lowest=-33)
            q, s = formats.codes(x, format, act_group, ue8m0)
            return q, s if s is None or not s.ndim else s.T

        return mosaic.experts(config=config, quantize=quantize, format=format, keep_wide=wide, ue8m0=ue8m0, **args)

    for name in ("w13", "w2"):
        args[name] = formats.decode(args, name, format, dtype)
        args[f"{name}_scale"] = args[f"{name}_scale_2"]

    def quantize_in_place(x):
        return formats.quantize(x, format, act_group, ue8m0)[0].astype(dtype), None

    return mosaic.experts(config=config, quantize=quantize_in_place, format="none", keep_wide=wide, **args)


def _run_decoded(*, config, format, act_group, ue8m0, **args):
    """The kernel that decodes weights of four bits in registers; FP8 activations are codes, or their values."""

    def quantize(x):
        group = _requantize.GROUP
        if config.codes:
            return _row_copies.encode(x, lowest=_expert_codes.LOWEST)
        if config.eight and config.encoder and act_group == group and ue8m0 and x.dtype == jnp.bfloat16:
            return _row_copies.encode(x, lowest=_requantize.LOWEST, group=group)
        if config.eight:
            q, s = formats.quantize_groups(x, format, act_group, ue8m0)
            return q, s.T
        return formats.quantize(x, format, act_group, ue8m0)[0].astype(args["x"].dtype), None

    how = {"format": format, "act_group": act_group, "ue8m0": ue8m0}
    return decoded.experts(config=config, quantize=None if act_group is None else quantize, **how, **args)


def _outputs(**_):
    return ("o",)


def _probe(rng: np.random.Generator, **args: Any) -> tuple[Args, np.ndarray]:
    """Three tokens, the first and the last among them, and the experts that they chose."""
    T, ids = args["x"].shape[0], np.asarray(args["ids"])
    foreign = args["expert_map"] is not None or (ids < 0).any() or (ids >= args["w13"].shape[0]).any()
    if args["format"] == "fp8_tensor" or foreign or T <= 3:
        return args, np.arange(T)  # rows share a scale, or ids mean something else
    rows = np.array([0, rng.integers(1, T - 1), T - 1])
    hit, ids = np.unique(ids[rows], return_inverse=True)
    fewer: Args = {name: args[name][rows] for name in ("x", "weights")}
    fewer |= {"ids": jnp.asarray(ids.reshape(len(rows), -1), jnp.int32)}
    for name, x in args.items():
        if name.startswith(("w13", "w2")) and x is not None:
            fewer[name] = x[hit]
    return args | fewer, rows


def _cost(*, x, w13, w2, weights, ids, w13_scale, w2_scale, **_):
    """Both products of every pair; the weights of experts that are hit, activations once."""
    (T, M), A, E = x.shape, ids.shape[1], w13.shape[0]
    F = w13.shape[1] // 2
    hit = len(set(jnp.asarray(ids).reshape(-1).tolist()) & set(range(E)))
    per_expert = sum(a.size // E * jnp.dtype(a.dtype).itemsize for a in (w13, w2, w13_scale, w2_scale) if a is not None)
    return 6 * T * A * M * F, hit * per_expert + 2 * T * M * jnp.dtype(x.dtype).itemsize + 8 * T * A


MECHANISM = Mechanism(
    name=_OP,
    source="vLLM 0.26.0 fused_moe/fused_moe.py; https://github.com/deepseek-ai/DeepGEMM",
    op=experts,
    prepare=prepare,
    reference=_reference,
    outputs=_outputs,
    kernels={
        "decoded": Kernel(
            run=_run_decoded,
            why_not=decoded.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=decoded.default_config,
            configs=decoded.configs,
        ),
        "mosaic": Kernel(
            run=_run_mosaic,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        ),
    },
    cases=cases.CASES,
    cost=_cost,
    probe=_probe,
    module="jaxattn.nn.moe:FusedMoE",
    captures=("moe/experts_*",),
    support=cases.SUPPORT,
)
