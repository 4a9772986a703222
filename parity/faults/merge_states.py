"""What may be wrong with the merge of two partial results: its twin with a switch thrown, or changed arguments."""

from collections.abc import Callable

import ml_dtypes
import numpy as np

from parity.mutations import Args, Arrays, Fault, Faults, Implementation
from parity.twins.merge_states import Switches, run


def _switched(**switches) -> Implementation:
    return lambda args, wide: run(args, wide, Switches(**switches))


def _with_args(change: Callable[[Args], Args]) -> Implementation:
    return lambda args, wide: run(args | change(args), wide)


def _on_output(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Implementation:
    def faulty(args: Args, wide: bool) -> Arrays:
        out = run(args, wide)
        return out | {name: change(out[name].copy()).astype(out[name].dtype)}

    return faulty


def _zero_row(o: np.ndarray) -> np.ndarray:
    norms = np.abs(o.astype(np.float64)).max(-1)
    o[np.unravel_index(np.argmax(norms), norms.shape)] = 0
    return o


def _swap_heads(o: np.ndarray) -> np.ndarray:
    o[:, [0, 1]] = o[:, [1, 0]]
    return o


def _both(args: Args) -> np.ndarray:
    """Rows in which neither side is empty."""
    return np.isfinite(args["prefix_lse"]) & np.isfinite(args["suffix_lse"])


def _some(args: Args) -> bool:
    return bool(_both(args).any())


def _marked(sign: float) -> Callable[[Args], bool]:
    return lambda args: any(bool((args[f"{side}_lse"] == sign).any()) for side in ("prefix", "suffix"))


def _has_empty(args: Args) -> bool:
    return _marked(np.inf)(args) or _marked(-np.inf)(args)


def _plain(args: Args) -> bool:
    return _some(args) and args.get("out_scale") is None


def _has_lse(args: Args) -> bool:
    return bool(args.get("return_lse", True)) and _some(args)


def _close(args: Args) -> bool:
    """Several rows in which both sides matter, so that a wrong weight shows beyond rounding."""
    return _plain(args) and bool((np.abs(args["prefix_lse"] - args["suffix_lse"])[_both(args)] < 8).sum() > 4)


def _two_heads(args: Args) -> bool:
    return args["prefix_o"].shape[1] > 1


def _float32(args: Args) -> bool:
    return args["prefix_o"].dtype == np.float32 and _close(args)


def _fp8(args: Args) -> bool:
    return args.get("out_scale") is not None


def _fault(name: str, what: str, run: Implementation, applies: Callable[[Args], bool]) -> Fault:
    return Fault(name=name, what=what, run=run, applies=applies)


FAULTS = Faults(
    twin=run,
    faults=(
        _fault("base-2", "log-sum-exps are taken for base 2", _switched(base=2.0), _close),
        _fault("plus-inf-kept", "+inf is not taken for empty", _switched(plus_infinity=False), _marked(np.inf)),
        _fault("nan-leaked", "an empty side is multiplied with zero", _switched(leak=True), _has_empty),
        _fault("even-weights", "both sides weigh one half", _switched(even=True), _close),
        _fault(
            "weights-rounded",
            "weights are rounded to bfloat16 in a float32 op",
            _switched(round_weights=ml_dtypes.bfloat16),
            _float32,
        ),
        _fault(
            "sides-swapped",
            "each side is weighed with the other's log-sum-exp",
            _with_args(lambda a: {"prefix_lse": a["suffix_lse"], "suffix_lse": a["prefix_lse"]}),
            _close,
        ),
        _fault(
            "lse-of-the-next-head",
            "each head has its neighbour's log-sum-exp of the prefix",
            _with_args(lambda a: {"prefix_lse": np.roll(a["prefix_lse"], 1, axis=1)}),
            lambda a: _close(a) and _two_heads(a),
        ),
        _fault(
            "output-1-percent", "the output is 1 % too large", _on_output("o", lambda o: o * o.dtype.type(1.01)), _plain
        ),
        _fault("row-zeroed", "one row of one head is zero", _on_output("o", _zero_row), _some),
        _fault(
            "heads-swapped",
            "two heads are exchanged",
            _on_output("o", _swap_heads),
            lambda a: _some(a) and _two_heads(a),
        ),
        _fault("lse-base-2", "the log-sum-exp is in base 2", _on_output("lse", lambda x: x / np.log(2)), _has_lse),
        _fault(
            "lse-1e-4", "the log-sum-exp is off by 1e-4", _on_output("lse", lambda x: x + x.dtype.type(1e-4)), _has_lse
        ),
        _fault(
            "scale-forgotten", "float8 codes are not scaled", _with_args(lambda a: {"out_scale": np.float32(1)}), _fp8
        ),
        _fault(
            "scale-multiplied",
            "float8 codes are multiplied with the scale",
            _with_args(lambda a: {"out_scale": 1 / a["out_scale"]}),
            _fp8,
        ),
    ),
)
