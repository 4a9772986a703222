"""Queries of the lightning indexer on Mosaic GPU: one pass over memory, see `jaxattn.ops.indexer_q`.

A head is a row of a tile: rotated, rounded, and coded with one scale (FP8) or, relabelled as rows of 32, with one for
each of them (MXFP4).
"""

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _codes, _frames, _mosaic, _rotary, _rows
from pallas_kernels import _plans as plans
from pallas_kernels._frames import Frame
from pallas_kernels._rotary import Heads

_GROUP = 32
_DIMS = (32, 64, 128, 256)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """`rows`: heads of one warpgroup."""

    rows: int

    def __post_init__(self):
        plans.check_rows(self.rows)


def why_not(*, q, weights, cos_sin, format, interleaved, **_) -> str | None:
    """None if the kernel can run these arguments, else one sentence."""
    (_, H, D), Dr = q.shape, cos_sin.shape[1]
    for name, x in (("q", q), ("weights", weights)):
        if jnp.dtype(x.dtype).name not in plans.DTYPES:
            return f"{name} must be {_mosaic.either(plans.DTYPES)}, got {jnp.dtype(x.dtype).name}"
    if D not in _DIMS:
        return f"heads must have {_mosaic.either(_DIMS)} numbers, got {D}"
    if not interleaved and Dr & (Dr - 1):
        return f"rotated halves must be a power of two, got {Dr} numbers"
    if not interleaved and Dr // 2 < _rows.vector(q.dtype):
        return f"rotated halves must fill {_rows.vector(q.dtype)} numbers of a lane each, got {Dr} numbers"
    return None if H else "there are no heads"


def _legal(q) -> list[int]:
    (_, H, D), vec = q.shape, _rows.vector(q.dtype)
    every = list(_rows.choices(D, vec))
    return [r for r in every if H % r == 0] or every


def default_config(*, q, **_) -> Config:
    """The largest tile up to 4096 numbers that leaves every multiprocessor four of them, else the smallest."""
    (N, H, D), legal = q.shape, _legal(q)
    fitting = [r for r in legal if r * D <= plans.TILE_VALUES and 4 * _mosaic.num_sms() * r <= N * H]
    return Config(rows=max(fitting, default=legal[0]))


def configs(*, q, **_) -> Iterable[Config]:
    """All legal tiles; where there are some, those that lie within a token."""
    return [Config(rows=r) for r in _legal(q)]


def indexer_q(*, config: Config, q, weights, positions, cos_sin, scales, format, first, interleaved, floor):
    """Launch; arguments as prepared by `jaxattn.ops.indexer_q`."""
    (N, H, D), Dr, vec, four = q.shape, cos_sin.shape[1], _rows.vector(q.dtype), format == "mxfp4"
    least, dtype = _rows.smallest(D, vec), q.dtype
    if reason := _rows.why_not_rows(config.rows, D, vec):
        raise ValueError(f"indexer_q: {reason}")
    heads, start_of_part = Heads(H, config.rows), 0 if first else D - Dr
    factors = [
        heads.spread(jnp.pad(a, ((0, 0), (start_of_part, D - Dr - start_of_part))))
        for a in _rotary.angles(cos_sin, positions, interleaved=interleaved)
    ]

    def process(start, rows, q_ref, w_ref, cos_ref, sin_ref, o_ref, folded_ref, *scale_ref):
        frame, at = Frame((rows, D), vec, _frames.is_narrow(dtype)), pl.ds(start, rows)
        x = _frames.wide(frame.load(q_ref.at[at]))
        w = _frames.wide(plgpu.load(w_ref.at[at], layout=frame.shared, optimized=False))
        cos, sin = (heads.load(ref, start, frame) for ref in (cos_ref, sin_ref))
        turned = _rotary.turned(x, cos, sin, frame.numbers, 1 if interleaved else Dr // 2)
        if Dr < D:
            column = plgpu.broadcasted_iota(jnp.int32, frame.shape, 1, layout=frame.numbers)
            turned = jnp.where((column >= start_of_part) & (column < start_of_part + Dr), turned, x)
        x = turned.astype(dtype)
        if four:
            group = Frame((rows * D // _GROUP, _GROUP), vec, frame.narrow)
            where = pl.ds(start * (D // _GROUP), group.shape[0])
            x = _mosaic.relabel(x, frame.numbers, group.shape, group.numbers)
            code = _codes.mxfp4_exponent(group, group.largest([x]))
            y = _codes.over_power(group, _frames.wide(x), _codes.power(code))
            half = _rows.layout(_GROUP // 2, vec // 2)
            packed = _mosaic.pack_nibbles(_codes.e2m1(group, y), group.numbers, half)
            _mosaic.store(o_ref.at[where], packed)
            _mosaic.store(scale_ref[0].at[where], code.astype(jnp.uint8))
        else:
            top = jnp.maximum(frame.largest([x]), frame.full(floor))
            s = _codes.power(_codes.exponent(frame.divide_rows(top, _codes.LIMITS[_codes.E4M3]), up=True))
            _mosaic.store(o_ref.at[at], _codes.float8(_codes.over_power(frame, _frames.wide(x), s)))
            w = frame.row("mul.rn.f32", jnp.multiply, w, s)
        for scale in scales:
            w = frame.row("mul.rn.f32", jnp.multiply, w, frame.full(scale))
        _mosaic.store(folded_ref.at[at], w)

    R, by_row, shared = N * H, [] if heads.by_token else factors, factors if heads.by_token else []
    types = [jax.ShapeDtypeStruct((R, D), jnp.float8_e4m3fn), jax.ShapeDtypeStruct((R,), jnp.float32)]
    if four:
        groups = R * D // _GROUP
        types[0] = jax.ShapeDtypeStruct((groups, _GROUP // 2), jnp.uint8)
        types.append(jax.ShapeDtypeStruct((groups,), jnp.uint8))
    arrays, rows, missing = [q.reshape(R, D), weights.reshape(R), *by_row], config.rows, 0
    if 0 < R < least:  # one tile, filled up with zeros
        rows, missing = least, least - R
        arrays = [jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) for x in arrays]
        types = [jax.ShapeDtypeStruct((t.shape[0] // R * least, *t.shape[1:]), t.dtype) for t in types]
    out = _frames.launch_tiles(process, arrays, types, rows=rows, least=least, name="indexer_q", shared=shared)
    if missing:
        out = [x[: x.shape[0] // least * R] for x in out]
    codes, folded, *exponents = out
    codes = codes.reshape(N, H, D // 2 if four else D)
    return (codes, folded.reshape(N, H), *(x.reshape(N, H, D // _GROUP) for x in exponents))
