"""INT8 quantizers on Mosaic GPU: one pass over memory, see `jaxattn.ops.quantize_int8`."""

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from pallas_kernels import _codes, _frames, _mosaic
from pallas_kernels import _plans as plans
from pallas_kernels._frames import Frame

_MAX = 127.0
_FLOOR = 1e-10
_FAR = 2.0**30


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


def quantize_int8(*, config: Config, x, granularity, scale, azp, symmetric, group, rule):
    """Launch; arguments as prepared by `jaxattn.ops.quantize_int8`."""
    plan, (N, M) = plans.plan(x, granularity, group), x.shape
    plan.check("quantize_int8", config.rows)
    if granularity == "block":
        return plans.run_blocks(x, _block, jnp.int8, "quantize_int8_blocks")
    flat, q_type = plans.cut(plan, x, granularity), jax.ShapeDtypeStruct((plan.N, plan.D), jnp.int8)
    row_type = jax.ShapeDtypeStruct((plan.N,), jnp.float32)

    def run(coder, types, shared=()):
        process = plans.encode(coder, len(shared))
        return plans.run(plan, process, [flat], types, rows=config.rows, name="quantize_int8", shared=shared)

    if granularity == "tensor":
        scale = scale.astype(jnp.float32).reshape(())
        shared = [scale.reshape(1)] + ([] if azp is None else [azp.astype(jnp.int32).reshape(1)])
        (q,) = run(_static, [q_type], shared)
        return (
            (plans.uncut(plan, q, x.shape, granularity), scale)
            if azp is None
            else (plans.uncut(plan, q, x.shape, granularity), scale, azp.reshape(()))
        )
    if not symmetric:
        types = [q_type, row_type, jax.ShapeDtypeStruct((plan.N,), jnp.int32)]
        q, s, zero = run(_asymmetric, types)
        return q, s.reshape(N, 1), zero.reshape(N, 1)
    coder = {"group": _group, "channel": _channel}.get(granularity, _triton if rule == "triton" else _token)
    q, s = run(coder, [q_type, row_type])
    return plans.uncut(plan, q, x.shape, granularity), s.reshape(N, -(-M // group) if granularity == "group" else 1)


# ---------------------------------------------------------------- scales and codes of rows
def _token(frame: Frame, pieces):
    return _by_factor(frame, frame.largest(pieces), _even)


def _triton(frame: Frame, pieces):
    return _by_factor(frame, jnp.maximum(frame.largest(pieces), frame.full(_FLOOR)), _away)


def _by_factor(frame: Frame, top: jax.Array, code):
    """`amax / 127`, and codes of `x * (127 / amax)`."""
    s = frame.divide_rows(top, _MAX)
    usable = s >= _codes.TINY
    factor = frame.divide_rows(frame.full(_MAX), jnp.where(usable, top, 1.0))
    factor = frame.spread(jnp.where(usable, factor, 0.0))
    s = jnp.where(usable, s, 0.0)
    return [s], lambda x: code(frame, _codes.or_zero(frame.each("mul.rn.f32", jnp.multiply, x, factor)))


def _channel(frame: Frame, pieces):
    s = frame.divide_rows(frame.largest(pieces), _MAX)
    s = jnp.where(s >= _codes.TINY, s, 0.0)
    # codes stop at +-127 because |x / s| does
    return [s], lambda x: _even(frame, _codes.or_zero(frame.quotient(x, s)))


def _group(frame: Frame, pieces):
    s = frame.divide_rows(jnp.maximum(frame.largest(pieces), frame.full(_FLOOR)), _MAX)
    return [s], lambda x: _codes.or_zero(frame.quotient(x, s)).astype(jnp.int32).astype(jnp.int8)


def _block(frame: Frame, top: jax.Array):
    s = frame.divide_rows(jnp.maximum(top, frame.full(_FLOOR)), _MAX)
    return s, lambda x: _even(frame, _codes.or_zero(frame.quotient(x, s)))


def _asymmetric(frame: Frame, pieces):
    """`(max - min) / 255` and the zero point of each row; constant rows as the reference has them."""
    known = [_codes.or_zero(_frames.wide(x)) for x in pieces]
    low, high = known[0], known[0]
    for x in known[1:]:
        low, high = jnp.minimum(low, x), jnp.maximum(high, x)
    low, high = (
        jnp.where(jnp.abs(x) < _codes.TINY, 0.0, x) for x in (frame.reduce(jnp.min, low), frame.reduce(jnp.max, high))
    )
    s = frame.divide_rows(high - low, 255.0)
    constant = s < _codes.TINY
    shift = -128.0 - frame.divide_rows(low, jnp.where(constant, 1.0, s))
    shift = jnp.round(jnp.clip(shift, -_FAR, _FAR)).astype(jnp.int32)
    sign = jnp.where(low > 0, 1, jnp.where(low < 0, -1, 0))
    azp = jnp.where(constant, -sign, shift)
    inverse = frame.divide_rows(frame.full(1.0), jnp.where(constant, 1.0, s))
    inverse = frame.spread(jnp.where(constant, 0.0, inverse))
    # of a constant row every product is 0, and the zero point must not be added
    added = frame.spread(jnp.where(constant, 0, azp))
    out = jnp.where(constant, jnp.where(low == 0, 1.0, jnp.abs(low)), s)
    return [out, azp], lambda x: _shifted(frame, frame.each("mul.rn.f32", jnp.multiply, x, inverse), added)


def _static(frame: Frame, pieces, scale, azp=None):
    del pieces
    s = frame.full(scale)
    if azp is None:
        # clipped first, between the last code and the border beyond it, so that quotients cannot overflow
        low, high = frame.spread(s * -128.25), frame.spread(s * 127.25)

        def code(x):
            inside = jnp.minimum(jnp.maximum(x, low), high)
            return _even(frame, _codes.or_zero(frame.quotient(inside, s, scales_of_maxima=False)))

        return [], code
    inverse = frame.spread(jnp.where(s < _codes.TINY, 0.0, frame.divide_rows(frame.full(1.0), s)))
    added = jnp.clip(azp, -int(_FAR), int(_FAR))
    return [], lambda x: _shifted(frame, frame.each("mul.rn.f32", jnp.multiply, x, inverse), added)


# ---------------------------------------------------------------- roundings
def _even(frame: Frame, x: jax.Array) -> jax.Array:
    """|x| <= 128 to the nearest integer, halves to even."""
    return _codes.nearest_integer(frame, x).astype(jnp.int8)


def _away(frame: Frame, x: jax.Array) -> jax.Array:
    """|x| <= 127 to the nearest integer, halves away from zero."""
    even = _codes.nearest_integer(frame, x) - _codes.ROUNDER_BITS
    rest = x - even.astype(jnp.float32)  # exact
    even = even + jnp.where((rest == 0.5) & (x > 0), 1, 0) - jnp.where((rest == -0.5) & (x < 0), 1, 0)
    return even.astype(jnp.int8)


def _shifted(frame: Frame, x: jax.Array, azp: jax.Array) -> jax.Array:
    """`sat(even(x) + azp)`, for x and azp of any size, NaN as 0."""
    whole = _mosaic.to_int32(jnp.clip(x, -_FAR, _FAR), frame.numbers)
    return jnp.clip(whole + azp, -128, 127).astype(jnp.int8)
