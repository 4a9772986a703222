"""Load balancing with exact fractions, with switches for faults."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    lightest_first: bool = False
    """Packing starts with the lightest item."""
    whole_load: bool = False
    """Replicas are packed as if each had the whole load."""
    by_load: bool = False
    """The heaviest expert gets every replica."""
    no_groups: bool = False
    """Groups may be split among nodes."""
    round_robin: bool = False
    """Items are dealt out in turn."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """The placement from the op's arguments; shares and sums are fractions, which no rounding can reorder."""
    del wide
    load, P, ranks = args["load"], args["num_replicas"], args["num_ranks"]
    groups, nodes = args.get("num_groups", 1), args.get("num_nodes", 1)
    if groups % nodes or on.no_groups:
        groups = nodes = 1
    placed = [_layer([Fraction(float(x)) for x in np.float32(row)], P, groups, nodes, ranks, on) for row in load]
    if args.get("previous") is not None:
        placed = [_keep(new, old.tolist(), P // ranks) for new, old in zip(placed, args["previous"], strict=True)]
    return {"physical_to_logical": np.asarray(placed, np.int32)}


def _layer(load, P, groups, nodes, ranks, on):
    size, slots = len(load) // groups, []
    for node in _pack([sum(load[g * size : (g + 1) * size]) for g in range(groups)], nodes, on):
        experts = [g * size + i for g in node for i in range(size)]
        count = dict.fromkeys(experts, 1)
        chosen = list(experts)
        while len(chosen) < P // nodes:
            worst = max(experts, key=lambda e: load[e] if on.by_load else load[e] / count[e])
            chosen.append(worst)
            count[worst] += 1
        shares = [load[e] if on.whole_load else load[e] / count[e] for e in chosen]
        slots += [chosen[i] for rank in _pack(shares, ranks // nodes, on) for i in rank]
    return slots


def _pack(weights, packs, on):
    room = len(weights) // packs
    if room == 1:
        return [[i] for i in range(packs)]
    found: list[list[int]] = [[] for _ in range(packs)]
    for n, item in enumerate(
        sorted(range(len(weights)), key=lambda i: weights[i] if on.lightest_first else -weights[i])
    ):
        free = [pack for pack in range(packs) if len(found[pack]) < room]
        at = n % packs if on.round_robin else min(free, key=lambda pack: sum(weights[i] for i in found[pack]))
        found[at].append(item)
    return found


def _keep(new, old, width):
    result = []
    for start in range(0, len(new), width):
        rest, kept = new[start : start + width], []
        for x in old[start : start + width]:
            kept.append(x if x in rest else None)
            if x in rest:
                rest.remove(x)
        result += [rest.pop(0) if x is None else x for x in kept]
    return result
