"""Pairs sorted by expert in whole blocks on Mosaic GPU: a counting sort, see `jaxattn.ops.align_block_size`.

The first launch counts (`_counting`) and fills the result with what stands for padding; the second one writes each pair
to its place, a few in every thread block, and the experts of blocks in blocks of its own.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _counting, _mosaic, _routing

_PAIRS, _CHUNKS = (32, 64, 128), (384, 512, 1024, 2048)
_UNROLLED = 8
"""Places that are read together."""
_BLOCKS = 256
"""Blocks whose experts one thread block finds."""

i32 = jnp.int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of a thread block's work."""

    pairs: int = 64
    """Of one thread block: 32, 64 or 128."""
    chunk: int = 512
    """Pairs that are counted together: 384 (of 32 or 64 and 128), 512, 1024 or 2048."""

    def __post_init__(self):
        for name, known in (("pairs", _PAIRS), ("chunk", _CHUNKS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be {_mosaic.either(known)}, got {getattr(self, name)}")


def why_not(*, topk_ids, **_) -> str | None:
    """None: the kernel can run any arguments."""
    del topk_ids


def default_config(*, topk_ids, **_) -> Config:
    """Many pairs have longer chunks, whose counts every thread block reads."""
    pairs = topk_ids.size
    return Config(pairs=64 if pairs >= 1 << 14 else 32, chunk=_counting.default_chunk(pairs))


def configs(*, topk_ids, **_) -> Iterator[Config]:
    """Every configuration."""
    del topk_ids
    return (Config(pairs=pairs, chunk=chunk) for pairs in _PAIRS for chunk in _CHUNKS)


def align_block_size(*, config: Config, topk_ids, block_size, num_experts, expert_map):
    """Launch; arguments as prepared by `jaxattn.ops.align_block_size`."""
    pairs, E = topk_ids.size, num_experts
    rows = _routing.capacity(pairs, block_size, E)
    blocks = rows // block_size
    if not pairs:
        return jnp.zeros(0, i32), jnp.zeros(0, i32), jnp.zeros(1, i32)
    chunk = _counting.chunk(config.pairs, min(config.chunk, pairs))
    sort = _counting.Sort(pairs=pairs, num_experts=E, part=config.pairs, chunk=chunk, block=block_size)
    ids = _counting.flat(sort, topk_ids, expert_map)
    more = [jax.ShapeDtypeStruct((n,), i32) for n in (blocks, 1)]
    counts, *outputs = _counting.counted(sort, ids, rows, more)
    finders = -(-blocks // _BLOCKS)

    def body(sorted_ref, experts_ref, padded_ref, ids_ref, counts_ref, *, starts_ref, places_ref, **scratch):
        block, memory = lax.axis_index("block"), _counting.Memory(ids_ref, counts_ref, **scratch)

        @pl.when(block < finders)
        def _():
            _counting.find_starts(sort, memory, starts_ref)
            pl.when(block == 0)(lambda: _counting.put(padded_ref, 0, starts_ref[E]))
            first, some = block * _BLOCKS, _counting.SLAB
            mine = lax.div(jnp.minimum(blocks - first, _BLOCKS) + (some - 1), i32(some))
            find = functools.partial(_find, sort, starts_ref, experts_ref, places_ref)
            lax.fori_loop(0, mine, lambda n, _: find(first + n * some), None)

        pl.when(block >= finders)(lambda: _write(sort, memory, sorted_ref, places_ref, block - finders))

    launch = plgpu.kernel(
        body,
        out_type=(),
        scratch_types=sort.scratch | {"starts_ref": sort.starts, "places_ref": plgpu.SMEM((config.pairs,), i32)},
        grid=(finders + sort.parts,),
        grid_names=("block",),
        kernel_name="sort_pairs",
    )
    return tuple(pl.run_state(lambda refs: launch(*refs, ids, counts))(outputs))


def _find(sort, starts_ref, experts_ref, found_ref, first) -> None:
    """The experts of 32 blocks, or of as many as there are."""
    blocks, some = experts_ref.shape[0], _counting.SLAB
    experts = _counting.experts_of_blocks(sort, starts_ref, first)
    pl.when(first + some <= blocks)(lambda: _mosaic.store(experts_ref.at[pl.ds(first, some)], experts))

    @pl.when(first + some > blocks)
    def _():
        found_ref[pl.ds(0, some)] = experts
        lax.fori_loop(0, blocks - first, lambda i, _: _counting.put(experts_ref, first + i, found_ref[i]), None)


def _write(sort, memory, sorted_ref, places_ref, part) -> None:
    """A part's pairs to their places."""

    def take(start, count, experts, place):
        places_ref[pl.ds(start, count)] = jnp.where(experts < sort.num_experts, place, -1)

    def write(n, _):
        places = [places_ref[n * _UNROLLED + i] for i in range(_UNROLLED)]
        for i, at in enumerate(places):
            pair = part * sort.part + n * _UNROLLED + i
            pl.when(at >= 0)(lambda at=at, pair=pair: _counting.put(sorted_ref, at, pair))

    _counting.find_places(sort, memory, part, take)
    lax.fori_loop(0, sort.part // _UNROLLED, write, None)
