"""Weight-only products in numpy, with the float16 sums of other people's kernels and with switches for faults."""

from dataclasses import dataclass
from typing import Any

import numpy as np

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]

_NF4 = (-1, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0)
_NF4 += (0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1)
_FP4 = (0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4)
_E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    zero_shift: int = 0
    """Added to every zero point."""
    group_shift: int = 0
    """Input features use the scale of a group so many further."""
    swap_neighbours: bool = False
    """Even and odd input features (AWQ: output features) are exchanged."""
    ignore_order: bool = False
    """`g_idx` is not used."""
    drop_last: bool = False
    """The last input feature is left out."""
    high_first: bool = False
    """Codes are taken out of words from the high end."""
    gain: float = 1.0
    """Factor of the weight."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """`o` from the op's arguments as numpy arrays; `wide` computes in float64 without rounding the weight."""
    x = args["x"]
    w = weight(args, wide, on) * on.gain
    if on.drop_last:
        w[-1] = 0
    o = x.astype(np.float64) @ w
    return {"o": o if wide else o.astype(np.float32).astype(x.dtype)}


def weight(args: Args, wide: bool, on: Switches = NONE) -> np.ndarray:
    """The weight [M, F] in float64, rounded to the dtype of x unless `wide`."""
    x, w, scales, format = (args[name] for name in ("x", "w", "scales", "format"))
    M = x.shape[1]
    s = scales.astype(np.float64)
    bits = args.get("bits", 4)
    if format in ("gptq", "gptq_v2", "awq", "marlin", "wna16"):
        q, zero = _integers(args, bits, on)
        if format == "marlin":
            s = _marlin_scales(s)
        if format == "wna16":
            s = s.T
        rows = np.arange(M) // (M // len(s))
        if args.get("g_idx") is not None and not on.ignore_order:
            rows = args["g_idx"]
        rows = (rows + on.group_shift) % len(s)
        zero = np.broadcast_to(np.asarray(zero), s.shape) + on.zero_shift
        out = (q - zero[rows]) * s[rows]
    else:
        out = _floats(w, s, scales, args, M, on)
    if on.swap_neighbours:
        axis = 1 if format == "awq" else 0
        out = np.flip(out.reshape(*out.shape[:axis], -1, 2, *out.shape[axis + 1 :]), axis + 1).reshape(out.shape)
    return out if wide else out.astype(np.float32).astype(x.dtype).astype(np.float64)


def _integers(args: Args, bits: int, on: Switches):
    """Codes [M, F] and zero points [G, F] or one number."""
    w, zeros, format = args["w"], args.get("zeros"), args["format"]
    if format in ("gptq", "gptq_v2"):
        return _words(w.T, bits, on).T, _words(zeros, bits, NONE) + (format == "gptq")
    if format == "awq":
        back = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])
        q, zero = (
            _words(v, 4, o).reshape(len(v), -1, 8)[..., back].reshape(len(v), -1) for v, o in ((w, on), (zeros, NONE))
        )
        return q, zero
    if format == "wna16":
        if bits == 8:
            return w.T.astype(np.int64), zeros.T.astype(np.int64)
        return _nibbles(w, on.high_first).T, _nibbles(zeros.T, False)
    return _marlin(w, bits, on), 2 ** (bits - 1)


def _floats(w, s, scales, args, M: int, on: Switches) -> np.ndarray:
    format = args["format"]
    if format in ("nf4", "fp4"):
        book = np.array(_NF4 if format == "nf4" else _FP4 + tuple(-v for v in _FP4), np.float32).astype(np.float64)
        values = book[_nibbles(w[None], not on.high_first)[0]].reshape(len(s), -1)
        return (values * np.roll(s, -on.group_shift)[:, None]).reshape(-1, M).T
    if format in ("mxfp4", "nvfp4"):
        code = _nibbles(w, on.high_first)
        values = np.array(_E2M1)[code & 7] * np.where(code & 8, -1, 1)
    else:
        values = w.astype(np.float64)
    if scales.dtype == np.uint8:
        s = np.exp2(scales.astype(np.float64) - 127)
    if format == "nvfp4":
        s = s * np.float64(args["global_scale"])
    if format == "fp8" and s.shape[1] > 1:
        s = np.repeat(s, 128, 0)[: len(w)]
    s = np.roll(s, -on.group_shift, 1 if s.shape[1] > 1 else 0)
    group = {"mxfp4": 32, "mxfp8": 32, "nvfp4": 16}.get(format, 128 if s.shape[1] > 1 else M)
    return (values * np.repeat(s, group, 1)[:, :M]).T


def _words(w: np.ndarray, bits: int, on: Switches) -> np.ndarray:
    """Codes of a little-endian bit stream along the last axis."""
    stream = np.unpackbits(np.ascontiguousarray(w).view(np.uint8), axis=-1, bitorder="little")
    codes = stream.reshape(len(w), -1, bits) @ (1 << np.arange(bits))
    per = 32 // bits
    if on.high_first and bits != 3:
        codes = codes.reshape(len(w), -1, per)[..., ::-1].reshape(len(w), -1)
    return codes


def _nibbles(w: np.ndarray, high_first: bool) -> np.ndarray:
    parts = (w >> 4, w & 15) if high_first else (w & 15, w >> 4)
    return np.stack(parts, -1).reshape(*w.shape[:-1], -1).astype(np.int64)


def _marlin(w: np.ndarray, bits: int, on: Switches) -> np.ndarray:
    """Marlin's tiles undone place by place: lane, 16 columns, half, row within the fragment."""
    order = (0, 2, 4, 6, 1, 3, 5, 7) if bits == 4 else (0, 2, 1, 3)
    stored = _words(w, bits, on)
    rows, F = len(w), stored.shape[1] // 16
    tiles = stored.reshape(rows, F // 64, 1024 // len(order), len(order))[..., np.argsort(order)]
    tiles = tiles.reshape(rows, F // 64, 32, 4, 2, 4)
    out = np.zeros((rows, 16, F // 64, 64), np.int64)
    for lane in range(32):
        for block in range(4):
            for half in range(2):
                for i, row in enumerate((0, 1, 8, 9)):
                    place = 2 * (lane % 4) + row, 16 * block + lane // 4 + 8 * half
                    out[:, place[0], :, place[1]] = tiles[:, :, lane, block, half, i]
    return out.reshape(rows * 16, F)


def _marlin_scales(s: np.ndarray) -> np.ndarray:
    if len(s) > 1:
        return s.reshape(len(s), -1, 8, 8).swapaxes(2, 3).reshape(s.shape)
    order = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    return s.reshape(-1, 32)[:, np.argsort(order)].reshape(s.shape)


# ---------------------------------------------------------------- other people's sums
def gptq_in_float16(args: Args) -> np.ndarray:
    """The product in float16: per word a chain of fused multiply-adds over even and one over odd input features."""
    x, scales, bits = args["x"], args["scales"], args["bits"]
    q, zero = _integers(args, bits, NONE)
    rows, M = args["g_idx"], len(q)
    offset = _half(-zero * scales.astype(np.float64))
    w = _half(q * scales.astype(np.float64)[rows] + offset[rows])
    per, total = 32 // bits, np.zeros((len(x), q.shape[1]))
    for start in range(0, M, 128):
        block = np.zeros_like(total)
        for word in range(start, min(start + 128, M), per):
            chains = []
            for first in (0, 1):
                chain = np.zeros_like(total)
                for k in range(word + first, word + per, 2):
                    chain = _half(x[:, k, None].astype(np.float64) * w[k] + chain)
                chains.append(chain)
            block = _half(block + _half(chains[0] + chains[1]))
        total = _half(total + block)
    return total.astype(np.float16)


def awq_split(args: Args) -> np.ndarray:
    """The product as eight float16 sums over every eighth 32 input features, added in float32."""
    x, w = args["x"].astype(np.float64), weight(args, False)
    blocks = np.arange(w.shape[0]) // 32
    parts = [_half(x[:, blocks % 8 == z] @ w[blocks % 8 == z]) for z in range(8)]
    return np.sum(parts, 0).astype(np.float32).astype(np.float16)


def _half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float64)
