"""Paged attention in numpy, with switches for other people's roundings and for faults."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.twins import cache_write, hadamard_transform

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    round_scores: Any = None
    """Dtype to which each step from q.k to the capped score is rounded."""
    round_shifted: Any = None
    """Dtype to which scores are rounded after the maximum is subtracted."""
    round_tanh: Any = None
    """Dtype to whose precision the soft cap's tanh is computed."""
    round_p: Any = None
    """Dtype of P, None = that of q."""
    operand: Callable[[np.ndarray], np.ndarray] | None = None
    """What matrix products make of each operand (float32)."""
    early_division: bool = False
    """P is divided by its sum before it is rounded."""
    exp: Callable[[np.ndarray], np.ndarray] = np.exp
    hadacore: bool = False
    """4-bit heads: q and the result are rotated by products in 16 bits, the result after a rounding; zero points are
    subtracted after the product of P and codes, so that what `operand` cut off P stays."""
    hide_last_key: bool = False
    """The newest visible key is not seen."""
    top_left: bool = False
    """The first query is aligned with the first key."""
    late_softcap: bool = False
    """The mask comes before the soft cap."""
    leak: bool = False
    """Unread slots are multiplied with zero instead of left out."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """`o` [N, H, D] and, with `return_lse`, `lse` [N, H], from the op's arguments as numpy arrays.

    Args:
        args: of `jaxattn.paged_attention`.
        wide: compute in float64 throughout, else in float32 with the op's roundings.
        on: departures.
    """
    if args.get("k_scale_pages") is not None:
        return _over_codes(args, wide, on)
    q, starts, lengths = args["q"], args["query_start"], args["lengths"]
    dtype, work = (np.dtype(np.float64), np.float64) if wide else (q.dtype, np.float32)
    (N, H, D), K = q.shape, args["k_pages"].shape[2]
    o, lse = np.zeros((N, H, D), work), np.full((N, H), -np.inf, work)
    for b, length in enumerate(lengths.tolist()):
        rows = slice(int(starts[b]), int(starts[b + 1]))
        count = rows.stop - rows.start
        if count and length:
            pos = np.arange(count) + (0 if on.top_left else length - count)
            seen, k, v = _keys(args, b, length, pos, dtype, work, on)
            queries = q[rows].astype(work).reshape(count, K, H // K, D)
            o[rows], lse[rows] = _softmax(args, queries, k, v, seen, dtype, on)
    return {"o": o.astype(dtype)} | ({"lse": lse} if args.get("return_lse") else {})


def _over_codes(args: Args, wide: bool, on: Switches) -> Arrays:
    """Over a cache with scales per token and head: the numbers that the codes stand for, 4-bit heads rotated."""
    work, rest = np.float64 if wide else np.float32, {k: v for k, v in args.items() if not k.endswith("_scale_pages")}
    packed = args["k_pages"].dtype == np.uint8
    for side in ("k", "v"):
        codes, scales = args[f"{side}_pages"], args[f"{side}_scale_pages"]
        if packed:
            rest[f"{side}_pages"] = unpacked(codes, scales).astype(work)
        else:
            rest[f"{side}_pages"] = codes.astype(work) * scales.astype(work)[..., None]
    if not packed:
        return run(rest, wide, on)
    q, D = args["q"], args["q"].shape[-1]
    signed = cache_write.signs(D) * q.astype(work)
    turned = (signed @ hadamard_transform.matrix(D)).astype(work)
    rest["q"] = (turned if wide else turned.astype(q.dtype)).astype(work)
    rest["scale"] = (args.get("scale") or D**-0.5) / D
    if on.hadacore:
        rest["q"] = cache_write.rotated(q, False).astype(work)
        rest["v_pages"] = np.concatenate(parts(args["v_pages"], args["v_scale_pages"]), -1)
    out = run(rest, wide, on)
    if on.hadacore:
        half = hadamard_transform.hadacore(out["o"].astype(q.dtype).reshape(-1, D)).reshape(q.shape)
        back = half.astype(work) * work(D**0.5) * cache_write.signs(D) / D
    else:
        back = (out["o"].astype(work) @ hadamard_transform.matrix(D)) * cache_write.signs(D) / D
    return out | {"o": back.astype(np.float64 if wide else q.dtype)}


def unpacked(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Rotated heads from bytes of two numbers and scales whose lowest mantissa bits hold the zero point."""
    both, zero, step = parts(codes, scales)
    with np.errstate(invalid="ignore"):  # NaN in what nobody reads
        return (both - zero) * step


def parts(codes: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [..., D], zero point [..., 1] and step [..., 1] in float32."""
    bits = scales.astype(np.float32).view(np.int32)
    both = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1).astype(np.float32)
    return both, (bits & 15).astype(np.float32)[..., None], (bits & -16).view(np.float32)[..., None]


def _keys(args: Args, b: int, length: int, pos: np.ndarray, dtype, work, on: Switches):
    """Visibility [T, S], keys and values [S, K, D] of one request; zeros where nobody looks."""
    page, window, causal = args["k_pages"].shape[1], args.get("window"), args.get("causal", True)
    used = -(-length // page)
    key = np.arange(used * page if on.leak else length)
    ahead = key - pos[:, None]
    seen = np.broadcast_to(key < length, ahead.shape).copy()
    if causal:
        seen &= ahead <= 0
    if window is not None:
        seen &= (-window < ahead) & (causal | (ahead < window))
    if on.hide_last_key:
        newest = key.size - 1 - np.argmax(seen[:, ::-1], axis=1)
        seen[np.arange(pos.size), newest] = False
    read = seen.any(0)[:, None, None] | on.leak

    def gather(name: str) -> np.ndarray:
        x = args[f"{name}_pages"][args["page_table"][b, :used]].astype(work)
        x = x.reshape(-1, *x.shape[2:])[: key.size]
        if (factor := args.get(f"{name}_scale")) is not None:
            x = (x * np.asarray(factor, work).reshape(())).astype(dtype).astype(work)
        return np.where(read, x, 0)

    return seen, gather("k"), gather("v")


def _softmax(args: Args, q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray, dtype, on: Switches):
    """The outputs [T, H, D] and log-sum-exps [T, H] of one request."""
    (T, K, G, D), work = q.shape, q.dtype
    scale, cap, sinks = args.get("scale") or D**-0.5, args.get("softcap"), args.get("sinks")

    def product(pattern: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.einsum(pattern, x, y) if on.operand is None else np.einsum(pattern, on.operand(x), on.operand(y))

    def rounded(x: np.ndarray, to: Any) -> np.ndarray:
        return x if to is None else x.astype(to).astype(work)

    def capped(s: np.ndarray) -> np.ndarray:
        if cap is None:
            return s
        t = rounded(np.tanh(rounded(s / work.type(cap), on.round_scores)), on.round_tanh or on.round_scores)
        return rounded(t * work.type(cap), on.round_scores)

    s = rounded(product("tkgd,skd->tkgs", q, k), on.round_scores)
    s = rounded(s * work.type(scale), on.round_scores)
    hidden = ~seen[:, None, None]
    s = capped(np.where(hidden, -np.inf, s)) if on.late_softcap else np.where(hidden, -np.inf, capped(s))
    sink = np.full((K, G), -np.inf, work) if sinks is None else sinks.astype(work).reshape(K, G)
    own = s.max(-1)
    top = np.maximum(own, sink)
    safe = np.where(np.isfinite(top), top, 0)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        e = on.exp(rounded(s - safe[..., None], on.round_shifted))
        total = (e.sum(-1) + on.exp(rounded(sink - safe, on.round_shifted)))[..., None]
        p = rounded(e / total if on.early_division else e, dtype if on.round_p is None else on.round_p)
        o = _values(p, v, product, on) / (1 if on.early_division else total)
        o = np.where((np.isfinite(own) & (sink < np.inf))[..., None], o, 0)
        base = np.where(np.isfinite(own), own, 0)
        lse = np.log(on.exp(s - base[..., None]).sum(-1)) + base
    return o.reshape(T, K * G, D), lse.reshape(T, K * G)


def _values(p: np.ndarray, v: np.ndarray, product: Callable[..., np.ndarray], on: Switches) -> np.ndarray:
    """P V, or with `hadacore` P times the steps, times codes, less what belongs to the zero points."""
    if not on.hadacore:
        return product("tkgs,skd->tkgd", p, v)
    codes, zero, step = v[..., :-2], v[..., -2], v[..., -1]
    p = p * step.T[None, :, None]
    return product("tkgs,skd->tkgd", p, codes) - (p * zero.T[None, :, None]).sum(-1, keepdims=True)


def vector_exp(x: np.ndarray) -> np.ndarray:
    """exp(x) as a vectorised CPU kernel takes it: whole vectors of 16 through a cubic (relative error 1.1e-4), the rest
    of the last axis exactly.

    Source: Malossi, Ineichen, Bekas, Curioni, "Fast exponential computation on SIMD architectures", 2015.
    """
    z = np.where(np.isfinite(x), x, -1e4) * x.dtype.type(np.log2(np.e))
    f = z - np.floor(z)
    cubic = 0.00010703434948458272 + f * (0.30354260500649682 - f * (0.22433836478672356 + f * 0.079204240219773236))
    fast = (np.exp2(np.floor(z)) * (1 + f - cubic)).astype(x.dtype)
    vectors = x.shape[-1] // 16 * 16
    return np.concatenate([fast[..., :vectors], np.exp(x[..., vectors:])], axis=-1)


def tf32(x: np.ndarray) -> np.ndarray:
    """Float32 as a tensor core reads it in a TF32 product: the lower 13 bits are cut off."""
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
