"""What may be wrong with sparse attention: the twin with a switch thrown, or changed arguments."""

import numpy as np

from parity.faults._plant import fault
from parity.mutations import Args, Arrays, Fault, Faults
from parity.twins.sparse_mla import Switches, run


def _lists(args: Args) -> bool:
    """Lists with a length that leaves out several valid entries of one token."""
    counts, indices = args.get("counts"), args["indices"]
    if counts is None:
        return False
    rows = len(args["cache"]) * (args.get("page") or 1)
    behind = (np.arange(indices.shape[1]) >= counts[:, None]) & (indices >= 0) & (indices < rows)
    return int(behind.sum(1).max()) > 4


def _sinks(args: Args) -> bool:
    return args.get("sinks") is not None and bool((args["sinks"] > 1).any())


def _lse(args: Args) -> bool:
    return bool(args.get("return_lse"))


def _off_by_one(args: Args, wide: bool) -> Arrays:
    return run(args | {"indices": np.where(args["indices"] >= 0, args["indices"] + 1, args["indices"])}, wide)


def _swapped(args: Args, wide: bool) -> Arrays:
    out = run(args, wide)
    o = out["o"].copy()
    o[:, [0, -1]] = o[:, [-1, 0]]
    return out | {"o": o}


def _plain(args: Args) -> bool:
    return args.get("format", "plain") == "plain"


FAULTS = Faults(
    twin=run,
    faults=(
        fault("lengths-ignored", "entries behind a list's length count", run, Switches(ignore_counts=True), _lists),
        fault("sinks-ignored", "sinks take no weight", run, Switches(no_sink=True), _sinks),
        fault(
            "sink-in-lse",
            "the log-sum-exp holds the sink",
            run,
            Switches(sink_in_lse=True),
            lambda a: _lse(a) and _sinks(a),
        ),
        fault("one-cache", "the second cache is ignored", run, Switches(first_only=True)),
        fault("codes-unscaled", "V4's codes are not scaled", run, Switches(unscaled=True)),
        fault("scale-5-percent", "the softmax scale is 5 % too large", run, Switches(scale=1.05)),
        fault("lse-base-2", "the log-sum-exp is in base 2", run, Switches(base2=True), _lse),
        Fault(name="next-row", what="every index means the next row", run=_off_by_one, applies=_plain),
        Fault(name="heads-swapped", what="two heads are exchanged", run=_swapped),
    ),
)
