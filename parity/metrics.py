"""Numbers that describe how two arrays differ; pure numpy, every result fit for JSON (no NaN, no infinity)."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

PERCENTILES = (50, 90, 99, 99.9)
ULP_BINS = ("0", "1", "2", "<=4", "<=16", "more")
MAX_CELLS = 64
"""Largest side of a heat map; more rows are pooled to their worst."""

type Floats = np.ndarray


def number(x: Any) -> float | str | int | bool:
    """A JSON number; NaN and infinities as "nan", "inf", "-inf"."""
    if isinstance(x, bool | np.bool_):
        return bool(x)
    if isinstance(x, int | np.integer):
        return int(x)
    value = float(x)
    return value if math.isfinite(value) else "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def is_float(dtype: Any) -> bool:
    """True for numpy's and ml_dtypes' floating types."""
    dtype = np.dtype(dtype)
    return dtype.kind == "f" or dtype.name in ("bfloat16", *(n for n in dir(ml_dtypes) if n.startswith("float")))


def ulp(x: Floats, dtype: Any) -> Floats:
    """Distance of neighbouring numbers of `dtype` around each |x|, in float64; finite x."""
    info = ml_dtypes.finfo(dtype)
    smallest = float(info.smallest_normal)
    magnitude = np.clip(np.abs(np.asarray(x, np.float64)), smallest, float(info.max))
    return np.ldexp(float(info.eps), np.frexp(magnitude)[1] - 1)


def ulp_distance(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Number of representable steps between two arrays of one floating dtype; +0 and -0 are the same number."""
    return np.abs(_ordinal(got) - _ordinal(expected))


def _ordinal(x: np.ndarray) -> np.ndarray:
    bits = x.view(f"u{x.dtype.itemsize}").astype(np.int64) if x.dtype.itemsize < 8 else x.view(np.int64)
    top = 1 << (8 * x.dtype.itemsize - 1)
    if x.dtype.itemsize == 8:
        return np.where(bits < 0, -(bits & (2**63 - 1)), bits)
    return np.where(bits >= top, -(bits - top), bits)


@dataclass(frozen=True)
class Slice:
    """The worst group of one way to group the slice axes."""

    axes: tuple[str, ...]
    index: tuple[int, ...]
    value: float

    def __str__(self):
        return ", ".join(f"{a} {i}" for a, i in zip(self.axes, self.index, strict=True))


@dataclass(frozen=True)
class Error:
    """Statistics of |x - truth| over the finite elements."""

    max: float
    mean: float
    rms: float
    p99: float
    slice: float
    """Worst relative RMS over all groups of slices whose truth is not zero throughout."""
    at: tuple[int, ...]
    """Where the maximum is."""
    worst_slice: Slice | None

    def to_json(self) -> dict[str, Any]:
        """Statistics by name, with the place of the worst slice."""
        where = self.worst_slice and {"axes": list(self.worst_slice.axes), "index": list(self.worst_slice.index)}
        values = {name: number(getattr(self, name)) for name in ("max", "mean", "rms", "p99", "slice")}
        return {**values, "at": list(self.at), "worst_slice": where}


def error(x: np.ndarray, truth: Floats, axes: Sequence[str], slice_rank: int) -> Error:
    """Error statistics of an array against the float64 truth; elements that are not finite on both sides are left out.

    Args:
        x: any dtype, shape of `truth`.
        truth: float64.
        axes: name of each axis.
        slice_rank: the first so many axes index slices.
    """
    return _statistics(_distance(x, truth), truth, axes, slice_rank)


def code_error(x: np.ndarray, truth: Floats) -> Error:
    """Statistics of the errors that explain codes: the least |d| / |truth| for which `truth + d` rounds to the code.

    It is 1 where the truth is zero and the code is not.

    Args:
        x: float8 or int8 codes, rounded to nearest and saturated.
        truth: float64, what they were rounded from; NaN is left out.
    """
    values = _values(x.dtype)
    between = np.concatenate([[-np.inf], (values[1:] + values[:-1]) / 2, [np.inf]])
    wide = np.asarray(x, np.float64)
    known = np.isfinite(wide) & ~np.isnan(truth)
    at = np.searchsorted(values, np.where(known, wide, 0))
    t = np.where(known, truth, 0)
    outside = np.maximum(0, np.maximum(between[at] - t, t - between[at + 1]))
    size = np.divide(outside, np.abs(t), out=np.where(outside > 0, 1.0, 0.0), where=t != 0)
    return _statistics(size, truth, (), 0)


def next_to(x: np.ndarray, y: np.ndarray, within: float = 0.0) -> np.ndarray:
    """Where the code of x is one step from that of y, or no farther away than `within`; NaN is next to nothing.

    Args:
        x: float8 codes, or uint8 of a packed format: then its upper or lower half, if it holds two codes.
        y: likewise.
        within: difference of float8 numbers.
    """
    a, b = (np.ascontiguousarray(v).view(np.uint8).reshape(v.shape) for v in (x, y))
    distance = np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64))
    if x.dtype == np.uint8:
        return np.isin(a - b, (1, 255, 16, 240))
    return (np.isin(a - b, (1, 255)) | (distance <= within)) & ~np.isnan(distance)


def _values(dtype: Any) -> Floats:
    """All finite numbers of an 8-bit type in order, one zero."""
    codes = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    return np.unique(codes[np.isfinite(codes)] + 0.0)


def rounding(truth: Floats, dtype: Any, slice_rank: int) -> dict[str, float]:
    """The same statistics for one rounding to `dtype` whose error is uniform in half a unit in the last place."""
    finite = np.where(np.isfinite(truth), truth, 0)
    unit = np.where(np.isfinite(truth), ulp(finite, dtype), 0)
    groups = _groups(unit / math.sqrt(12), truth, slice_rank)
    return {
        "max": float(unit.max(initial=0)) / 2,
        "mean": float(unit.mean()) / 4 if unit.size else 0.0,
        "rms": _rms(unit) / math.sqrt(12),
        "p99": float(np.percentile(unit, 99)) / 2 if unit.size else 0.0,
        "slice": max((float(v.max(initial=0)) for _, v in groups), default=0.0),
    }


def _statistics(distance: Floats, truth: Floats, axes: Sequence[str], slice_rank: int) -> Error:
    if not distance.size:
        return Error(0.0, 0.0, 0.0, 0.0, 0.0, (), None)
    worst = None
    for subset, values in _groups(distance, truth, slice_rank):
        at = np.unravel_index(int(values.argmax()), values.shape) if values.size else None
        if at is not None and (worst is None or values[at] > worst.value):
            worst = Slice(tuple(axes[a] for a in subset), tuple(map(int, at)), float(values[at]))
    return Error(
        max=float(distance.max()),
        mean=float(distance.mean()),
        rms=_rms(distance),
        p99=float(np.percentile(distance, 99)),
        slice=worst.value if worst else 0.0,
        at=tuple(map(int, np.unravel_index(int(distance.argmax()), distance.shape))),
        worst_slice=worst,
    )


def _distance(x: np.ndarray, truth: Floats) -> Floats:
    wide = np.asarray(x, np.float64)
    both = np.isfinite(wide) & np.isfinite(truth)
    return np.abs(np.where(both, wide, 0) - np.where(both, truth, 0))


def _groups(distance: Floats, truth: Floats, slice_rank: int) -> list[tuple[tuple[int, ...], Floats]]:
    """Relative RMS of each group, for each non-empty set of slice axes; 0 where the truth is zero throughout."""
    finite = np.where(np.isfinite(truth), truth, 0)
    out = []
    for size in range(1, slice_rank + 1):
        for subset in itertools.combinations(range(slice_rank), size):
            rest = tuple(a for a in range(truth.ndim) if a not in subset)
            power, noise = (np.square(x).sum(rest) for x in (finite, distance))
            out.append((subset, np.sqrt(np.divide(noise, power, out=np.zeros_like(noise), where=power > 0))))
    return out


def zero_slices(x: np.ndarray, truth: Floats, slice_rank: int) -> list[tuple[int, ...]]:
    """Slices whose truth is zero throughout but whose x is not."""
    rest = tuple(range(slice_rank, truth.ndim))
    bad = (truth == 0).all(rest) & (np.asarray(x, np.float64) != 0).any(rest)
    return [tuple(map(int, i)) for i in np.argwhere(bad)]


def masks(got: np.ndarray, expected: np.ndarray) -> dict[str, list[tuple[int, ...]]]:
    """Places at which exactly one of both is NaN, +inf, -inf (the first thousand each)."""
    tests = {"nan": np.isnan, "inf": np.isposinf, "-inf": np.isneginf}
    wide = [np.asarray(x, np.float64) for x in (got, expected)]
    out = {}
    for name, test in tests.items():
        differ = np.argwhere(test(wide[0]) != test(wide[1]))
        out[name] = [tuple(map(int, i)) for i in differ[:1000]]
    return out


def difference(got: np.ndarray, expected: np.ndarray) -> dict[str, Any]:
    """Everything worth knowing about `got - expected`, two arrays of one shape and dtype.

    Returns:
        dtype; elements; max/mean/p.. of the absolute (`abs`) and relative (`rel`) difference, the latter against
        max(|expected|, `rel_floor`) with rel_floor = rms(expected) / 64; rms, rel_rms; cosine and similarity distance;
        sqnr_db (None where nothing differs); ulp histogram in the arrays' dtype; bias {mean, fraction_below};
        mismatches (elements that are not equal; NaN equals NaN); masks {nan, inf, -inf: places that differ}.
    """
    a, b = (np.asarray(x, np.float64) for x in (got, expected))
    finite = np.isfinite(a) & np.isfinite(b)
    x, y = a[finite], b[finite]
    d = x - y
    size = np.abs(d)
    floor = _rms(y) / 64
    rel = size / np.maximum(np.abs(y), floor) if floor else np.where(size == 0, 0.0, np.inf)
    xx, yy, xy = float(x @ x), float(y @ y), float(x @ y)
    differing = d[d != 0]
    return {
        "dtype": np.dtype(got.dtype).name,
        "elements": int(a.size),
        "finite": int(finite.sum()),
        "abs": _distribution(size),
        "rel": _distribution(rel),
        "rel_floor": floor,
        "rms": _rms(d),
        "rel_rms": number(_rms(d) / _rms(y)) if _rms(y) else None,
        "cosine_distance": _from_one(xy, math.sqrt(xx) * math.sqrt(yy)),
        "similarity_distance": _from_one(2 * xy, xx + yy),
        "sqnr_db": 20 * math.log10(_rms(y) / _rms(d)) if _rms(d) and _rms(y) else None,
        "ulp": ulp_histogram(got[finite], expected[finite]) if is_float(got.dtype) else {},
        "bias": {
            "mean": float(d.mean()) if d.size else 0.0,
            "fraction_below": float((differing < 0).mean()) if differing.size else None,
        },
        "mismatches": int(((a != b) & ~(np.isnan(a) & np.isnan(b))).sum()),
        "masks": {name: len(places) for name, places in masks(got, expected).items()},
    }


def _from_one(product: float, norm: float) -> float | None:
    return 1 - product / norm if norm else None


def _distribution(x: Floats) -> dict[str, float | str]:
    if not x.size:
        return dict.fromkeys(("max", "mean", *(f"p{p:g}" for p in PERCENTILES)), 0.0)
    values = {"max": x.max(), "mean": x.mean()} | {f"p{p:g}": np.percentile(x, p) for p in PERCENTILES}
    return {name: number(v) for name, v in values.items()}


def ulp_histogram(got: np.ndarray, expected: np.ndarray) -> dict[str, int]:
    """How many elements lie 0, 1, 2, at most 4, at most 16, or more units in the last place apart."""
    steps = ulp_distance(np.ascontiguousarray(got), np.ascontiguousarray(expected))
    counts = np.bincount(np.searchsorted([0, 1, 2, 4, 16], steps.ravel()), minlength=len(ULP_BINS))
    return dict(zip(ULP_BINS, map(int, counts), strict=True))


def worst(got: np.ndarray, expected: np.ndarray, truth: Floats, count: int = 10) -> list[dict[str, Any]]:
    """The elements that differ most, those that are finite on one side only first: {index, got, expected, truth}."""
    a, b = (np.asarray(x, np.float64) for x in (got, expected))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        size = np.abs(a - b)
    size = np.where(same, 0, np.where(np.isfinite(size), size, np.inf)).ravel()
    count = min(count, size.size)
    top = np.argpartition(-size, count - 1)[:count] if count else np.empty(0, np.int64)
    out = []
    for i in sorted(top.tolist(), key=lambda i: (-size[i], i)):
        if size[i] == 0:
            break
        at = np.unravel_index(i, a.shape)
        values = {"got": a[at], "expected": b[at], "truth": np.asarray(truth)[at]}
        out.append({"index": [int(k) for k in at], **{name: number(v) for name, v in values.items()}})
    return out


def slice_table(
    subject: np.ndarray, peer: np.ndarray, truth: Floats, axes: Sequence[str], slice_rank: int, relative: bool
) -> dict[str, Any]:
    """RMS error of every slice on both sides, for heat maps; large tables are pooled to the worst of each block.

    Returns:
        axes, shape (before pooling), block (slices per cell along each axis), unit; `subject`, `peer`: nested lists.
    """
    rest = tuple(range(slice_rank, truth.ndim))
    finite = np.where(np.isfinite(truth), truth, 0)
    count = math.prod(truth.shape[slice_rank:])
    norm = np.sqrt(np.square(finite).sum(rest)) if relative else np.full(truth.shape[:slice_rank], math.sqrt(count))
    table: dict[str, Any] = {
        "axes": list(axes[:slice_rank]),
        "shape": list(truth.shape[:slice_rank]),
        "unit": "rms error / rms truth" if relative else "rms error",
    }
    for name, x in (("subject", subject), ("peer", peer)):
        noise = np.sqrt(np.square(_distance(x, truth)).sum(rest))
        values, block = _pool(np.divide(noise, norm, out=np.zeros_like(noise), where=norm > 0))
        table["block"] = block
        table[name] = np.round(values, 9).tolist() if not relative else values.astype(np.float32).tolist()
    return table


def _pool(x: Floats) -> tuple[Floats, list[int]]:
    block = [max(1, -(-n // MAX_CELLS)) for n in x.shape]
    for axis, b in enumerate(block):
        if b > 1:
            starts = np.arange(0, x.shape[axis], b)
            x = np.maximum.reduceat(x, starts, axis=axis)
    return x, block


def _rms(x: Floats) -> float:
    return math.sqrt(float(np.square(x).mean())) if x.size else 0.0
