"""Hadamard rotation on Mosaic GPU: one pass over memory, see `jaxattn.ops.hadamard_transform`."""

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import _codes, _frames, _mosaic, _rows
from pallas_kernels import _plans as plans
from pallas_kernels._frames import Frame

_LONGEST = 4096
"""128 values a lane, a warp holds a group."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """`rows`: groups of one warpgroup."""

    rows: int

    def __post_init__(self):
        plans.check_rows(self.rows)


def why_not(*, x, group, **_) -> str | None:
    """None if the kernel can run these arguments, else one sentence."""
    if jnp.dtype(x.dtype).name not in plans.DTYPES:
        return f"x must be {_mosaic.either(plans.DTYPES)}, got {jnp.dtype(x.dtype).name}"
    vec = _rows.vector(x.dtype)
    if not vec <= group <= _LONGEST:
        return f"groups must hold {vec} to {_LONGEST} values, got {group}"
    return None


def _rows_of(x, group: int) -> tuple[int, int]:
    return x.size // group, _rows.vector(x.dtype)


def default_config(*, x, group, **_) -> Config:
    """The largest tile that still fills the card."""
    N, vec = _rows_of(x, group)
    return Config(rows=_rows.default_rows(N, group, vec, _mosaic.num_sms()))


def configs(*, x, group, **_) -> Iterable[Config]:
    """All legal heights."""
    return [Config(rows=r) for r in _rows.choices(group, _rows.vector(x.dtype))]


def hadamard_transform(*, config: Config, x, group):
    """Launch; arguments as prepared by `jaxattn.ops.hadamard_transform`."""
    N, vec = _rows_of(x, group)
    if reason := _rows.why_not_rows(config.rows, group, vec):
        raise ValueError(f"hadamard_transform: {reason}")

    def process(start, rows, x_ref, o_ref):
        frame, where = Frame((rows, group), vec, _frames.is_narrow(x.dtype)), pl.ds(start, rows)
        y = _codes.rotate(frame, _frames.wide(frame.load(x_ref.at[where])), group)
        _mosaic.store(o_ref.at[where], y.astype(o_ref.dtype))

    types = [jax.ShapeDtypeStruct((N, group), x.dtype)]
    call = {"rows": config.rows, "least": _rows.smallest(group, vec), "name": "hadamard_transform"}
    return _frames.launch_tiles(process, [x.reshape(N, group)], types, **call)[0].reshape(x.shape)
