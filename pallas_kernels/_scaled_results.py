"""Results of products of codes: what sums are multiplied with and increased by, see `scaled_matmul`."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _inline_memory

Factors = dict[str, tuple[jax.Array, int]]

f32 = jnp.float32


def factors(r: Any, blocks: bool, width: int, row, feature) -> Factors:
    """What 64 rows of `width` features are multiplied with or increased by, each with its dimension.

    Args:
        r: refs `azp`, `a_scale`, `sums`, `b_scale` and `bias`, each None if the product has none.
        blocks: the scales are of blocks of inputs, and applied already.
        width: features.
        row: the first one.
        feature: the first one.
    """
    rows, line = (
        ("azp",) if blocks else ("azp", "a_scale"),
        ("sums", "bias") if blocks else ("sums", "b_scale", "bias"),
    )
    given = [(name, getattr(r, name), d) for d, names in enumerate((rows, line)) for name in names]
    loads = (
        (lambda ref: _inline_memory.load_rows(ref, row)),
        (lambda ref: _inline_memory.load_line(ref, feature, width)),
    )
    return {name: (ref[0] if ref.shape[0] == 1 else loads[d](ref), d) for name, ref, d in given if ref is not None}


def finished(factors: Factors, value):
    """`(value - azp * sums) * b_scale * a_scale + bias` as far as there are such, float32."""
    spread = {name: lax.broadcast_in_dim(v, value.shape, [d]) if v.ndim else v for name, (v, d) in factors.items()}
    if "azp" in spread:
        value = value - spread["azp"] * spread["sums"]
    value = value.astype(f32)
    if "b_scale" in spread:
        value = value * spread["b_scale"] * spread["a_scale"]
    if "bias" in spread:
        value = value + spread["bias"]
    return value
