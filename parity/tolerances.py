"""The one table of tolerances: every rule with its derivation, date and margin. No other file holds a tolerance.

A rule bounds the error of one side (*subject*) against the float64 truth by the error of the other side (*peer*)
against the same truth, so that it scales with data, shape and dtype and names no absolute number. What must be added
is one rounding of the output type, because a peer may be exact by luck where an honest port rounds once.
"""

import math
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal

type Statistic = Literal["max", "mean", "rms", "p99", "slice"]
type Floor = Literal["rounding", "peak", "logarithm", "products", "chain"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """`error(subject) <= factor * error(peer) (+) floor_factor * floor`, for one statistic of the error."""

    statistic: Statistic
    """`slice`: the worst relative RMS over every group of the slice axes (each row, each head, each row and head)."""
    factor: float
    floor: Floor = "rounding"
    """`rounding`: the same statistic of one uniformly distributed rounding of the truth; `peak`: eps * max|truth|;
    `logarithm`: one logarithm on the hardware's special function unit, `products`: the same behind `LATENT_STEPS` of a
    tensor core, see `judge.floors`; `chain`: `CHAIN`."""
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
    codes: bool = False
    """Errors are those that explain a code of a small format, see `metrics.code_error`."""
    near: float = 0.0
    """With `bitwise`: the share of codes, at most, that may be next to the peer's, see `metrics.next_to` and `most`."""
    within: float = 0.0
    """A distance that counts as next: steps of small numbers are smaller than errors that do not shrink with them."""
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

OWN_TRUTH = replace(
    DEFAULT,
    name="own_truth",
    two_sided=False,
    derivation="""
As `default`, where the truth is the peer's own code run in float64, as of transformers' models: what the peer is off is
its rounding and nothing else, so no mathematics of ours can be contradicted by it and its error needs no bound.
""",
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

SPECIAL = 2.0**-22.5
"""Largest relative error of the special function unit's ex2 and lg2; absolute where lg2 is between -1 and 1."""

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

CONTRACT_LSE = replace(
    LSE,
    name="contract_lse",
    two_sided=False,
    derivation="As `lse`, one-sided: the reference's logarithm is exact to a rounding, the kernel's runs in base 2.",
)

CONTRACT_WEIGHTS = Rule(
    name="contract_weights",
    checks=(
        Check(statistic="rms", factor=1.5, floor="peak", floor_factor=2**0.5 * 2 / 3**0.5),
        Check(statistic="max", factor=2, floor="peak", floor_factor=2 * 2**0.5),
        Check(statistic="slice", factor=8, join="quadrature"),
    ),
    derivation="""
float32 weights of a router, w = s / sum(s), against a reference that is rounded about once. The factor 1.5 of
`contract` takes for granted that the peer's roundings are as many as the kernel's; here the score s comes from the
special function unit, whose ex2 is good to 2^-22.5 = sqrt(2) eps of s. Both s and the sum carry it: 2 sqrt(2) eps of w
at most, and, spread evenly over either sign, 1 / sqrt(3) of that as an RMS. Half a unit each for two divisions is less
and in the factor. A slice is one token's few weights: the RMS of six numbers scatters by a third, and 2 sqrt(2) eps is
eight of the peer's 0.35 eps (half a unit / sqrt(3), a unit being 1/2 to 1 eps).
""",
    date="2026-11",
    margin="a kernel is off by 2.8e-8 of 1.3e-7 on an H200; a bias or a group that is forgotten moves weights by 1e-3",
)

LATENT_STEPS = 576 // 16
"""Partial sums of a score over 512 + 64 columns: a tensor core adds 16 products at a time."""

CONTRACT_LSE_LATENT = Rule(
    name="contract_lse_latent",
    checks=(
        Check(statistic="rms", factor=2, floor="products", join="quadrature"),
        Check(statistic="max", factor=2, floor="products"),
    ),
    derivation="""
As `contract_lse`, whose factor 2 takes for granted that both sides accumulate q.k alike. With 576 columns they do not:
the reference rounds float32 sums of mixed sign to nearest, and its errors, half a unit each, cancel. A tensor core cuts
the sum off to float32 after every 16 products (https://arxiv.org/abs/2403.00232), always towards zero: up to one unit
in the last place of the sum so far, half a unit on average, and the errors add up. The score that decides lse is the
row's largest, at most |lse| but for the logarithm of the number of keys. On its way up it spends half of the n steps in
its own binade, a quarter in the one below with units half as large, and so on: n/2 (1 + 1/4 + 1/16 + ...) = 2n/3 units
of |lse| if every step lost a whole one, n/3 = 12 ulp(max|lse|) on average. One of them is certain to be near, as the
spread of a sum of n cuts is sqrt(n/12), less than 2 units. The floor is that of `lse` and n/3 units for a maximum, half
of it for an RMS, as scores lie anywhere within their binade.
""",
    date="2026-11",
    margin="sums as the hardware makes them are off by 3.3e-6 of 8e-6 at lse = 7; a scale off by 1e-5 is found",
)

CONTRACT_FP8_SUMS = Rule(
    name="contract_fp8_sums",
    checks=(
        Check(statistic="rms", factor=1.5, floor="peak", floor_factor=2**11),
        Check(statistic="max", factor=2, floor="peak", floor_factor=2**13),
    ),
    derivation="""
A float32 number that adds up scores of FP8 tensor cores, against a reference whose sums are float32. An instruction
aligns 32 products and the sum so far to the largest of these 33 and drops what lies more than 13 bits below it: errors
are uniform in 2^-13 of the largest, of either sign as the addends are, 2^-13 / sqrt(3) each. 128 products take four
instructions, so 132 errors: sqrt(132 / 3) 2^-13 = 2^-10.3 of the largest addend. That is a product or a partial sum
and smaller than the largest score; and weighted sums over 16 heads or more average the errors, which differ from head
to head, by 4: 2^-12 of the largest number, 2^11 units of float32. The largest of a few thousand is four times that.
""",
    date="2026-11",
    margin="DeepGEMM is off by 1.4e-4 of a number; a head, a rectifier or a scale that is left out by 1e-2 and more",
)

CHAIN = 16 * 2.0**-24
"""Relative error of a float32 number that a fused quantizer rounds to a code, on either side of a comparison."""

CODES = Rule(
    name="codes",
    codes=True,
    checks=(
        Check(statistic="max", factor=2, floor="chain"),
        Check(statistic="mean", factor=2, floor="chain"),
    ),
    derivation="""
A code with a few bits hides every error below half its step, so its own error says nothing. What does is the number
before it was rounded, which the float64 truth leaves unrounded: the *error that explains a code* is the smallest
relative change of that number with which it rounds to the code, 0 where it does anyway. A code may so differ from the
truth's only where the truth lies within the derived error of a border, by one step in practice.
Kernel and reference round intermediate results to 16 bits alike, so the explaining errors of the reference bound the
kernel's: factor 2, for a number at the border of a 16-bit rounding that falls on the other side. Float32 arithmetic
differs on top: the sum of squares (its relative error, at most 12 x 2^-24 for pieces of a row added in turn and then
as a tree, counts half under the root), the root, its inverse, two products, the scale and the quotient round once
each, 2^-24 at most: 16 x 2^-24 in all. That is also the floor of the mean, which finds errors that all codes share and
that stay below the largest.
""",
    date="2026-11",
    margin="kernels equal the reference but for one code in 10^5; 1 % more moves one code in ten",
)

CONTRACT_CODES = Rule(
    name="contract_codes",
    bitwise=True,
    checks=(),
    near=40 * CHAIN,
    derivation="""
Bytes of a packed cache, kernel against reference, behind float32 arithmetic of which nothing but the roundings to
formats is defined: exponentials, sums, roots. Nothing is known of the numbers before they were rounded, but they lie
anywhere between two codes: where two such numbers differ by d, their codes differ with the probability d / step, by one
step. That d is CHAIN of a number at most. A step of e4m3 is at least 2^-4 of a number, so one code in 2^16 differs; of
bfloat16 2^-8, one number in 2^12; of two E2M1 codes in a byte 2^-2 each, one byte in 2^17. A rounding to bfloat16 on
the way changes nothing: it moves one number in (2^-8 / d) by 2^-8. Most in an entry of V4: 448 codes and 64 bfloat16
numbers in 584 bytes, (448 x 16 + 64 x 256) / 584 = 40 CHAIN a byte.
A code in the upper half of a byte moves the byte by 16, a bfloat16 number by 1 in its low byte and, with a carry, in
its high byte. Scales that differ move 32 codes or more by several steps, and fail. Of chance, see `most`.
""",
    date="2026-11",
    margin="2 of 636480 bytes differ on an H200, 1 of 143616; numbers that are 1e-4 too large move one byte in 10^3",
)

CONTRACT_FP8_CODES = Rule(
    name="contract_fp8_codes",
    bitwise=True,
    checks=(),
    near=0.05,
    within=448 * 2.0**-8,
    derivation="""
e4m3 codes of silu(gate) * up, whose halves are sums of 128 products or fewer on FP8 tensor cores, against a reference
whose sums are float32: as `contract_codes`, with other numbers. An instruction adds 32 products with errors of 2^-13 of
the largest, see `contract_fp8_sums`; groups of 32 have their own scales, are added in float32, and each makes up half
of the RMS of four: sqrt(33 / 3) 2^-13 = 2^-11.3 of a half's RMS in all, d. The rounding of halves to 16 bits keeps its
average. A half h moves the product by d / |h| of itself and its code, whose step is 1/12 of it on average, with the
probability min(1, 12 d / |h|). Halves are normal: the mean is sqrt(2 / pi) 12 d (1 + ln(1 / 12 d)) = 2.4 %, twice that
for both. Where one half is small, so is the step, but not the other half's share of the error, and the code moves by
several: four times d of a half of three RMS, of which two make 448, is 448 / 3 x 4 d = 448 x 2^-9, and a rounding of
the other half to bfloat16 that falls on the other side as much again.
""",
    date="2026-11",
    margin="1 of 2304 and 1 of 320 differ on an H200; numbers that are 1 % too large move one code in eight",
)


def most(expected: float) -> int:
    """How many of independent events, of which `expected` are expected, are no surprise.

    Poisson's law exceeds it one time in 10,000. Where less than one is expected it is none: inputs are drawn from fixed
    seeds, so that chance decides once, and small cases stay sharp for faults that move a single code.
    """
    if expected < 1:
        return 0
    count, below = 0, math.exp(-expected)
    while below < 1 - 1e-4:
        count += 1
        below += math.exp(count * math.log(expected) - expected - math.lgamma(count + 1))
    return count


PROPAGATED = Rule(
    name="propagated",
    two_sided=True,
    checks=(
        Check(statistic="rms", factor=2, join="quadrature"),
        Check(statistic="mean", factor=2, join="quadrature"),
        Check(statistic="p99", factor=4),
        Check(statistic="max", factor=4),
        Check(statistic="slice", factor=4, join="quadrature"),
    ),
    derivation="""
For outputs inside a model that runs on its own numbers: both sides' errors have passed through the same layers, but
began as different roundings. Over a whole output they average, as for `default`. One token's error does not: norms and
routing weights multiply all of a token's features with one number that carries one rounding, so that a token's error
has few degrees of freedom, and extremes over some tens of tokens compare two small samples. The ratio of two RMS values
of k degrees of freedom each exceeds 4 with the probability that F(k, k) exceeds 16: 1 % at k = 4, 0.03 % at k = 8; it
exceeds 2 (the default) with 12 % and 3 %, and a model has hundreds of such comparisons.
""",
    date="2026-11",
    margin="correct models use up to 0.6 of it in float32; faults of one module exceed it hundredfold there",
)


def extreme(size: int) -> float:
    """How much farther the largest of `size` errors may exceed the largest self-noise than the RMS its RMS.

    The errors are taken as normal, all of one variance. At most one largest error in 10,000 is above the numerator;
    the self-noise of an element is the RMS of two such numbers (of `bisect`'s two runs), and the largest of `size` is
    below the denominator one time in 100. Between fewer than 16 numbers extremes are chance, and 16 are assumed.
    """
    n = max(size, 16)
    most = NormalDist().inv_cdf(1 - 1e-4 / (2 * n))
    least = math.sqrt(-math.log(-math.expm1(math.log(0.01) / n)))
    return most / least


def local(terms: int, dtype_eps: float, size: int) -> Rule:
    """The rule for one module of a model against its counterpart in another framework, on the same inputs.

    The peer of its checks is the self-noise: what the module's outputs change by when each of its inputs, and each
    result of the modules inside it, moves by one unit in the last place, up or down at random.

    Args:
        terms: the largest dimension of the module's parameters and inputs, a bound of the terms of any sum in it.
        dtype_eps: eps of the coarser of the two sides' dtypes.
        size: elements of the tensor.
    """
    wide = min(dtype_eps, 2.0**-23)
    factor = round(math.sqrt(4 + terms / 12 * (wide / dtype_eps) ** 2), 3)
    return Rule(
        name="local",
        checks=(
            Check(statistic="rms", factor=factor, join="quadrature"),
            Check(statistic="max", factor=round(factor * extreme(size), 3)),
            Check(statistic="slice", factor=factor, join="quadrature"),
        ),
        derivation="""
Both sides round the same formula at other places. A rounding is uniform in half a unit: RMS 1/sqrt(12) of one. The
self-noise moves every input by a whole unit, as much as twelve roundings of it; factor 2 in RMS is worth 48 in all, 24
stages that round on each side, and modules between two others have fewer. Sums are kept in float32 or wider: if the n
partial sums of a product are rounded one after the other, their errors add to n / 2 roundings of the result (partial
sums of random signs grow with the root), n of both sides, n / 12 square units of float32, which only shows where the
dtype is float32 itself. The floor is one rounding of the output. Sensitivity (a softmax's, a router's) is in the noise.
Two largest values differ by chance more than two RMS do, see `extreme`.
""",
        date="2026-11",
        margin="Llama, DeepSeek-V3 and gpt-oss use up to 45 %; planted faults exceed it at least 9 times in bfloat16",
    )


PROJECTED = math.sqrt(45 / 16)
"""How far an RMS that is estimated from 16 random projections may exceed the true one: the sum of 16 squares of normal
numbers is below 45 in all but one of ten thousand cases."""

_TO_CAPTURES = (DEFAULT, EXACT, LSE, CODES, PROPAGATED)
_TO_KERNELS = (
    CONTRACT,
    CONTRACT_LSE,
    CONTRACT_LSE_LATENT,
    CONTRACT_WEIGHTS,
    CONTRACT_FP8_SUMS,
    CONTRACT_CODES,
    CONTRACT_FP8_CODES,
)
RULES = {rule.name: rule for rule in (*_TO_CAPTURES, *_TO_KERNELS)}

ROUNDED_ONCE = 0.55
"""Units in the last place of a sum that a compensated summation rounds once: half a unit, and a tenth of that for the
second-order rounding of the corrections."""

FLOAT64 = 16 * 2.0**-52
"""Relative difference of two float64 computations of one number in another order: sixteen roundings, for tests only."""

DIVERGENCE = 16 * FLOAT64
"""The same for a Kullback-Leibler divergence, whose terms have either sign and may be ten times their sum."""

SAME_NARROW_LAYER = 4
"""Difference, in largest outputs and eps of a 16-bit dtype, of an attention layer on two implementations: each rounds
the softmax's weights, the attention's output and the layer's output by half a unit, three units in all."""

SAME_SUMS = 64 * 2.0**-23
"""Difference, in largest outputs, of two float32 layers that add the same terms in another order: projections and
attention over up to 64 terms each, every partial sum rounded once by half a unit, two layers of such sums."""

SAME_LAYER = 1024 * 2.0**-24
"""Difference, in largest outputs, of two float32 layers that attend over up to 150 keys in another order: projections
of 48 and 256 terms and products of 64 and 150, half a unit for each partial sum, are 518; the score's part of it, 112,
moves the weights by as much times a score of at most 4.5. All of it stays below 1024 half units."""

E4M3_NOISE = 2.0**-3 / 12**0.5
"""Relative RMS error, at most, of numbers rounded to e4m3 in groups: half a step is at most 2^-4 of a number, and
its error is uniform. A linear layer hands the noise of its activations on to its outputs."""

SAME_COMPUTATION = 2.0**-4
"""Relative RMS error beyond which a benchmark's peer computes something else than the op and is not timed. No proof of
the peer: codes of 4 bits, the coarsest inner rounding of any, leave at most 2^-4 of a number (half a step of a value in
[1/2, 1) of full scale); a wrong mask, scale or head gives 2^-2 and more."""

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
