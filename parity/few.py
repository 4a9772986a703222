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


def kernel(mechanism: Mechanism, capture: "Capture") -> str | None:
    """The kernel that is interpreted on a capture; None where none supports it."""
    try:
        with _mosaic.interpret():
            return execution.supported(mechanism, cases.find(mechanism.name).arguments(capture))[0]
    except Exception:  # the comparison meets it again and reports it
        return None


def first(pairs: Sequence[tuple[Mechanism, "Capture"]]) -> set[tuple[str, str]]:
    """(mechanism, capture) of the first pair that each kernel supports."""
    missing = {mechanism.name: set(mechanism.kernels) for mechanism, _ in pairs}
    found = set()
    for mechanism, capture in pairs:
        if missing[mechanism.name] and (name := kernel(mechanism, capture)) in missing[mechanism.name]:
            missing[mechanism.name].remove(name)
            found.add((mechanism.name, capture.name))
    return found


def left_out(pairs: Sequence[tuple[Mechanism, "Capture"]]) -> list[str]:
    """Why the kernel of each pair is not interpreted, "" where it is: on the first capture that it supports.

    A kernel that does not support a capture is not left out: saying so takes no time.

    Args:
        pairs: in the order of their size.
    """
    seen: set[tuple[str, str | None]] = set()
    reasons = []
    for mechanism, capture in pairs:
        key = mechanism.name, kernel(mechanism, capture)
        reasons.append(REASON if key[1] is not None and key in seen else "")
        seen.add(key)
    return reasons
