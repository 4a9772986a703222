"""DeepSeek-era attention, MoE and quantization for JAX on NVIDIA GPUs."""

from jaxattn.ops.paged_attention import paged_attention
from jaxattn.registry import MECHANISMS, explain

__version__ = "0.1.0"

__all__ = ["MECHANISMS", "explain", "paged_attention"]
