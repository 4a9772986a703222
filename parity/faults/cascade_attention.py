"""What may be wrong with a cascade: its numpy twin with a switch thrown, or changed arguments."""

import numpy as np

from parity.mutations import Args, Fault, Faults, Implementation
from parity.twins.cascade_attention import Switches, run


def _switched(**switches) -> Implementation:
    return lambda args, wide: run(args, wide, Switches(**switches))


def _shares(args: Args) -> bool:
    """Some request with queries shares something."""
    counts = np.diff(args["query_start"])
    return any(
        end > 0 and counts[first:last].sum() > 0
        for starts, ends in zip(args["group_start"], args["shared"], strict=True)
        for first, last, end in zip(starts[:-1], starts[1:], ends, strict=True)
    )


def _finite_sinks(args: Args) -> bool:
    return _shares(args) and args.get("sinks") is not None


def _many_queries(args: Args) -> bool:
    """A group with two queries or more: a causal mask hides keys from the first."""
    starts, ends = args["group_start"][0], args["shared"][0]
    counts = np.diff(args["query_start"])
    return any(e > 0 and counts[a:b].sum() > 1 for a, b, e in zip(starts[:-1], starts[1:], ends, strict=True))


FAULTS = Faults(
    twin=run,
    faults=(
        Fault(
            name="sink-twice",
            what="the sink joins prefix and suffix",
            run=_switched(sink_twice=True),
            applies=_finite_sinks,
        ),
        Fault(
            name="sink-without-weight",
            what="the suffix's weight leaves the sink out",
            run=_switched(no_sink_weight=True),
            applies=_finite_sinks,
        ),
        Fault(
            name="causal-prefix",
            what="prefixes get a causal mask",
            run=_switched(causal_prefix=True),
            applies=_many_queries,
        ),
        Fault(
            name="prefix-counted-twice",
            what="the suffix repeats the last page of the prefix",
            run=lambda args, wide: run(args, wide, Switches(overlap=args["k_pages"].shape[1])),
            applies=_shares,
        ),
        Fault(
            name="log-base-2",
            what="natural logarithms are weighed as powers of two",
            run=_switched(wrong_base=True),
            applies=_shares,
        ),
    ),
)
