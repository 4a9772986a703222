"""Hyper-connections as Flax modules: residual streams around a layer, and their end."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxattn import _checks
from jaxattn.ops.mhc_head import mhc_head
from jaxattn.ops.mhc_post import mhc_post
from jaxattn.ops.mhc_pre import mhc_pre


class HyperConnections(nnx.Module):
    """Manifold-constrained hyper-connections around one layer: `streams -> pre -> layer -> post -> streams`.

    Parameters, float32 as in checkpoints: `fn [(2 + C) C, C M]`, `scale [3]`, `base [(2 + C) C]`.

    Example:
        streams = hyper(streams, lambda x: attention(norm(x), cache, batch))
    """

    def __init__(
        self,
        features: int,
        streams: int = 4,
        *,
        iters: int = 20,
        eps: float = 1e-6,
        rms_eps: float = 1e-6,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        """Draw the parameters: small weights, scales of 1, biases of 0.

        Args:
            features: M.
            streams: C.
            iters: Sinkhorn steps.
            eps: of gates and Sinkhorn's sums.
            rms_eps: of the norm.
            implementation: handed to `jaxattn.mhc_pre` and `jaxattn.mhc_post`.
            rngs: source of the parameters.

        Raises:
            ValueError: sizes.
        """
        _checks.check_count("HyperConnections", features=features, streams=streams, iters=iters)
        rows, width = (2 + streams) * streams, streams * features
        self.fn = nnx.Param(jax.random.normal(rngs.params(), (rows, width), jnp.float32) * width**-0.5)
        self.scale, self.base = nnx.Param(jnp.ones(3)), nnx.Param(jnp.zeros(rows))
        self.iters, self.eps, self.rms_eps, self.implementation = iters, eps, rms_eps, implementation

    def pre(self, streams: Float[Array, "N C M"], **update: Any) -> tuple[Array, ...]:
        """`jaxattn.mhc_pre` with these parameters; `update` (y, post, comb) updates the streams first."""
        return mhc_pre(
            streams,
            self.fn[...],
            self.scale[...],
            self.base[...],
            **update,
            iters=self.iters,
            eps=self.eps,
            rms_eps=self.rms_eps,
            implementation=self.implementation,
        )

    def __call__(
        self,
        streams: Float[Array, "N C M"],
        layer: Callable[[Float[Array, "N M"]], Float[Array, "N M"]],
    ) -> Float[Array, "N C M"]:
        """The streams after `layer`, which sees one vector a token."""
        x, post, comb = self.pre(streams)
        return self.post(streams, layer(x), post, comb)

    def post(
        self, streams: Float[Array, "N C M"], y: Float[Array, "N M"], post: Float[Array, "N C"], comb: Array
    ) -> Float[Array, "N C M"]:
        """`jaxattn.mhc_post`."""
        return mhc_post(streams, y, post, comb, implementation=self.implementation)


class HyperHead(nnx.Module):
    """The streams as one vector a token, for the final norm: `jaxattn.mhc_head`."""

    def __init__(self, features: int, streams: int = 4, *, eps: float = 1e-6, rms_eps: float = 1e-6, rngs: nnx.Rngs):
        """Draw the parameters, `fn [C, C M]`, `scale []`, `base [C]`; arguments as of `HyperConnections`."""
        _checks.check_count("HyperHead", features=features, streams=streams)
        width = streams * features
        self.fn = nnx.Param(jax.random.normal(rngs.params(), (streams, width), jnp.float32) * width**-0.5)
        self.scale, self.base = nnx.Param(jnp.ones(())), nnx.Param(jnp.zeros(streams))
        self.eps, self.rms_eps = eps, rms_eps

    def __call__(self, streams: Float[Array, "N C M"]) -> Float[Array, "N M"]:
        """One vector a token."""
        scale = self.scale[...]
        return mhc_head(streams, self.fn[...], scale, self.base[...], eps=self.eps, rms_eps=self.rms_eps)
