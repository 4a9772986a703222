"""Ways to plant a fault in a twin that has switches."""

from collections.abc import Callable
from typing import Any

import numpy as np

from parity.mutations import Args, Arrays, Fault, Implementation

type Twin = Callable[..., Arrays]

_KEPT: dict[int, tuple[Args, dict[Any, Arrays]]] = {}
"""Outputs of twins for the last arguments: every fault is compared with the same twin, and asked more than once."""


def _once(twin: Twin, args: Args, wide: bool, *on: Any) -> Arrays:
    """`twin(args, wide, *on)`, computed once while other arguments do not replace these."""
    if id(args) not in _KEPT:
        while len(_KEPT) >= 4:
            del _KEPT[next(iter(_KEPT))]
        _KEPT[id(args)] = args, {}
    found, key = _KEPT[id(args)][1], (twin, wide, *on)
    if key not in found:
        found[key] = twin(args, wide, *on)
    return found[key]


def fault(name: str, what: str, twin: Twin, on: Any, applies: Callable[[Args], bool] = lambda args: True) -> Fault:
    """The twin with its switches thrown, where that changes a number by more than a rounding could.

    Args:
        name: of the fault.
        what: is wrong.
        twin: `twin(args, wide, switches)`.
        on: switches.
        applies: further condition.
    """

    def run(args: Args, wide: bool) -> Arrays:
        return _once(twin, args, wide, on)

    return Fault(name=name, what=what, run=run, applies=lambda args: applies(args) and _differ(twin, run, args))


def _differ(twin: Twin, run: Implementation, args: Args) -> bool:
    """True if any bit of the outputs changes."""
    right, wrong = _once(twin, args, False), run(args, False)
    return any(
        np.ascontiguousarray(x).tobytes() != np.ascontiguousarray(wrong[name]).tobytes() for name, x in right.items()
    )
