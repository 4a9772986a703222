"""What lies between the two products of experts, inside kernels."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Activation:
    """Of a gate and an up half; see `jaxattn.ops.gated_activation`."""

    kind: str
    limit: float | None
    alpha: float
    beta: float
    rounded: bool
    """The gate's half is rounded before the product."""

    def __call__(self, gate: jax.Array, up: jax.Array, narrow: Any) -> jax.Array:
        """float32 of float32 sums, which are first rounded to the dtype `narrow`."""
        gate, up = (x.astype(narrow).astype(jnp.float32) for x in (gate, up))
        if self.limit is not None:
            gate = jnp.minimum(gate, self.limit)
            up = jnp.clip(up, -self.limit, self.limit)
        gate = gate / (1 + jnp.exp(-(gate * self.alpha)))
        if self.rounded:
            gate = gate.astype(narrow).astype(jnp.float32)
        return gate * (up + self.beta)
