"""Choice of a token's experts by one warp: each lane keeps the two best of its numbers, its head and its second.

The largest head of the 32 lanes is chosen, the lowest id of equals, by two reductions of integers; where it lay the
second moves up. Only a lane that lost both looks through its numbers again, for the two best behind the last choice.
The steps are written once, over the numbers of a lane (`_Device`) or of all lanes of a block's tokens (`_Plain`, for
the interpreter).
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _exact, _mosaic, _words
from pallas_kernels._mosaic import arith, gpu_utils, ir, llvm
from pallas_kernels._words import Memory, Thread, Word

WARP_LANES, PART_LANES = 32, 4
_MAGNITUDE = 2**31 - 1
_LOST = -(2**31)
"""The key of what was chosen: below that of -inf."""
_LOGARITHM = (
    -0.13018856942653656006,
    0.14084610342979431152,
    -0.12148627638816833496,
    0.13980610668659210205,
    -0.16684235632419586182,
    0.20012299716472625732,
    -0.24999669194221496582,
    0.33333182334899902344,
    -0.5,
)
"""Coefficients of `logf` in libdevice, highest power first."""

f32, i32 = jnp.float32, jnp.int32


def choose(
    weights_ref: Any,
    ids_ref: Any,
    scores_ref: Any,
    scores: jax.Array,
    choice: jax.Array,
    *,
    layout: Any,
    top_k: int,
    kept: int | None,
    pairs: bool,
    renormalize: bool,
    scaling: float,
) -> None:
    """Write the weights and ids of a block's tokens, one a warp.

    Args:
        weights_ref: float32 [tokens, top_k] in global memory.
        ids_ref: int32, likewise.
        scores_ref: float32 [tokens, E] in shared memory, to work in.
        scores: float32 [tokens, 8, E / 8].
        choice: float32, likewise; finite or -inf, never -0 beside +0.
        layout: of both; four neighbouring lanes hold one of the 8 parts, every lane vectors in turn with the others.
        top_k: experts to choose; as many numbers of the kept groups are finite.
        kept: parts to choose from, None = all.
        pairs: a part counts by the sum of its two best numbers, else by its best.
        renormalize: divide the weights by their sum.
        scaling: of the weights.
    """
    tokens, parts, width = scores.shape
    vec, count = layout.to_mgpu().vector_length, width // PART_LANES
    options = {"top_k": top_k, "kept": kept, "pairs": pairs, "renormalize": renormalize, "scaling": scaling}
    offsets = [PART_LANES * vec * (i // vec) + i % vec for i in range(count)]
    if _mosaic.interpreting():
        numbers = choice.reshape(tokens, parts, -1, PART_LANES, vec).transpose(2, 4, 0, 1, 3)
        numbers = numbers.reshape(count, tokens, WARP_LANES)
        results = _route(_Plain(scores.reshape(tokens, -1), width, vec), numbers, offsets, **options)
        for ref, x in zip((weights_ref, ids_ref), results, strict=True):
            _mosaic.store(ref, x[:, :top_k])
        return

    def emit(context, weights_ref, ids_ref, scores_ref, scores, choice):
        del context
        warp = _Device(scores_ref, parts * width, width, vec)
        warp.keep(scores.registers.flat, vec)
        gpu_utils.inline_ptx("bar.warp.sync 0xffffffff;", has_side_effects=True, convergent=True)
        results = _route(warp, _words.words_of(choice), offsets, **options)
        place = (Thread().warp * top_k + warp.lane) << 2
        for ref, x in zip((weights_ref, ids_ref), results, strict=True):
            Memory(ref).at(place).store_if(_words.less(warp.lane, top_k), x)

    ref = plgpu.RefType()
    inline: Any = plgpu.inline_mgpu(arg_types=(ref, ref, ref, layout, layout))
    inline(emit)(weights_ref, ids_ref, scores_ref, scores, choice)


def softplus(x: jax.Array, layout: Any) -> jax.Array:
    """log1p(u) of u = exp(x) as `log(w) * (u / (w - 1))` with w = 1 + u, and u where w is 1; anything for x above 20.

    The instructions are those that `jnp.log` and `/` become, less what they do for numbers that w is not.
    """
    u = jnp.exp(x)
    if _mosaic.interpreting():
        w = 1 + u
        return jnp.where(w == 1, u, jnp.log(w) * (u / jnp.where(w == 1, 1.0, w - 1)))

    def emit(context, u):
        del context
        return _words.fragment([_log1p(x) for x in _words.words_of(u)], u.shape, layout, "f32")

    out = plgpu.ShapeDtypeStruct(u.shape, f32, layout=layout)
    inline: Any = plgpu.inline_mgpu(arg_types=(layout,), return_type=out)
    return inline(emit)(plgpu.layout_cast(u, layout))


def _log1p(u: Word) -> Word:
    """See `softplus`."""
    constant = _words.float_word
    w = _float("add.rn", u, constant(1))
    exponent = (w + -0x3F2AAAAB) & -0x800000
    f = _float("add.rn", w + (~exponent + 1), constant(-1))
    power = _words.asm("cvt.rn.f32.s32 $0, $1;", exponent)  # times 2^23
    series = constant(_LOGARITHM[0])
    for coefficient in _LOGARITHM[1:]:
        series = _float("fma.rn", series, f, constant(coefficient))
    series = _float("fma.rn", _float("mul.rn", f, series), f, f)
    logarithm = _float("fma.rn", power, constant(math.log(2) * 2.0**-23), series)
    inverse = _words.asm("rcp.approx.ftz.f32 $0, $1;", _float("add.rn", w, constant(-1)))
    both = _float("mul.rn", logarithm, _float("mul.rn", inverse, u))
    return _words.select(_same(w, constant(1)), u, both)


# ---------------------------------------------------------------- the choice
def _route(warp, numbers, offsets, *, top_k, kept, pairs, renormalize, scaling) -> tuple[Any, Any]:
    """(weight, id) of expert number i of the warp's token in lane i."""
    chosen = _choose(warp, numbers, offsets, top_k, kept, pairs)
    weights = [warp.score(i) for i in chosen]
    mine = [warp.same(warp.lane, warp.integer(i)) for i in range(top_k)]

    def spread(lot):
        out = lot[0]
        for here, x in list(zip(mine, lot, strict=True))[1:]:
            out = warp.select(here, x, out)
        return out

    weight = spread(weights)
    if renormalize:
        total = functools.reduce(warp.add, weights)
        total = warp.select(warp.above(total, warp.number(0)), total, warp.number(1))
        weight = warp.divide(weight, total)
    return warp.multiply(weight, warp.number(scaling)), spread(chosen)


def _choose(warp, numbers, offsets, top_k, kept, pairs) -> list[Any]:
    """The ids, the same in every lane."""
    lowest = warp.number(-math.inf)
    (best, at), (other, beside) = _two_best(warp, numbers, offsets)
    if kept is not None:
        closed = _closed(warp, best, other if pairs else None, kept)
        best, other = (warp.select(closed, lowest, x) for x in (best, other))
    head, second = _key(warp, best), _key(warp, other)
    mine, follower = warp.first + at, warp.first + beside
    ids = []
    while True:
        top = warp.most(head)
        ids.append(warp.least(warp.select(warp.same(head, top), mine, warp.integer(_MAGNITUDE))))
        if len(ids) == top_k:
            return ids
        lost = warp.same(mine, ids[-1])
        head, mine = warp.select(lost, second, head), warp.select(lost, follower, mine)
        second = warp.select(lost, warp.integer(_LOST), second)
        if len(ids) > 1 and len(numbers) > 2:
            bound, last = warp.as_number(_unsigned(warp, top)), ids[-1]

            def again(bound=bound, last=last):
                left = []
                for x, offset in zip(numbers, offsets, strict=True):
                    behind = warp.both(warp.equal(x, bound), warp.below(last, warp.first + offset))
                    left.append(warp.select(warp.either(warp.above(bound, x), behind), x, lowest))
                (best, at), (other, beside) = _two_best(warp, left, offsets)
                return _key(warp, best), warp.first + at, _key(warp, other), warp.first + beside

            empty = warp.both(lost, warp.same(head, warp.integer(_LOST)))
            head, mine, second, follower = warp.when(empty, again, (head, mine, second, follower))


def _two_best(warp, numbers: Sequence[Any], offsets: Sequence[int]) -> Any:
    """((number, offset) of the best of a lane, of the second best); of equals the lower offset comes first."""
    filler = (warp.number(-math.inf), warp.integer(0))
    found = [((x, warp.integer(o)),) for x, o in zip(numbers, offsets, strict=True)]
    while len(found) > 1 or len(found[0]) == 1:
        pairs = [tuple(found[i : i + 2]) for i in range(0, len(found), 2)]
        found = [_merge(warp, *pair, filler=filler) if len(pair) == 2 else (*pair[0], filler)[:2] for pair in pairs]
    return found[0]


def _merge(warp, low, high, *, filler) -> Any:
    """The two best of two lots of one or two, best first; offsets of `high` are above those of `low`."""
    turned = warp.above(high[0][0], low[0][0])
    best = warp.largest(low[0][0], high[0][0]), warp.select(turned, high[0][1], low[0][1])
    if len(low) == len(high) == 1:
        return best, (warp.smallest(low[0][0], high[0][0]), warp.select(turned, low[0][1], high[0][1]))
    low, high = ((*x, filler)[:2] for x in (low, high))
    a, at = (warp.select(turned, low[0][i], low[1][i]) for i in (0, 1))
    b, beside = (warp.select(turned, high[1][i], high[0][i]) for i in (0, 1))
    return best, (warp.largest(a, b), warp.select(warp.above(b, a), beside, at))


def _closed(warp, best, second, kept: int):
    """True in the lanes of parts that are not among the `kept` best, the lowest of equals first."""
    for hop in (1, 2):
        other = warp.across(best, hop)
        if second is not None:
            second = warp.largest(warp.largest(second, warp.across(second, hop)), warp.smallest(best, other))
        best = warp.largest(best, other)
    total = best if second is None else warp.add(best, second)
    part, quarter = warp.lane >> 2, warp.lane & 3
    ahead = warp.integer(0)
    for there in (quarter, quarter + 4):  # each lane compares its part with two of the eight
        x = warp.from_lane(total, there << 2)
        earlier = warp.both(warp.equal(x, total), warp.below(there, part))
        ahead = ahead + warp.select(warp.either(warp.above(x, total), earlier), warp.integer(1), warp.integer(0))
    for hop in (1, 2):
        ahead = ahead + warp.across(ahead, hop)
    return warp.below(warp.integer(kept - 1), ahead)


def _key(warp, x):
    """Integers in the order of numbers."""
    return _unsigned(warp, warp.as_integer(x))


def _unsigned(warp, bits):
    """The magnitude's bits of negative numbers turned over; the inverse of itself."""
    return bits ^ (warp.sign(bits) & _MAGNITUDE)


# ---------------------------------------------------------------- what a lane can do
class _Device:
    """Instructions on the words of this thread; float32 numbers are words as well."""

    def __init__(self, memory: Any, size: int, width: int, vec: int):
        thread = Thread()
        self.lane = thread.lane
        self.first = thread.group * width + thread.column * vec
        self._scores = Memory(memory).at(thread.warp * (4 * size))

    def keep(self, registers: Iterable[Any], vec: int) -> None:
        """Write the scores of this lane, for `score`."""
        own = self._scores.at(self.first << 2)
        for i, register in enumerate(registers):
            llvm.store(register, own.at(4 * PART_LANES * vec * i).pointer, alignment=4 * vec)

    integer = staticmethod(Word.of)
    number = staticmethod(_words.float_word)
    select = staticmethod(_words.select)
    below = staticmethod(_words.less)
    both = staticmethod(_words.both)
    across = staticmethod(_words.shuffle)

    def score(self, expert: Word) -> Word:
        return self._scores.at(expert << 2).load(0, 4)

    def either(self, a: Any, b: Any) -> Any:
        return arith.ori(a, b)

    def same(self, a: Word, b: Word) -> Any:
        return arith.cmpi(arith.CmpIPredicate.eq, a.value, b.value)

    def above(self, a: Word, b: Word) -> Any:
        return _compare(arith.CmpFPredicate.OGT, a, b)

    def equal(self, a: Word, b: Word) -> Any:
        return _same(a, b)

    def as_integer(self, x: Word) -> Word:
        return x

    def as_number(self, x: Word) -> Word:
        return x

    def sign(self, x: Word) -> Word:
        return _words.asm("shr.s32 $0, $1, 31;", x)

    def largest(self, a: Word, b: Word) -> Word:
        return _float("max", a, b)

    def smallest(self, a: Word, b: Word) -> Word:
        return _float("min", a, b)

    def add(self, a: Word, b: Word) -> Word:
        return _float("add.rn", a, b)

    def multiply(self, a: Word, b: Word) -> Word:
        return _float("mul.rn", a, b)

    def divide(self, a: Word, b: Word) -> Word:
        return _float("div.rn", a, b)

    def most(self, x: Word) -> Word:
        return _reduced("max", x)

    def least(self, x: Word) -> Word:
        return _reduced("min", x)

    def from_lane(self, x: Word, lane: Word) -> Word:
        text = "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;"
        return Word(_together(text, x, lane))

    def when(self, condition: Any, make: Callable[[], Sequence[Word]], old: Sequence[Word]) -> list[Word]:
        """What `make()` makes where the condition holds, else `old`."""
        before = [x.value for x in old]
        branch = gpu_utils.scf.IfOp(condition, [x.type for x in before], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            gpu_utils.scf.YieldOp([x.value for x in make()])
        with ir.InsertionPoint(branch.else_block):
            gpu_utils.scf.YieldOp(before)
        return [Word(x) for x in branch.results]


def _float(instruction: str, *operands: Word) -> Word:
    names = ", ".join(f"${i}" for i in range(len(operands) + 1))
    return _words.asm(f"{instruction}.f32 {names};", *operands)


def _compare(how: Any, a: Word, b: Word) -> Any:
    return arith.cmpf(how, *(arith.bitcast(ir.F32Type.get(), x.value) for x in (a, b)))


def _same(a: Word, b: Word) -> Any:
    return _compare(arith.CmpFPredicate.OEQ, a, b)


def _reduced(how: str, x: Word) -> Word:
    return Word(_together(f"redux.sync.{how}.s32 $0, $1, 0xffffffff;", x))


def _together(text: str, *operands: Word) -> Any:
    """An instruction of all lanes of the warp."""
    kind, values = ir.IntegerType.get_signless(32), [x.value for x in operands]
    return gpu_utils.inline_ptx(text, *values, result_types=kind, has_side_effects=True, convergent=True)


class _Plain:
    """The same on arrays [tokens, 32]: the numbers of every lane."""

    def __init__(self, scores: jax.Array, width: int, vec: int):
        self._scores = scores
        self.lane = lax.broadcasted_iota(i32, (scores.shape[0], WARP_LANES), 1)
        self.first = self.lane // PART_LANES * width + self.lane % PART_LANES * vec

    select = staticmethod(jnp.where)
    largest, smallest = staticmethod(jnp.maximum), staticmethod(jnp.minimum)
    both, either = staticmethod(jnp.logical_and), staticmethod(jnp.logical_or)
    same = equal = staticmethod(jnp.equal)
    above, below = staticmethod(jnp.greater), staticmethod(jnp.less)
    add, multiply = staticmethod(jnp.add), staticmethod(jnp.multiply)
    divide = staticmethod(_exact.divide)

    def integer(self, x: int) -> jax.Array:
        return jnp.full(self.lane.shape, x, i32)

    def number(self, x: float) -> jax.Array:
        return jnp.full(self.lane.shape, x, f32)

    def score(self, expert: jax.Array) -> jax.Array:
        return jnp.take_along_axis(self._scores, expert, 1)

    def as_integer(self, x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(x, i32)

    def as_number(self, x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(x, f32)

    def sign(self, x: jax.Array) -> jax.Array:
        return x >> 31

    def most(self, x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(jnp.max(x, 1, keepdims=True), x.shape)

    def least(self, x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(jnp.min(x, 1, keepdims=True), x.shape)

    def across(self, x: jax.Array, hop: int) -> jax.Array:
        return self.from_lane(x, self.lane ^ hop)

    def from_lane(self, x: jax.Array, lane: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, lane, 1)

    def when(self, condition: jax.Array, make: Callable[[], Sequence[Any]], old: Sequence[Any]) -> list[jax.Array]:
        return [jnp.where(condition, *x) for x in zip(make(), old, strict=True)]
