"""Flax NNX modules: parameters, projections and cache state around one op call each."""

from jaxattn.nn.attention import PagedAttention
from jaxattn.nn.cache import KVPages, PagedBatch, PagedKVCache
from jaxattn.nn.cascade import CascadeAttention, SharedPrefixes
from jaxattn.nn.deepseek_v4 import DeepseekV4Attention
from jaxattn.nn.deepseek_v4_cache import V4Batch, V4Cache
from jaxattn.nn.deepseek_v4_layer import DeepseekV4DecoderLayer, MTPBlock
from jaxattn.nn.deepseek_v32 import DeepseekV32Attention, V32Cache
from jaxattn.nn.hyper import HyperConnections, HyperHead
from jaxattn.nn.latent import LatentCache, MLAttention
from jaxattn.nn.mlp import GatedMLP
from jaxattn.nn.moe import ExpertLoad, FusedMoE, MoEConfig
from jaxattn.nn.norm import LayerNorm, RMSNorm
from jaxattn.nn.quantized_linear import QuantizedLinear, QuantizedParam, pack_module, quantize_module
from jaxattn.nn.rotary import RotaryTable
from jaxattn.nn.self_attention import Attention
from jaxattn.nn.turboquant_cache import TurboQuantKVCache, turboquant_caches

__all__ = [
    "Attention",
    "CascadeAttention",
    "DeepseekV4Attention",
    "DeepseekV4DecoderLayer",
    "DeepseekV32Attention",
    "ExpertLoad",
    "FusedMoE",
    "GatedMLP",
    "HyperConnections",
    "HyperHead",
    "KVPages",
    "LatentCache",
    "LayerNorm",
    "MLAttention",
    "MTPBlock",
    "MoEConfig",
    "PagedAttention",
    "PagedBatch",
    "PagedKVCache",
    "QuantizedLinear",
    "QuantizedParam",
    "RMSNorm",
    "RotaryTable",
    "SharedPrefixes",
    "TurboQuantKVCache",
    "V4Batch",
    "V4Cache",
    "V32Cache",
    "pack_module",
    "quantize_module",
    "turboquant_caches",
]
