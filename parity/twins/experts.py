"""The experts of a mixture in numpy, expert by expert, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from parity.twins import _codes

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    chains: bool = False
    """Products are added in bfloat16, four at a time (vLLM's moe_wna16)."""
    swap_gate: bool = False
    """Up rows are taken for gate rows."""
    no_clamp: bool = False
    """The limit is ignored."""
    no_weights: bool = False
    """Routing weights are ignored."""
    next_expert: bool = False
    """Every pair goes to the next expert."""
    drop_slot: bool = False
    """The last slot is left out."""
    no_bias: bool = False
    """Biases are left out."""
    one_scale: bool = False
    """All groups have the first group's scale."""
    high_first: bool = False
    """The high four bits of a byte come first."""
    twice: bool = False
    """Weights on the activation are applied to the output again."""
    gain: float = 1.0
    """Factor of the result."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """`o` from the op's arguments as numpy arrays; sums are float64, roundings the op's; `wide` rounds nowhere."""
    x, ids = args["x"], args["ids"]
    (T, A), E, dtype = ids.shape, len(args["w13"]), x.dtype
    ids = _local(ids, args.get("expert_map"), E)
    if on.next_expert:
        ids = np.where(ids >= 0, (ids + 1) % E, -1)
    if on.drop_slot:
        ids = ids.copy()
        ids[:, -1] = -1
    which = ids.reshape(-1)
    weight = np.where(which >= 0, 1 if on.no_weights else args["weights"].reshape(-1), 0).astype(np.float64)
    narrow = (lambda v: v) if wide else (lambda v: v.astype(np.float32).astype(dtype).astype(np.float64))
    h = narrow(_product(np.repeat(x, A, 0).astype(np.float64), args, "w13", which, wide, on))
    gate, up = _split(h, args.get("activation", "silu"), on)
    limit, oai = args.get("limit"), args.get("activation", "silu") == "swigluoai"
    if limit is not None and not on.no_clamp:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    alpha, beta = args.get("alpha") or (1.702 if oai else 1.0), args.get("beta")
    beta = (1.0 if oai else 0.0) if beta is None else beta
    early = args.get("weight_on", "output") == "activation"
    with np.errstate(over="ignore"):
        gate = gate / (1 + np.exp(-alpha * gate))
    a = (gate if early or oai else narrow(gate)) * (up + beta)
    if early:
        a = a * weight[:, None]
        a = a.astype(np.float32).astype(np.float64) if args.get("act_group") and not wide else narrow(a)
    else:
        a = narrow(a)
    y = _product(a, args, "w2", which, wide, on, weight if early else None)
    if not early or on.twice:
        y = y * weight[:, None]
    y = np.where(which[:, None] >= 0, narrow(y), 0)
    o = y.reshape(T, A, -1).sum(1) * on.gain
    return {"o": o if wide else o.astype(np.float32).astype(dtype)}


def _local(ids, table, E):
    if table is not None:
        ids = np.where((ids >= 0) & (ids < len(table)), table[np.clip(ids, 0, len(table) - 1)], -1)
    return np.where((ids >= 0) & (ids < E), ids, -1)


def _split(h, kind, on):
    F = h.shape[1] // 2
    gate, up = (h[:, ::2], h[:, 1::2]) if kind == "swigluoai" else (h[:, :F], h[:, F:])
    return (up, gate) if on.swap_gate else (gate, up)


def _product(x, args, name, which, wide, on, bias_weight=None):
    """`x[r] @ w[which[r]].T + bias` with quantized activations."""
    q, s = (x, 1.0) if wide else _quantize(x, args, on)
    o = np.zeros((len(x), args[name].shape[1]))
    for e in set(which.tolist()) - {-1}:
        rows = which == e
        w, factor = _weight(args, name, e, wide, on)
        acc = _chains(q[rows], w) if on.chains else q[rows] @ w.T
        acc = acc * (s[rows] if np.ndim(s) else s) * factor
        bias = args.get(f"{name}_bias")
        if bias is not None and not on.no_bias:
            b = bias[e].astype(np.float64)
            acc = acc + (b if bias_weight is None else b * bias_weight[rows, None])
        o[rows] = acc
    return o


def _quantize(x, args, on):
    """Codes with their group scales multiplied in, and a factor of the sums."""
    form, group = args.get("format", "none"), args.get("act_group")
    x = x.astype(np.float32)
    if form == "fp8_tensor":
        s = np.abs(x).max(initial=0) / np.float32(448)
        return _codes.float8(x * (1 / s), "float8_e4m3fn").astype(np.float64), np.float64(s)
    if form == "int8":
        top = np.maximum(np.abs(x).max(1, keepdims=True), np.float32(1e-10))
        whole = x * (np.float32(127) / top)
        return np.clip(np.trunc(whole + np.copysign(0.5, whole)), -128, 127).astype(np.float64), (top / np.float32(127))
    if form != "fp8_block" and not group:
        return x.astype(np.float64), 1.0
    group, floor = group or 128, 1e-10 if form == "fp8_block" else 1e-4
    parts = _codes.grouped(x, group)
    s = np.maximum(np.abs(parts).max(-1), np.float32(floor)) / np.float32(448)
    s = _codes.power_of_two(s) if args.get("ue8m0", True) else s
    s = np.broadcast_to(s[:, :1], s.shape) if on.one_scale else s
    q = _codes.float8(parts / s[..., None], "float8_e4m3fn").astype(np.float64) * s[..., None]
    return q.reshape(len(x), -1)[:, : x.shape[1]], 1.0


def _weight(args, name, e, wide, on):
    """Values of one expert's weight in float64, and the factor of its sums."""
    w, scale, form = args[name][e], args.get(f"{name}_scale"), args.get("format", "none")
    if form == "none":
        return w.astype(np.float64), 1.0
    s = scale[e].astype(np.float64)
    if form == "fp8_tensor":
        return w.astype(np.float64), s
    if form == "int8":
        return w.astype(np.float64), s[:, 0]
    if form == "mxfp4":
        s = 2.0 ** (s - 127)
    if on.one_scale:
        s = np.broadcast_to(s[:, :1], s.shape)
    if form == "fp8_block":
        s = np.repeat(np.repeat(s, 128, 0), 128, 1)[: w.shape[0], : w.shape[1]]
        return w.astype(np.float64) * s, 1.0
    halves = (w >> 4, w & 15) if on.high_first else (w & 15, w >> 4)
    codes = np.stack(halves, -1).reshape(len(w), -1)
    s = np.repeat(s, codes.shape[1] // s.shape[1], 1)
    if form == "wna16":
        zeros = args.get(f"{name}_zeros")
        zero = 8 if zeros is None else np.stack([zeros[e] & 15, zeros[e] >> 4], 1).reshape(len(w), -1)
        zero = zero if zeros is None else np.repeat(zero, codes.shape[1] // zero.shape[1], 1)
        values = (codes.astype(np.float64) - zero) * s
        return (values if wide else values.astype(np.float32).astype(scale.dtype).astype(np.float64)), 1.0
    values = np.where(codes & 8, -1, 1) * _E2M1[codes & 7] * s
    return values * (args[f"{name}_scale_2"][e].astype(np.float64) if form == "nvfp4" else 1), 1.0


def _chains(x, w):
    """Four products after each other in bfloat16, the sums of four in float32."""
    rows, groups = x.reshape(len(x), 1, -1, 4), w.reshape(1, len(w), -1, 4)
    total = np.zeros((len(x), len(w), groups.shape[2]))
    for k in range(4):
        total = (rows[..., k] * groups[..., k] + total).astype(ml_dtypes.bfloat16).astype(np.float64)
    return total.sum(-1)
