"""What may be wrong with a Hadamard rotation: another matrix in the twin."""

import numpy as np

from parity.mutations import Args, Arrays, Fault, Faults
from parity.twins.hadamard_transform import matrix, run


def _size(args: Args) -> int:
    return args.get("group") or args["x"].shape[1]


def _walsh(args: Args, wide: bool) -> Arrays:
    """Rows in the order of their sign changes."""
    h = matrix(_size(args))
    order = np.argsort((np.diff(h, axis=1) != 0).sum(1), kind="stable")
    return run(args, wide, h[order] / np.sqrt(len(h)))


def _unnormalised(args: Args, wide: bool) -> Arrays:
    return run(args, wide, matrix(_size(args)))


def _one_percent(args: Args, wide: bool) -> Arrays:
    h = matrix(_size(args))
    return run(args, wide, 1.01 * h / np.sqrt(len(h)))


def _unsigned_corner(args: Args, wide: bool) -> Arrays:
    """The last butterfly subtracts where it should add: the lower right quarter has the wrong sign."""
    h = matrix(_size(args))
    half = len(h) // 2
    h[half:, half:] *= -1
    return run(args, wide, h / np.sqrt(len(h)))


FAULTS = Faults(
    twin=run,
    faults=(
        Fault(name="walsh-order", what="rows are in sequency order", run=_walsh, applies=lambda a: _size(a) > 2),
        Fault(name="unnormalised", what="1 / sqrt(n) is missing", run=_unnormalised, applies=lambda a: _size(a) > 1),
        Fault(name="output-1-percent", what="the output is 1 % too large", run=_one_percent),
        Fault(
            name="last-butterfly",
            what="the last step does not change the sign",
            run=_unsigned_corner,
            applies=lambda a: _size(a) > 1,
        ),
    ),
)
