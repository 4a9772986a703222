"""The one table of tolerances: every rule with its derivation, date and margin. No other file holds a tolerance.

A rule bounds the error of one side (*subject*) against the float64 truth by the error of the other side (*peer*)
against the same truth, so that it scales with data, shape and dtype and names no absolute number. What must be added
is one rounding of the output type, because a peer may be exact by luck where an honest port rounds once.
"""

from dataclasses import dataclass
from typing import Literal

type Statistic = Literal["max", "mean", "rms", "p99", "slice"]
type Floor = Literal["rounding", "peak", "logarithm"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """`error(subject) <= factor * error(peer) (+) floor_factor * floor`, for one statistic of the error."""

    statistic: Statistic
    """`slice`: the worst relative RMS over every group of the slice axes (each row, each head, each row and head)."""
    factor: float
    floor: Floor = "rounding"
    """`rounding`: the same statistic of one uniformly distributed rounding of the truth; `peak`: eps * max|truth|;
    `logarithm`: one logarithm on the hardware's special function unit, see `judge.floors`."""
    floor_factor: float = 1.0
    join: Literal["sum", "quadrature"] = "sum"
    """`quadrature` for means over many independent errors, `sum` for extremes."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How an output is judged, and why so."""

    name: str
    checks: tuple[Check, ...]
    derivation: str
    date: str
    margin: str
    """How far correct implementations stay below, and wrong ones above."""
    bitwise: bool = False
    two_sided: bool = False
    """The peer's error is bounded in turn, by that of a yardstick: our reference, or a numpy form with the peer's known
    roundings. A foreign output that contradicts our mathematics fails instead of widening the allowance."""


DEFAULT = Rule(
    name="default",
    two_sided=True,
    checks=(
        Check(statistic="rms", factor=2, join="quadrature"),
        Check(statistic="mean", factor=2, join="quadrature"),
        Check(statistic="p99", factor=2),
        Check(statistic="max", factor=2),
        Check(statistic="slice", factor=2, join="quadrature"),
    ),
    derivation="""
Both sides compute the same formula from the same inputs with the same roundings (inputs, P, output) in another order.
Their errors e are then draws from one distribution, e^2 = r^2 + f^2 with r the inner roundings and f the final one.
The factor 2 is FlashAttention's criterion; it covers another order of summation and another running maximum, which
moves the rounding of P (one coherent rounding of P is at most 2.3 f in a row that a single key dominates).
The floor f must not come from the peer, which may round luckily (one visible key: o = v, no error at all), nor from
the rounding of this very truth, which may be lucky too: it is the error of a rounding that is uniform in half a unit
in the last place, element by element: RMS ulp/sqrt(12), mean ulp/4, extremes ulp/2.
RMS, mean and slices: errors of independent sources add in quadrature, so the allowance is sqrt((2 e)^2 + f^2), about
2.4 f for a peer at 1.1 f. Added linearly it would be 3.2 f, and a softmax scale that is 1 % off (about 6 f in bfloat16)
would hide in slices of 64 values. Maxima and percentiles are single elements, in which roundings can align: sum.
Slices: RMS of the error over RMS of the truth within each row, each head and each (row, head); the worst slice of one
side against the worst slice of the other, because which slice is worst is chance.
""",
    date="2026-11",
    margin="correct ports use half of it; a 1 % wrong softmax scale needs factor 3 to 6 in bfloat16",
)

EXACT = Rule(
    name="exact",
    bitwise=True,
    checks=(),
    derivation="""
Codes, scales, packed bytes, routing ids under a stated tie rule, permutations and copies have one right answer, and
the float64 truth rounds to it; any differing bit is a difference in meaning.
""",
    date="2026-11",
    margin="none",
)

LSE = Rule(
    name="lse",
    two_sided=True,
    checks=(
        Check(statistic="rms", factor=2, floor="logarithm", join="quadrature"),
        Check(statistic="max", factor=2, floor="logarithm"),
    ),
    derivation="""
A log-sum-exp is a float32 number m + log(l) whatever the type of the inputs; its absolute error is what matters,
because exp(lse) weighs partial results when they are merged: an error d changes weights by the factor 1 + d.
It inherits the rounding of the largest logit. A kernel works in base 2: scaling, the product with log2(e), and the
product with ln(2) round once each (3 x 2^-24 relative), and the special function unit's ex2 and lg2 are good to
2^-22.5 each, an absolute error in the logarithm. The floor is the sum, 3/2 ulp(max|lse|) + 2 x 2^-22.5, for a maximum
and half of it for an RMS. The factor 2 covers the accumulation of q.k, which both sides share.
""",
    date="2026-11",
    margin="FA3 and FlashMLA stay within 1e-6 absolute; log base 2 is off by 0.44 |lse|, a folded sink by about 1e-2",
)

CONTRACT = Rule(
    name="contract",
    checks=(
        Check(statistic="rms", factor=1.5, floor="peak", floor_factor=1 / 100),
        Check(statistic="max", factor=2, floor="peak"),
        Check(statistic="slice", factor=2, join="quadrature"),
    ),
    derivation="""
A kernel against the reference in the op's own dtype, both through the float64 truth: rms <= 1.5 rms(same) + ulp/100,
max <= 2 max|same| + ulp, ulp = eps * max|truth|. Correct kernels sit at an RMS ratio of 0.5 to 0.8 (they keep sums in
float32 and round less often than the reference), so 1.5 leaves a factor 2; the RMS averages over thousands of elements
and has almost no scatter, which is why it may be tight while the maximum, an extreme of few, gets 2 and a whole ulp.
The slice check finds a single wrong row that neither notices in a large output; it is that of the default rule.
""",
    date="2026-11",
    margin="1 % wrong scale: RMS ratio 2.3 to 5.5 in bfloat16, 10^4 in float32 (every kernel has float32 cases)",
)

CONTRACT_LSE = Rule(
    name="contract_lse",
    checks=LSE.checks,
    derivation="As `lse`, one-sided: the reference's logarithm is exact to a rounding, the kernel's runs in base 2.",
    date=LSE.date,
    margin=LSE.margin,
)

RULES = {rule.name: rule for rule in (DEFAULT, EXACT, LSE, CONTRACT, CONTRACT_LSE)}

FLOAT64 = 16 * 2.0**-52
"""Relative difference of two float64 computations of one number in another order: sixteen roundings, for tests of the
metrics themselves."""

SHARED_ERROR = 0.5
"""Two outputs share one deviation from the truth if they lie closer to each other than half the smaller of their own
errors; independent errors of equal size would put them sqrt(2) errors apart. Diagnosis only: no verdict uses it."""


def find(name: str) -> Rule:
    """The rule of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in RULES:
        raise ValueError(f"unknown tolerance rule {name!r}; known: {', '.join(RULES)}")
    return RULES[name]
