"""What may be wrong with the combination of N partial results: its twin with a switch thrown, or changed arguments."""

from collections.abc import Callable

import numpy as np

from parity.mutations import Args, Arrays, Fault, Faults, Implementation
from parity.twins.combine_partials import Switches, run


def _switched(**switches) -> Implementation:
    return lambda args, wide: run(args, wide, Switches(**switches))


def _on_output(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Implementation:
    def faulty(args: Args, wide: bool) -> Arrays:
        out = run(args, wide)
        return out | {name: change(out[name].copy()).astype(out[name].dtype)}

    return faulty


def _zero_row(x: np.ndarray) -> np.ndarray:
    norms = np.abs(x.astype(np.float64)).max(-1)
    x[np.unravel_index(np.argmax(norms), norms.shape)] = 0
    return x


def _ranks(args: Args) -> bool:
    """Several rows in which two ranks matter, so that a wrong weight shows beyond rounding."""
    lse = np.where(np.isfinite(args["lse"]), args["lse"], -np.inf)
    if len(lse) < 2:
        return False
    second, first = np.sort(lse, axis=0)[-2:]
    return bool((second > np.where(np.isfinite(first), first, 0) - 4).sum() > 1)


def _marked(value: float) -> Callable[[Args], bool]:
    return lambda args: bool((np.isnan(args["lse"]) if np.isnan(value) else args["lse"] == value).any())


def _has_empty(args: Args) -> bool:
    return not np.isfinite(args["lse"]).all()


def _returns_corrected(args: Args) -> bool:
    return bool(args.get("return_corrected"))


def _first_rank_matters(args: Args) -> bool:
    """The sum over ranks is judged on the mechanism's own cases; vLLM leaves it to a collective."""
    lse = np.where(np.isfinite(args["lse"]), args["lse"], -np.inf)
    return bool((lse[0] > lse.max(0) - 2)[np.isfinite(lse[0])].any())


def _judged(args: Args) -> bool:
    return not _has_captured_shape(args) and _first_rank_matters(args)


def _has_captured_shape(args: Args) -> bool:
    """Captures hold no sum; they have an empty rank for a whole sequence, only one NaN and at most one +inf."""
    nan, inf = np.isnan(args["lse"]).sum(), (args["lse"] == np.inf).sum()
    return _returns_corrected(args) and nan == 1 and (inf == 0 or (inf == 1 and args["o"].shape[1:] == (2, 3, 64)))


def _fault(name: str, what: str, run: Implementation, applies: Callable[[Args], bool] = lambda args: True) -> Fault:
    return Fault(name=name, what=what, run=run, applies=applies)


FAULTS = Faults(
    twin=run,
    faults=(
        _fault("other-base", "log-sum-exps are taken for the other base", _switched(other_base=True), _ranks),
        _fault("nan-kept", "a NaN log-sum-exp is not taken for empty", _switched(keep=np.nan), _marked(np.nan)),
        _fault("plus-inf-kept", "+inf is not taken for empty", _switched(keep=np.inf), _marked(np.inf)),
        _fault("nan-leaked", "an empty rank is multiplied with zero", _switched(leak=True), _has_empty),
        _fault("even-weights", "all ranks weigh the same", _switched(even=True), _ranks),
        _fault("rank-forgotten", "the first rank is missing in the sum", _switched(first_rank=1), _judged),
        _fault(
            "ranks-swapped",
            "the results of ranks are exchanged",
            _on_output("corrected", lambda x: x[::-1]),
            lambda a: _returns_corrected(a) and _ranks(a),
        ),
        _fault("row-zeroed", "one row of one rank is zero", _on_output("corrected", _zero_row), _returns_corrected),
        _fault(
            "lse-is-the-maximum",
            "the log-sum-exp is off by log 2",
            _on_output("lse", lambda x: x - x.dtype.type(np.log(2))),
        ),
        _fault("lse-1e-4", "the log-sum-exp is off by 1e-4", _on_output("lse", lambda x: x + x.dtype.type(1e-4))),
    ),
)
