"""Quantized formats: one module each, with `quantize`, `dequantize`, `pack` and `unpack` where they apply."""
