"""MegaMoE's arithmetic stage by stage: the reference for fused and distributed FP8 x FP4 mixtures."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float8e4m3fn, Int32, UInt8

from jaxattn import _mechanism
from jaxattn._mechanism import Args, Case, Kernel, Mechanism
from jaxattn.ops import _expert_cases, align_block_size, experts, gated_activation, unpermute
from jaxattn.ops import _expert_formats as formats
from jaxattn.quant import mx
from jaxattn.quant import primitives as p
from pallas_kernels import _mosaic
from pallas_kernels import megamoe_staged as mosaic

_OP = "megamoe_staged"
_HOW: dict[str, Any] = {"format": "mxfp4", "act_group": mx.GROUP, "ue8m0": True}


def megamoe_staged(
    x: Float[Array, "T M"],
    weights: Float[Array, "T A"],
    ids: Int32[Array, "T A"],
    w13: UInt8[Array, "E 2F M/2"],
    w13_scale: UInt8[Array, "E 2F M/32"],
    w2: UInt8[Array, "E M F/2"],
    w2_scale: UInt8[Array, "E M F/32"],
    *,
    limit: float | None = None,
    expert_map: Int32[Array, " global"] | None = None,
    implementation: str | None = None,
    config: Any = None,
) -> tuple[
    Float[Array, "T M"],
    Float8e4m3fn[Array, "T M"],
    UInt8[Array, "T M/32"],
    Float8e4m3fn[Array, "T A F"],
    UInt8[Array, "T A F/32"],
]:
    r"""The mixture of MXFP4 experts on FP8 activations, with everything that is quantized on the way.

        1. staging    x8, x_scale = e4m3(x / 2^s) per 32, s = ceil(log2(max(amax, 1e-4) / 448))
        2. L1         h = round(x8 @ w13[e].T), float32 sums, both sides scaled per 32
        3. epilogue   gate = min(gate, limit), up = clip(up, +-limit); a = gate / (1 + exp(-gate)) * up * weight
        4. requantize a8, a_scale = e4m3(a / 2^s) per 32, the same rule
        5. L2         y = round(a8 @ w2[e].T) per (token, slot)
        6. combine    o = round(sum of y in float32, slots in order), no weight

    `round` is to the dtype of x. `experts(format="mxfp4", act_group=32, weight_on="activation")` gives the same `o`.

    Args:
        x: bfloat16, float16 or float32 (float64: reference only, quantizes nothing).
        weights: float32, renormalized and scaled by the router.
        ids: int32; ids outside 0..E-1 (-1 = padding) take no part.
        w13: packed E2M1, the even input feature in the low four bits; gate rows, then up rows.
        w13_scale: UE8M0 bytes.
        w2: likewise.
        w2_scale: likewise.
        limit: of the clamp; DeepSeek-V4 has 10.
        expert_map: for every id the local expert, or -1.
        implementation: None (choose), "mosaic" (Hopper) or "reference".
        config: launch configuration of the named kernel.

    Returns:
        `o`, `x8`, `x_scale`, `a8`, `a_scale`; pairs that take no part have a8 = 0 with the floor's scale.

    Raises:
        TypeError: dtypes; ValueError: shapes or options.

    Source: https://github.com/deepseek-ai/DeepGEMM (fp8_fp4_mega_moe); vLLM 0.26.0
    `deepseek_v4/nvidia/ops/prepare_megamoe.py`. The fused kernel has no floor under amax of a; a zero group is the
    floor's scale and zeros here.
    """
    args = prepare(x, weights, ids, w13, w13_scale, w2, w2_scale, limit=limit, expert_map=expert_map)
    return _mechanism.run(MECHANISM, args, implementation, config)


def prepare(x, weights, ids, w13, w13_scale, w2, w2_scale, *, limit=None, expert_map=None) -> Args:
    """Validate and complete the arguments of `megamoe_staged`; raises as it does."""
    checked = experts.prepare(
        x,
        w13,
        w2,
        weights,
        ids,
        format="mxfp4",
        w13_scale=w13_scale,
        w2_scale=w2_scale,
        act_group=mx.GROUP,
        limit=limit,
        weight_on="activation",
        expert_map=expert_map,
    )
    names = ("x", "weights", "ids", "w13", "w13_scale", "w2", "w2_scale", "limit", "expert_map")
    return {name: checked[name] for name in names}


def stage(x: Float[Array, "*N K"]) -> tuple[Array, UInt8[Array, "*N K/32"]]:
    """FP8 codes and UE8M0 bytes per 32 of any float; float64 codes are not rounded, only clamped."""
    q, s = formats.quantize_groups(x, "mxfp4", mx.GROUP, True)
    return q, p.ue8m0_ceil(s)


def _reference(x, weights, ids, w13, w13_scale, w2, w2_scale, *, limit, expert_map):
    (T, A), E = ids.shape, w13.shape[0]
    which = align_block_size.local_experts(ids, E, expert_map).reshape(T * A)
    none = (which == E)[:, None]
    x8, x_scale = stage(x)
    h = formats.grouped_product(jnp.repeat(x, A, axis=0), {"w": w13, "scale": w13_scale}, which, **_HOW)
    h = experts.round_to(h, x.dtype).astype(x.dtype)
    weight = jnp.where(none, 0, p.wide(weights).reshape(T * A, 1))
    a = jnp.where(none, 0, gated_activation.activate(h, "silu", limit, 1.0, 0.0, fused=True) * weight)
    a8, a_scale = stage(a)
    y = formats.grouped_product(a, {"w": w2, "scale": w2_scale}, which, **_HOW)
    y = jnp.where(none, 0, experts.round_to(y, x.dtype)).astype(x.dtype)
    F = w13.shape[1] // 2
    o = unpermute.moe_sum(y.reshape(T, A, w2.shape[1]))
    return o, x8, x_scale, a8.reshape(T, A, F), a_scale.reshape(T, A, F // mx.GROUP)


def _run(*, config, **args):
    return mosaic.megamoe_staged(config=config, stage=stage, **args)


def _outputs(**_):
    return ("o", "x8", "x_scale", "a8", "a_scale")


def _cost(*, x, w13, w2, weights, ids, w13_scale, w2_scale, **_):
    """As `experts`."""
    return experts._cost(x=x, w13=w13, w2=w2, weights=weights, ids=ids, w13_scale=w13_scale, w2_scale=w2_scale)


def make_inputs(
    rng: np.random.Generator,
    T: int,
    A: int,
    E: int,
    M: int,
    F: int,
    *,
    dtype: str = "bfloat16",
    masked: float = 0.0,
    **options,
) -> Args:
    """Random arguments of `megamoe_staged`; a share `masked` of pairs has the id -1 and a weight of NaN."""
    args = _expert_cases.make_inputs(rng, T, A, E, M, F, format="mxfp4", dtype=dtype)
    del args["format"]
    gone = rng.random((T, A)) < masked
    args["ids"] = jnp.where(gone, -1, args["ids"])
    args["weights"] = jnp.where(gone, jnp.nan, args["weights"])
    return args | options


def _case(name: str, *sizes: int, **options) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, *sizes, **options), tags=frozenset({"smoke"}))


def _struct(**options) -> Args:
    args = _expert_cases.struct(format="mxfp4", **options)
    del args["format"]
    return args


MECHANISM = Mechanism(
    name=_OP,
    source="https://github.com/deepseek-ai/DeepGEMM; vLLM 0.26.0 deepseek_v4/nvidia/ops/prepare_megamoe.py",
    op=megamoe_staged,
    prepare=prepare,
    reference=_reference,
    outputs=_outputs,
    kernels={
        "mosaic": Kernel(
            run=_run,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=(
        _case("T9-A2-E4", 9, 2, 4, 128, 128, limit=10.0),
        _case("T7-A3-E5-masked-fp32", 7, 3, 5, 128, 64, dtype="float32", masked=0.3, limit=0.5),
        _case("T5-A1-E4-no-limit", 5, 1, 4, 64, 64),
    ),
    cost=_cost,
    captures=("moe/megamoe_input_staging*",),
    support=(("bfloat16", _struct()), ("float32", _struct(dtype="float32"))),
)
