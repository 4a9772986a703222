"""Norms as modules whose parameters are named as in checkpoints."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxattn import _checks
from jaxattn.ops.rms_norm_quant import rms_norm_quant


class RMSNorm(nnx.Module):
    """`x / sqrt(mean(x^2) + eps) * weight`, in float32 with one rounding; `weight` [M] is one at first."""

    def __init__(self, features: int, *, eps: float = 1e-6, dtype: DTypeLike = jnp.bfloat16):
        """Make the parameter.

        Args:
            features: M.
            eps: added to the mean of squares.
            dtype: of the parameter, inputs and outputs.

        Raises:
            TypeError, ValueError: sizes that can never be right.
        """
        _checks.check_count("RMSNorm", features=features)
        _checks.check_positive("RMSNorm", eps=eps)
        self.weight = nnx.Param(jnp.ones(features, dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "N M"]) -> Float[Array, "N M"]:
        """The normed tokens, in the dtype of `x`, which must be that of the parameter."""
        return rms_norm_quant(x, self.weight[...], eps=self.eps)


class LayerNorm(nnx.Module):
    """`(x - mean) / sqrt(variance + eps) * weight + bias`, in float32 with one rounding; float32 `weight` and `bias`.

    XLA's work: the indexer of DeepSeek-V3.2 norms 128 numbers a token.
    """

    def __init__(self, features: int, *, eps: float = 1e-6):
        """Make the parameters, one and zero.

        Args:
            features: M.
            eps: added to the variance.

        Raises:
            TypeError, ValueError: sizes that can never be right.
        """
        _checks.check_count("LayerNorm", features=features)
        _checks.check_positive("LayerNorm", eps=eps)
        self.weight = nnx.Param(jnp.ones(features, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(features, jnp.float32))
        self.eps = eps

    def __call__(self, x: Float[Array, "N M"]) -> Float[Array, "N M"]:
        """The normed tokens, in the dtype of `x`."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        centred = wide - jnp.mean(wide, -1, keepdims=True)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(centred), -1, keepdims=True) + self.eps)
        return (centred * inverse * self.weight[...] + self.bias[...]).astype(x.dtype)
