"""A DeepSeek-V3 checkpoint in FP8 blocks: the weights to the bit, the noise of FP8 activations within its bound.

Transformers runs such checkpoints on GPUs alone. The model of the dequantized checkpoint, which `test_models` holds
against transformers, stands for it.
"""

import json
import shutil

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jaxattn.models import Checkpoint, load_model
from jaxattn.nn import FusedMoE, QuantizedLinear
from jaxattn.nn.linear import matrix
from jaxattn.ops import _expert_formats
from parity import tolerances
from parity.models import running

FAMILY = "deepseek_v3_fp8"
DEPTH = 12
"""Rounded inputs between the tokens and the logits: of q, q, kv, o, gate and up, down in each of two layers."""


@pytest.fixture(scope="module")
def dequantized(tmp_path_factory):
    """A folder with the same numbers in float32."""
    folder, source = tmp_path_factory.mktemp("plain"), Checkpoint.open(running.DATA / FAMILY)
    config = {k: v for k, v in source.config.items() if k != "quantization_config"} | {"torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {}
    for name, stored in source.tensors.items():
        scale = source.tensors.get(f"{name}_scale_inv")
        if name.endswith("_scale_inv"):
            continue
        w = stored.read().astype(np.float32)
        if scale is not None:
            rows, columns = w.shape
            w *= np.repeat(np.repeat(scale.read(), 128, 0), 128, 1)[:rows, :columns]
        arrays[name] = w
    save_file(arrays, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def models(dequantized):
    return running.model(FAMILY, "float32"), load_model(dequantized, progress=False)


def test_weights_stay_in_fp8_and_stand_for_the_same_numbers(models):
    fp8, plain = models
    others = {path: m for path, m in nnx.iter_modules(plain)}
    linears = experts = 0
    for path, module in nnx.iter_modules(fp8):
        if isinstance(module, QuantizedLinear):
            linears += 1
            assert module.weight.dtype == np.dtype("float8_e4m3fn")
            np.testing.assert_array_equal(matrix(module, "float32"), others[path].kernel[...])
        if isinstance(module, FusedMoE):
            for part in ("w13", "w2"):
                w, scale = getattr(module, part)[...], getattr(module, f"{part}_scale")[...]
                for e in range(w.shape[0]):
                    experts += 1
                    whole = _expert_formats.dequantize(w[e], scale[e], None, None, format="fp8_block", dtype="float32")
                    np.testing.assert_array_equal(whole, getattr(others[path], part)[e])
    assert (linears, experts) == (16, 8)


def test_outputs_differ_by_the_noise_of_fp8_activations(models):
    fp8, plain = models
    tokens = running.prompts(FAMILY)[0]
    ours, wanted = (running.whole(m, tokens)["logits"].astype(np.float64) for m in (fp8, plain))
    error = np.sqrt(((ours - wanted) ** 2).mean() / (wanted**2).mean())
    assert 0 < error <= np.sqrt(DEPTH) * tolerances.E4M3_NOISE


def test_a_missing_scale_is_named(tmp_path):
    folder = tmp_path / FAMILY
    shutil.copytree(running.DATA / FAMILY, folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = "model.layers.1.mlp.experts.2.up_proj.weight_scale_inv"
    shard = folder / index["weight_map"].pop(name)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    arrays = {
        n: t.read() for n, t in Checkpoint.open(running.DATA / FAMILY).tensors.items() if t.file.name == shard.name
    }
    save_file({n: a for n, a in arrays.items() if n != name}, shard)
    with pytest.raises(ValueError, match=rf"got 1 problem:\n  .*: {name}: missing; must have shape \[1, 2\]"):
        load_model(folder, progress=False)
