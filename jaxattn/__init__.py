"""DeepSeek-era attention, MoE and quantization for JAX on NVIDIA GPUs."""

from jaxattn.ops.cache_write import cache_write
from jaxattn.ops.combine_partials import combine_partials
from jaxattn.ops.merge_states import merge_states
from jaxattn.ops.paged_attention import paged_attention
from jaxattn.ops.softmax_scale import rope_magnitude, softmax_scale, yarn_mscale
from jaxattn.ops.window_cache import admission_pages, longest_hit, pages_for_hit, slot_mapping, window_cache
from jaxattn.registry import MECHANISMS, explain

__version__ = "0.1.0"

__all__ = [
    "MECHANISMS",
    "admission_pages",
    "cache_write",
    "combine_partials",
    "explain",
    "longest_hit",
    "merge_states",
    "paged_attention",
    "pages_for_hit",
    "rope_magnitude",
    "slot_mapping",
    "softmax_scale",
    "window_cache",
    "yarn_mscale",
]
