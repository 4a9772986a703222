"""Exact top-k of a row by one thread block: counts of keys in shared memory; the device code is in `_topk_steps`.

The block counts how many of the row's numbers fall into each of `bins` intervals (32 powers of two of either sign, each
cut into equal parts), finds the interval with the k-th largest, and goes over the row once more, now out of a cache, to
note in a bit mask what lies above the interval and what in it. Of the few numbers in it each finds its rank among them.
If there are many, whole ranges of integer keys are counted first, which needs at most three more rounds; if they are
all equal, the lowest entries are taken. Work grows with a token's range, not with the row.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic
from pallas_kernels import _topk_steps as steps

THREADS = (128, 256, 512, 1024)
BINS = (1024, 2048, 4096)
LOADS = (1, 2, 4)
PIECES = (1, 2, 4, 8)
MOST = 2**19
"""Entries of the longest row: a byte of shared memory for each four."""
_INFINITE = 0x7F800000

i32 = jnp.int32


class Launch:
    """Base of the configurations of `indexer_topk`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counted(Launch):
    """`threads` of a block; `bins` that keys are counted in; `loads` in flight; `pieces`: blocks that share a row."""

    threads: int = 128
    bins: int = 2048
    loads: int = 2
    pieces: int = 1

    def __post_init__(self):
        for name, legal in (("threads", THREADS), ("bins", BINS), ("loads", LOADS), ("pieces", PIECES)):
            if getattr(self, name) not in legal:
                raise ValueError(f"{name} must be {_mosaic.either(legal)}, got {getattr(self, name)}")


def _scratch(S: int, topk: int, config: Counted) -> list[Any]:
    """Counts, whose place the choice takes in the end; mask, a word for 16 entries; candidates; numbers."""
    words = -(-(S + 4) // 16) + 1
    staged = max(config.bins, topk if topk < S else 0)
    shapes = ((staged,), (words,), (2 * steps.CANDIDATES,), (steps.NUMBERS,))
    return [plgpu.SMEM(shape, i32) for shape in shapes]


def why_not(S: int, topk: int, config: Counted) -> str | None:
    """None if a block can do rows of S entries, else one sentence."""
    if S > MOST:
        return f"a block holds marks of at most {MOST} entries, got {S}"
    needed = _mosaic.smem_bytes(_scratch(S, topk, config))
    if needed > _mosaic.SMEM_BYTES:
        return f"{config} needs {needed} bytes of shared memory of {_mosaic.SMEM_BYTES}"
    return None


def rule(N: int, S: int) -> Counted:
    """Enough threads for a row's length, few enough for several rows on a multiprocessor; few long rows are shared."""
    pieces = max(p for p in PIECES if p == 1 or (N * p <= _mosaic.num_sms() and 4096 * p <= S))
    length = S // pieces
    threads = 128 if length <= 4096 else 256 if length <= 8192 else 512 if length <= 32768 else 1024
    return Counted(threads=max(threads, 512) if pieces > 1 else threads, pieces=pieces)


def choose(config: Counted, logits, starts, ends, topk: int) -> jax.Array:
    """Launch; arguments as prepared by `jaxattn.ops.indexer_topk`."""
    N, S = logits.shape
    if S % 4:
        logits = jnp.pad(logits, ((0, 0), (0, -S % 4)))
    ends = jnp.minimum(ends, S)

    def body(starts_ref, ends_ref, x_ref, o_ref, bins_ref, mask_ref, near_ref, numbers_ref):
        n = lax.axis_index("row")
        start = starts_ref[n]
        length = ends_ref[n] - start
        block = SimpleNamespace(n=n, start=start, length=length, topk=topk, **dataclasses.asdict(config))
        block.x, block.out, block.counts, block.mask = x_ref, o_ref, bins_ref, mask_ref
        block.near, block.numbers = near_ref, numbers_ref

        def search():
            low, high, wanted, inside = _first_round(block)
            low, high, wanted, inside = lax.while_loop(_many, lambda s: _round(block, s), (low, high, wanted, inside))
            whole = wanted == inside
            tied = (low == high) & (inside > steps.CANDIDATES)
            steps.mark(block, low, jnp.where(whole, low - 1, high))
            steps.settle(block, wanted, ~(whole | tied))
            steps.write(block, jnp.where(tied & ~whole, wanted, 0))

        lax.cond(length <= topk, lambda: steps.write_all(block), search)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((N, topk), i32),
        scratch_types=_scratch(logits.shape[1], topk, config),
        grid=(N,),
        grid_names=("row",),
        cluster=() if _mosaic.interpreting() or config.pieces == 1 else (config.pieces,),
        cluster_names=() if _mosaic.interpreting() or config.pieces == 1 else ("piece",),
        num_threads=1 if _mosaic.interpreting() else config.threads // 128,
        thread_name="part",
        kernel_name="indexer_topk",
    )(starts, ends, logits)


def _many(state) -> jax.Array:
    """True while what lies in the interval is not to be taken whole, too much to rank, and not all equal."""
    low, high, wanted, inside = state
    return (inside > steps.CANDIDATES) & (inside != wanted) & (low < high)


def _first_round(block):
    """(lowest and highest key of the interval with the k-th largest, how many of it are wanted, how many there are)."""
    number, above, inside = steps.count_numbers(block)
    half = block.bins // 2
    width = steps.width(block.bins)
    place = jnp.where(number < half, half - 1 - number, number - half)
    smallest = jnp.where(place == 0, 0, steps.LEAST + place * width)
    largest = jnp.where(place == half - 1, i32(_INFINITE), steps.LEAST + (place + 1) * width - 1)
    negative = number < half
    low, high = jnp.where(negative, ~largest, smallest), jnp.where(negative, ~smallest, largest)
    return low, high, block.topk - above, inside


def _round(block, state):
    """The same within an interval of keys, which is cut into at most `bins` of a power of two."""
    low, high, wanted, _ = state
    shift = i32(0)
    spread = high - low  # less than 2^31: an interval of the first round has one sign
    for k in range(31 - (block.bins.bit_length() - 1), 0, -1):
        shift = jnp.where((spread >> (k - 1 + block.bins.bit_length() - 1)) & 1 == 1, jnp.maximum(shift, k), shift)
    number, above, inside = steps.count_keys(block, low, high, shift, wanted)
    first = low + (number << shift)
    last = first + ((i32(1) << shift) - 1)
    return first, jnp.minimum(last, high), wanted - above, inside
