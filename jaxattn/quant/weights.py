"""Every weight-only format behind one name: what a matmul with unquantized activations multiplies with.

| format | w | scales | zeros | |
|---|---|---|---|---|
| gptq, gptq_v2 | int32 [M * bits / 32, F] | [G, F] | int32 [G, F * bits / 32] | bits 2, 3, 4, 8; g_idx [M] |
| awq | int32 [M, F / 8] | [G, F] | int32 [G, F / 8] | |
| marlin | int32 [M / 16, F * bits / 2] | [G, F], permuted | | bits 4, 8 |
| wna16 | uint8 [F, M / 2] or [F, M] | [F, G] | uint8 [F / 2, G] or [F, G], or none | bits 4, 8 |
| int8 | int8 [F, M] | float32 [F, 1] | | |
| fp8 | float8 [F, M] | float32 [F, 1] or [ceil(F / 128), ceil(M / 128)] | | |
| mxfp4, mxfp8 | uint8 [F, M / 2], float8_e4m3fn [F, M] | uint8 [F, M / 32] | | |
| nvfp4 | uint8 [F, M / 2] | float8_e4m3fn [F, M / 16] | | global_scale, multiplied |
| nf4, fp4 | uint8 [F * M / 2] | float32 [F * M / 64] | | |
"""

from typing import Literal

from jaxtyping import Array, Float, Int32

from jaxattn.quant import awq, fp8, gptq, int8, marlin, mx, nf4, nvfp4, wna16

type Format = Literal[
    "gptq", "gptq_v2", "awq", "marlin", "wna16", "int8", "fp8", "mxfp4", "mxfp8", "nvfp4", "nf4", "fp4"
]
INTEGERS = ("gptq", "gptq_v2", "awq", "marlin", "wna16")
"""Formats whose scales have the dtype of the activations."""
FORMATS = (*INTEGERS, "int8", "fp8", "mxfp4", "mxfp8", "nvfp4", "nf4", "fp4")
WIDTHS = {"gptq": (2, 3, 4, 8), "gptq_v2": (2, 3, 4, 8), "marlin": (4, 8), "wna16": (4, 8)}
"""Widths of the formats that have several; the others have one."""


def dequantize(
    w: Array,
    scales: Array,
    format: Format,
    *,
    M: int,
    dtype: str,
    zeros: Array | None = None,
    g_idx: Int32[Array, " M"] | None = None,
    global_scale: Float[Array, ""] | None = None,
    bits: int = 4,
) -> Float[Array, "M F"]:
    """The weight, input features first, in `dtype`.

    Args:
        w: codes as in the module's table.
        scales: as in the table.
        format: one of `FORMATS`.
        M: input features.
        dtype: of the result; that of `scales` for the formats in `INTEGERS`.
        zeros: zero points of gptq, gptq_v2, awq and wna16.
        g_idx: group of each input feature, GPTQ's act-order.
        global_scale: of nvfp4.
        bits: width of the codes.

    Raises:
        ValueError: the format needs zero points or a global scale, and they are missing.
    """
    if format in ("gptq", "gptq_v2", "awq"):
        if zeros is None:
            raise ValueError(f"format {format!r} needs zeros; pass it")
        if format == "awq":
            return awq.dequantize(w, zeros, scales)
        return gptq.dequantize(w, zeros, scales, g_idx, bits=bits, version=1 if format == "gptq" else 2)
    if format == "marlin":
        return marlin.dequantize(w, scales, bits=bits)
    if format == "wna16":
        return wna16.dequantize(w, scales, zeros, bits=bits).T
    if format == "int8":
        return int8.dequantize(w, scales, granularity="channel", dtype=dtype).T
    if format == "fp8":
        return fp8.dequantize(w, scales, "channel" if scales.shape[-1] == 1 else "block", dtype=dtype).T
    if format == "nvfp4":
        if global_scale is None:
            raise ValueError("format 'nvfp4' needs global_scale; pass it")
        return nvfp4.dequantize(w, scales, global_scale, dtype=dtype).T
    if format in ("nf4", "fp4"):
        return nf4.dequantize(w, scales, (2 * w.size // M, M), format, dtype=dtype).T
    return mx.dequantize(w, scales, dtype=dtype).T
