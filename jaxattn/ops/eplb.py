"""Expert-parallel load balancing: which experts to replicate and where to put the replicas."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32

from jaxattn import _checks, _mechanism
from jaxattn._mechanism import Args, Case, Mechanism

_OP = "eplb"
_KNUTH = 2654435769
"""floor(2^32 / golden ratio)."""


def eplb(
    load: Float[Array, "L E"],
    *,
    num_replicas: int,
    num_groups: int = 1,
    num_nodes: int = 1,
    num_ranks: int,
    previous: Int32[Array, "L P"] | None = None,
    implementation: str | None = None,
    config: Any = None,
) -> Int32[Array, "L P"]:
    """The logical expert in each of P = `num_replicas` physical slots; ranks share slots evenly, nodes share ranks.

    1. Groups of experts are packed on nodes: heaviest first, each to the lightest node that has room.
    2. Within a node the expert with the largest `load / replicas` gets one replica more, until all slots are taken.
    3. Replicas, each with its share of the load, are packed on the node's ranks as groups were on nodes.

    If groups do not divide evenly among nodes, one group and one node are assumed (global balancing). Equal loads are
    taken in the order of their ids. Loads are float32, shares and sums float64, as in vLLM; the policy runs on the host
    (in a callback under `jit`), as it does there, once in thousands of steps.

    Args:
        load: float32, tokens that each logical expert got in each layer; finite, not negative.
        num_replicas: P, physical experts of a layer; a multiple of `num_ranks`, at least E.
        num_groups: of consecutive experts, from which grouped routing chooses.
        num_nodes: of the cluster.
        num_ranks: devices, a multiple of `num_nodes`.
        previous: the placement until now; an expert that stays on its rank then keeps its slot.
        implementation: None or "reference".
        config: None.

    Raises:
        TypeError: dtypes; ValueError: sizes that do not divide each other, or loads that are negative or not finite.

    Source: https://github.com/deepseek-ai/eplb; vLLM 0.26.0 `distributed/eplb/policy/default.py`, whose order among
    equal loads is undefined.
    """
    args = prepare(
        load,
        num_replicas=num_replicas,
        num_groups=num_groups,
        num_nodes=num_nodes,
        num_ranks=num_ranks,
        previous=previous,
    )
    return _mechanism.run(MECHANISM, args, implementation, config)


# ---------------------------------------------------------------- statistics and use of a placement
def expert_load(
    ids: Int[Array, "T A"], num_experts: int, tokens: Int32[Array, ""] | int | None = None
) -> Int32[Array, " E"]:
    """(token, slot) pairs of each expert; ids outside 0..E-1 and tokens from `tokens` on (padding) do not count."""
    T = _checks.check_shapes("expert_load", ids=(ids, "T A"))["T"]
    _checks.check_count("expert_load", num_experts=num_experts)
    real = jnp.arange(T)[:, None] < (T if tokens is None else tokens)
    at = jnp.where(real & (ids >= 0), ids, num_experts).reshape(-1)
    return jnp.zeros(num_experts, jnp.int32).at[at].add(1, mode="drop")


def replicas(
    physical_to_logical: Int32[Array, "L P"], num_experts: int
) -> tuple[Int32[Array, "L E S"], Int32[Array, "L E"]]:
    """Slots of every logical expert in ascending order, filled up with -1, and how many there are.

    S = P - E + 1 slots suffice.
    """
    P = _checks.check_shapes("replicas", physical_to_logical=(physical_to_logical, "L P"))["P"]
    own = physical_to_logical[:, None, :] == jnp.arange(num_experts)[None, :, None]
    slots = jnp.sort(jnp.where(own, jnp.arange(P), P), -1)[..., : P - num_experts + 1].astype(jnp.int32)
    return jnp.where(slots < P, slots, -1), jnp.sum(own, -1, dtype=jnp.int32)


def choose_replica(
    ids: Int32[Array, "T A"], slots: Int32[Array, "E S"], counts: Int32[Array, " E"]
) -> Int32[Array, "T A"]:
    """Physical experts for the ids of one layer: token t takes replica `(t * 2654435769 mod 2^32) mod count`.

    Ids outside 0..E-1 give -1. Source: vLLM 0.26.0 `router/base_router.py` (Knuth's multiplicative hash).
    """
    T = _checks.check_shapes("choose_replica", ids=(ids, "T A"), slots=(slots, "E S"), counts=(counts, "E"))["T"]
    known = (ids >= 0) & (ids < slots.shape[0])
    at = jnp.where(known, ids, 0)
    spread = jnp.arange(T, dtype=jnp.uint32)[:, None] * jnp.uint32(_KNUTH)
    replica = (spread % jnp.maximum(counts[at], 1).astype(jnp.uint32)).astype(jnp.int32)
    return jnp.where(known, slots[at, replica], -1)


def rank_load(
    load: Float[np.ndarray, "L E"], physical_to_logical: Int[np.ndarray, "L P"], num_ranks: int
) -> Float[np.ndarray, "L ranks"]:
    """Load of every rank if each expert's load is shared evenly by its replicas (on the host)."""
    load, placed = np.asarray(load, np.float64), np.asarray(physical_to_logical)
    L, P = placed.shape
    counts = np.stack([np.bincount(row, minlength=load.shape[1]) for row in placed])
    return np.take_along_axis(load / np.maximum(counts, 1), placed, 1).reshape(L, num_ranks, P // num_ranks).sum(-1)


# ---------------------------------------------------------------- the policy
def prepare(load, *, num_replicas, num_groups=1, num_nodes=1, num_ranks, previous=None) -> Args:
    """Validate and complete the arguments of `eplb`; raises as it does."""
    E = _checks.check_shapes(_OP, load=(load, "L E"))["E"]
    _checks.check_dtype(_OP, "load", load, ("float32", _checks.F64))
    _checks.check_count(_OP, num_replicas=num_replicas, num_groups=num_groups, num_nodes=num_nodes, num_ranks=num_ranks)
    if num_replicas < E:
        raise ValueError(f"{_OP}: num_replicas must be at least the number of experts, got {num_replicas=} and E={E}")
    if num_groups % num_nodes:
        num_groups = num_nodes = 1  # global
    for what, whole, part in (
        (f"the number of experts E={E}", E, ("num_groups", num_groups)),
        (f"{num_replicas=}", num_replicas, ("num_ranks", num_ranks)),
        (f"{num_ranks=}", num_ranks, ("num_nodes", num_nodes)),
    ):
        if whole % part[1]:
            raise ValueError(f"{_OP}: {what} must be a multiple of {part[0]}={part[1]}")
    if previous is not None:
        _checks.check_shapes(_OP, load=(load, "L E"), previous=(previous, "L P"))
        _checks.check_dtype(_OP, "previous", previous, ("int32",))
        if previous.shape[1] != num_replicas:
            raise ValueError(f"{_OP}: previous must have {num_replicas=} columns, got {previous.shape[1]}")
    return {
        "load": load,
        "num_replicas": int(num_replicas),
        "num_groups": int(num_groups),
        "num_nodes": int(num_nodes),
        "num_ranks": int(num_ranks),
        "previous": previous,
    }


def _reference(load, *, num_replicas, num_groups, num_nodes, num_ranks, previous):
    """The policy on the host, directly or in a callback."""

    def place(load, previous):
        load = np.asarray(load, np.float32)
        if not np.isfinite(load).all() or (load < 0).any():
            raise ValueError(f"{_OP}: loads must be finite and not negative, got {load.min()} to {load.max()}")
        rows = [_layer(row, num_replicas, num_groups, num_nodes, num_ranks) for row in load]
        placed = np.asarray(rows, np.int32).reshape(len(load), num_replicas)
        return placed if previous is None else _keep_slots(placed, np.asarray(previous), num_ranks)

    if _checks.is_concrete(load) and (previous is None or _checks.is_concrete(previous)):
        return jnp.asarray(place(load, previous))
    out = jax.ShapeDtypeStruct((load.shape[0], num_replicas), jnp.int32)
    return jax.pure_callback(place, out, load, previous, vmap_method="sequential")


def _layer(load, num_replicas, num_groups, num_nodes, num_ranks):
    """The logical expert of each slot of one layer."""
    size = len(load) // num_groups
    groups = _pack(load.reshape(num_groups, size).sum(-1, dtype=np.float32), num_nodes)
    slots = []
    for node in groups:
        experts = np.concatenate([np.arange(g * size, (g + 1) * size) for g in node])
        chosen, counts = _replicate(load[experts], num_replicas // num_nodes)
        shares = (load[experts] / counts)[chosen]  # float32 / int64 = float64
        for rank in _pack(shares, num_ranks // num_nodes):
            slots += [experts[chosen[i]] for i in rank]
    return slots


def _pack(weights, packs):
    """Items of each pack: heaviest first, each into the lightest pack that is not full."""
    room = len(weights) // packs
    if room == 1:
        return [[i] for i in range(packs)]
    found, sums = [[] for _ in range(packs)], np.zeros(packs)
    for item in np.argsort(-weights, kind="stable"):
        pack = int(np.argmin(sums))
        found[pack].append(int(item))
        sums[pack] = np.inf if len(found[pack]) == room else sums[pack] + weights[item]
    return found


def _replicate(load, slots):
    """Expert of each slot, the first len(load) of which are the experts themselves, and replicas of each expert."""
    counts, chosen = np.ones(len(load), np.int64), list(range(len(load)))
    for _ in range(slots - len(load)):
        chosen.append(int(np.argmax(load / counts)))
        counts[chosen[-1]] += 1
    return np.asarray(chosen), counts


def _keep_slots(placed, previous, num_ranks):
    """Reorder within each rank so that experts that stay keep their slots; newcomers fill the rest in order."""
    result = placed.copy()
    width = placed.shape[1] // num_ranks
    for layer in range(len(placed)):
        for start in range(0, placed.shape[1], width):
            new = placed[layer, start : start + width].tolist()
            kept: list[int | None] = []
            for old in previous[layer, start : start + width].tolist():
                kept.append(old if old in new else None)
                if old in new:
                    new.remove(old)
            result[layer, start : start + width] = [new.pop(0) if x is None else x for x in kept]
    return result


def _outputs(**_):
    return ("physical_to_logical",)


def _cost(*, load, num_replicas, **_):
    """Host work; loads in, placement out."""
    L, E = load.shape
    return L * E * num_replicas, 4 * L * (E + num_replicas)


def make_inputs(
    rng: np.random.Generator,
    L: int,
    E: int,
    P: int,
    ranks: int,
    *,
    skew: float = 1.0,
    previous: bool = False,
    **options,
) -> Args:
    """Random arguments of `eplb` without equal loads: log-normal with standard deviation `skew`."""
    load = np.exp(skew * rng.standard_normal((L, E))) * 1000
    args: Args = {"load": jnp.asarray(load, jnp.float32), "num_replicas": P, "num_ranks": ranks}
    if previous:
        old = [rng.permutation(np.concatenate([np.arange(E), rng.integers(0, E, P - E)])) for _ in range(L)]
        args["previous"] = jnp.asarray(np.stack(old), jnp.int32)
    return args | options


def _case(name: str, *sizes: int, **options) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, *sizes, **options), tags=frozenset({"smoke"}))


MECHANISM = Mechanism(
    name=_OP,
    source="https://github.com/deepseek-ai/eplb; vLLM 0.26.0 distributed/eplb/policy/default.py",
    op=eplb,
    prepare=prepare,
    reference=_reference,
    outputs=_outputs,
    kernels={},
    cases=(
        _case("hierarchical-E32-P40", 3, 32, 40, 8, num_groups=4, num_nodes=2),
        _case("global-E16-P24", 2, 16, 24, 4),
        _case("skewed-E64-P96-previous", 2, 64, 96, 8, skew=3.0, num_groups=8, num_nodes=4, previous=True),
        _case("no-replicas-E8-P8", 1, 8, 8, 4, num_groups=3, num_nodes=2),
    ),
    cost=_cost,
    captures=("moe/eplb_rebalance*",),
    support=(
        (
            "any sizes",
            {"load": jax.ShapeDtypeStruct((2, 32), jnp.float32), "num_replicas": 40, "num_ranks": 8},
        ),
    ),
)
