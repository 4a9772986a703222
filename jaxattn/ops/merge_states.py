"""Merge of two partial attention results by their log-sum-exps."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float8e4m3fn

from jaxattn import _checks, _kv_quant, _mechanism
from jaxattn._mechanism import Args, Case, Kernel, Mechanism
from pallas_kernels import _exact, _mosaic
from pallas_kernels import merge_states as mosaic

_OP = "merge_states"

type Output = Float[Array, "T H D"] | Float8e4m3fn[Array, "T H D"]


def merge_states(
    prefix_o: Float[Array, "T H D"],
    prefix_lse: Float[Array, "T H"],
    suffix_o: Float[Array, "T H D"],
    suffix_lse: Float[Array, "T H"],
    *,
    out_scale: Float[Array, ""] | float | None = None,
    return_lse: bool = True,
    implementation: str | None = None,
    config: Any = None,
) -> Output | tuple[Output, Float[Array, "T H"]]:
    r"""Attention over two disjoint sets of keys, from the results over each.

        w_p = exp(prefix_lse - m),  w_s = exp(suffix_lse - m),  m = max(prefix_lse, suffix_lse)
        o   = prefix_o * (w_p / (w_p + w_s)) + suffix_o * (w_s / (w_p + w_s)),   lse = log(w_p + w_s) + m

    in float32, ratios first, one rounding at the end. The order of the two sides does not matter.

    Args:
        prefix_o: normalised result over the first keys, bfloat16, float16 or float32 (float64: reference only).
        prefix_lse: its natural-log log-sum-exp, float32. Base-2 values (FlashInfer) must be multiplied by log(2) first.
            An infinity of either sign says that this side saw no key: its `o` is not used and may be NaN.
        suffix_o: result over the other keys, the dtype of `prefix_o`.
        suffix_lse: its log-sum-exp.
        out_scale: one number: return float8_e4m3fn codes of `o * (1 / out_scale)`, clamped to +-448; NaN stays NaN.
        return_lse: also return the merged log-sum-exp.
        implementation: None (choose), "reference" or "mosaic".
        config: launch configuration of the named kernel.

    Returns:
        `o` in the dtype of `prefix_o` (float8_e4m3fn with `out_scale`); with `return_lse` also `lse` in float32. If one
        side is empty the other is copied, bit for bit; if both are, `o` is 0 and `lse` is -inf.

    Raises:
        TypeError: dtypes; ValueError: shapes or options;
        NotImplementedError: the named implementation cannot run this call.

    Source: section 2.2 of https://arxiv.org/abs/2501.01005; roundings as vLLM 0.26.0 `csrc/attention/
    merge_attn_states.cu`, whose log-sum-exps are [H, T] and which copies the prefix if both sides are empty.
    """
    args = prepare(prefix_o, prefix_lse, suffix_o, suffix_lse, out_scale=out_scale, return_lse=return_lse)
    return _mechanism.run(MECHANISM, args, implementation, config)


def prepare(prefix_o, prefix_lse, suffix_o, suffix_lse, *, out_scale=None, return_lse=True) -> Args:
    """Validate and complete the arguments of `merge_states`; raises as it does."""
    _checks.check_shapes(
        _OP,
        prefix_o=(prefix_o, "T H D"),
        prefix_lse=(prefix_lse, "T H"),
        suffix_o=(suffix_o, "T H D"),
        suffix_lse=(suffix_lse, "T H"),
    )
    dtype = _checks.check_dtype(_OP, "prefix_o", prefix_o, _checks.FLOATS)
    _checks.check_dtype(_OP, "suffix_o", suffix_o, (dtype,), "both sides need one dtype; cast one of them")
    for name, x in (("prefix_lse", prefix_lse), ("suffix_lse", suffix_lse)):
        _checks.check_dtype(_OP, name, x, (_checks.F64,) if dtype == _checks.F64 else ("float32",))
    return {
        "prefix_o": prefix_o,
        "prefix_lse": prefix_lse,
        "suffix_o": suffix_o,
        "suffix_lse": suffix_lse,
        "out_scale": _checks.number(_OP, "out_scale", out_scale),
        "return_lse": bool(return_lse),
    }


def _reference(prefix_o, prefix_lse, suffix_o, suffix_lse, *, out_scale, return_lse):
    """The formula; float64 inputs give the truth, which float8 output does not round."""
    wide = jnp.float64 if prefix_o.dtype == jnp.float64 else jnp.float32
    no_prefix, no_suffix = jnp.isinf(prefix_lse), jnp.isinf(suffix_lse)
    p_lse, s_lse = jnp.where(no_prefix, -jnp.inf, prefix_lse), jnp.where(no_suffix, -jnp.inf, suffix_lse)
    top = jnp.maximum(p_lse, s_lse)
    top = jnp.where(top == -jnp.inf, 0, top)
    p_weight, s_weight = jnp.exp(p_lse - top), jnp.exp(s_lse - top)
    total = p_weight + s_weight
    p, s = prefix_o.astype(wide), suffix_o.astype(wide)
    p_weight, s_weight = _exact.divide(p_weight, total), _exact.divide(s_weight, total)
    o = p * p_weight[..., None] + s * s_weight[..., None]
    one = jnp.where(no_prefix[..., None], s, p)
    o = jnp.where((no_prefix | no_suffix)[..., None], one, o)
    o = jnp.where((no_prefix & no_suffix)[..., None], 0, o)
    if out_scale is None:
        o = o.astype(prefix_o.dtype)
    else:
        o = _kv_quant.fp8(o * _exact.divide(jnp.ones((), wide), out_scale.astype(wide).reshape(())))
    return (o, jnp.log(total) + top) if return_lse else o


def _outputs(*, return_lse, **_):
    return ("o", "lse") if return_lse else ("o",)


def _cost(*, prefix_o, out_scale, return_lse, **_):
    """Three operations an element; both inputs, the output and the log-sum-exps once."""
    T, H, D = prefix_o.shape
    width = jnp.dtype(prefix_o.dtype).itemsize
    out = width if out_scale is None else 1
    return 3 * T * H * D, T * H * (D * (2 * width + out) + 4 * (2 + return_lse))


def make_inputs(
    rng: np.random.Generator,
    T: int,
    H: int,
    D: int,
    *,
    dtype: str = "bfloat16",
    spread: float = 3.0,
    empty: bool = True,
    **options,
) -> Args:
    """Random arguments of `merge_states`.

    Args:
        rng: source of randomness.
        T: tokens.
        H: heads.
        D: head dim.
        dtype: of both outputs.
        spread: standard deviation of the log-sum-exps.
        empty: mark a tenth of each side's rows empty with either infinity, and fill their outputs with NaN.
        **options: passed on to the op.
    """
    args: Args = {}
    for side in ("prefix", "suffix"):
        o = rng.standard_normal((T, H, D)).astype(np.float32)
        lse = (spread * rng.standard_normal((T, H))).astype(np.float32)
        if empty:
            gone = rng.random((T, H)) < 0.1
            lse[gone] = rng.choice(np.array([-np.inf, np.inf], np.float32), gone.sum())
            o[gone] = np.nan
        args |= {f"{side}_o": jnp.asarray(o, dtype), f"{side}_lse": jnp.asarray(lse)}
    return args | options


def _case(name: str, T: int, H: int, D: int, *tags: str, **options) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, T, H, D, **options), tags=frozenset(tags or ("smoke",)))


_CASES = (
    _case("T7-H4-D128", 7, 4, 128),
    _case("T16-H8-D64-no-empty", 16, 8, 64, empty=False),
    _case("T5-H3-D192-fp16", 5, 3, 192, dtype="float16"),
    _case("T5-H7-D80", 5, 7, 80),
    _case("T3-H4-D512", 3, 4, 512),
    _case("T1-H1-D128-no-lse", 1, 1, 128, empty=False, return_lse=False),
    _case("T9-H5-D128-fp32", 9, 5, 128, dtype="float32"),
    _case("T9-H8-D64-fp32-wide-spread", 9, 8, 64, dtype="float32", spread=60.0),
    _case("T6-H8-D128-fp8-out", 6, 8, 128, out_scale=np.float32(0.01)),
    _case("T1000-H32-D128", 1000, 32, 128, "full"),
    _case("T63-H127-D128-fp32", 63, 127, 128, "full", dtype="float32"),
    _case("T8192-H32-D128", 8192, 32, 128, "full", "bench", empty=False),
)


def _struct(dtype: str, T: int, H: int, D: int, **options) -> Args:
    o, lse = jax.ShapeDtypeStruct((T, H, D), jnp.dtype(dtype)), jax.ShapeDtypeStruct((T, H), jnp.float32)
    return {"prefix_o": o, "prefix_lse": lse, "suffix_o": o, "suffix_lse": lse, **options}


_SUPPORT = (
    *(
        (f"{dtype}, D {D}", _struct(dtype, 64, 32, D))
        for dtype in ("bfloat16", "float16", "float32")
        for D in (64, 128, 192, 512)
    ),
    ("bfloat16, D 128, float8_e4m3fn out", _struct("bfloat16", 64, 32, 128, out_scale=1.0)),
    ("bfloat16, D 100", _struct("bfloat16", 64, 32, 100)),
    ("bfloat16, D 512, 3 rows", _struct("bfloat16", 1, 3, 512)),
)

MECHANISM = Mechanism(
    name=_OP,
    source="https://arxiv.org/abs/2501.01005, section 2.2; vLLM 0.26.0 csrc/attention/merge_attn_states.cu",
    op=merge_states,
    prepare=prepare,
    reference=_reference,
    outputs=_outputs,
    kernels={
        "mosaic": Kernel(
            run=mosaic.merge_states,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=_CASES,
    cost=_cost,
    captures=("attention/merge_states_*", "partial_attention/merge_states_*"),
    support=_SUPPORT,
)
