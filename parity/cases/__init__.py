"""What a foreign capture means in our terms: one adapter per mechanism, under the mechanism's stem."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from parity.captures import Capture

type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Output:
    """How one output is laid out and judged."""

    axes: tuple[str, ...]
    """Name of each axis, in order."""
    slice_rank: int
    """The first `slice_rank` axes index the slices that are judged one by one; the rest lies inside a slice."""
    rule: str
    """Name of a rule of `parity.tolerances` for comparisons with a capture."""
    contract: str
    """Name of the rule for the kernel against our own reference."""
    note: str = ""
    """An explained difference, with a link; it is printed, and widens nothing."""


@dataclass(frozen=True, kw_only=True)
class Explained:
    """Why a capture is further from the truth than our reference, with numbers instead of a wider tolerance.

    `rounded` repeats the foreign rounding steps in numpy; its own error bounds the capture's, in place of the
    reference's. `wide` is the same computation in float64, so that the bound stands without our reference.
    """

    note: str
    """What the foreign code does, with a link."""
    rounded: Arrays
    """The outputs that are explained; the others are judged as usual."""
    wide: Arrays


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Translation between a capture's names, layouts and conventions and those of an op."""

    arguments: Callable[["Capture"], dict[str, Any]]
    """The op's keyword arguments; whatever the op promises not to read is poisoned."""
    outputs: Mapping[str, Output]
    """Output name, shared by capture and op -> how it is judged."""
    expected: Callable[["Capture"], Arrays] = lambda capture: dict(capture.outputs)
    """The captured outputs in the op's layout."""
    convention: Callable[["Capture", Arrays], Arrays] = lambda capture, outputs: outputs
    """The op's outputs in the convention of the capture (for example: is the sink part of the log-sum-exp?)."""
    explain: Callable[["Capture", dict[str, Any]], Explained | None] = lambda capture, args: None
    """Known foreign roundings of this capture, given the op's arguments; None where there are none."""


def find(mechanism: str) -> Adapter:
    """The adapter of a mechanism.

    Raises:
        ValueError: the mechanism names captures, but nobody wrote what they mean.
    """
    name = f"{__name__}.{mechanism}"
    if importlib.util.find_spec(name) is None:
        raise ValueError(f"{mechanism} has captures but no adapter; write parity/cases/{mechanism}.py")
    return importlib.import_module(name).ADAPTER
