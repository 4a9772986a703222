"""Hadamard rotation of groups, alone and before a 4-bit format (fp_quant).

`y = x H / sqrt(n)` with Sylvester's matrix H of +-1 and n the group; it is its own inverse. Rotated weights and
activations have the same products, and outliers spread over their group before they are quantized.
Source: vLLM 0.26.0 `_C.hadacore_transform`, `fp_quant.py`; https://arxiv.org/abs/2509.23202 (groups of 32 and 16).
"""

from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxattn.quant import mx, nvfp4
from jaxattn.quant import primitives as p
from pallas_kernels import _exact

GROUP = 32
"""Group of fp_quant."""


def rotate(x: Float[Array, "... M"], group: int | None = None) -> Float[Array, "... M"]:
    """`x H / sqrt(n)` in every group of n numbers, in float32 (float64 for float64), rounded to the dtype of `x` once.

    Args:
        x: any float.
        group: n, a power of two that divides M; None = M.

    Raises:
        ValueError: n is no power of two, or does not divide M.
    """
    M = x.shape[-1]
    group = M if group is None else group
    check(M, group)
    y = _exact.butterflies(p.wide(x), group)
    root = lax.optimization_barrier(jnp.asarray(group**-0.5, y.dtype))
    return p.rounded(y * root, x.dtype)


def quantize(
    x: Float[Array, "... M"], format: Literal["mxfp4", "nvfp4"] = "mxfp4", *, group: int = GROUP
) -> tuple[Array, ...]:
    """Rotated in groups, then quantized: what `mx.quantize` or `nvfp4.quantize` return.

    Raises:
        ValueError: another format, or sizes that do not fit.
    """
    if format not in ("mxfp4", "nvfp4"):
        raise ValueError(f"format must be mxfp4 or nvfp4, got {format!r}")
    y = rotate(x, group)
    return mx.quantize(y, "mxfp4") if format == "mxfp4" else nvfp4.quantize(y)


def dequantize(*codes: Array, group: int = GROUP, dtype: str = "float32") -> Float[Array, "... M"]:
    """What `quantize` was given, up to the format's error; the rotation is undone in float32."""
    y = mx.dequantize(*codes) if len(codes) == 2 else nvfp4.dequantize(codes[0], codes[1], p.inverse(codes[2]))
    return rotate(y, group).astype(dtype)


def check(M: int, group: int) -> None:
    """Raise `ValueError` for groups that `rotate` does not take."""
    if group < 1 or group & (group - 1):
        raise ValueError(f"a Hadamard rotation needs a power of two, got a group of {group}")
    if M % group:
        raise ValueError(f"the group must divide the last dimension, got groups of {group} and {M} numbers")
