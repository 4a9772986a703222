"""Inverse RoPE and FP8 codes on Mosaic GPU: one pass over memory, see `jaxattn.ops.inv_rope_fp8_quant`.

Blocks of 128 numbers are the rows of a tile, so a scale belongs to a row; the last half of every head's last row is
rotated. A tile lies within one token, so its angles are two vectors.
"""

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic, _rows

_DTYPES = ("bfloat16", "float16", "float32")
_BLOCK, _ROTARY = 128, 64
_FLOOR, _MAX = 1e-10, 448.0
_ROWS = (8, 16, 32, 64)
_MANTISSA = 0x7FFFFF
_EXPONENTS = 254 << 23


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """`rows`: blocks of 128 numbers of one token in a tile."""

    rows: int

    def __post_init__(self):
        if self.rows not in _ROWS:
            raise ValueError(f"rows must be {_mosaic.either(_ROWS)}, got {self.rows}")


def why_not(*, o, cos_sin, **_) -> str | None:
    """None if the kernel can run these arguments, else one sentence."""
    _, H, D = o.shape
    if jnp.dtype(o.dtype).name not in _DTYPES:
        return f"the output must be {_mosaic.either(_DTYPES)}, got {jnp.dtype(o.dtype).name}"
    if cos_sin.shape[1] != _ROTARY:
        return f"the rotated part must have {_ROTARY} numbers, got {cos_sin.shape[1]}"
    if H * D // _BLOCK % _ROWS[0]:
        return f"a token's H * D numbers must be a multiple of {_ROWS[0] * _BLOCK}, got {H} heads of {D}"
    return None


def _legal(H: int, D: int) -> list[int]:
    return [r for r in _ROWS if H * D // _BLOCK % r == 0]


def default_config(*, o, **_) -> Config:
    """The largest tile: 64 numbers a lane."""
    return Config(rows=_legal(o.shape[1], o.shape[2])[-1])


def configs(*, o, **_) -> Iterable[Config]:
    """All legal tiles."""
    return [Config(rows=r) for r in _legal(o.shape[1], o.shape[2])]


def inv_rope_fp8_quant(*, config: Config, o, positions, cos_sin, groups):
    """Launch; arguments as prepared by `jaxattn.ops.inv_rope_fp8_quant`."""
    N, H, D = o.shape
    per_token, per_head, rows = H * D // _BLOCK, D // _BLOCK, config.rows
    if rows not in _legal(H, D):
        raise ValueError(f"inv_rope_fp8_quant: {rows=} is not legal for {H} heads of {D}")
    if not N:
        return jnp.zeros((0, groups, H // groups * D), jnp.float8_e4m3fn), jnp.zeros((0, groups, per_token // groups))
    vec = _rows.vector(o.dtype)
    kind = _rows.layout(_BLOCK, vec)
    cos, sin = angles(cos_sin, positions, _BLOCK)

    def body(x_ref, cos_ref, sin_ref, q_ref, s_ref):
        tile, token = lax.axis_index("tile"), lax.axis_index("token")
        start = token * per_token + tile * rows

        def column(ref):
            values = plgpu.load(ref.at[token], layout=kind.reduce(0), optimized=False)
            return lax.broadcast_in_dim(values, (rows, _BLOCK), [1])

        x = plgpu.load(x_ref.at[pl.ds(start, rows)], layout=kind, optimized=False).astype(jnp.float32)
        row = plgpu.broadcasted_iota(jnp.int32, (rows, _BLOCK), 0, layout=kind) + tile * rows
        turned = _mosaic.product_sum(x, column(cos_ref), _mosaic.swap_pairs(x, kind), column(sin_ref), kind)
        x = jnp.where(row % per_head == per_head - 1, turned, x)
        size = jnp.abs(x)
        top = jnp.max(jnp.where(size == size, size, 0.0), axis=1)
        bits = lax.bitcast_convert_type(jnp.maximum(top, _FLOOR) * (1 / _MAX), jnp.int32)
        bits = jnp.minimum((bits + _MANTISSA) & ~_MANTISSA, _EXPONENTS - (1 << 23))
        _mosaic.store(s_ref.at[pl.ds(start, rows)], lax.bitcast_convert_type(bits, jnp.float32))
        inverse = lax.bitcast_convert_type(_EXPONENTS - bits, jnp.float32)
        codes = x * lax.broadcast_in_dim(inverse, (rows, _BLOCK), [0])
        if _mosaic.interpreting():
            codes = jnp.where(codes == codes, jnp.clip(codes, -_MAX, _MAX), jnp.nan)
        _mosaic.store(q_ref.at[pl.ds(start, rows)], codes.astype(jnp.float8_e4m3fn))

    blocks = N * per_token
    q, scale = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((blocks, _BLOCK), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((blocks,), jnp.float32),
        ],
        grid=(per_token // rows, N),
        grid_names=("tile", "token"),
        kernel_name="inv_rope_fp8_quant",
    )(o.reshape(blocks, _BLOCK), cos, sin)
    return q.reshape(N, groups, -1), scale.reshape(N, groups, -1)


def angles(cos_sin: jax.Array, positions: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """Factors of numbers and of swapped neighbours that rotate back the last 64 of `width`, float32 [N, width]."""
    rows = cos_sin.astype(jnp.float32)[jnp.clip(positions, 0, cos_sin.shape[0] - 1)]
    cos, sin = (jnp.repeat(x, 2, axis=1) for x in jnp.split(rows, 2, axis=1))
    sin = sin * jnp.tile(jnp.array([1.0, -1.0]), sin.shape[1] // 2)
    kept = ((0, 0), (width - cos.shape[1], 0))
    return jnp.pad(cos, kept, constant_values=1.0), jnp.pad(sin, kept)
