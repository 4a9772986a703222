"""Faults in the tiny DeepSeek-V3 and DeepSeek-V4."""

from contextlib import ExitStack, contextmanager
from unittest import mock

import jax.numpy as jnp

from jaxattn import yarn_mscale
from jaxattn.nn import deepseek_v4


@contextmanager
def plant(model, fault):
    """DeepSeek-V3 with one fault in every layer."""
    with ExitStack() as stack:

        def put(module, name, value):
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)

        for layer in model.model.layers:
            if fault == "wrong_rope":
                put(layer.self_attn, "interleaved", not layer.self_attn.interleaved)
            elif fault == "missing_mscale":
                put(layer.self_attn, "scale", layer.self_attn.scale / yarn_mscale(4.0, 0.8) ** 2)
            elif hasattr(layer.mlp, "gate_proj"):
                gate, up = layer.mlp.gate_proj, layer.mlp.up_proj
                put(layer.mlp, "gate_proj", up)
                put(layer.mlp, "up_proj", gate)
        yield


FAULTS = {  # fault -> the first module that is wrong, what of it
    "wrong_rope": ("model.layers.0.self_attn", "input into o_proj"),
    "missing_mscale": ("model.layers.0.self_attn", "input into o_proj"),
    "swapped_gate_up": ("model.layers.0.mlp.gate_proj", "y"),
}


def _halves(x):
    """Heads whose rotated pairs lie half the rotary part apart, as neighbours."""
    plain, first, second = x[..., :-64], x[..., -64:-32], x[..., -32:]
    return jnp.concatenate([plain, jnp.stack([first, second], -1).reshape(*first.shape[:-1], 64)], -1)


def _back(x):
    """What `_halves` changed, changed back."""
    return jnp.concatenate([x[..., :-64], x[..., -64::2], x[..., -63::2]], -1)


@contextmanager
def plant_v4(model, fault):
    """DeepSeek-V4 with one fault in every layer; the wrong scale is V3's mscale, which V4's YaRN does not have."""
    rope, insert, attend = deepseek_v4.rope, deepseek_v4.qnorm_rope_kv_insert, deepseek_v4.sparse_mla

    def other_insert(heads, kv, *args, **options):
        return insert(_halves(heads), _halves(kv), *args, **options)

    def other_rope(x, positions, table, inverse=False):
        found = rope(x if inverse else _halves(x), positions, table, inverse=inverse)
        return _back(found) if inverse else found

    def other_scale(q, cache, indices, **options):
        factor = yarn_mscale(16.0, 1.0) if "extra_cache" in options else 1.0
        return attend(q * factor**2, cache, indices, **options)

    with ExitStack() as stack:
        if fault == "wrong_rope":
            stack.enter_context(mock.patch.object(deepseek_v4, "qnorm_rope_kv_insert", other_insert))
            stack.enter_context(mock.patch.object(deepseek_v4, "rope", other_rope))
        elif fault == "foreign_mscale":
            stack.enter_context(mock.patch.object(deepseek_v4, "sparse_mla", other_scale))
        else:
            for layer in model.layers:
                w = layer.ffn.w13[...]
                stack.callback(layer.ffn.w13.set_value, w)
                layer.ffn.w13.set_value(jnp.concatenate(jnp.split(w, 2, 1)[::-1], 1))
        yield


V4_FAULTS = {  # fault -> the first module that is wrong, what of it, and all that are
    "wrong_rope": (
        "layers.0.attn",
        "input into o_b_proj",
        {f"layers.{i}.attn" for i in range(4)} | {f"layers.{i}.attn.indexer" for i in (1, 3)},
    ),
    "foreign_mscale": ("layers.1.attn", "input into o_b_proj", {f"layers.{i}.attn" for i in (1, 2, 3)}),
    "swapped_gate_up": ("layers.0.ffn", "y", {f"layers.{i}.ffn" for i in range(4)}),
}
