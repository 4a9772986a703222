"""Attention over a packed TurboQuant cache on Mosaic GPU (Hopper)."""

from pallas_kernels.turboquant_attention.split import (
    DTYPES,
    HEAD_DIMS,
    PAGES,
    ROWS,
    Config,
    configs,
    default_config,
    turboquant_attention,
    why_not,
)

__all__ = [
    "DTYPES",
    "HEAD_DIMS",
    "PAGES",
    "ROWS",
    "Config",
    "configs",
    "default_config",
    "turboquant_attention",
    "why_not",
]
