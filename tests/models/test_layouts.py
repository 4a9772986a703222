"""Layouts in which transformers saves the same models: float32 routers, experts not quantized, YaRN renamed."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from jaxattn.models import Checkpoint, generate, load_model
from jaxattn.nn import DeepseekV32Attention
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


@nnx.jit
def logits(model):
    cache, tables = model.make_cache(1, 64)
    batch = model.make_batch(tables, jnp.array([9]), jnp.array([0, 9]), tokens=9)
    return model(jnp.arange(3, 12), cache, batch)


def test_deepseek_v32_is_v3_with_an_indexer(tmp_path, rng):
    """With as many tokens as there are, logits and generated tokens are V3's; with one, they are not."""
    source = Checkpoint.open(DATA / "deepseek_v3")  # two layers of it: one dense, one of experts
    tensors = {n: t.read() for n, t in source.tensors.items() if not n.startswith("model.layers.2.")}
    config = source.config | {"num_hidden_layers": 2, "torch_dtype": "float32"}
    (folder := tmp_path / "dense").mkdir()
    dense, prompts = saved(folder, config, tensors), [[5, 17, 3, 20, 9], [40, 8]]
    for layer in range(2):
        shapes = {"wq_b": (3 * 16, 48), "wk": (16, 64), "weights_proj": (3, 64)}
        for name, shape in shapes.items():
            w = jnp.asarray(rng.standard_normal(shape) / 8, jnp.bfloat16)
            tensors[f"model.layers.{layer}.self_attn.indexer.{name}.weight"] = np.asarray(w)
        for name in ("weight", "bias"):
            w = np.asarray(jnp.asarray(rng.standard_normal(16), jnp.bfloat16))
            tensors[f"model.layers.{layer}.self_attn.indexer.k_norm.{name}"] = w
    index = {"model_type": "deepseek_v32", "index_n_heads": 3, "index_head_dim": 16}
    found = {}
    for topk in (64, 1):
        (folder := tmp_path / str(topk)).mkdir()
        found[topk] = saved(folder, config | index | {"index_topk": topk}, tensors)
        assert isinstance(found[topk].model.layers[0].self_attn, DeepseekV32Attention)
    want, many, one = (np.asarray(logits(model)) for model in (dense, found[64], found[1]))
    assert np.abs(many - want).max() <= 2**12 * np.finfo(np.float32).eps * np.abs(want).max()
    assert np.abs(one - want).max() > np.abs(want).max() / 100
    assert generate(found[64], prompts, max_new_tokens=4) == generate(dense, prompts, max_new_tokens=4)
