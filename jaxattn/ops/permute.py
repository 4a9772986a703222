"""Rows of tokens sorted by expert, with offsets and the way back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxattn import _checks, _mechanism
from jaxattn._mechanism import Args, Case, Kernel, Mechanism
from jaxattn.ops import align_block_size
from pallas_kernels import _mosaic
from pallas_kernels import permute as mosaic

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
        implementation: None (choose), "reference" or "mosaic".
        config: launch configuration of the named kernel.

    Returns:
        `permuted`: rows behind the last expert (pairs that take no part) are 0; `offsets`: expert e has rows offsets[e]
        to offsets[e + 1] - 1; `positions`: row of each (token, slot), -1 for pairs that take no part.

    Raises:
        TypeError: dtypes; ValueError: shapes or sizes;
        NotImplementedError: the named implementation cannot run this call.

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


def _struct(dtype: str, M: int) -> Args:
    ids = jax.ShapeDtypeStruct((2048, 8), jnp.int32)
    return {"x": jax.ShapeDtypeStruct((2048, M), jnp.dtype(dtype)), "topk_ids": ids, "num_experts": 256}


MECHANISM = Mechanism(
    name=_OP,
    source="vLLM 0.26.0 fused_moe/moe_permute_unpermute.py",
    op=permute,
    prepare=prepare,
    reference=_reference,
    outputs=_outputs,
    kernels={
        "mosaic": Kernel(
            run=mosaic.permute,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=(
        _case("T9-A2-E8-M128", 9, 2, 8, 128),
        _case("T9-A3-E4-M24-expert-map-fp32", 9, 3, 4, 24, dtype="float32", mapped=True),
        _case("T12-A1-E16-M8-one-expert", 12, 1, 16, 8, hot=1),
        _case("T22-A6-E40-M256-expert-map-fp32", 22, 6, 40, 256, dtype="float32", mapped=True),
        _case("T13-A3-E8-M200-one-expert-fp16", 13, 3, 8, 200, dtype="float16", hot=3),
        _case("T40-A8-E130-M128-int8", 40, 8, 130, 128, dtype="int8"),
        _case("T256-A8-E256-M7168-fp8", 256, 8, 256, 7168, dtype="float8_e4m3fn", tags=("full",)),
        _case("T1000-A10-E512-M2880", 1000, 10, 512, 2880, tags=("full",), mapped=True),
        _case("T4096-A6-E64-M4096", 4096, 6, 64, 4096, tags=("full", "bench")),
    ),
    cost=_cost,
    captures=("moe/permute_unpermute*",),
    support=(
        *(
            (f"{dtype}, M {M}", _struct(dtype, M))
            for dtype, M in (
                ("bfloat16", 4096),
                ("bfloat16", 2880),
                ("float16", 7168),
                ("float32", 4096),
                ("float8_e4m3fn", 7168),
                ("int8", 4096),
                ("bfloat16", 64),
                ("float64", 4096),
            )
        ),
    ),
)
