"""Products in numpy that add up in blocks."""

import numpy as np

BLOCK = 32


def product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """`x [..., n] @ y [n, m]` in their dtype: sums of 32 products each, which are then added in pairs.

    BLAS adds all products one after the other, and the roundings of n partial sums add up; GPUs split long sums, so
    their results are two or three times as close to the truth.
    """
    parts = [x[..., i : i + BLOCK] @ y[i : i + BLOCK] for i in range(0, len(y), BLOCK)]
    while len(parts) > 1:
        parts = [sum(parts[i + 1 : i + 2], parts[i]) for i in range(0, len(parts), 2)]
    return parts[0]
