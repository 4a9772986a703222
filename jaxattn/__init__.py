"""DeepSeek-era attention, MoE and quantization for JAX on NVIDIA GPUs."""

from jaxattn.ops.cache_write import cache_write
from jaxattn.ops.combine_partials import combine_partials
from jaxattn.ops.hadamard_transform import hadamard_transform
from jaxattn.ops.merge_states import merge_states
from jaxattn.ops.paged_attention import paged_attention
from jaxattn.ops.quantize_fp8 import quantize_fp8
from jaxattn.ops.quantize_int8 import quantize_int8
from jaxattn.ops.quantize_mx import quantize_mx
from jaxattn.ops.rms_norm_quant import rms_norm_quant
from jaxattn.ops.scaled_matmul import scaled_matmul
from jaxattn.ops.silu_mul_quant import silu_mul_quant
from jaxattn.ops.softmax_scale import rope_magnitude, softmax_scale, yarn_mscale
from jaxattn.ops.weight_only_matmul import weight_only_matmul
from jaxattn.ops.window_cache import admission_pages, longest_hit, pages_for_hit, slot_mapping, window_cache
from jaxattn.registry import MECHANISMS, explain

__version__ = "0.1.0"

__all__ = [
    "MECHANISMS",
    "admission_pages",
    "cache_write",
    "combine_partials",
    "explain",
    "hadamard_transform",
    "longest_hit",
    "merge_states",
    "paged_attention",
    "pages_for_hit",
    "quantize_fp8",
    "quantize_int8",
    "quantize_mx",
    "rms_norm_quant",
    "rope_magnitude",
    "scaled_matmul",
    "silu_mul_quant",
    "slot_mapping",
    "softmax_scale",
    "weight_only_matmul",
    "window_cache",
    "yarn_mscale",
]
