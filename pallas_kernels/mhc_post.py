"""The update of hyper-connected streams on Mosaic GPU: one pass over memory, see `jaxattn.ops.mhc_post`.

A warpgroup takes some columns of one token's streams: coefficients are scalars, numbers go straight through registers.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic

_DTYPES = ("bfloat16", "float16", "float32")
_LANES, _STREAMS = 128, 4
_COLUMNS = (256, 512, 1024, 2048)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """`columns` of a token's streams for one warpgroup."""

    columns: int

    def __post_init__(self):
        if self.columns not in _COLUMNS:
            raise ValueError(f"columns must be {_mosaic.either(_COLUMNS)}, got {self.columns}")


def why_not(*, residual, **_) -> str | None:
    """None if the kernel can run these arguments, else one sentence."""
    _, C, M = residual.shape
    if jnp.dtype(residual.dtype).name not in _DTYPES:
        return f"streams must be {_mosaic.either(_DTYPES)}, got {jnp.dtype(residual.dtype).name}"
    if C != _STREAMS:
        return f"the number of streams must be {_STREAMS}, got {C}"
    if M % _COLUMNS[0]:
        return f"the streams' width must be a multiple of {_COLUMNS[0]}, got {M}"
    return None


def _legal(M: int, itemsize: int) -> list[int]:
    """Widths that divide M, up to two 16-byte loads a lane and stream."""
    return [c for c in _COLUMNS if M % c == 0 and c * itemsize <= 2 * 16 * _LANES]


def default_config(*, residual, **_) -> Config:
    """One 16-byte load a lane and stream where the width allows it."""
    itemsize = jnp.dtype(residual.dtype).itemsize
    legal = _legal(residual.shape[2], itemsize)
    return Config(columns=max(c for c in legal if c * itemsize <= 16 * _LANES or c == legal[0]))


def configs(*, residual, **_) -> Iterable[Config]:
    """All legal widths."""
    legal = _legal(residual.shape[2], jnp.dtype(residual.dtype).itemsize)
    return [Config(columns=c) for c in legal]


def layout(columns: int, itemsize: int):
    """Register layout of the columns."""
    return plgpu.Layout.WG_STRIDED((columns,), min(16 // itemsize, columns // _LANES))


def mhc_post(*, config: Config, residual, y, post, comb):
    """Launch; arguments as prepared by `jaxattn.ops.mhc_post`."""
    N, C, M = residual.shape
    columns, itemsize = config.columns, jnp.dtype(residual.dtype).itemsize
    if columns not in _legal(M, itemsize):
        raise ValueError(f"mhc_post: {columns=} is not legal for streams of {M}")
    if not N:
        return jnp.zeros_like(residual)
    kind = layout(columns, itemsize)

    def body(r_ref, y_ref, post_ref, comb_ref, o_ref):
        n, part = lax.axis_index("token"), lax.axis_index("part")
        here = pl.ds(part * columns, columns)

        def load(ref):
            return plgpu.load(ref, layout=kind, optimized=False).astype(jnp.float32)

        streams = [load(r_ref.at[n * C + i, here]) for i in range(C)]
        out = load(y_ref.at[n, here])
        for j in range(C):
            comb = [comb_ref[n * C * C + i * C + j] for i in range(C)]
            new = mixed(streams, out, comb, post_ref[n * C + j])
            _mosaic.store(o_ref.at[n * C + j, here], new.astype(o_ref.dtype))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((N * C, M), residual.dtype),
        grid=(M // columns, N),
        grid_names=("part", "token"),
        kernel_name="mhc_post",
    )(residual.reshape(N * C, M), y, post.reshape(-1), comb.reshape(-1)).reshape(N, C, M)


def mixed(streams: Sequence[jax.Array], out: jax.Array, comb: Sequence[Any], post: Any) -> jax.Array:
    """A new stream in float32: `sum_i comb[i] streams[i] + post out`, in this order."""
    total = streams[0] * comb[0]
    for x, factor in zip(streams[1:], comb[1:], strict=True):
        total += x * factor
    return total + out * post
