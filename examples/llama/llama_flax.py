"""The Llama of `capture_llama.py` in Flax NNX, written the way a port is: other names, other layouts, same formulas."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

V, M, F, L, H, K, D = 64, 32, 48, 2, 4, 2, 8
MSCALE = 0.1 * math.log(4) + 1
HERE = Path(__file__).parent


class Norm(nnx.Module):
    def __init__(self, weight):
        self.scale = nnx.Param(weight)

    def __call__(self, x):
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)
        return normed.astype(x.dtype) * self.scale


class Linear(nnx.Module):
    def __init__(self, weight):
        self.kernel = nnx.Param(weight.T)

    def __call__(self, x):
        return jnp.matmul(x, self.kernel, precision="highest")


class Embed(nnx.Module):
    def __init__(self, weight):
        self.table = nnx.Param(weight)

    def __call__(self, tokens):
        return self.table[tokens]


def rotate(x, positions):
    angles = positions[:, None, None] * 10000.0 ** (-jnp.arange(0, D, 2) / D)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


class Attention(nnx.Module):
    def __init__(self, w):
        self.q, self.k, self.v, self.o = (Linear(w[f"{name}_proj.weight"]) for name in "qkvo")

    def __call__(self, x):
        T = x.shape[0]
        q = rotate(self.q(x).reshape(T, H, D), jnp.arange(T)).reshape(T, K, H // K, D)
        k = rotate(self.k(x).reshape(T, K, D), jnp.arange(T))
        v = self.v(x).reshape(T, K, D)
        scores = jnp.einsum("tkgd,skd->kgts", q, k, precision="highest") * (D**-0.5 * MSCALE**2)
        seen = jnp.tril(jnp.ones((T, T), bool))
        p = jax.nn.softmax(jnp.where(seen, scores.astype(jnp.float32), -jnp.inf), -1).astype(v.dtype)
        return self.o(jnp.einsum("kgts,skd->tkgd", p, v, precision="highest").reshape(T, H * D))


class MLP(nnx.Module):
    def __init__(self, w):
        self.gate, self.up, self.down = (Linear(w[f"{name}_proj.weight"]) for name in ("gate", "up", "down"))

    def __call__(self, x):
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    def __init__(self, w):
        self.attn_norm = Norm(w["input_layernorm.weight"])
        self.attn = Attention(below(w, "self_attn."))
        self.mlp_norm = Norm(w["post_attention_layernorm.weight"])
        self.mlp = MLP(below(w, "mlp."))

    def __call__(self, x):
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nnx.Module):
    """Packed tokens `[T]` to logits `[T, V]`."""

    def __init__(self, w):
        self.embed = Embed(w["model.embed_tokens.weight"])
        self.layers = nnx.List([Layer(below(w, f"model.layers.{i}.")) for i in range(L)])
        self.norm = Norm(w["model.norm.weight"])
        self.head = Linear(w["lm_head.weight"])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def below(weights, prefix):
    """The weights whose names start with the prefix, without it."""
    return {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}


def make(dtype=jnp.float32, folder=HERE):
    """The model with the weights that `capture_llama.py` wrote, and how to call it with the captured inputs."""
    weights = {name: jnp.asarray(x, dtype) for name, x in np.load(folder / "weights.npz").items()}
    return Llama(weights), lambda model, inputs: model(jnp.asarray(inputs["input_ids"][0]))


def make_bfloat16():
    """The same in bfloat16."""
    return make(jnp.bfloat16)
