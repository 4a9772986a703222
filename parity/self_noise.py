"""The judge of one tensor of a model: our error against the golden tensor by our own sensitivity to roundings."""

import math
from typing import Any

import ml_dtypes
import numpy as np

from jaxattn import capture
from parity import judge, metrics, tolerances

OURS, NOISE = "ours", "self-noise"


def coarser(a: Any, b: Any) -> np.dtype:
    """The dtype with fewer bits of precision, `a` for other than floating types."""
    if not (metrics.is_float(a) and metrics.is_float(b)):
        return np.dtype(a)
    return max((np.dtype(x) for x in (a, b)), key=lambda x: float(ml_dtypes.finfo(x).eps))


def perturb(x: np.ndarray, dtype: Any, rng: np.random.Generator) -> np.ndarray:
    """An array with its finite numbers, but zeros, moved by one unit of `dtype` in the last place, up or down."""
    if not metrics.is_float(x.dtype):
        return x
    info = ml_dtypes.finfo(dtype)
    wide = np.asarray(x, np.float64)
    moves = np.isfinite(wide) & (wide != 0)
    safe = np.where(moves, wide, 1)
    moved = safe + np.where(rng.integers(0, 2, x.shape) > 0, 1, -1) * metrics.ulp(safe, dtype)
    moved = np.clip(moved, float(info.min), float(info.max))
    return np.where(moves, moved, wide).astype(x.dtype)


def moved(perturbed: np.ndarray, ours: np.ndarray) -> np.ndarray:
    """Squared change of each element, float64; 0 where one of both is not finite."""
    with np.errstate(invalid="ignore", over="ignore"):
        change = np.square(perturbed.astype(np.float64) - ours.astype(np.float64))
    return np.where(np.isfinite(change), change, 0)


def full(golden: np.ndarray, ours: np.ndarray, moved: np.ndarray, terms: int) -> tuple[judge.Verdict, float | None]:
    """Judge our tensor by `tolerances.local`; the relative RMS error comes with the verdict.

    Args:
        golden: the other side's tensor.
        ours: same shape, any dtype; both are compared in the coarser one.
        moved: by how much ours changes when the inputs move by one unit in the last place, RMS of several times.
        terms: bound of the terms of any sum behind it.
    """
    if not metrics.is_float(golden.dtype):
        return _equal(golden, ours, moved)
    dtype = coarser(golden.dtype, ours.dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        truth = golden.astype(dtype).astype(np.float64)
        noise = (truth + moved).astype(dtype)
        subject = ours.astype(dtype)
    axes = {3: ("batch", "token", "dim"), 2: ("token", "dim"), 4: ("batch", "token", "head", "dim")}.get(truth.ndim)
    verdict = judge.judge(
        tolerances.local(terms, float(ml_dtypes.finfo(dtype).eps), truth.size),
        truth=truth, subject=subject, peer=noise, names=(OURS, NOISE), axes=axes, slice_rank=max(truth.ndim - 1, 0),
    )  # fmt: skip
    finite = np.isfinite(truth) & np.isfinite(subject.astype(np.float64))
    return verdict, relative(subject.astype(np.float64)[finite], truth[finite])


def relative(got: np.ndarray, expected: np.ndarray) -> float | None:
    """RMS of the difference over RMS of what was expected; None where that is zero."""
    return _rms(got - expected) / size if (size := _rms(expected)) else None


def _equal(golden: np.ndarray, ours: np.ndarray, moved: np.ndarray) -> tuple[judge.Verdict, float | None]:
    """Integers and booleans: equal, but for elements that the perturbation changes too."""
    wrong = golden.astype(ours.dtype) != ours
    free = wrong & (moved != 0)
    places = np.argwhere(wrong & ~free)
    said = f"; {int(free.sum())} more change when the inputs move by one unit" if free.any() else ""
    if not len(places):
        return judge.Verdict(status="pass", reason=f"equal{said}", headroom=0.0), 0.0
    at = tuple(places[0])
    reason = f"{len(places)} of {ours.size} elements differ, first at {tuple(map(int, at))}: ours {ours[at]}, golden "
    return judge.Verdict(status="fail", reason=f"{reason}{golden[at]}{said}"), None


def statistics(
    golden: np.ndarray, dtype: np.dtype, ours: np.ndarray, moved: np.ndarray, terms: int
) -> tuple[judge.Verdict, float | None]:
    """Judge our tensor by the golden one's statistics: NaN and infinities counted, the RMS error from projections.

    Args:
        golden: as `capture.statistics` gives them.
        dtype: of the golden tensor.
        ours: our tensor.
        moved: its self-noise.
        terms: bound of the terms of any sum behind it.
    """
    head = len(capture.STATISTICS)
    mine = capture.statistics(ours)
    for name in ("nan", "inf"):
        i = capture.STATISTICS.index(name)
        if mine[i] != golden[i]:
            reason = f"{OURS}: {int(mine[i])} elements are {name}, {int(golden[i])} of the golden tensor"
            return judge.Verdict(status="fail", reason=reason), None
    coarse = coarser(dtype, ours.dtype)
    error = _rms(mine[head:] - golden[head:])
    wide = ours.astype(np.float64)
    noise = _rms(moved)
    floor, factor = 0.0, 1.0
    if metrics.is_float(coarse):
        floor = metrics.rounding(wide, coarse, 0)["rms"]
        factor = tolerances.local(terms, float(ml_dtypes.finfo(coarse).eps), ours.size).checks[0].factor
    allowed = tolerances.PROJECTED * math.hypot(factor * noise, floor)
    share = error / allowed if allowed else math.inf if error else 0.0
    said = f"RMS error {error:.3g}, estimated from projections, allowed {allowed:.3g} ({factor:.3g} x {NOISE}'s "
    said += f"{noise:.3g} and {floor:.2g} for rounding, times {tolerances.PROJECTED:.2f} for the estimate)"
    needed = error / (tolerances.PROJECTED * noise) if noise else math.inf
    bound = {"measured": error, "allowed": allowed, "factor": factor, "needed": metrics.number(needed)}
    verdict = judge.Verdict(
        status="pass" if share <= 1 else "fail",
        reason=f"{OURS}: {said}",
        metrics={"dtype": coarse.name, "rms": error},
        allowed={f"{OURS}.rms": bound},
        headroom=share if math.isfinite(share) else None,
    )
    return verdict, error / golden[1] if golden[1] else None


def hashes(
    golden: np.ndarray, dtype: np.dtype, ours: np.ndarray, moved: np.ndarray, terms: int
) -> tuple[judge.Verdict, float | None]:
    """Equal bits or not; arguments as for `statistics`, integers are compared in the golden dtype."""
    if not metrics.is_float(dtype):
        ours = ours.astype(dtype)
    if ours.dtype == dtype and (capture.digest(ours) == golden).all():
        return judge.Verdict(status="pass", reason="equal to the bit", headroom=0.0, metrics={"dtype": dtype.name}), 0.0
    why = "the hashes differ" if ours.dtype == dtype else f"ours is {ours.dtype}, the golden tensor {dtype}"
    return judge.Verdict(status="fail", reason=f"{why}: not equal to the bit", metrics={"dtype": dtype.name}), None


def _rms(x: np.ndarray) -> float:
    return math.sqrt(float(np.square(x).mean())) if x.size else 0.0
