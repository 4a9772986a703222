"""What may be wrong with paged attention: its numpy twin with a switch thrown, or changed arguments or outputs."""

from collections.abc import Callable

import ml_dtypes
import numpy as np

from parity.mutations import Args, Arrays, Fault, Faults, Implementation
from parity.twins.paged_attention import Switches, run


# ---------------------------------------------------------------- ways to plant a fault
def _switched(**switches) -> Implementation:
    return lambda args, wide: run(args, wide, Switches(**switches))


def _with_args(change: Callable[[Args], Args]) -> Implementation:
    return lambda args, wide: run(args | change(args), wide)


def _on_output(name: str, change: Callable[[np.ndarray, Args], np.ndarray]) -> Implementation:
    def faulty(args: Args, wide: bool) -> Arrays:
        out = run(args, wide)
        return out | {name: change(out[name].copy(), args).astype(out[name].dtype)}

    return faulty


def _zero_row(o: np.ndarray, args: Args) -> np.ndarray:
    o[len(o) // 2, o.shape[1] // 2] = 0
    return o


def _swap_heads(o: np.ndarray, args: Args) -> np.ndarray:
    o[:, [0, 1]] = o[:, [1, 0]]
    return o


def _nan(o: np.ndarray, args: Args) -> np.ndarray:
    o[-1, -1, 0] = np.nan
    return o


def _other_kv_head(args: Args) -> Args:
    """Query head h reads KV head h % K instead of h // G."""
    K = args["k_pages"].shape[2]
    H = args["q"].shape[1]
    order = np.arange(H).reshape(H // K, K).T.ravel()
    return {"q": args["q"][:, order]} | ({} if args.get("sinks") is None else {"sinks": args["sinks"][order]})


def _undo_head_order(args: Args, wide: bool) -> Arrays:
    H, K = args["q"].shape[1], args["k_pages"].shape[2]
    back = np.argsort(np.arange(H).reshape(H // K, K).T.ravel())
    out = run(args | _other_kv_head(args), wide)
    return {name: x[:, back] for name, x in out.items()}


def _swap_pages(args: Args) -> Args:
    table, b = args["page_table"].copy(), int(np.argmax(args["lengths"]))
    last = -(-_longest(args) // args["k_pages"].shape[1]) - 1
    table[b, [0, last]] = table[b, [last, 0]]
    return {"page_table": table}


def _folded_sink(lse: np.ndarray, args: Args) -> np.ndarray:
    return np.logaddexp(lse.astype(np.float64), args["sinks"].astype(np.float64))


# ---------------------------------------------------------------- where a fault changes anything
def _longest(args: Args) -> int:
    return int(args["lengths"].max(initial=0))


def _has_finite_sink(args: Args) -> bool:
    return args.get("sinks") is not None and bool(np.isfinite(args["sinks"]).any())


def _has_lse(args: Args) -> bool:
    return bool(args.get("return_lse"))


def _has_exact_lse(args: Args) -> bool:
    """Not so with a float8 cache, whose keys are rounded to q's dtype, or with 16-bit queries of a 4-bit cache, which
    are rounded behind their rotation: both move the log-sum-exp by more than 1e-4.
    """
    rotated = args["k_pages"].dtype == np.uint8 and args["q"].dtype.itemsize < 4
    return _has_lse(args) and not _fp8(args) and not rotated


def _window_bites(args: Args) -> bool:
    return args.get("window") is not None and args["window"] < _longest(args)


def _two_heads(args: Args) -> bool:
    return args["q"].shape[1] > 1


def _grouped(args: Args) -> bool:
    return 1 < args["k_pages"].shape[2] < args["q"].shape[1]


def _order_of_pages_matters(args: Args) -> bool:
    """The longest request has queries and a last page that is not full."""
    page, b = args["k_pages"].shape[1], int(np.argmax(args["lengths"]))
    return bool(np.diff(args["query_start"])[b]) and _longest(args) > page and _longest(args) % page != 0


def _prefill(args: Args) -> bool:
    queries = np.diff(args["query_start"])
    return args.get("causal", True) and bool(((queries > 0) & (queries < args["lengths"])).any())


def _part_page(args: Args) -> bool:
    page, read = args["k_pages"].shape[1], np.diff(args["query_start"]) > 0
    return bool((args["lengths"][read] % page != 0).any())


def _is_float32(args: Args) -> bool:
    return args["q"].dtype == np.float32


def _fp8(args: Args) -> bool:
    return args.get("k_scale") is not None


def _fault(name: str, what: str, run: Implementation, applies: Callable[[Args], bool] = lambda args: True) -> Fault:
    return Fault(name=name, what=what, run=run, applies=applies)


_SINK = "sinks"
_SMALL_CAP = 16
"""A masked score of -cap weighs exp(-cap); above this it is lost in the rounding of a 16-bit output."""
_BF16 = ml_dtypes.bfloat16

FAULTS = Faults(
    twin=run,
    faults=(
        _fault("sink-dropped", "the sink is forgotten", _with_args(lambda a: {_SINK: None}), _has_finite_sink),
        _fault(
            "sink-scaled",
            "the sink is multiplied by the softmax scale",
            _with_args(lambda a: {_SINK: a[_SINK] * np.float32(a.get("scale") or a["q"].shape[2] ** -0.5)}),
            _has_finite_sink,
        ),
        _fault(
            "sink-shifted",
            "each head has its neighbour's sink",
            _with_args(lambda a: {_SINK: np.roll(a[_SINK], 1)}),
            lambda a: _has_finite_sink(a) and _two_heads(a),
        ),
        _fault(
            "window-plus-one",
            "the window shows one key too many",
            _with_args(lambda a: {"window": a["window"] + 1}),
            _window_bites,
        ),
        _fault(
            "window-minus-one",
            "the window shows one key too few",
            _with_args(lambda a: {"window": a["window"] - 1}),
            lambda a: _window_bites(a) and a["window"] > 1,
        ),
        _fault("window-ignored", "there is no window", _with_args(lambda a: {"window": None}), _window_bites),
        _fault(
            "scale-1-percent",
            "the softmax scale is 1 % too large",
            _with_args(lambda a: {"scale": 1.01 * (a.get("scale") or a["q"].shape[2] ** -0.5)}),
            lambda a: _longest(a) > 1,
        ),
        _fault("last-key-dropped", "the newest visible key is not seen", _switched(hide_last_key=True)),
        _fault("top-left-causal", "queries are aligned with the first keys", _switched(top_left=True), _prefill),
        _fault(
            "softcap-ignored",
            "there is no soft cap",
            _with_args(lambda a: {"softcap": None}),
            lambda a: a.get("softcap") is not None,
        ),
        _fault(
            "softcap-after-mask",
            "the soft cap is applied to masked scores",
            _switched(late_softcap=True),
            lambda a: a.get("softcap") is not None and a["softcap"] < _SMALL_CAP,
        ),
        _fault("p-rounded-to-bf16", "P is rounded to bfloat16 in a float32 op", _switched(round_p=_BF16), _is_float32),
        _fault(
            "scores-rounded-to-bf16",
            "scores are rounded to bfloat16 in a float32 op",
            _switched(round_scores=_BF16),
            _is_float32,
        ),
        _fault(
            "nan-leaked", "masked slots are multiplied with zero instead of left out", _switched(leak=True), _part_page
        ),
        _fault("nan-element", "one element is NaN", _on_output("o", _nan)),
        _fault("row-zeroed", "one row of one head is zero", _on_output("o", _zero_row)),
        _fault("heads-swapped", "two heads are exchanged in the output", _on_output("o", _swap_heads), _two_heads),
        _fault("kv-head-modulo", "query head h reads KV head h % K", _undo_head_order, _grouped),
        _fault(
            "pages-swapped",
            "the first and the last page of a request are exchanged",
            _with_args(_swap_pages),
            _order_of_pages_matters,
        ),
        _fault("output-1-percent", "the output is 1 % too large", _on_output("o", lambda o, a: o * o.dtype.type(1.01))),
        _fault("k-scale-ignored", "key codes are not scaled", _with_args(lambda a: {"k_scale": None}), _fp8),
        _fault("v-scale-ignored", "value codes are not scaled", _with_args(lambda a: {"v_scale": None}), _fp8),
        _fault("lse-base-2", "the log-sum-exp is in base 2", _on_output("lse", lambda x, a: x / np.log(2)), _has_lse),
        _fault(
            "lse-with-sink",
            "the sink is folded into the log-sum-exp (or out of it)",
            _on_output("lse", _folded_sink),
            lambda a: _has_lse(a) and _has_finite_sink(a),
        ),
        _fault(
            "lse-1e-4",
            "the log-sum-exp is off by 1e-4",
            _on_output("lse", lambda x, a: x + x.dtype.type(1e-4)),
            _has_exact_lse,
        ),
    ),
)
