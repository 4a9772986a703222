"""Rotary embedding of heads on Mosaic GPU: one pass over memory, see `jaxattn.ops.rope`.

The rotated part of a tile of heads and the rest, which is copied, are two arrays.
"""

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import _frames, _mosaic, _rotary, _rows
from pallas_kernels import _plans as plans
from pallas_kernels._frames import Frame
from pallas_kernels._rotary import Heads

_VALUES = 64
"""Most numbers of a head in a lane."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """`rows`: heads of one warpgroup."""

    rows: int

    def __post_init__(self):
        plans.check_rows(self.rows)


def why_not(*, x, cos_sin, interleaved, **_) -> str | None:
    """None if the kernel can run these arguments, else one sentence."""
    if jnp.dtype(x.dtype).name not in plans.DTYPES:
        return f"x must be {_mosaic.either(plans.DTYPES)}, got {jnp.dtype(x.dtype).name}"
    Dr, vec = cos_sin.shape[1], _rows.vector(x.dtype)
    for name, width in (("rotated", Dr), ("other", x.shape[2] - Dr)):
        if width and (width % vec or width // _rows.lanes(width, vec) > _VALUES):
            return f"the {name} numbers must be a multiple of {vec}, at most {_VALUES} in each lane, got {width}"
    if not interleaved and Dr & (Dr - 1):
        return f"rotated halves must be a power of two, got {Dr} numbers"
    return None if x.shape[1] else "there are no heads"


def _least(D: int, Dr: int, vec: int) -> int:
    """Heads of the smallest tile, of both arrays."""
    return max(_rows.smallest(width, vec) for width in (Dr, D - Dr) if width)


def _legal(x, Dr: int) -> list[int]:
    (_, H, D), vec = x.shape, _rows.vector(x.dtype)
    least = _least(D, Dr, vec)
    every = [least << i for i in range(8) if i == 0 or least * D << i <= 2 * plans.TILE_VALUES]
    return [r for r in every if H % r == 0] or every


def default_config(*, x, cos_sin, **_) -> Config:
    """The largest tile up to 4096 numbers that leaves every multiprocessor four of them, else the smallest."""
    (N, H, D), legal = x.shape, _legal(x, cos_sin.shape[1])
    fitting = [r for r in legal if r * D <= plans.TILE_VALUES and 4 * _mosaic.num_sms() * r <= N * H]
    return Config(rows=max(fitting, default=legal[0]))


def configs(*, x, cos_sin, **_) -> Iterable[Config]:
    """All legal tiles; where there are some, those that lie within a token."""
    return [Config(rows=r) for r in _legal(x, cos_sin.shape[1])]


def rope(*, config: Config, x, positions, cos_sin, interleaved, first, inverse):
    """Launch; arguments as prepared by `jaxattn.ops.rope`."""
    (N, H, D), Dr, vec = x.shape, cos_sin.shape[1], _rows.vector(x.dtype)
    if config.rows % (least := _least(D, Dr, vec)):
        raise ValueError(f"rope: rows={config.rows} must be a multiple of {least}, the smallest tile")
    if not N:
        return x
    heads, narrow = Heads(H, config.rows), _frames.is_narrow(x.dtype)
    turning, kept = (pl.ds(0, Dr), pl.ds(Dr, D - Dr)) if first else (pl.ds(D - Dr, Dr), pl.ds(0, D - Dr))
    distance = 1 if interleaved else Dr // 2

    def process(start, rows, x_ref, cos_ref, sin_ref, o_ref):
        at, frame = pl.ds(start, rows), Frame((rows, Dr), vec, narrow)
        part = frame.load(x_ref.at[at, turning])
        if Dr < D:
            whole = Frame((rows, D - Dr), vec, narrow)
            _mosaic.store(o_ref.at[at, kept], whole.load(x_ref.at[at, kept]))
        cos, sin = (heads.load(ref, start, frame) for ref in (cos_ref, sin_ref))
        part = _rotary.turned(_frames.wide(part), cos, sin, frame.numbers, distance)
        _mosaic.store(o_ref.at[at, turning], part.astype(o_ref.dtype))

    factors = [heads.spread(a) for a in _rotary.angles(cos_sin, positions, interleaved=interleaved, inverse=inverse)]
    by_row, shared = ([], factors) if heads.by_token else (factors, [])
    (out,) = _frames.launch_tiles(
        process,
        [x.reshape(N * H, D), *by_row],
        [jax.ShapeDtypeStruct((N * H, D), x.dtype)],
        rows=config.rows,
        least=least,
        name="rope",
        shared=shared,
    )
    return out.reshape(x.shape)
