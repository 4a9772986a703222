"""Quantizers of MXFP8, MXFP4 and NVFP4 on Mosaic GPU: one pass over memory, see `jaxattn.ops.quantize_mx`."""

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _codes, _exact, _frames, _mosaic, _rows
from pallas_kernels import _plans as plans
from pallas_kernels._frames import Frame

_GROUP = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
_ROTATIONS = (32, 64, 128, 256, 512)
_SMALLEST = 2.0**-115


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """`rows`: groups (with a rotation: rotated groups) of one warpgroup."""

    rows: int

    def __post_init__(self):
        plans.check_rows(self.rows)


def why_not(*, x, rotation, **_) -> str | None:
    """None if the kernel can run these arguments, else one sentence."""
    if jnp.dtype(x.dtype).name not in plans.DTYPES:
        return f"x must be {_mosaic.either(plans.DTYPES)}, got {jnp.dtype(x.dtype).name}"
    if rotation not in (None, *_ROTATIONS):
        return f"rotated groups must be {_mosaic.either(_ROTATIONS)}, got {rotation}"
    return None


def default_config(*, x, format, rotation, **_) -> Config:
    """The largest tile up to 4096 values that still fills the card; MXFP4 of 16384 x 7168: 113 us, smaller ones 130."""
    D, vec = _length(format, rotation), _rows.vector(x.dtype)
    return Config(rows=_rows.default_rows(x.size // D, D, vec, _mosaic.num_sms(), plans.TILE_VALUES))


def configs(*, x, format, rotation, **_) -> Iterable[Config]:
    """All legal heights."""
    return [Config(rows=r) for r in _rows.choices(_length(format, rotation), _rows.vector(x.dtype))]


def _length(format: str, rotation: int | None) -> int:
    """Row length of the tiles."""
    return _GROUP[format] if rotation is None else rotation


def quantize_mx(*, config: Config, x, format, rule, ties, floor, global_scale, swizzled, rotation):
    """Launch; arguments as prepared by `jaxattn.ops.quantize_mx`, scales not swizzled."""
    del swizzled
    (N, M), group, D, vec, dtype = x.shape, _GROUP[format], _length(format, rotation), _rows.vector(x.dtype), x.dtype
    if reason := _rows.why_not_rows(config.rows, D, vec):
        raise ValueError(f"quantize_mx: {reason}")
    flat, parts, four = x.reshape(x.size // D, D), D // group, format != "mxfp8"
    g = None
    if format == "nvfp4":
        g = _global_scale(flat, vec, rotation) if global_scale is None else global_scale.astype(jnp.float32).reshape(())

    def process(start, rows, x_ref, *refs):
        g_ref, (q_ref, s_ref) = (None, refs) if g is None else (refs[0], refs[1:])
        frame = Frame((rows, D), vec, _frames.is_narrow(dtype))
        numbers = frame.load(x_ref.at[pl.ds(start, rows)])
        if rotation is not None:
            numbers = _codes.rotate(frame, _frames.wide(numbers), rotation).astype(dtype)
        whole = frame
        frame = Frame((rows * parts, group), vec, whole.narrow)
        if parts > 1:
            numbers = _mosaic.relabel(numbers, whole.numbers, frame.shape, frame.numbers)
        top = frame.largest([numbers])
        if g_ref is not None:
            s, y = _nvfp4(frame, _frames.wide(numbers), top, frame.full(g_ref[0]))
        else:
            code = _exponent(frame, top, format, rule, floor)
            s, y = code.astype(jnp.uint8), _codes.over_power(frame, _frames.wide(numbers), _codes.power(code))
        where = pl.ds(start * parts, rows * parts)
        if four:
            half = _rows.layout(group // 2, vec // 2)
            _mosaic.store(q_ref.at[where], _mosaic.pack_nibbles(_codes.e2m1(frame, y, ties), frame.numbers, half))
        else:
            _mosaic.store(q_ref.at[where], _codes.float8(y))
        _mosaic.store(s_ref.at[where], s)

    groups = x.size // group
    types = [
        jax.ShapeDtypeStruct((groups, group // 2 if four else group), jnp.uint8 if four else jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((groups,), jnp.uint8 if g is None else jnp.float8_e4m3fn),
    ]
    q, s = _frames.launch_tiles(
        process,
        [flat],
        types,
        rows=config.rows,
        least=_rows.smallest(D, vec),
        name=f"quantize_{format}",
        shared=[] if g is None else [g.reshape(1)],
        parts=parts,
    )
    q, s = q.reshape(N, M // 2 if four else M), s.reshape(N, M // group)
    return (q, s) if g is None else (q, s, g)


def _exponent(frame: Frame, top: jax.Array, format: str, rule: str | None, floor: float) -> jax.Array:
    """Code of the scale of groups whose largest magnitude is `top`."""
    if format == "mxfp8":
        return _codes.exponent(jnp.maximum(top, frame.full(_codes.TINY)), up=False)
    if rule == "floor":
        return jnp.maximum(_codes.exponent(jnp.maximum(top, frame.full(_codes.TINY)), up=False), 3) - 2
    return _codes.mxfp4_exponent(frame, top, floor)


def _nvfp4(frame: Frame, x: jax.Array, top: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """E4M3 scales of groups and what their codes are rounded from; zeros of the sign of x where the scale is 0."""
    sixth = frame.row("mul.rn.f32", jnp.multiply, top, frame.full(1 / 6))
    scaled = frame.row("mul.rn.f32", jnp.multiply, g, sixth)
    s = _codes.float8(jnp.maximum(scaled, frame.full(0.0)))
    one, zero = frame.full(1.0), frame.full(0.0)
    usable = g >= _codes.TINY
    whole = s.astype(jnp.float32) * jnp.where(usable, frame.divide_rows(one, jnp.where(usable, g, one)), zero)
    usable = whole >= _codes.TINY
    r = frame.spread(jnp.where(usable, frame.divide_rows(one, jnp.where(usable, whole, one)), zero))
    signed_zero = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & (-(2**31)), jnp.float32)
    return s, jnp.where(r == 0.0, signed_zero, x * r)


def _global_scale(x: jax.Array, vec: int, rotation: int | None) -> jax.Array:
    """`448 * 6 / amax`, 1 where that would overflow; of the rotated numbers, if they are."""

    def rotated(frame, numbers):
        assert rotation is not None
        return _codes.rotate(frame, _frames.wide(numbers), rotation).astype(x.dtype)

    change = None if rotation is None else rotated
    top = _frames.largest(x, vec, "quantize_nvfp4_amax", change)
    usable = top >= _SMALLEST
    limit = jnp.full_like(top, _codes.LIMITS[_codes.E4M3] * _codes.E2M1_MAX)
    return jnp.where(usable, _exact.divide(limit, jnp.where(usable, top, 1)), 1)
