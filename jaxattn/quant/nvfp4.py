"""NVFP4: E2M1 in blocks of 16 with an E4M3 scale each, and one float32 scale for the tensor.

    g = 448 * 6 / amax(tensor)
    s = e4m3(clip(g * (amax * (1/6)), +-448))              per 16 numbers
    q = e2m1(clip(x * (1 / (s * (1/g))), +-6))             ties to even, -0 kept; zeros where s = 0
    x ~ value(q) * s / g

`g` is the quantizer's global scale. Checkpoints of weights store `1 / g` and multiply with it ("weight_scale_2").
Source: vLLM 0.26.0 `nvfp4_emulation_utils.py`, `quant_utils.py` (swizzle_blockscale).
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8

from jaxattn.quant import primitives as p

GROUP = 16
_ROWS, _COLUMNS = 128, 4
"""A tile of swizzled scales."""
_SMALLEST = 2.0**-115


def global_scale(x: Float[Array, "..."]) -> Float[Array, ""]:
    """`448 * 6 / amax`; 1 for a tensor of zeros, or of numbers so small that the quotient would overflow."""
    top = p.amax(x, None)
    usable = top >= _SMALLEST
    return jnp.where(usable, p.divide(jnp.full_like(top, p.E4M3_MAX * p.E2M1_MAX), jnp.where(usable, top, 1)), 1)


def quantize(
    x: Float[Array, "... M"], scale: Float[Array, ""] | None = None
) -> tuple[UInt8[Array, "... M/2"], Float[Array, "... M/16"], Float[Array, ""]]:
    """Packed codes, float8_e4m3fn block scales and the global scale `g` of `x`.

    Args:
        x: any float; M a multiple of 16.
        scale: the global scale; None = `global_scale(x)`.

    Raises:
        ValueError: M is no multiple of 16.
    """
    check(x.shape[-1])
    x = p.wide(x)
    g = global_scale(x) if scale is None else jnp.asarray(scale).astype(x.dtype).reshape(())
    parts = p.grouped(x, GROUP)
    sixth = lax.optimization_barrier(jnp.asarray(1 / 6, x.dtype))
    s = jnp.clip(g * lax.optimization_barrier(p.amax(parts, -1) * sixth), 0, p.E4M3_MAX).astype(jnp.float8_e4m3fn)
    s = lax.optimization_barrier(s)  # else XLA for GPUs computes on without the rounding
    whole = s.astype(x.dtype) * p.inverse(g)
    codes = p.to_e2m1(jnp.where(whole > 0, parts * p.inverse(whole), jnp.copysign(0, parts)))
    return pack(p.ungrouped(codes, x.shape[-1])), s[..., 0], g


def dequantize(
    q: UInt8[Array, "... M/2"], block: Float[Array, "... M/16"], scale: Float[Array, ""], *, dtype: str = "float32"
) -> Float[Array, "... M"]:
    """`value(q) * (block * scale)`, rounded to `dtype` once.

    Args:
        q: packed codes.
        block: e4m3 scales, not swizzled.
        scale: what values are multiplied with: "weight_scale_2" of a checkpoint, `1 / g` of `quantize`.
        dtype: of the result.
    """
    values = p.grouped(p.from_e2m1(unpack(q)), GROUP)
    factor = p.wide(block) * p.wide(jnp.asarray(scale)).reshape(())
    return p.ungrouped(values * factor[..., None], 2 * q.shape[-1]).astype(dtype)


pack = p.pack_nibbles
unpack = p.unpack_nibbles


def swizzle(block: Float[Array, "N G"]) -> Float[Array, "N+pad G+pad"]:
    """Scales as tensor cores of compute capability 10 read them: 128 x 4 tiles, rows 0, 32, 64, 96 beside each other.

    Rows are padded with zeros to a multiple of 128, columns to one of 4.
    """
    N, G = block.shape
    rows, columns = -(-N // _ROWS), -(-G // _COLUMNS)
    x = jnp.pad(block, ((0, rows * _ROWS - N), (0, columns * _COLUMNS - G)))
    x = x.reshape(rows, 4, 32, columns, _COLUMNS).transpose(0, 3, 2, 1, 4)
    return x.reshape(rows * _ROWS, columns * _COLUMNS)


def unswizzle(swizzled: Float[Array, "N+pad G+pad"], N: int, G: int) -> Float[Array, "N G"]:
    """The scales of `swizzle`, without padding."""
    rows, columns = swizzled.shape[0] // _ROWS, swizzled.shape[1] // _COLUMNS
    x = swizzled.reshape(rows, columns, 32, 4, _COLUMNS).transpose(0, 3, 2, 1, 4)
    return x.reshape(rows * _ROWS, columns * _COLUMNS)[:N, :G]


def check(M: int) -> None:
    """Raise `ValueError` unless M is a multiple of 16."""
    if M % GROUP:
        raise ValueError(f"the last dimension must be a multiple of {GROUP}, got {M}")
