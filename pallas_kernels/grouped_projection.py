"""V4's grouped output projection on Mosaic GPU: the kernel of `scaled_matmul`, whose inputs depend on the features."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import scaled_matmul

CODES = "float8_e4m3fn"
LEAST = 16
"""Features of the narrowest tile."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(scaled_matmul.Config):
    """As that of `scaled_matmul`."""


def why_not(*, x, weight, dtype, **_) -> str | None:
    """None if the kernel can run these arguments, else one sentence."""
    given = jnp.dtype(x.dtype).name
    if given != CODES:
        return f"x must hold codes of {CODES}, got {given}; tensor cores round float32 to TF32"
    if dtype not in ("bfloat16", "float16"):
        return f"FP8 tensor cores keep about 14 bits of a sum, so results must be bfloat16 or float16, got {dtype}"
    if weight.shape[1] % LEAST:
        return f"each group must have a multiple of {LEAST} outputs, got {weight.shape[1]}"
    return None if x.size else f"needs tokens, groups and inputs, got shape {tuple(x.shape)}"


def default_config(**args) -> Config:
    """That of a product with as many rows and features."""
    return _own(scaled_matmul.default_config(**_product(**args)))


def configs(**args) -> Iterator[Config]:
    """All legal ones."""
    return map(_own, scaled_matmul.configs(**_product(**args)))


def _own(config: scaled_matmul.Config) -> Config:
    return Config(**dataclasses.asdict(config))


def _product(*, x, weight, dtype, **_) -> dict[str, Any]:
    """Arguments of `scaled_matmul` by shape."""
    groups, R, W = weight.shape
    b = jax.ShapeDtypeStruct((groups * R, W), weight.dtype)
    return {"a": x, "b": b, "block": scaled_matmul.BLOCK, "out_dtype": dtype}


def grouped_projection(*, config: scaled_matmul.Config, x, x_scale, weight, weight_scale, dtype):
    """Run the kernel on prepared arguments of `jaxattn.grouped_projection`.

    Raises:
        ValueError: `config` does not fit these shapes.
    """
    groups, R, W = weight.shape
    y = scaled_matmul.scaled_matmul(
        config=config,
        a=x,
        b=weight.reshape(groups * R, W),
        a_scale=x_scale,
        b_scale=weight_scale.reshape(-1, weight_scale.shape[2]),
        bias=None,
        azp=None,
        b_sums=None,
        block=scaled_matmul.BLOCK,
        out_dtype=dtype,
    )
    return y.reshape(x.shape[0], groups, R)
