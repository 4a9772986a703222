"""Inputs on which quantizers go wrong, for the cases of several mechanisms."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def adversarial(rng: np.random.Generator, N: int, M: int, dtype: str, kind: str = "mixed") -> Float[Array, "N M"]:
    """Rows of zeros, of -0, constant, tiny and huge rows, exact powers of two and ties among normal numbers.

    Args:
        rng: source of randomness.
        N: rows; the special ones come first.
        M: row length.
        dtype: of the result.
        kind: "mixed", or "plain" for normal numbers only.
    """
    x = rng.standard_normal((N, M)).astype(np.float32)
    if kind == "plain":
        return jnp.asarray(x, dtype)
    line = np.linspace(-448, 448, M, dtype=np.float32)
    special = [
        np.zeros(M),
        np.full(M, -0.0),
        np.where(np.arange(M) == M // 2, 3e4, x[min(2, N - 1)]),  # one outlier
        line,
        np.exp2(rng.integers(-6, 9, M)) * rng.choice([-1, 1], M),
        np.round(line / 3.5) / 2,  # halves: ties of several grids
        np.full(M, -5.0),
        x[0] * np.float32(1e-7),
        np.where(np.arange(M) < M // 2, 0, x[min(1, N - 1)]),  # groups of zeros beside others
    ]
    for row, values in zip(range(1, N), special, strict=False):
        x[row] = values
    return jnp.asarray(x, dtype)
