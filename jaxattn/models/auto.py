"""The model that a checkpoint folder holds."""

from pathlib import Path

from jax.typing import DTypeLike

from jaxattn.models._causal import CausalModel
from jaxattn.models.checkpoint import Checkpoint, CheckpointError
from jaxattn.models.deepseek_v3 import DeepseekV3ForCausalLM
from jaxattn.models.deepseek_v4 import DeepseekV4ForCausalLM
from jaxattn.models.gpt_oss import GptOssForCausalLM

MODELS: dict[str, type[CausalModel] | type[DeepseekV4ForCausalLM]] = {
    "deepseek_v2": DeepseekV3ForCausalLM,
    "deepseek_v3": DeepseekV3ForCausalLM,
    "deepseek_v32": DeepseekV3ForCausalLM,
    "deepseek_v4": DeepseekV4ForCausalLM,
    "gpt_oss": GptOssForCausalLM,
}
"""`model_type` -> class."""


def load_model(
    folder: str | Path, *, dtype: DTypeLike | None = None, progress: bool = True
) -> CausalModel | DeepseekV4ForCausalLM:
    """The model of a Hugging Face checkpoint folder, by the `model_type` of its `config.json`.

    Args:
        folder: with `config.json` and safetensors files.
        dtype: of activations and unquantized parameters; None = the configuration's.
        progress: show a bar.

    Raises:
        CheckpointError: no model here has this type, or as `CausalModel.from_pretrained`.
    """
    checkpoint = Checkpoint.open(folder)
    kind = checkpoint.config.get("model_type")
    if kind not in MODELS:
        raise CheckpointError(
            f"{checkpoint.folder / 'config.json'}: model_type must be {' or '.join(MODELS)}, got {kind!r}"
        )
    return MODELS[kind].from_pretrained(checkpoint, dtype=dtype, progress=progress)
