"""What may be wrong with the indexer: the twin with a switch thrown."""

from parity.faults._plant import fault
from parity.mutations import Args, Faults
from parity.twins.indexer import Switches, run

_WHAT = {
    "negative-scores": ("negative scores count", Switches(no_relu=True)),
    "keys-unscaled": ("keys are not scaled", Switches(no_scale=True)),
    "mxfp4-one-scale": ("MXFP4: a key has one scale", Switches(one_scale=True)),
    "mxfp4-nibbles-swapped": ("MXFP4: the two numbers of a byte change places in keys", Switches(swapped=True)),
    "mxfp4-queries-unscaled": ("MXFP4: queries are not scaled", Switches(queries_unscaled=True)),
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


def _mxfp4(args: Args) -> bool:
    return _dense(args) and args.get("q_scale") is not None


_WHERE = {name: _mxfp4 for name in _WHAT if name.startswith("mxfp4")}
_WHERE |= {"worst-entries": _chooses, "one-entry-too-many": _ends_early}

FAULTS = Faults(
    twin=run,
    faults=tuple(fault(name, what, run, on, _WHERE.get(name, _dense)) for name, (what, on) in _WHAT.items()),
)
