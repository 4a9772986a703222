"""The example Llama with one fault each: what a port gets wrong. `scripts/bisect.py` takes them by name."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "llama"))

import llama_flax as llama  # noqa: E402


class OwnRotation(llama.Attention):
    """Attention in which a method stands for the function `rotate`."""

    def __call__(self, x):
        original, llama.rotate = llama.rotate, self.rotate
        try:
            return super().__call__(x)
        finally:
            llama.rotate = original


class NeighboursRotated(OwnRotation):
    """RoPE of neighbouring dims against each other, not of halves."""

    def rotate(self, x, positions):
        angles = positions[:, None, None] * 10000.0 ** (-jnp.arange(0, llama.D, 2) / llama.D)
        a, b = x[..., 0::2].astype(jnp.float32), x[..., 1::2].astype(jnp.float32)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape).astype(x.dtype)


class NoMscale(llama.Attention):
    """Scores without YaRN's mscale^2."""

    def __call__(self, x):
        original, llama.MSCALE = llama.MSCALE, 1.0
        try:
            return super().__call__(x)
        finally:
            llama.MSCALE = original


class SwappedMLP(llama.MLP):
    """SiLU of the wrong half."""

    def __call__(self, x):
        return self.down(jax.nn.silu(self.up(x)) * self.gate(x))


def plant(dtype, name, cls, layers=(0, 1)):
    """The model with `name` of some layers replaced by an object of another class with the same attributes."""
    model, call = llama.make(dtype)
    for i in layers:
        good = getattr(model.layers[i], name)
        bad = cls.__new__(cls)
        vars(bad).update(vars(good))
        setattr(model.layers[i], name, bad)
    return model, call


def clean(dtype=jnp.float32):
    return llama.make(dtype)


def wrong_rope(dtype=jnp.float32):
    return plant(dtype, "attn", NeighboursRotated)


def missing_mscale(dtype=jnp.float32):
    return plant(dtype, "attn", NoMscale)


def swapped_gate_up(dtype=jnp.float32):
    return plant(dtype, "mlp", SwappedMLP)


def swapped_weights(dtype=jnp.float32):
    """The checkpoint's gate and up loaded into each other, in the second layer only."""
    model, call = llama.make(dtype)
    mlp = model.layers[1].mlp
    mlp.gate, mlp.up = mlp.up, mlp.gate
    return model, call


def poisoned(dtype=jnp.float32):
    """A NaN in one weight of the second layer."""
    model, call = llama.make(dtype)
    kernel = model.layers[1].attn.v.kernel
    kernel[...] = kernel[...].at[3, 4].set(jnp.nan)
    return model, call


def compiled():
    """A model behind jit."""
    jitted = nnx.jit(lambda m, x: m(x))
    return llama.Linear(jnp.ones((4, 3))), lambda m, inputs: jitted(m, jnp.asarray(inputs["x"]))


FAULTS = {  # fault -> our module, what of it
    "wrong_rope": ("layers.0.attn", "input into o_proj"),
    "missing_mscale": ("layers.0.attn", "input into o_proj"),
    "swapped_gate_up": ("layers.0.mlp", "input into down_proj"),
    "swapped_weights": ("layers.1.mlp.gate", "y"),
    "poisoned": ("layers.1.attn.v", "y"),
}
