"""Choice of the next token on the device."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, PRNGKeyArray

from jaxattn import _checks


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen; the most probable one if `temperature` is 0."""

    temperature: float = 0.0
    top_k: int | None = None
    """Only the so many most probable tokens, ties to the lowest id."""
    top_p: float | None = None
    """Of these, only the most probable ones that together reach this probability."""

    def __post_init__(self):
        op = "Sampling"
        if self.temperature:
            _checks.check_positive(op, temperature=self.temperature)
        if self.top_k is not None:
            _checks.check_count(op, top_k=self.top_k)
        _checks.check_positive(op, top_p=self.top_p)
        if self.top_p is not None and self.top_p > 1:
            raise ValueError(f"{op}: top_p must be at most 1, got {self.top_p}")
        if not self.temperature and (self.top_k is not None or self.top_p is not None):
            raise ValueError(f"{op}: top_k and top_p need a temperature above 0, got {self.temperature}")


def sample(
    logits: Float[Array, "B V"], key: PRNGKeyArray, place: Int32[Array, " B"], how: Sampling
) -> Int32[Array, " B"]:
    """One token of each row.

    Args:
        logits: any float; computed with in float32. NaN is never chosen.
        key: of all requests and steps.
        place: what tells a row's random numbers from those of its other steps, such as the token's position; rows
            differ by their index as well.
        how: static.
    """
    x = jnp.where(jnp.isnan(logits), -jnp.inf, logits.astype(jnp.float32))
    if not how.temperature:
        return jnp.argmax(x, -1).astype(jnp.int32)
    keys = jax.vmap(lambda b, n: jax.random.fold_in(jax.random.fold_in(key, b), n))(jnp.arange(len(x)), place)
    x = x / how.temperature
    if how.top_k is None and how.top_p is None:
        return jax.vmap(jax.random.categorical)(keys, x).astype(jnp.int32)
    order = jnp.argsort(-x, -1, stable=True)
    x = jnp.take_along_axis(x, order, -1)
    kept = jnp.arange(x.shape[1]) < (x.shape[1] if how.top_k is None else how.top_k)
    x = jnp.where(kept, x, -jnp.inf)
    if how.top_p is not None:
        share = jax.nn.softmax(x, -1)
        before = jnp.cumsum(share, -1) - share
        x = jnp.where((before < how.top_p) | (jnp.arange(x.shape[1]) == 0), x, -jnp.inf)
    rank = jax.vmap(jax.random.categorical)(keys, x)
    return jnp.take_along_axis(order, rank[:, None], -1)[:, 0].astype(jnp.int32)
