"""FP8 quantizers on Mosaic GPU: one pass over memory, see `jaxattn.ops.quantize_fp8`."""

import dataclasses
import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from pallas_kernels import _codes, _exact, _frames
from pallas_kernels import _plans as plans
from pallas_kernels._frames import Frame


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """`rows`: rows, or groups, of one warpgroup."""

    rows: int

    def __post_init__(self):
        plans.check_rows(self.rows)


def why_not(*, x, granularity, group, **_) -> str | None:
    """None if the kernel can run these arguments, else one sentence."""
    return plans.why_not(x, granularity, group)


def default_config(*, x, granularity, group, **_) -> Config:
    """Tiles as large as still fill the card, lines one by one."""
    return Config(rows=plans.plan(x, granularity, group).default_rows())


def configs(*, x, granularity, group, **_) -> Iterable[Config]:
    """All legal heights."""
    return [Config(rows=r) for r in plans.plan(x, granularity, group).choices()]


def quantize_fp8(*, config: Config, x, granularity, scale, upper_bound, dtype, group, rule, ue8m0):
    """Launch; arguments as prepared by `jaxattn.ops.quantize_fp8`."""
    plan, (N, M) = plans.plan(x, granularity, group), x.shape
    plan.check("quantize_fp8", config.rows)
    if granularity == "block":
        how = functools.partial(group_scale, dtype=dtype, rule="deep_gemm", ue8m0=ue8m0)
        return plans.run_blocks(x, how, dtype, "quantize_fp8_blocks")
    flat, q_type = plans.cut(plan, x, granularity), jax.ShapeDtypeStruct((plan.N, plan.D), jnp.dtype(dtype))
    row_type = jax.ShapeDtypeStruct((plan.N,), jnp.float32)

    def run(coder, types, shared=()):
        process = plans.encode(coder, len(shared))
        return plans.run(plan, process, [flat], types, rows=config.rows, name="quantize_fp8", shared=shared)

    if granularity == "tensor":
        if scale is None:
            top = _frames.largest(flat, plan.vec, "quantize_fp8_amax")
            scale = _exact.divide(top, _codes.LIMITS[dtype])
        scale = scale.astype(jnp.float32).reshape(())
        (q,) = run(functools.partial(_codes.fp8_static, dtype=dtype), [q_type], [scale.reshape(1)])
        return plans.uncut(plan, q, x.shape, granularity), scale
    if granularity == "group":

        def coder(frame, pieces):
            s, encode = group_scale(frame, frame.largest(pieces), dtype=dtype, rule=rule, ue8m0=ue8m0)
            return [s], encode

        q, s = run(coder, [q_type, row_type])
        return plans.uncut(plan, q, x.shape, granularity), s.reshape(N, -(-M // group))
    shared = [] if upper_bound is None else [upper_bound.astype(jnp.float32).reshape(1)]
    q, s = run(functools.partial(_codes.fp8_token, dtype=dtype), [q_type, row_type], shared)
    return q, s.reshape(N, 1)


def group_scale(frame: Frame, top: jax.Array, *, dtype: str, rule: str, ue8m0: bool) -> tuple[jax.Array, _codes.Encode]:
    """The scale of groups or blocks whose largest magnitude is `top`, and the function that encodes their numbers."""
    limit = _codes.LIMITS[dtype]
    top = jnp.maximum(top, frame.full(1e-4 if rule == "deep_gemm" else 1e-10))
    s = top * frame.full(1 / limit) if rule == "triton" else frame.over_constant(top, limit)
    if ue8m0:
        s = _codes.power_above(jnp.maximum(s, frame.full(1e-10)) if rule == "cuda" else s)
        return s, lambda x: _codes.float8(_codes.over_power(frame, x, s), dtype)
    if rule == "deep_gemm":
        r = frame.spread(frame.divide_rows(frame.full(1.0), s))
        return s, lambda x: _codes.float8(x * r, dtype)
    return s, lambda x: _codes.float8(frame.quotient(x, s), dtype)
