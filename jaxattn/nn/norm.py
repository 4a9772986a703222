"""RMSNorm as a module whose parameter is named as in checkpoints."""

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
