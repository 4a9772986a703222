"""What may be wrong with the sorting of pairs by expert: the twin with a switch thrown."""

from parity.faults._plant import fault
from parity.mutations import Faults
from parity.twins.align_block_size import Switches, run

_WHAT = {
    "reversed": ("within an expert the last pair comes first", Switches(reverse=True)),
    "empty-blocks": ("experts without tokens take a block", Switches(empty_blocks=True)),
    "padding-is-pair-0": ("padding rows point to pair 0", Switches(pad_zero=True)),
    "pair-lost": ("the last pair is lost", Switches(one_less=True)),
}

FAULTS = Faults(twin=run, faults=tuple(fault(name, what, run, on) for name, (what, on) in _WHAT.items()))
