"""Whole models whose linear layers are converted by path: they run, near what they were."""

from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from jaxattn.models import load_model
from jaxattn.models.pooling import Embedder
from jaxattn.nn import QuantizedLinear, quantize_module

MODELS = Path(__file__).resolve().parents[2] / "parity" / "data" / "models"
STEP = 2.0**-4
"""Largest step between e4m3 codes, relative to the number; weights and activations take one each, and layers add up."""
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9, 8]]


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_a_model_is_converted_by_path(name):
    model = load_model(MODELS / name, dtype="bfloat16", progress=False)
    exact = Embedder(model, requests=2, capacity=16, chunk=16)(PROMPTS)
    converted = quantize_module(model, {"lm_head": None, "*": "fp8_channel"})
    plain = [path for path, m in nnx.iter_modules(model) if isinstance(m, nnx.Linear)]
    assert plain == [("lm_head",)] and set(converted.values()) == {"fp8_channel"}
    assert isinstance(model.model.layers[0].self_attn.o_proj, QuantizedLinear)
    lost = np.linalg.norm(Embedder(model, requests=2, capacity=16, chunk=16)(PROMPTS) - exact, axis=1)
    assert (lost > 0).all() and (lost < 2 * STEP * len(model.model.layers)).all()  # vectors have length 1
