"""Whole models made of `jaxattn.nn`, their checkpoints, and generation."""

from jaxattn.models.auto import load_model
from jaxattn.models.checkpoint import Checkpoint, CheckpointError, Piece
from jaxattn.models.deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM
from jaxattn.models.deepseek_v4 import DeepseekV4ForCausalLM
from jaxattn.models.deepseek_v4_config import DeepseekV4Config
from jaxattn.models.generation import CausalLM, generate
from jaxattn.models.gpt_oss import GptOssConfig, GptOssForCausalLM
from jaxattn.models.sampling import Sampling
from jaxattn.models.speculative import Drafted, generate_with_drafts

__all__ = [
    "CausalLM",
    "Checkpoint",
    "CheckpointError",
    "DeepseekV3Config",
    "DeepseekV3ForCausalLM",
    "DeepseekV4Config",
    "DeepseekV4ForCausalLM",
    "Drafted",
    "GptOssConfig",
    "GptOssForCausalLM",
    "Piece",
    "Sampling",
    "generate",
    "generate_with_drafts",
    "load_model",
]
