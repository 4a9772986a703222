"""The judge: two arrays, the float64 truth and a rule give a verdict: where, by how much, and what would pass."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from parity import metrics, tolerances
from parity.tolerances import Check, Rule


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the judge found; every field but `status` and `reason` is ready for JSON."""

    status: str
    """`pass` or `fail`."""
    reason: str
    metrics: dict[str, Any] = field(default_factory=dict)
    allowed: dict[str, dict[str, Any]] = field(default_factory=dict)
    """`side.statistic` -> {measured, allowed, factor, needed}; needed = the factor that would pass."""
    headroom: float | None = None
    worst: list[dict[str, Any]] = field(default_factory=list)
    slices: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """True if the status is `pass`."""
        return self.status == "pass"


@dataclass(frozen=True)
class Yardstick:
    """What a peer's error is held against by two-sided rules: an array and its own float64 truth."""

    name: str
    x: np.ndarray
    truth: np.ndarray


@dataclass(frozen=True)
class _Bound:
    """One inequality, measured <= allowed."""

    side: str
    against: str
    check: Check
    measured: float
    allowed: float
    baseline: float
    floor: float

    @property
    def name(self) -> str:
        return f"{self.side}.{self.check.statistic}"

    @property
    def ratio(self) -> float:
        if self.measured == 0:
            return 0.0
        return self.measured / self.allowed if self.allowed else math.inf

    @property
    def needed(self) -> float:
        """The factor at which this check would pass."""
        if self.check.join == "sum":
            rest = self.measured - self.floor
        else:
            rest = math.sqrt(max(0.0, self.measured**2 - self.floor**2))
        if rest <= 0:
            return 0.0
        return rest / self.baseline if self.baseline else math.inf

    def to_json(self) -> dict[str, Any]:
        return {
            "measured": metrics.number(self.measured),
            "allowed": metrics.number(self.allowed),
            "factor": self.check.factor,
            "needed": metrics.number(self.needed),
        }


def judge(
    rule: Rule,
    *,
    truth: np.ndarray,
    subject: np.ndarray,
    peer: np.ndarray,
    names: tuple[str, str] = ("subject", "peer"),
    yardstick: Yardstick | None = None,
    axes: Sequence[str] | None = None,
    slice_rank: int = 0,
    details: bool = True,
) -> Verdict:
    """Judge `subject` against `peer` through the truth.

    Args:
        rule: which checks; `rule.bitwise` compares subject and peer directly (with `rule.near` some codes may be
            neighbours), `rule.codes` asks what explains their codes, `rule.two_sided` also holds the peer's error
            against that of the yardstick.
        truth: float64 [...].
        subject: what is judged, any dtype.
        peer: what it is compared with, the subject's shape and dtype.
        names: of subject and peer, for the sentence.
        yardstick: for two-sided rules, what the peer's error is held against; None = the subject.
        axes: name of each axis.
        slice_rank: the first so many axes index the slices that are judged one by one.
        details: also fill in the fields that a report shows; status, reason, allowed and headroom are there anyway.
    """
    if problem := _unlike(truth, subject, peer, names):
        return Verdict(status="fail", reason=problem)
    axes = tuple(axes or (f"axis{i}" for i in range(truth.ndim)))
    truth = np.asarray(truth, np.float64)
    relative = any(c.statistic == "slice" for c in rule.checks)
    found: dict[str, Any] = {"metrics": {}}
    if details:
        found = {
            "metrics": metrics.difference(subject, peer),
            "worst": metrics.worst(subject, peer, truth),
            "slices": metrics.slice_table(subject, peer, truth, axes, slice_rank, relative),
        }
    if rule.bitwise:
        return _bitwise(rule, subject, peer, names, axes, found)
    sides = {names[0]: subject, names[1]: peer}
    if rule.codes:
        errors = {name: metrics.code_error(x, truth) for name, x in sides.items()}
    else:
        errors = {name: metrics.error(x, truth, axes, slice_rank) for name, x in sides.items()}
    found["metrics"]["error"] = {name: e.to_json() for name, e in errors.items()}
    rms = errors[names[1]].rms
    found["metrics"]["rms_ratio"] = errors[names[0]].rms / rms if rms else None
    checked = names if rule.two_sided else names[:1]
    for name in checked:
        problem = _wrong_places(name, sides[name], truth, axes, slice_rank)
        if problem := problem or (_wrong_sign(name, sides[name], truth, axes) if rule.codes else None):
            return Verdict(status="fail", reason=problem, **found)
    chain = {("chain", statistic): tolerances.CHAIN for statistic in ("max", "mean")}
    floor = chain if rule.codes else floors(truth, subject.dtype, slice_rank)
    bounds = _bounds(rule, names[0], names[1], errors[names[0]], errors[names[1]], floor)
    if rule.two_sided:
        against, base = names[0], errors[names[0]]
        if yardstick is not None:
            against, base = yardstick.name, metrics.error(yardstick.x, yardstick.truth, axes, slice_rank)
        bounds += _bounds(rule, names[1], against, errors[names[1]], base, floor)
    tightest = max(bounds, key=lambda b: b.ratio)
    found["allowed"] = {b.name: b.to_json() for b in bounds}
    found["headroom"] = tightest.ratio if math.isfinite(tightest.ratio) else None
    if tightest.ratio > 1:
        return Verdict(status="fail", reason=_explain(tightest, errors, sides, truth, axes, rule.codes), **found)
    return Verdict(
        status="pass",
        reason=f"within rule '{rule.name}': tightest is {tightest.name}, {tightest.measured:.3g} of "
        f"{tightest.allowed:.3g} allowed (headroom {tightest.ratio:.2f})",
        **found,
    )


def floors(truth: np.ndarray, dtype: Any, slice_rank: int) -> dict[tuple[str, str], float]:
    """(floor, statistic) -> the part of an allowance that does not depend on the other side; see `tolerances`."""
    finite = np.abs(truth[np.isfinite(truth)])
    largest = float(finite.max(initial=0))
    out = {("rounding", s): v for s, v in metrics.rounding(truth, dtype, slice_rank).items()}
    out |= {("peak", s): float(ml_dtypes.finfo(dtype).eps) * largest for s in ("rms", "max")}
    unit = float(metrics.ulp(np.asarray(largest), np.float32))
    logarithm = 1.5 * unit + 2 * tolerances.SPECIAL
    for floor, most in (("logarithm", logarithm), ("products", logarithm + tolerances.LATENT_STEPS / 3 * unit)):
        out |= {(floor, "max"): most, (floor, "rms"): most / 2}
    return out


def _bounds(rule: Rule, side: str, against: str, error, base, floor) -> list[_Bound]:
    bounds = []
    for check in rule.checks:
        measured, baseline = getattr(error, check.statistic), getattr(base, check.statistic)
        added = check.floor_factor * floor[check.floor, check.statistic]
        scaled = check.factor * baseline
        allowed = scaled + added if check.join == "sum" else math.hypot(scaled, added)
        bounds.append(_Bound(side, against, check, measured, allowed, baseline, added))
    return bounds


def _unlike(truth, subject, peer, names) -> str | None:
    for name, x in zip(names, (subject, peer), strict=True):
        if x.shape != truth.shape:
            return f"{name} has shape {x.shape}, the truth {truth.shape}"
    if subject.dtype != peer.dtype:
        return f"{names[0]} has dtype {subject.dtype}, {names[1]} {peer.dtype}"
    if not truth.size:
        return "nothing to compare: the output has no elements"
    return None


def _bitwise(rule: Rule, subject, peer, names, axes, found) -> Verdict:
    raw = [np.ascontiguousarray(x).view(f"V{x.dtype.itemsize}").reshape(x.shape) for x in (subject, peer)]
    differ = np.argwhere(raw[0] != raw[1])
    if not len(differ):
        return Verdict(status="pass", reason="equal to the bit", headroom=0.0, **found)
    at, more = tuple(differ[0]), ""
    if rule.near:
        which = tuple(differ.T)
        far = differ[~metrics.next_to(subject[which], peer[which], rule.within)]
        allowed = tolerances.most(subject.size * rule.near)
        if not len(far) and len(differ) <= allowed:
            reason = f"within rule '{rule.name}': {len(differ)} of {subject.size} codes are next to {names[1]}'s"
            headroom = len(differ) / allowed
            return Verdict(status="pass", reason=f"{reason}, {allowed} allowed", headroom=headroom, **found)
        at = tuple(far[0]) if len(far) else at
        more = f", {len(far)} by more than a step" if len(far) else f", {allowed} may differ by a step"
    return Verdict(
        status="fail",
        reason=f"{len(differ)} of {subject.size} elements differ in their bits{more}, first at {place(axes, at)}: "
        f"{names[0]} {metrics.number(subject[at])}, {names[1]} {metrics.number(peer[at])}",
        **found,
    )


def _wrong_places(name: str, x: np.ndarray, truth: np.ndarray, axes, slice_rank: int) -> str | None:
    """NaN and infinities must be where the truth has them, and a slice of zeros must be zeros."""
    for kind, places in metrics.masks(x, truth).items():
        if places:
            at = places[0]
            return (
                f"{name}: {kind} disagrees with the truth in {len(places)} elements, first at {place(axes, at)}: "
                f"got {metrics.number(x[at])}, truth {metrics.number(truth[at])}"
            )
    if slice_rank and (bad := metrics.zero_slices(x, truth, slice_rank)):
        return f"{name}: the truth is zero throughout {place(axes, bad[0])}, the output is not ({len(bad)} such slices)"
    return None


def _wrong_sign(name: str, x: np.ndarray, truth: np.ndarray, axes) -> str | None:
    """A float code of zero must have the sign of the truth."""
    if not metrics.is_float(x.dtype):
        return None
    wide = np.asarray(x, np.float64)
    bad = np.argwhere((wide == 0) & (np.signbit(wide) != np.signbit(truth)))
    if not len(bad):
        return None
    at = tuple(bad[0])
    return (
        f"{name}: zero has the wrong sign in {len(bad)} elements, first at {place(axes, at)}: got {wide[at]}, truth "
        f"{truth[at]:.6g}"
    )


def place(axes: Sequence[str], index: Sequence[int]) -> str:
    """`(token 3, head 1, dim 17)`."""
    return "(" + ", ".join(f"{a} {int(i)}" for a, i in zip(axes, index, strict=False)) + ")"


def _explain(bound: _Bound, errors, sides, truth, axes, codes: bool = False) -> str:
    error = errors[bound.side]
    what = {"rms": "RMS error", "max": "largest error", "mean": "mean error", "p99": "99th percentile of the error"}
    named = what.get(bound.check.statistic) or "relative RMS error of the worst slice"
    named += " that explains a code" if codes else ""
    at = error.at
    where = f"largest at {place(axes, at)}: got {metrics.number(sides[bound.side][at])}, truth {truth[at]:.6g}"
    if error.worst_slice is not None:
        where = f"worst slice ({error.worst_slice}), {where}"
    factor = f"{bound.needed:.3g}" if math.isfinite(bound.needed) else "no factor, the other side is exact"
    parts = f"{bound.check.factor:g} x {bound.against}'s {bound.baseline:.3g} and {bound.floor:.2g} for rounding"
    measured = f"{bound.measured:.3g} against the truth, allowed {bound.allowed:.3g} ({parts})"
    return f"{bound.side}: {named} {measured}; {where}; would pass at factor {factor}"
