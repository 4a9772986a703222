"""The gated feed-forward layer of dense layers and shared experts."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxattn import _checks
from jaxattn.nn.linear import make_linear, project
from jaxattn.ops.gated_activation import gated_activation


class GatedMLP(nnx.Module):
    """`down_proj(silu(gate_proj(x)) * up_proj(x))`, with the roundings of `jaxattn.gated_activation`."""

    def __init__(
        self,
        features: int,
        width: int,
        *,
        limit: float | None = None,
        format: str | None = None,
        ue8m0: bool = False,
        dtype: DTypeLike = jnp.bfloat16,
        rngs: nnx.Rngs,
    ):
        """Draw the parameters.

        Args:
            features: M.
            width: F.
            limit: clamp of gate and value.
            format: of the weights, as for `QuantizedLinear`; None = not quantized.
            ue8m0: of format "fp8_block".
            dtype: of parameters, inputs and outputs.
            rngs: source of the parameters.

        Raises:
            TypeError, ValueError: sizes or format.
        """
        _checks.check_count("GatedMLP", features=features, width=width)
        how: dict[str, Any] = {"format": format, "ue8m0": ue8m0, "dtype": dtype, "rngs": rngs}
        self.gate_proj, self.up_proj = (make_linear(features, width, **how) for _ in range(2))
        self.down_proj = make_linear(width, features, **how)
        self.limit = limit

    def __call__(self, x: Float[Array, "N M"]) -> Float[Array, "N M"]:
        """The layer of every token."""
        joined = jnp.concatenate([project(self.gate_proj, x), project(self.up_proj, x)], -1)
        return project(self.down_proj, gated_activation(joined, limit=self.limit))
