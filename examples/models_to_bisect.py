"""Factories of this package's own models for `scripts/bisect.py`: the tiny checkpoints, in float32 and bfloat16.

python scripts/bisect.py --flax examples/models_to_bisect.py:deepseek_v3 --run f32 --names OUT/names.toml --out OUT \
    --golden parity/data/models/torch-deepseek_v3.safetensors
"""

import atexit
import shutil
import tempfile
from pathlib import Path

import jax.numpy as jnp

from jaxattn.models import DeepseekV4ForCausalLM, load_model
from parity.models import tiny_deepseek_v4

CHECKPOINTS = Path(__file__).resolve().parents[1] / "parity" / "data" / "models"


def prefill(model, inputs):
    """Logits of one prompt, with a paged cache of its own."""
    tokens = jnp.asarray(inputs["input_ids"], jnp.int32).reshape(-1)
    n = tokens.shape[0]
    cache, tables = model.make_cache(1, max(n, 64))
    batch = model.make_batch(tables, jnp.array([n], jnp.int32), jnp.array([0, n], jnp.int32), tokens=n)
    return model(tokens, cache, batch)


def make(name, dtype="float32"):
    """The model of a tiny checkpoint and how to call it."""
    return load_model(CHECKPOINTS / name, dtype=dtype, progress=False), prefill


def deepseek_v3():
    """In float32."""
    return make("deepseek_v3")


def deepseek_v3_bfloat16():
    """In bfloat16."""
    return make("deepseek_v3", "bfloat16")


def deepseek_v2():
    """In float32."""
    return make("deepseek_v2")


def gpt_oss():
    """In float32."""
    return make("gpt_oss")


def gpt_oss_bfloat16():
    """In bfloat16."""
    return make("gpt_oss", "bfloat16")


def deepseek_v4():
    """In float32, exact; the checkpoint is written first, and the whole prompt is one step."""
    folder = Path(tempfile.mkdtemp(prefix="tiny-v4-"))
    atexit.register(shutil.rmtree, folder)
    tiny_deepseek_v4.write(folder, quantized=False)
    how = {"dtype": "float32", "exact": True, "max_positions": 512, "chunk": 512, "mtp_blocks": 0}
    return DeepseekV4ForCausalLM.from_pretrained(folder, progress=False, **how), prefill
