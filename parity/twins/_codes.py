"""Codes of small formats in numpy, for the twins of several stems; float64 codes are clamped, not rounded."""

import ml_dtypes
import numpy as np

E4M3_MAX = 448.0
LIMITS = {"float8_e4m3fn": E4M3_MAX, "float8_e5m2": 57344.0}
TOKEN_FLOOR = 1 / 512


def float8(x: np.ndarray, dtype: str, *, clamp: bool = True, cut: bool = False) -> np.ndarray:
    """float8 codes of float32 numbers; float64 numbers stay, clamped.

    Args:
        x: numbers.
        dtype: of the codes.
        clamp: saturate.
        cut: toward zero instead of to nearest.
    """
    limit = LIMITS[dtype]
    x = np.clip(x, -limit, limit) if clamp else x
    if x.dtype == np.float64:
        return x
    code = x.astype(getattr(ml_dtypes, dtype))
    if cut:
        above = np.abs(code.astype(x.dtype)) > np.abs(x)
        code = (code.view(np.uint8) - above).astype(np.uint8).view(code.dtype)
    return code


def grouped(x: np.ndarray, group: int) -> np.ndarray:
    """`[N, M]` as `[N, ceil(M / group), group]`, filled up with zeros."""
    x = np.pad(x, ((0, 0), (0, -x.shape[1] % group)))
    return x.reshape(len(x), -1, group)


def inverse(s: np.ndarray) -> np.ndarray:
    """`1 / s`, 0 for 0."""
    return np.divide(1, s, out=np.zeros_like(s), where=s >= 2.0**-126)


def power_of_two(x: np.ndarray, how: str = "ceil") -> np.ndarray:
    """`x` rounded to a power of two: "ceil", "floor" or "nearest", no smaller than 2^-126."""
    mantissa, exponent = np.frexp(x.astype(np.float32))  # x = mantissa * 2^exponent, mantissa in [1/2, 1)
    up = {"ceil": mantissa > 0.5, "floor": False, "nearest": mantissa >= 0.75}[how]
    return np.ldexp(np.float32(1), np.maximum(exponent - 1 + up, -126)).astype(x.dtype)


def fp8_rows(y: np.ndarray, args: dict, *, floor: float = TOKEN_FLOOR, cut: bool = False) -> tuple[np.ndarray, ...]:
    """What a fused op makes of its rows `y`: `(o,)`, `(q,)` or `(q, scale)`, by `args["mode"]`."""
    mode, kind = args.get("mode", "none"), "float8_e4m3fn"
    if mode == "none":
        return (y,)
    if mode == "static":
        s = np.asarray(args["scale"]).astype(y.dtype).reshape(())
        return (float8(y * inverse(s), kind, cut=cut),)
    parts = y[:, None] if mode == "token" else grouped(y, args.get("group", 128))
    top = np.abs(parts).max(-1, initial=0)
    if args.get("upper_bound") is not None:
        top = np.minimum(top, np.asarray(args["upper_bound"]).astype(y.dtype).reshape(()))
    s = np.maximum(top / y.dtype.type(E4M3_MAX), y.dtype.type(floor) / y.dtype.type(E4M3_MAX))
    q = float8(parts / s[..., None], kind, cut=cut)
    return q.reshape(len(y), -1)[:, : y.shape[1]], s
