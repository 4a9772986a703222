"""Hyper-connections in numpy, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import numpy as np

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    once: bool = False
    """Sinkhorn stops after the first step."""
    transposed: bool = False
    """The matrix is [destination, source]."""
    single_gate: bool = False
    """Output gates end at 1."""
    norm_per_stream: bool = False
    """Each stream is normed by itself."""
    run: int = 0
    """Products are added one by one in float32, in runs of so many; 0 = in float64."""
    gates_exchanged: bool = False
    """Rows of pre and post are exchanged."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """`layer_input`, `post`, `comb` and, with `y`, `new_residual` from the op's arguments as numpy arrays."""
    work = np.float64 if wide else np.float32
    residual, eps = args["residual"], work(args.get("eps", 1e-6))
    out: Arrays = {}
    if args.get("y") is not None:
        residual = mix(residual, args["y"], args["post"], args["comb"], wide)
        out["new_residual"] = residual
    R = residual.astype(work)
    N, C, _ = R.shape

    def product(x: np.ndarray) -> np.ndarray:
        if on.run and not wide:
            parts = (x.reshape(N, 1, -1) * args["fn"]).reshape(N, len(args["fn"]), -1, on.run)
            return np.add.accumulate(parts, axis=-1, dtype=work)[..., -1].sum(-1)
        return (x.reshape(N, -1).astype(np.float64) @ args["fn"].astype(np.float64).T).astype(work)

    squares = (R**2).mean((2,) if on.norm_per_stream else (1, 2), keepdims=True)
    rho = 1 / np.sqrt(squares + work(args.get("rms_eps", 1e-6)))
    if on.norm_per_stream:
        u = product(R * rho)
    else:
        u = product(R) * rho[:, :, 0]
    s, b = args["scale"].astype(work), args["base"].astype(work)
    first, second = (slice(C, 2 * C), slice(0, C)) if on.gates_exchanged else (slice(0, C), slice(C, 2 * C))
    pre = _sigmoid(u[:, first] * s[0] + b[first]) + eps
    gate = work(1 if on.single_gate else args.get("post_mult", 2.0))
    post = gate * _sigmoid(u[:, second] * s[1] + b[second])
    a = (u[:, 2 * C :] * s[2] + b[2 * C :]).reshape(N, C, C)
    a = np.exp(a - a.max(2, keepdims=True))
    a = a / a.sum(2, keepdims=True) + eps
    for i in range(1 if on.once else args.get("iters", 20)):
        a = a / (a.sum(2, keepdims=True) + eps) if i else a
        a = a / (a.sum(1, keepdims=True) + eps)
    x = (pre[..., None] * R).sum(1)
    comb = np.swapaxes(a, 1, 2) if on.transposed else a
    return {
        "layer_input": x if wide else x.astype(residual.dtype),
        "post": post,
        "comb": np.ascontiguousarray(comb),
    } | out


def mix(residual: np.ndarray, y: np.ndarray, post: np.ndarray, comb: np.ndarray, wide: bool) -> np.ndarray:
    """`sum_i comb[i, j] residual_i + post_j y`."""
    work = np.float64 if wide else np.float32
    out = np.einsum("nij,nic->njc", comb.astype(work), residual.astype(work))
    out = out + post.astype(work)[..., None] * y.astype(work)[:, None]
    return out if wide else out.astype(residual.dtype)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return (1 / (1 + np.exp(-x))).astype(x.dtype)
