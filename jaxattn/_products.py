"""Products of layers and models: float32 in full on every backend, unless JAX is told to round.

On NVIDIA GPUs, JAX's default for float32 is TF32, which keeps 11 bits of each factor; PyTorch's default is float32.
`jax.default_matmul_precision`, where it is set, decides. References do not ask it: they always take the highest.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


def precision_of(*operands: Any) -> str | None:
    """What a product of these takes: "highest" if any is wider than 16 bits and JAX's configuration names nothing.

    Products of 16-bit numbers are exact anyway.
    """
    wide = any(jnp.dtype(x.dtype).itemsize > 2 for x in operands)
    return "highest" if wide and jax.config.jax_default_matmul_precision is None else None


def dot_general(x: Array, y: Array, dimension_numbers: Any, precision: Any = None, **options: Any) -> Array:
    """`jax.lax.dot_general` with this precision, None = `precision_of`; for `nnx.Linear`."""
    how = precision_of(x, y) if precision is None else precision
    return lax.dot_general(x, y, dimension_numbers, precision=how, **options)


def einsum(form: str, *operands: Array) -> Array:
    """The sum of products, accumulated and returned in float32 (float64 for float64), never rounded to less."""
    wide = jnp.promote_types(jnp.result_type(*operands), jnp.float32)
    return jnp.einsum(form, *operands, precision=precision_of(*operands), preferred_element_type=wide)
