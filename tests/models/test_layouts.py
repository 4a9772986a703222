"""Layouts in which transformers saves the same models: float32 routers, experts not quantized, YaRN renamed."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jaxattn.models import Checkpoint, load_model
from jaxattn.quant import mx

DATA = Path(__file__).resolve().parents[2] / "parity" / "data" / "models"


def saved(folder, config, tensors):
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: np.ascontiguousarray(t) for n, t in tensors.items()}, folder / "model.safetensors")
    return load_model(folder, progress=False)


def test_routers_in_float32_stay_so(tmp_path, rng):
    source = Checkpoint.open(DATA / "deepseek_v3")
    tensors = {n: t.read() for n, t in source.tensors.items()}
    tensors |= {n: t.astype(np.float32) for n, t in tensors.items() if n.endswith(".gate.weight")}
    wide, plain = saved(tmp_path, source.config, tensors), load_model(DATA / "deepseek_v3", progress=False)
    layers = [m.model.layers[1].mlp for m in (wide, plain)]
    assert [layer.gate.dtype for layer in layers] == [jnp.float32, jnp.bfloat16]
    x = jnp.asarray(rng.standard_normal((5, 64)), jnp.bfloat16)
    (weights, ids), (others, same) = (layer.route(x) for layer in layers)
    np.testing.assert_array_equal(ids, same)
    assert np.abs(weights - others).max() <= 64 * np.finfo(np.float32).eps
    assert layers[0](x).dtype == jnp.bfloat16


def test_experts_of_gpt_oss_may_be_plain_and_the_configuration_new(tmp_path):
    source = Checkpoint.open(DATA / "gpt_oss")
    tensors = {n: t.read() for n, t in source.tensors.items()}
    for blocks in [n for n in tensors if n.endswith("_blocks")]:
        name = blocks.removesuffix("_blocks")
        codes, scales = tensors.pop(blocks), tensors.pop(f"{name}_scales")
        w = mx.dequantize(codes.reshape(*codes.shape[:2], -1), scales, dtype=jnp.bfloat16)
        tensors[name] = np.asarray(w).transpose(0, 2, 1)
    config = {k: v for k, v in source.config.items() if k not in ("quantization_config", "rope_theta", "torch_dtype")}
    config["rope_parameters"] = config.pop("rope_scaling") | {"rope_theta": 150000.0}
    plain, packed = saved(tmp_path, config | {"dtype": "bfloat16"}, tensors), load_model(source.folder, progress=False)
    assert plain.config.rope == packed.config.rope
    for a, b in zip(plain.model.layers, packed.model.layers, strict=True):
        for part in ("w13", "w2"):
            w = mx.dequantize(getattr(b.mlp, part)[...], getattr(b.mlp, f"{part}_scale")[...], dtype=jnp.bfloat16)
            assert getattr(a.mlp, part).dtype == jnp.bfloat16
            np.testing.assert_array_equal(np.float32(getattr(a.mlp, part)[...]), np.float32(w))
