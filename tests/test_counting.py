"""Where the counting sort of pairs by expert says that they go, beside a stable sort in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _counting, _mosaic


def found(sort, ids):
    """Places of all pairs, and where experts start."""
    ids = _counting.flat(sort, ids)
    counts = _counting.counted(sort, ids) if sort.chunks > 1 else []

    def body(ids_ref, *refs, starts_ref, **scratch):
        *counts_refs, places_ref, found_ref = refs
        memory = _counting.Memory(ids_ref, *(counts_refs or [None]), **scratch)
        part = lax.axis_index("part")

        def take(first, count, experts, place):
            del experts
            _mosaic.store(places_ref.at[pl.ds(part * sort.part + first, count)], place)

        _counting.find_places(sort, memory, part, take)

        @pl.when(part == 0)
        def _():
            _counting.find_starts(sort, memory, starts_ref)
            for i in range(sort.num_experts + 1):
                found_ref[i] = starts_ref[i]

    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((n,), jnp.int32) for n in (sort.parts * sort.part, sort.num_experts + 1)],
        scratch_types=sort.scratch | {"starts_ref": sort.starts},
        grid=(sort.parts,),
        grid_names=("part",),
    )(ids, *counts)


@pytest.mark.usefixtures("interpret")
@pytest.mark.parametrize(
    ("pairs", "E", "part", "chunk", "block", "of"),
    [
        (300, 5, 100, 3200, 1, 7),  # one chunk, of three parts that are not whole
        (700, 20, 128, 128, 1, 22),  # six chunks, more than are read together
        (700, 20, 64, 128, 16, 22),  # blocks
        (260, 150, 128, 128, 3, 155),  # two slabs of experts
        (256, 128, 128, 128, 1, 128),  # as many experts as a slab has, all pairs take part
        (256, 3, 64, 128, 8, 1),  # one expert has all
    ],
)
def test_places_are_those_of_a_stable_sort(pairs, E, part, chunk, block, of, rng, monkeypatch):
    monkeypatch.setattr(_counting, "_LINES", 4)
    ids = rng.integers(0, of, pairs)
    ids[ids > E] = -1
    sort = _counting.Sort(pairs=pairs, num_experts=E, part=part, chunk=chunk, block=block)
    places, starts = (np.asarray(x) for x in jax.jit(found, static_argnums=0)(sort, jnp.asarray(ids, jnp.int32)))
    counts = np.bincount(ids[(ids >= 0) & (ids < E)], minlength=E)
    wanted = np.concatenate([[0], np.cumsum(-(-counts // block) * block)])
    np.testing.assert_array_equal(starts, wanted)
    seen = wanted.copy()
    for pair, expert in enumerate(ids):
        expert = expert if 0 <= expert < E else E
        assert places[pair] == seen[expert], pair
        seen[expert] += 1


def test_a_chunk_holds_whole_parts():
    assert _counting.chunk(48, 512) == 384
    assert _counting.chunk(64, 512) == 512
    assert _counting.chunk(72, 512) == 1152
