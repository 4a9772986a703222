"""What may be wrong with the indexer: the twin with a switch thrown."""

from parity.faults._plant import fault
from parity.mutations import Args, Faults
from parity.twins.indexer import Switches, run

_WHAT = {
    "negative-scores": ("negative scores count", Switches(no_relu=True)),
    "keys-unscaled": ("keys are not scaled", Switches(no_scale=True)),
    "one-entry-too-many": ("a token sees the entry behind its last", Switches(last_too_many=1)),
    "worst-entries": ("the worst entries are chosen", Switches(smallest=True)),
}


def _dense(args: Args) -> bool:
    """The twin reads no pages."""
    return args.get("page") is None


def _chooses(args: Args) -> bool:
    return _dense(args) and args["topk"] is not None


def _ends_early(args: Args) -> bool:
    return _dense(args) and bool((args["ends"] < len(args["k"])).any())


_WHERE = {"worst-entries": _chooses, "one-entry-too-many": _ends_early}

FAULTS = Faults(
    twin=run,
    faults=tuple(fault(name, what, run, on, _WHERE.get(name, _dense)) for name, (what, on) in _WHAT.items()),
)
