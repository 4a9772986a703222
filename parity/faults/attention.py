"""What may be wrong with packed attention: the faults of paged attention, seen through the twin's translation."""

import numpy as np

from parity.faults import paged_attention
from parity.mutations import Args, Arrays, Fault, Faults
from parity.twins.attention import packed, paged, run

_OTHER = ("nan-leaked", "pages-swapped", "k-scale-ignored", "v-scale-ignored")
"""Faults of pages and scales, which packed attention has not."""


def _translated(fault: Fault) -> Fault:
    def faulty(args: Args, wide: bool) -> Arrays:
        return packed(args, fault.run(paged(args), wide))

    return Fault(name=fault.name, what=fault.what, run=faulty, applies=lambda args: fault.applies(paged(args)))


def _starts(args: Args) -> tuple[np.ndarray, np.ndarray]:
    x = paged(args)
    return x["query_start"], np.concatenate([[0], np.cumsum(x["lengths"])])


def _next_sequence(args: Args, wide: bool) -> Arrays:
    """The first sequence starts one key late."""
    keys = _starts(args)[1].astype(np.int32)
    keys[0] += 1
    return run(args | {"key_start": keys}, wide)


FAULTS = Faults(
    twin=run,
    faults=(
        *(_translated(fault) for fault in paged_attention.FAULTS.faults if fault.name not in _OTHER),
        Fault(
            name="first-key-dropped",
            what="the first sequence starts one key late",
            run=_next_sequence,
            applies=lambda args: (
                args.get("query_start") is not None
                and args.get("window") is None
                and bool(np.diff(_starts(args)[0])[0] and np.diff(_starts(args)[1])[0] > 1)
            ),
        ),
    ),
)
