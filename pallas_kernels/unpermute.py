"""Weighted sums of the experts' rows on Mosaic GPU, see `jaxattn.ops.unpermute`: a thread block a token, or less.

All rows of a token are on their way before the first is added, and no number is moved twice: `_row_copies.add`.
"""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels import _mosaic, _row_copies

DTYPES = ("bfloat16", "float16", "float32")
_PIECES = (1, 2, 4, 8)
_REGISTERS = 128
"""Of a thread for the rows of a token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How rows are cut."""

    pieces: int = 1
    """Thread blocks of a token: at most 1, 2, 4 or 8, as rows can be cut."""

    def __post_init__(self):
        if self.pieces not in _PIECES:
            raise ValueError(f"pieces must be {_mosaic.either(_PIECES)}, got {self.pieces}")


def why_not(*, y, **_) -> str | None:
    """None if the kernel can run these arguments, else one sentence."""
    dtype = jnp.dtype(y.dtype).name
    if dtype not in DTYPES:
        return f"y must be {_mosaic.either(DTYPES)}, got {dtype}"
    return _row_copies.why_not(y.shape[1], y.dtype)


def default_config(*, y, positions, **_) -> Config:
    """Whole rows, unless there are too few tokens to fill the card or a token's rows would not fit into registers."""
    (tokens, A), M = positions.shape, y.shape[1]
    registers = A * _row_copies.registers(M, y.dtype)
    if tokens <= _mosaic.num_sms() // 2 or registers > 2 * _REGISTERS:
        return Config(pieces=8)
    return Config(pieces=2 if registers > _REGISTERS else 1)


def configs(*, y, **_) -> Iterator[Config]:
    """Every number of pieces."""
    del y
    return (Config(pieces=n) for n in _PIECES)


def unpermute(*, config: Config, y, positions, weights) -> jax.Array:
    """Launch; arguments as prepared by `jaxattn.ops.unpermute`."""
    (T, A), M = positions.shape, y.shape[1]
    if not T or not A or not y.shape[0]:
        return jnp.zeros((T, M), y.dtype)
    return _row_copies.add(y, positions, weights, config.pieces)
