"""DeepSeek-era attention, MoE and quantization for JAX on NVIDIA GPUs."""

from jaxattn.ops.align_block_size import align_block_size
from jaxattn.ops.attention import attention
from jaxattn.ops.cache_write import cache_write
from jaxattn.ops.cascade_attention import cascade_attention, prefix_length, prefix_tree, worthwhile
from jaxattn.ops.combine_partials import combine_partials
from jaxattn.ops.compressor import compressor
from jaxattn.ops.eplb import choose_replica, eplb, expert_load
from jaxattn.ops.experts import experts
from jaxattn.ops.gated_activation import gated_activation
from jaxattn.ops.grouped_matmul import grouped_matmul
from jaxattn.ops.grouped_projection import grouped_projection
from jaxattn.ops.hadamard_transform import hadamard_transform
from jaxattn.ops.indexer import indexer, indexer_keys
from jaxattn.ops.indexer_q import indexer_q
from jaxattn.ops.indexer_topk import indexer_topk
from jaxattn.ops.inv_rope_fp8_quant import inv_rope_fp8_quant
from jaxattn.ops.latent_cache_gather import latent_cache_gather
from jaxattn.ops.latent_cache_write import latent_cache_write
from jaxattn.ops.megamoe_staged import megamoe_staged
from jaxattn.ops.merge_states import merge_states
from jaxattn.ops.mhc_head import mhc_head
from jaxattn.ops.mhc_post import mhc_post
from jaxattn.ops.mhc_pre import mhc_pre
from jaxattn.ops.mla import mla
from jaxattn.ops.mtp import mtp
from jaxattn.ops.paged_attention import paged_attention
from jaxattn.ops.permute import permute
from jaxattn.ops.q_kv_rms_norm import q_kv_rms_norm
from jaxattn.ops.qnorm_rope_kv_insert import qnorm_rope_kv_insert
from jaxattn.ops.quantize_fp8 import quantize_fp8
from jaxattn.ops.quantize_int8 import quantize_int8
from jaxattn.ops.quantize_mx import quantize_mx
from jaxattn.ops.rms_norm_quant import rms_norm_quant
from jaxattn.ops.rope import rope, rope_table
from jaxattn.ops.routed_scaling import routed_scaling
from jaxattn.ops.router import gate_logits, router
from jaxattn.ops.scaled_matmul import scaled_matmul
from jaxattn.ops.silu_mul_quant import silu_mul_quant
from jaxattn.ops.softmax_scale import rope_magnitude, softmax_scale, yarn_mscale
from jaxattn.ops.sparse_indices import all_entries, entry_slots, sparse_indices, window_slots
from jaxattn.ops.sparse_mla import sparse_mla
from jaxattn.ops.turboquant_attention import turboquant_attention
from jaxattn.ops.turboquant_write import turboquant_write
from jaxattn.ops.unpermute import moe_sum, unpermute
from jaxattn.ops.weight_only_matmul import weight_only_matmul
from jaxattn.ops.window_cache import admission_pages, longest_hit, pages_for_hit, slot_mapping, window_cache
from jaxattn.registry import MECHANISMS, explain

__version__ = "0.1.0"

__all__ = [
    "MECHANISMS",
    "admission_pages",
    "align_block_size",
    "all_entries",
    "attention",
    "cache_write",
    "cascade_attention",
    "choose_replica",
    "combine_partials",
    "compressor",
    "entry_slots",
    "eplb",
    "expert_load",
    "experts",
    "explain",
    "gate_logits",
    "gated_activation",
    "grouped_matmul",
    "grouped_projection",
    "hadamard_transform",
    "indexer",
    "indexer_keys",
    "indexer_q",
    "indexer_topk",
    "inv_rope_fp8_quant",
    "latent_cache_gather",
    "latent_cache_write",
    "longest_hit",
    "megamoe_staged",
    "merge_states",
    "mhc_head",
    "mhc_post",
    "mhc_pre",
    "mla",
    "moe_sum",
    "mtp",
    "paged_attention",
    "pages_for_hit",
    "permute",
    "prefix_length",
    "prefix_tree",
    "q_kv_rms_norm",
    "qnorm_rope_kv_insert",
    "quantize_fp8",
    "quantize_int8",
    "quantize_mx",
    "rms_norm_quant",
    "rope",
    "rope_magnitude",
    "rope_table",
    "routed_scaling",
    "router",
    "scaled_matmul",
    "silu_mul_quant",
    "slot_mapping",
    "softmax_scale",
    "sparse_indices",
    "sparse_mla",
    "turboquant_attention",
    "turboquant_write",
    "unpermute",
    "weight_only_matmul",
    "window_cache",
    "window_slots",
    "worthwhile",
    "yarn_mscale",
]
