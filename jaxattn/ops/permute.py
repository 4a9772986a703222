"""Rows of tokens sorted by expert, with offsets and the way back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxattn import _checks, _mechanism
from jaxattn._mechanism import Args, Case, Mechanism
from jaxattn.ops import align_block_size

_OP = "permute"


def permute(
    x: Float[Array, "T M"],
    topk_ids: Int32[Array, "T A"],
    *,
    num_experts: int,
    expert_map: Int32[Array, " global"] | None = None,
    implementation: str | None = None,
    config: Any = None,
) -> tuple[Float[Array, "T*A M"], Int32[Array, "E+1"], Int32[Array, "T A"]]:
    """Copies of the tokens' rows, sorted by expert (stable), where each expert starts, and where each pair went.

    Args:
        x: any dtype.
        topk_ids: int32 expert of each (token, slot). Ids outside 0..E-1 (or of the map) take no part.
        num_experts: experts that this device holds, E.
        expert_map: for every id the local expert, or -1 = held by another rank.
        implementation: None or "reference"; XLA does the index work.
        config: None, for the same reason.

    Returns:
        `permuted`: rows behind the last expert (pairs that take no part) are 0; `offsets`: expert e has rows offsets[e]
        to offsets[e + 1] - 1; `positions`: row of each (token, slot), -1 for pairs that take no part.

    Raises:
        TypeError: dtypes; ValueError: shapes or sizes.

    Source: vLLM 0.26.0 `moe_permute_unpermute.py` (offsets in int64 there).
    """
    args = prepare(x, topk_ids, num_experts=num_experts, expert_map=expert_map)
    return _mechanism.run(MECHANISM, args, implementation, config)


def prepare(x, topk_ids, *, num_experts, expert_map=None) -> Args:
    """Validate and complete the arguments of `permute`; raises as it does."""
    named = {"x": (x, "T M"), "topk_ids": (topk_ids, "T A")}
    _checks.check_shapes(_OP, **named, **({} if expert_map is None else {"expert_map": (expert_map, "global")}))
    for name, ids in (("topk_ids", topk_ids), ("expert_map", expert_map)):
        if ids is not None:
            _checks.check_dtype(_OP, name, ids, ("int32",))
    _checks.check_count(_OP, num_experts=num_experts)
    return {"x": x, "topk_ids": topk_ids, "num_experts": int(num_experts), "expert_map": expert_map}


def _reference(x, topk_ids, *, num_experts, expert_map):
    """One stable sort of the experts, one gather of rows."""
    (T, A), E = topk_ids.shape, num_experts
    experts = align_block_size.local_experts(topk_ids, E, expert_map).reshape(T * A)
    order = align_block_size.order_by_expert(experts, E)
    counts = jnp.sum(experts[:, None] == jnp.arange(E, dtype=jnp.int32), 0, dtype=jnp.int32)
    offsets = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    row = jnp.arange(T * A, dtype=jnp.int32)
    positions = jnp.zeros((T * A,), jnp.int32).at[order].set(jnp.where(row < offsets[-1], row, -1))
    permuted = jnp.where((row < offsets[-1])[:, None], x[order // max(A, 1)], 0)
    return permuted, offsets, positions.reshape(T, A)


def _outputs(**_):
    return ("permuted", "offsets", "positions")


def _cost(*, x, topk_ids, num_experts, **_):
    """Tokens read and their copies written once."""
    (T, M), A = x.shape, topk_ids.shape[1]
    return 0, jnp.dtype(x.dtype).itemsize * T * M * (1 + A) + 8 * T * A + 4 * num_experts


def make_inputs(
    rng: np.random.Generator, T: int, A: int, E: int, M: int, *, dtype: str = "bfloat16", **options
) -> Args:
    """Random arguments of `permute`; options as for `align_block_size.make_inputs`."""
    args = align_block_size.make_inputs(rng, T, A, E, 1, **options)
    del args["block_size"]
    return {"x": jnp.asarray(rng.standard_normal((T, M)), dtype)} | args


def _case(name: str, *sizes: int, tags: tuple[str, ...] = ("smoke",), **options) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, *sizes, **options), tags=frozenset(tags))


MECHANISM = Mechanism(
    name=_OP,
    source="vLLM 0.26.0 fused_moe/moe_permute_unpermute.py",
    op=permute,
    prepare=prepare,
    reference=_reference,
    outputs=_outputs,
    kernels={},
    cases=(
        _case("T9-A2-E8-M128", 9, 2, 8, 128),
        _case("T9-A3-E4-M24-expert-map-fp32", 9, 3, 4, 24, dtype="float32", mapped=True),
        _case("T12-A1-E16-M8-one-expert", 12, 1, 16, 8, hot=1),
        _case("T4096-A6-E64-M4096", 4096, 6, 64, 4096, tags=("full", "bench")),
    ),
    cost=_cost,
    captures=("moe/permute_unpermute*",),
    support=(
        (
            "any sizes",
            {
                "x": jax.ShapeDtypeStruct((16, 128), jnp.bfloat16),
                "topk_ids": jax.ShapeDtypeStruct((16, 6), jnp.int32),
                "num_experts": 8,
            },
        ),
    ),
)
