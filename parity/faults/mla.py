"""What may be wrong with latent attention: the twin with a switch thrown, or changed arguments."""

import numpy as np

from parity.faults._plant import fault
from parity.mutations import Args, Arrays, Fault, Faults
from parity.twins.mla import Switches, run


def _lse(args: Args) -> bool:
    return bool(args.get("return_lse"))


def _swapped(args: Args, wide: bool) -> Arrays:
    out = run(args, wide)
    o = out["o"].copy()
    o[:, [0, -1]] = o[:, [-1, 0]]
    return out | {"o": o}


def _other_pages(args: Args, wide: bool) -> Arrays:
    table = args["page_table"].copy()
    used = -(-args["lengths"] // args["cache"].shape[1])
    for b, n in enumerate(used.tolist()):
        table[b, :n] = np.roll(table[b, :n], 1)
    return run(args | {"page_table": table}, wide)


def _partial(args: Args) -> bool:
    """A request of several pages, the last of which is not full."""
    page = args["cache"].shape[1]
    return bool(((args["lengths"] > page) & (args["lengths"] % page > 0)).any())


FAULTS = Faults(
    twin=run,
    faults=(
        fault("scale-5-percent", "the softmax scale is 5 % too large", run, Switches(scale=1.05)),
        fault("no-rotary-part", "scores lack the rotary part", run, Switches(no_rotary=True)),
        fault("own-row-hidden", "a query does not see its own row", run, Switches(last_hidden=True)),
        fault("value-from-the-end", "the value is the last part of a row", run, Switches(value_last=True)),
        fault("lse-base-2", "the log-sum-exp is in base 2", run, Switches(base2=True), _lse),
        Fault(name="heads-swapped", what="two heads are exchanged", run=_swapped),
        Fault(name="pages-shifted", what="pages are read in another order", run=_other_pages, applies=_partial),
    ),
)
