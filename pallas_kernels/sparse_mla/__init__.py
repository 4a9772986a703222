"""Sparse latent attention on Mosaic GPU (Hopper)."""

from pallas_kernels.sparse_mla._plan import Config, configs, default_config, why_not
from pallas_kernels.sparse_mla.launch import sparse_mla

__all__ = ["Config", "configs", "default_config", "sparse_mla", "why_not"]
