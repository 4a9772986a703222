"""Which kernels run where time is short: each on its smallest capture, because interpreting takes long."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxattn._mechanism import Mechanism
from pallas_kernels import _mosaic
from parity import cases, execution

if TYPE_CHECKING:
    from parity.captures import Capture

REASON = "left out to save time: without a GPU a kernel is interpreted on its smallest capture only; --full runs all"


def size(capture: "Capture") -> int:
    """Bytes of the inputs, for what the order of cases goes by."""
    return sum(x.nbytes for x in capture.inputs.values())


def kernels(pairs: Sequence[tuple[Mechanism, "Capture"]]) -> list[str | None]:
    """The interpreted kernel that supports each pair, None where there is none."""
    found: list[str | None] = []
    for mechanism, capture in pairs:
        try:
            with _mosaic.interpret():
                kernel, _ = execution.supported(mechanism, cases.find(mechanism.name).arguments(capture))
        except Exception:  # the comparison meets it again and reports it
            kernel = None
        found.append(kernel)
    return found


def left_out(pairs: Sequence[tuple[Mechanism, "Capture"]]) -> list[str]:
    """Why the kernel of each pair is not interpreted, "" where it is: on the first capture that it supports.

    A kernel that does not support a capture is not left out: saying so takes no time.

    Args:
        pairs: in the order of their size.
    """
    seen: set[tuple[str, str | None]] = set()
    reasons = []
    for (mechanism, _), kernel in zip(pairs, kernels(pairs), strict=True):
        key = mechanism.name, kernel
        reasons.append(REASON if kernel is not None and key in seen else "")
        seen.add(key)
    return reasons
