"""Rotary embedding inside row kernels: factors of numbers and of their partners, by token or by row."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic
from pallas_kernels._frames import Frame


def angles(
    cos_sin: jax.Array, positions: jax.Array, *, interleaved: bool = True, inverse: bool = False
) -> tuple[jax.Array, jax.Array]:
    """What numbers and their partners are multiplied with, float32 [N, Dr] each; partners are added.

    The partner of a number is its neighbour in the pair (2i, 2i + 1), or with halves the one Dr / 2 further on.

    Args:
        cos_sin: [P, Dr] `cos || sin`.
        positions: [N] rows of the table, those outside take the nearest row.
        interleaved: pairs are neighbours, else halves.
        inverse: turn back.
    """
    rows = cos_sin[jnp.clip(positions, 0, cos_sin.shape[0] - 1)].astype(jnp.float32)
    cos, sin = jnp.split(rows, 2, axis=1)
    sin = -sin if inverse else sin
    if not interleaved:
        return jnp.concatenate([cos, cos], 1), jnp.concatenate([-sin, sin], 1)
    return jnp.repeat(cos, 2, axis=1), jnp.stack([-sin, sin], -1).reshape(rows.shape)


def turned(x: jax.Array, cos: jax.Array, sin: jax.Array, layout: Any, distance: int = 1) -> jax.Array:
    """float32 pairs, so far apart, rotated, every product rounded; for `distance` see `_mosaic.partners`."""
    return _mosaic.product_sum(x, cos, _mosaic.partners(x, distance, layout), sin, layout)


@dataclasses.dataclass(frozen=True)
class Heads:
    """Heads as rows of a tile: angles belong to the token if tiles lie within one, else each row has its own."""

    H: int
    rows: int
    """Of a whole tile."""

    @property
    def by_token(self) -> bool:
        """A vector of angles serves a tile."""
        return self.H % self.rows == 0

    def spread(self, x: jax.Array) -> jax.Array:
        """Angles [N, Dr] as the kernel reads them, repeated where each row needs its own."""
        return x if self.by_token else jnp.repeat(x, self.H, axis=0)

    def load(self, ref: Any, start: Any, frame: Frame) -> jax.Array:
        """Angles of the rows from `start` on, [rows, Dr]."""
        if not self.by_token:
            return frame.load(ref.at[pl.ds(start, frame.shape[0])])
        token = lax.div(start, jnp.int32(self.H))
        values = plgpu.load(ref.at[token], layout=frame.numbers.reduce(0), optimized=False)
        return lax.broadcast_in_dim(values, frame.shape, [1])
