"""Attention of contiguous and packed sequences on Mosaic GPU (Hopper)."""

from pallas_kernels.attention._plan import Config
from pallas_kernels.attention.packed import attention, configs, default_config, why_not

__all__ = ["Config", "attention", "configs", "default_config", "why_not"]
