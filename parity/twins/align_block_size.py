"""Sorting by expert with padded blocks, pair by pair, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import numpy as np

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    reverse: bool = False
    """Within an expert the last pair comes first."""
    empty_blocks: bool = False
    """Experts without tokens take a block."""
    pad_zero: bool = False
    """Padding rows point to pair 0."""
    unmapped: bool = False
    """The expert map is ignored."""
    one_less: bool = False
    """The last expert's last pair is lost."""


NONE = Switches()


def local(args: Args, unmapped: bool = False) -> list[int]:
    """The expert of every pair, -1 for none."""
    ids, table, E = args["topk_ids"].reshape(-1).tolist(), args.get("expert_map"), args["num_experts"]
    if table is not None and not unmapped:
        ids = [int(table[i]) if 0 <= i < len(table) else -1 for i in ids]
    return [i if 0 <= i < E else -1 for i in ids]


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """The three outputs from the op's arguments as numpy arrays."""
    del wide
    experts, size, E = local(args, on.unmapped), args["block_size"], args["num_experts"]
    pairs = len(experts)
    rows, blocks = [], []
    for e in range(E):
        own = [i for i, x in enumerate(experts) if x == e]
        own = own[::-1] if on.reverse else own
        count = max(-(-len(own) // size), int(on.empty_blocks))
        rows += own + [0 if on.pad_zero else pairs] * (count * size - len(own))
        blocks += [e] * count
    used = len(rows)
    if on.one_less:
        rows[max(i for i, r in enumerate(rows) if r < pairs)] = pairs
    most = -(-(pairs + min(pairs, E) * (size - 1)) // size) * size
    rows, blocks = rows[:most], blocks[: most // size]
    rows += [pairs] * (most - len(rows))
    blocks += [-1] * (most // size - len(blocks))
    return {
        "sorted_ids": np.asarray(rows, np.int32),
        "expert_ids": np.asarray(blocks, np.int32),
        "padded": np.asarray([used], np.int32),
    }
