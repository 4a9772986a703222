"""What a foreign capture means in our terms: one adapter per mechanism, under the mechanism's stem."""

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
    expected: Callable[["Capture"], Arrays]
    """The captured outputs in the op's layout."""
    convention: Callable[["Capture", Arrays], Arrays]
    """The op's outputs in the convention of the capture (for example: is the sink part of the log-sum-exp?)."""
    explain: Callable[["Capture", dict[str, Any]], Explained | None]
    """Known foreign roundings of this capture, given the op's arguments; None where there are none."""


def find(mechanism: str) -> Adapter:
    """The adapter of a mechanism.

    Raises:
        ValueError: the mechanism names captures, but nobody wrote what they mean.
    """
    from parity.cases import (
        cache_write,
        combine_partials,
        hadamard_transform,
        merge_states,
        paged_attention,
        quantize_fp8,
        quantize_int8,
        quantize_mx,
        rms_norm_quant,
        scaled_matmul,
        silu_mul_quant,
        weight_only_matmul,
    )

    adapters = {
        "paged_attention": paged_attention.ADAPTER,
        "cache_write": cache_write.ADAPTER,
        "combine_partials": combine_partials.ADAPTER,
        "hadamard_transform": hadamard_transform.ADAPTER,
        "merge_states": merge_states.ADAPTER,
        "quantize_fp8": quantize_fp8.ADAPTER,
        "quantize_int8": quantize_int8.ADAPTER,
        "quantize_mx": quantize_mx.ADAPTER,
        "rms_norm_quant": rms_norm_quant.ADAPTER,
        "scaled_matmul": scaled_matmul.ADAPTER,
        "silu_mul_quant": silu_mul_quant.ADAPTER,
        "weight_only_matmul": weight_only_matmul.ADAPTER,
    }
    if mechanism not in adapters:
        raise ValueError(
            f"{mechanism} has captures but no adapter; write parity/cases/{mechanism}.py and list it in "
            f"parity/cases/__init__.py (there are: {', '.join(adapters)})"
        )
    return adapters[mechanism]
