"""MXFP8 and MXFP4: blocks of 32 along the last axis with a power-of-two scale (UE8M0).

`x ~ value(q) * 2^(scale - 127)`. Scales are bytes 1 to 254.

| format | rule | exponent of the scale | code |
|---|---|---|---|
| mxfp8 (e4m3) | floor | `floor(log2(max(amax, 2^-126)))`: codes stay below 2 in magnitude | `e4m3(x / s)` |
| mxfp4 (e2m1) | ceil | `ceil(log2(max(amax, floor) / 6))`: never saturates (DeepSeek, vLLM) | `e2m1(x / s)` |
| mxfp4 (e2m1) | floor | `floor(log2(amax)) - 2`: the block's largest numbers may saturate (OCP) | `e2m1(x / s)` |

Sources: vLLM 0.26.0 `mxfp8_utils.py`; https://github.com/deepseek-ai/DeepGEMM (per_token_cast_to_fp4);
OCP Microscaling Formats (MX) Specification 1.0, section 6.3.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from jaxattn.quant import primitives as p

type Format = Literal["mxfp8", "mxfp4"]
type Rule = Literal["ceil", "floor"]
GROUP = 32
MXFP4_FLOOR, DEEP_GEMM_FLOOR = 6 * p.TINY, 1e-4


def quantize(
    x: Float[Array, "... M"],
    format: Format = "mxfp4",
    *,
    rule: Rule | None = None,
    ties: p.Ties = "even",
    floor: float = MXFP4_FLOOR,
) -> tuple[Array, UInt8[Array, "... M/32"]]:
    """Codes and scale bytes of `x`; see the module's table.

    Args:
        x: any float; M a multiple of 32.
        format: "mxfp8" (float8_e4m3fn codes [..., M]) or "mxfp4" (bytes [..., M/2], even index in the low four bits).
        rule: of the scale; None = "floor" for mxfp8, "ceil" for mxfp4.
        ties: of E2M1, see `primitives.to_e2m1`.
        floor: smallest amax of rule "ceil": 6 * 2^-126 (vLLM's indexer) or 1e-4 (DeepGEMM's weight cast).

    Raises:
        ValueError: unknown options, or M is no multiple of 32.
    """
    check(x.shape[-1], format, rule, ties)
    parts = p.grouped(p.wide(x), GROUP)
    top = p.amax(parts, -1)
    if format == "mxfp8":
        scale = p.ue8m0_floor(jnp.maximum(top, p.TINY))
        return p.ungrouped(p.to_float8(p.divide_by_ue8m0(parts, scale)), x.shape[-1]), scale[..., 0]
    if rule == "floor":
        scale = jnp.maximum(p.ue8m0_floor(jnp.maximum(top, p.TINY)), 3) - jnp.uint8(2)
    else:
        scale = p.ue8m0_ceil(p.divide(jnp.maximum(top, floor), p.E2M1_MAX))
    codes = p.ungrouped(p.to_e2m1(p.divide_by_ue8m0(parts, scale), ties), x.shape[-1])
    return pack(codes), scale[..., 0]


def dequantize(q: Array, scale: UInt8[Array, "... M/32"], *, dtype: str = "float32") -> Float[Array, "... M"]:
    """`value(q) * 2^(scale - 127)` of either format (bytes are mxfp4), rounded to `dtype` once."""
    values = p.from_e2m1(unpack(q)) if q.dtype == jnp.uint8 else p.wide(q)
    parts = p.grouped(values, GROUP) * p.ue8m0_value(scale).astype(values.dtype)[..., None]
    return p.ungrouped(parts, values.shape[-1]).astype(dtype)


pack = p.pack_nibbles
unpack = p.unpack_nibbles


def check(M: int, format: str, rule: str | None, ties: str) -> None:
    """Raise `ValueError` for what `quantize` does not take."""
    if format not in ("mxfp8", "mxfp4"):
        raise ValueError(f"format must be mxfp8 or mxfp4, got {format!r}")
    if rule not in ((None, "floor") if format == "mxfp8" else (None, "ceil", "floor")):
        raise ValueError(f"rule of {format} must be {'floor' if format == 'mxfp8' else 'ceil or floor'}, got {rule!r}")
    if ties not in ("even", "zero"):
        raise ValueError(f"ties must be 'even' or 'zero', got {ties!r}")
    if M % GROUP:
        raise ValueError(f"the last dimension must be a multiple of {GROUP}, got {M}")
