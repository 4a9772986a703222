"""Linear layers as checkpoints store them: `nnx.Linear`, or `QuantizedLinear` in one of its formats."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxattn import _products
from jaxattn.nn.quantized_linear import QuantizedLinear


def make_linear(
    inputs: int,
    outputs: int,
    *,
    use_bias: bool = False,
    format: str | None = None,
    ue8m0: bool = False,
    dtype: DTypeLike = jnp.bfloat16,
    precision: Any = None,
    rngs: nnx.Rngs,
) -> Any:
    """A linear layer; call it through `project`.

    Args:
        inputs: M.
        outputs: F.
        use_bias: add one.
        format: of `QuantizedLinear`, whose weight is zero until it is loaded; None = `nnx.Linear`.
        ue8m0: of format "fp8_block".
        dtype: of parameters (unless quantized), inputs and outputs.
        precision: of the product of `nnx.Linear`; None = float32 in full, unless `jax.default_matmul_precision` is set.
        rngs: source of the parameters.
    """
    if format is not None:
        return QuantizedLinear(inputs, outputs, format=format, ue8m0=ue8m0, use_bias=use_bias, dtype=dtype)
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=use_bias,
        param_dtype=dtype,
        precision=precision,
        dot_general=_products.dot_general,
        preferred_element_type=jnp.promote_types(dtype, jnp.float32),
        rngs=rngs,
    )


def project(linear: Any, x: Float[Array, "*B M"]) -> Float[Array, "*B F"]:
    """The product and bias, accumulated in float32 (float64 for float64), rounded to the dtype of `x` once."""
    return linear(x).astype(x.dtype)


def dtype_of(linear: Any) -> str:
    """Name of the dtype that a layer takes and gives."""
    return linear.options.dtype if isinstance(linear, QuantizedLinear) else linear.kernel.dtype.name


def matrix(linear: Any, dtype: DTypeLike) -> Float[Array, "M F"]:
    """The matrix that a layer multiplies with, dequantized, rounded to `dtype`."""
    if isinstance(linear, nnx.Linear):
        return linear.kernel[...]
    return linear.matrix(dtype)
