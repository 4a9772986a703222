"""Products inside Hopper's tensor cores, which add a few terms at a time and cut off what lies far below the top."""

import numpy as np

FP8 = {"step": 32, "bits": 13}
"""FP8 operands: 32 products and the sum so far, cut off 13 bits below the largest term."""
BF16 = {"step": 16, "bits": 25}
"""16-bit operands: 16 products and the sum so far, 25 bits; the sum itself is cut off to float32."""


def scores(q: np.ndarray, k: np.ndarray, *, step: int, bits: int) -> np.ndarray:
    """`q [..., D] . k [S, D]` as [..., S], in float64, with the roundings of the hardware.

    Source: https://arxiv.org/abs/2412.19437, section 3.3.2 (FP8); https://arxiv.org/abs/2403.00232 (16 bit).
    """
    total = np.zeros((*q.shape[:-1], len(k)))
    for i in range(0, q.shape[-1], step):
        products = q[..., None, i : i + step].astype(np.float64) * k[:, i : i + step]
        terms = np.concatenate([products, total[..., None]], -1)
        total = _cut(terms, np.abs(terms).max(-1, keepdims=True), bits).sum(-1)
        total = _cut(total, np.abs(total), min(bits, 23))
    return total


def _cut(x: np.ndarray, top: np.ndarray, bits: int) -> np.ndarray:
    grid = np.exp2(np.frexp(top)[1] - 1.0 - bits)
    return np.trunc(x / grid) * grid
