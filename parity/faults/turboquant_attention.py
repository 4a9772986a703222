"""What may be wrong with attention over packed slots: the twin with a switch thrown, changed arguments or outputs."""

from collections.abc import Callable

import numpy as np

from parity.mutations import Args, Fault, Faults, Implementation
from parity.twins.turboquant_attention import Switches, run


def _switched(**switches) -> Implementation:
    return lambda args, wide: run(args, wide, Switches(**switches))


def _with_args(change: Callable[[Args], Args]) -> Implementation:
    return lambda args, wide: run(args | change(args), wide)


def _on_output(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Implementation:
    def faulty(args: Args, wide: bool) -> dict[str, np.ndarray]:
        out = run(args, wide)
        return out | {name: change(out[name].copy()).astype(out[name].dtype)}

    return faulty


def _zero_row(o: np.ndarray) -> np.ndarray:
    o[len(o) // 2, o.shape[1] // 2] = 0
    return o


def _nan(o: np.ndarray) -> np.ndarray:
    o[0, -1, -1] = np.nan
    return o


def _long(args: Args) -> bool:
    """Some request with queries has keys enough to be confused about."""
    return bool((args["lengths"][np.diff(args["query_start"]) > 0] > 8).any())


def _rotated(args: Args) -> bool:
    return args["preset"] != "k8v4" and _long(args)


def _nibbles(args: Args) -> bool:
    return args["preset"] != "3bit_nc"


def _hidden(args: Args) -> bool:
    return args.get("stored") is not None and bool((args["stored"] < args["lengths"]).any())


def _prefill(args: Args) -> bool:
    return bool((np.diff(args["query_start"]) > 1).any())


def _fault(name: str, what: str, run: Implementation, applies: Callable[[Args], bool] = lambda args: True) -> Fault:
    return Fault(name=name, what=what, run=run, applies=applies)


FAULTS = Faults(
    twin=run,
    faults=(
        _fault("norm-correction-forgotten", "levels keep their length", _switched(correct=False), _rotated),
        _fault("query-not-rotated", "queries are not rotated", _switched(rotate=False), _rotated),
        _fault("nibbles-swapped", "the two codes of a byte are exchanged", _switched(swap=True), _nibbles),
        _fault("last-key-dropped", "the newest visible key is not seen", _switched(hide_last_key=True), _long),
        _fault("stored-ignored", "hidden keys are seen", _switched(all_stored=True), _hidden),
        _fault("not-causal", "a query sees later keys", _switched(causal=False), _prefill),
        _fault(
            "scale-1-percent",
            "the softmax scale is 1 % too large",
            _with_args(lambda a: {"scale": 1.01 * (a.get("scale") or a["q"].shape[2] ** -0.5)}),
            _long,
        ),
        _fault("output-1-percent", "the output is 1 % too large", _on_output("o", lambda o: o * o.dtype.type(1.01))),
        _fault("row-zeroed", "one row of one head is zero", _on_output("o", _zero_row)),
        _fault("nan-element", "one element is NaN", _on_output("o", _nan)),
        _fault(
            "lse-base-2",
            "the log-sum-exp is in base 2",
            _on_output("lse", lambda x: x / np.log(2)),
            lambda a: bool(a.get("return_lse")),
        ),
    ),
)
