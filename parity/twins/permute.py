"""Rows sorted by expert, pair by pair, with switches for faults."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.twins.align_block_size import local

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Departures from the op; the default has none."""

    reverse: bool = False
    """Within an expert the last pair comes first."""
    pair_rows: bool = False
    """Pair i takes row i of x instead of its token's."""
    inclusive: bool = False
    """Offsets say where experts end."""
    forward: bool = False
    """Positions say which pair a row holds."""


NONE = Switches()


def run(args: Args, wide: bool, on: Switches = NONE) -> Arrays:
    """The three outputs from the op's arguments as numpy arrays."""
    experts, E = local(args), args["num_experts"]
    x, shape = args["x"], args["topk_ids"].shape
    order, counts = [], []
    for e in range(E):
        own = [i for i, found in enumerate(experts) if found == e]
        order += own[::-1] if on.reverse else own
        counts.append(len(own))
    permuted = np.zeros((len(experts), x.shape[1]), np.float64 if wide else x.dtype)
    positions = np.full(len(experts), -1, np.int32)
    for row, pair in enumerate(order):
        permuted[row] = x[pair % len(x) if on.pair_rows else pair // shape[1]]
        positions[row if on.forward else pair] = pair if on.forward else row
    offsets = np.cumsum([0, *counts])
    offsets = np.append(offsets[1:], offsets[-1:]) if on.inclusive else offsets
    return {"permuted": permuted, "offsets": offsets.astype(np.int32), "positions": positions.reshape(shape)}
