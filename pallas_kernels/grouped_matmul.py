"""Products of rows in groups on Mosaic GPU: the kernel of `scaled_matmul`, whose weight depends on the rows."""

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp

from pallas_kernels import _mosaic, _row_tiles, scaled_matmul

BLOCK = scaled_matmul.BLOCK
FP8 = ("float8_e4m3fn", "float8_e5m2")
CODES = ("bfloat16", "float16", *FP8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(scaled_matmul.Config):
    """As that of `scaled_matmul`; a tile lies in one group, so `rows` beyond a group's multiply nothing."""


def why_not(*, a, b, out_dtype, **_) -> str | None:
    """None if the kernel can run these arguments, else one sentence; shapes, dtypes and options are enough."""
    kind, (N, M), (E, F, _) = jnp.dtype(a.dtype), a.shape, b.shape
    if kind.name not in CODES:
        return f"a must be {_mosaic.either(CODES)}, got {kind.name}; tensor cores round float32 to TF32"
    if out_dtype not in ("bfloat16", "float16"):
        return f"tensor cores cut sums off, so results must be bfloat16 or float16, got {out_dtype}"
    if 0 in (N, M, E, F):
        return f"needs rows, inputs, groups and output features, got {N}, {M}, {E} and {F}"
    if M * kind.itemsize % 16:
        return f"rows of inputs must be multiples of 16 bytes, got {M} of {kind.name}; pad both operands with zeros"
    if F % 8:
        return f"the output features must be a multiple of 8, got {F}; pad the weights"
    return None


def default_config(*, a, b, **_) -> Config:
    """Tiles with about as many rows as a group has on average: a partial tile takes as long as a full one."""
    N, (E, F, _), eight = a.shape[0], b.shape, a.dtype.itemsize == 1
    rows, features, stages, width = 64, 64, 6, 8
    if N >= 256 * E:
        rows, features, stages, width = 256, 128, 4, 16 if eight else 8
    elif N > 64 * E:
        rows, features, stages = 128, 128, 6
    elif _row_tiles.most(N, E, 64) * F < _mosaic.num_sms() * 64:
        features, stages = 32, 8
    elif eight and N <= 8 * E and _row_tiles.most(N, E, 64) * F >= _mosaic.num_sms() * 4 * 128:
        features, stages = 128, 3
    cluster = 1 + (rows > 64 and F % (2 * features) == 0)
    return Config(rows=rows, features=features, stages=stages, cluster=cluster, width=width)


def configs(**args) -> Iterator[Config]:
    """Every configuration that fits shared memory and registers."""
    own = {f.name for f in dataclasses.fields(Config)}
    for config in scaled_matmul.configs(**_product(**args)):
        found = Config(**{name: getattr(config, name) for name in own})
        yield found
        if (found.rows, found.features, found.stages) == (64, 64, 4):
            yield dataclasses.replace(found, features=128, stages=3)
        if found.rows == 256:
            yield dataclasses.replace(found, width=16)


def _product(*, a, b, a_scale, out_dtype, **_) -> dict:
    """Arguments of `scaled_matmul` by shape."""
    return {"a": a, "b": b, "block": None if a_scale is None else BLOCK, "out_dtype": out_dtype}


def grouped_matmul(*, config: scaled_matmul.Config, a, b, offsets, a_scale, b_scale, out_dtype):
    """Run the kernel on prepared arguments of `jaxattn.grouped_matmul`.

    Raises:
        ValueError: `config` does not fit these shapes.
    """
    return scaled_matmul.scaled_matmul(
        config=config,
        a=a,
        b=b,
        a_scale=a_scale,
        b_scale=None if b_scale is None else b_scale.reshape(-1, b_scale.shape[2]),
        bias=None,
        azp=None,
        b_sums=None,
        block=None if a_scale is None else BLOCK,
        out_dtype=out_dtype,
        row_tiles=_row_tiles.tables(offsets, a.shape[0], config.rows),
        name="grouped_matmul",
    )
