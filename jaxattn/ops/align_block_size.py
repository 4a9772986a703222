"""Sorting of (token, slot) pairs by expert, each expert padded to whole blocks: the index work of grouped GEMMs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jaxattn import _checks, _mechanism
from jaxattn._mechanism import Args, Case, Kernel, Mechanism
from pallas_kernels import _mosaic, _routing
from pallas_kernels import align_block_size as mosaic

_OP = "align_block_size"


def align_block_size(
    topk_ids: Int32[Array, "T A"],
    *,
    block_size: int,
    num_experts: int,
    expert_map: Int32[Array, " global"] | None = None,
    implementation: str | None = None,
    config: Any = None,
) -> tuple[Int32[Array, " rows"], Int32[Array, " blocks"], Int32[Array, "1"]]:
    """Flat indices `token * A + slot` sorted by expert, each expert filled up to a multiple of `block_size`.

    Within an expert the order is that of the flat indices. Experts without tokens take no block. Sizes are static,
    `rows = capacity(...)`: nothing waits for the host and new routings never recompile.

    Args:
        topk_ids: int32 expert of each (token, slot). Ids outside 0..num_experts-1 (or of the map) take no part.
        block_size: rows of a block.
        num_experts: experts that this device holds, E.
        expert_map: for every id the local expert 0..E-1, or -1 = held by another rank; such pairs take no part.
        implementation: None (choose), "reference" or "mosaic".
        config: launch configuration of the named kernel.

    Returns:
        `sorted_ids`: flat indices, T * A where a row is padding; `expert_ids`: expert of each block, -1 for blocks
        behind the last; `padded`: [1] rows in use, a multiple of `block_size`.

    Raises:
        TypeError: dtypes; ValueError: shapes or sizes;
        NotImplementedError: the named implementation cannot run this call.

    Source: vLLM 0.26.0 `moe_align_block_size.py`, whose order inside an expert is not repeatable for many tokens, and
    whose blocks of other ranks' experts exist unless it is told to ignore them.
    """
    args = prepare(topk_ids, block_size=block_size, num_experts=num_experts, expert_map=expert_map)
    return _mechanism.run(MECHANISM, args, implementation, config)


capacity = _routing.capacity
local_experts = _routing.local_experts
order_by_expert = _routing.order_by_expert


def prepare(topk_ids, *, block_size, num_experts, expert_map=None) -> Args:
    """Validate and complete the arguments of `align_block_size`; raises as it does."""
    named = {"topk_ids": (topk_ids, "T A")} | ({} if expert_map is None else {"expert_map": (expert_map, "global")})
    _checks.check_shapes(_OP, **named)
    for name, (x, _) in named.items():
        _checks.check_dtype(_OP, name, x, ("int32",))
    _checks.check_count(_OP, block_size=block_size, num_experts=num_experts)
    return {
        "topk_ids": topk_ids,
        "block_size": int(block_size),
        "num_experts": int(num_experts),
        "expert_map": expert_map,
    }


def _reference(topk_ids, *, block_size, num_experts, expert_map):
    """One stable sort; the destination of a row is its rank in the expert behind the expert's padded start."""
    E, pairs = num_experts, topk_ids.size
    rows = capacity(pairs, block_size, E)
    experts = local_experts(topk_ids, E, expert_map).reshape(pairs)
    order = order_by_expert(experts, E)
    counts = jnp.sum(experts[:, None] == jnp.arange(E, dtype=jnp.int32), 0, dtype=jnp.int32)
    blocks = -(-counts // block_size)
    ends, block_ends = jnp.cumsum(counts, dtype=jnp.int32), jnp.cumsum(blocks, dtype=jnp.int32)
    shift = (block_ends - blocks) * block_size - (ends - counts)
    by_expert = experts[order]
    to = jnp.where(by_expert < E, jnp.arange(pairs, dtype=jnp.int32) + shift[jnp.minimum(by_expert, E - 1)], rows)
    sorted_ids = jnp.full((rows,), pairs, jnp.int32).at[to].set(order, mode="drop")
    block = jnp.arange(rows // block_size, dtype=jnp.int32)
    expert_ids = jnp.sum(block[:, None] >= block_ends, 1, dtype=jnp.int32)
    return sorted_ids, jnp.where(expert_ids < E, expert_ids, -1), block_ends[-1:] * block_size


def _outputs(**_):
    return ("sorted_ids", "expert_ids", "padded")


def _cost(*, topk_ids, block_size, num_experts, **_):
    """Ids read, indices written once."""
    rows = capacity(int(np.prod(topk_ids.shape)), block_size, num_experts)
    return 0, 4 * (int(np.prod(topk_ids.shape)) + rows + rows // block_size)


def make_inputs(
    rng: np.random.Generator, T: int, A: int, E: int, block_size: int, *, hot: int = 0, mapped: bool = False
) -> Args:
    """Random arguments of `align_block_size`.

    Args:
        rng: source of randomness.
        T: tokens.
        A: experts of a token.
        E: local experts.
        block_size: rows of a block.
        hot: only so many experts are hit (0 = all).
        mapped: ids count 2 E experts of which every second belongs to this rank.
    """
    total = (2 if mapped else 1) * E
    ids = np.stack([rng.permutation(hot or total)[:A] for _ in range(T)]) if T else np.zeros((0, A))
    args: Args = {"topk_ids": jnp.asarray(ids, jnp.int32), "block_size": block_size, "num_experts": E}
    if mapped:
        local = np.where(np.arange(total) % 2, -1, np.arange(total) // 2)
        args["expert_map"] = jnp.asarray(local, jnp.int32)
    return args


def _case(name: str, *sizes: int, tags: tuple[str, ...] = ("smoke",), **options) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, *sizes, **options), tags=frozenset(tags))


def _struct(T: int, A: int, E: int, block_size: int) -> Args:
    return {"topk_ids": jax.ShapeDtypeStruct((T, A), jnp.int32), "block_size": block_size, "num_experts": E}


MECHANISM = Mechanism(
    name=_OP,
    source="vLLM 0.26.0 fused_moe/moe_align_block_size.py",
    op=align_block_size,
    prepare=prepare,
    reference=_reference,
    outputs=_outputs,
    kernels={
        "mosaic": Kernel(
            run=mosaic.align_block_size,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=(
        _case("T13-A2-E8-block16", 13, 2, 8, 16),
        _case("T30-A4-E8-block16-expert-map", 30, 4, 8, 16, mapped=True),
        _case("T40-A1-E64-block8-one-expert", 40, 1, 64, 8, hot=1),
        _case("T1-A6-E256-block64", 1, 6, 256, 64),
        _case("T40-A8-E130-block48-expert-map", 40, 8, 130, 48, mapped=True),
        _case("T16384-A8-E256-block64", 16384, 8, 256, 64, tags=("full",)),
        _case("T4096-A6-E64-block128", 4096, 6, 64, 128, tags=("full", "bench")),
    ),
    cost=_cost,
    captures=("moe/align_block_size*",),
    support=tuple(
        (f"T {T}, A {A}, E {E}, blocks of {block}", _struct(T, A, E, block))
        for T, A, E, block in ((16, 6, 64, 16), (512, 8, 256, 64), (8192, 8, 384, 128))
    ),
)
