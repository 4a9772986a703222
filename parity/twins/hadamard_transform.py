"""Hadamard rotations in numpy as matrix products, and hadacore's roundings."""

from typing import Any

import numpy as np

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


def matrix(n: int) -> np.ndarray:
    """Sylvester's matrix of +-1: the sign is the parity of the bits that row and column share."""
    both = np.arange(n)[:, None] & np.arange(n)
    return 1.0 - 2.0 * (np.bitwise_count(both) & 1)


def run(args: Args, wide: bool, h: np.ndarray | None = None) -> Arrays:
    """`o` from the op's arguments; `h` replaces the normalised matrix."""
    x = args["x"]
    n = args.get("group") or x.shape[1]
    h = matrix(n) / np.sqrt(n) if h is None else h
    y = (x.astype(np.float64).reshape(len(x), -1, n) @ h).reshape(x.shape)
    return {"o": y if wide else y.astype(np.float32).astype(x.dtype)}


def butterflies(x: np.ndarray, n: int) -> np.ndarray:
    """`x H / sqrt(n)` in groups of n numbers, in the dtype of `x`, by sums and differences of neighbours first."""
    y, place = x.reshape(len(x), -1, n), np.arange(n)
    half = 1
    while half < n:
        other = y[..., place ^ half]
        y = np.where(place & half, other - y, y + other)
        half *= 2
    return (y * x.dtype.type(n**-0.5)).reshape(x.shape)


def hadacore(x: np.ndarray) -> np.ndarray:
    """`x H / sqrt(n)` for n = 16 k: the 16 neighbours first, then the k strides of 16, each product in 16 bits."""
    n, dtype = x.shape[1], x.dtype
    k = n // 16

    def rounded(y: np.ndarray) -> np.ndarray:
        return y.astype(np.float32).astype(dtype).astype(np.float64)

    parts = rounded(x.astype(np.float64).reshape(len(x), k, 16) @ matrix(16) / 4)
    root = float(np.asarray(k**-0.5, np.float32).astype(dtype))
    return (np.einsum("nka,kl->nla", parts, matrix(k)) * root).reshape(x.shape).astype(np.float32).astype(dtype)
