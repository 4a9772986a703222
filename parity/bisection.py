"""Where a Flax model leaves a golden one: every module is judged on golden inputs (forced) and in its own run (free).

Forced: each module with a counterpart gets the golden inputs and, whatever it returns, the modules after it get the
golden outputs. What a module returns is then its local error, and what reaches a module inside it before the golden
inputs replace it is the error of its own code up to there. Free: nothing is replaced, errors add up.

The yardstick is self-noise: the same run with every tensor that is replaced (free: that enters or leaves a module)
moved by one unit in the last place, see `tolerances.local`. Golden statistics and hashes only allow the free run.
"""

import inspect
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from jaxattn import _nnx_calls, capture
from parity import captures, execution, judge, metrics, names, self_noise
from parity.captures import Capture
from parity.golden import BisectionError, Golden, described, fed, kept, load, replaced, some

__all__ = ["BisectionError", "Compared", "Golden", "Logits", "Target", "first", "load", "run"]

FORCED, FREE = "teacher_forced", "free_running"
MEMORY = 1 << 30

type Call = Callable[[nnx.Module, Mapping[str, np.ndarray]], Any]


@dataclass(frozen=True)
class Target:
    """The Flax model and how it is called with the golden root's inputs."""

    model: nnx.Module
    call: Call | None = None
    """`call(model, inputs)`; None: `model(**inputs)` where the names fit its signature, else by position."""

    def __call__(self, model: nnx.Module, inputs: Mapping[str, np.ndarray]) -> Any:
        """Run a copy of the model; mechanisms of this package are compiled, which eager calls are not."""
        with execution.compiled():
            return self._run(model, inputs)

    def _run(self, model: nnx.Module, inputs: Mapping[str, np.ndarray]) -> Any:
        if self.call is not None:
            return self.call(model, inputs)
        function: Any = model
        known = capture.arguments(type(model).__call__, (model,), {k: None for k in inputs})
        arrays = {k: jnp.asarray(v) for k, v in inputs.items()}
        return function(**arrays) if set(arrays) <= set(known) - {"x0"} else function(*arrays.values())

    def modules(self, golden: Golden) -> list[names.Module]:
        """The modules that a call runs, for a draft of names."""
        calls: list[capture.Call] = []
        with capture.capture(self.model, calls.append, mode="hash"):
            self(self.model, golden.root.inputs)
        return [
            names.Module(
                c.path,
                tuple(tuple(s) for s in c.params["parameters"].values()),
                tuple(tuple(s) for k, (_, s) in c.params["tensors"].items() if k.startswith("out.")),
                c.order / len(calls),
            )
            for c in calls
            if c.call == 0
        ]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One judged tensor."""

    module: str
    """Golden path of the module that answers for it."""
    ours: str
    call: int
    output: str
    """Name of the output, or `input into child`: what the module's own code hands to a module inside it."""
    comparison: str
    verdict: judge.Verdict
    order: int
    """Place in the run: smaller is earlier."""
    error: float | None
    """Relative RMS error, None if there is none to compute."""


@dataclass(frozen=True)
class Logits:
    """Logits of the free run beside the golden ones, in the golden layout."""

    ours: np.ndarray
    golden: np.ndarray
    moved: np.ndarray
    terms: int


@dataclass(frozen=True)
class _Event:
    comparison: str
    case: Capture
    kind: str
    name: str
    array: np.ndarray
    order: int
    terms: int
    rows: Sequence[int] | None
    """Of the golden tensor, those that `array` has."""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.case.case, self.kind, self.name


@dataclass
class Store:
    """Arrays by key; those beyond `memory` bytes wait in files."""

    memory: int
    folder: Path
    _held: dict[Any, np.ndarray | tuple] = field(default_factory=dict)
    _bytes: int = 0
    spilled: int = 0

    def put(self, key: Any, array: np.ndarray) -> None:
        """Keep an array."""
        if self._bytes + array.nbytes <= self.memory:
            self._bytes += array.nbytes
            self._held[key] = array
            return
        path = self.folder / f"{self.spilled}.bin"
        np.ascontiguousarray(array).reshape(-1).view(np.uint8).tofile(path)
        self._held[key] = path, array.dtype, array.shape
        self.spilled += 1

    def take(self, key: Any, default: Any = None) -> Any:
        """The array, which is forgotten; `default` where there is none."""
        held = self._held.pop(key, default)
        if isinstance(held, np.ndarray):
            self._bytes -= held.nbytes
        if not isinstance(held, tuple):
            return held
        path, dtype, shape = held
        array = np.fromfile(path, np.uint8).view(dtype).reshape(shape)
        path.unlink()
        return array

    def __contains__(self, key: Any) -> bool:
        return key in self._held


def run(
    target: Target,
    golden: Golden,
    known: names.Names,
    pairs: Mapping[str, str],
    *,
    memory: int = MEMORY,
    only: Callable[[str], bool] = lambda path: True,
    comparisons: Sequence[str] = (FORCED, FREE),
    samples: int = 2,
    seed: int = 0,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> tuple[list[Compared], Logits | None]:
    """Judge every module; the forced comparisons come first, each kind in the order of the run.

    Args:
        target: the Flax model.
        golden: captured calls of the other one.
        known: which module and array is which.
        pairs: golden path -> our path, as `names.check` gives them.
        memory: bytes of our tensors that are held between two runs; what is beyond goes to files.
        only: which golden modules are reported.
        comparisons: which of both; the forced one needs full golden tensors.
        samples: perturbed runs whose squared changes are averaged.
        seed: of the perturbations.
        progress: called as `progress(done, total, what)` before each of the runs and once at the end.

    Returns:
        What was judged, and the logits of the free run, if the names file tells them and the golden ones are there.

    Raises:
        BisectionError: the model calls compiled modules, or nothing could be compared.
    """
    pairs = {"": "", **pairs}
    found: list[Compared] = []
    logits: list[Logits] = []
    runs = 1 + samples
    stages = [c for c in comparisons if c == FREE or golden.mode == "full"]
    for i, comparison in enumerate(stages):
        with tempfile.TemporaryDirectory() as folder:
            store = Store(memory, Path(folder))
            runner = _Run(target, golden, known, pairs, comparison)
            said = comparison.replace("_", " ")
            progress(i * runs, len(stages) * runs, said)
            runner.run(None, lambda event, store=store: store.put(event.key, event.array))
            for sample in range(samples):
                progress(i * runs + 1 + sample, len(stages) * runs, f"{said}, perturbed")
                last = sample == samples - 1

                def take(event: _Event, store: Store = store, last: bool = last) -> None:
                    if event.key not in store:
                        return
                    ours, before = store.take(event.key), store.take((*event.key, "moved"), 0.0)
                    moved = before + self_noise.moved(event.array, ours)
                    if last and golden.mode == "full" and _is_logits(event, known):
                        logits.append(
                            Logits(ours, event.case.outputs[event.name], np.sqrt(moved / samples), event.terms)
                        )
                    if last:
                        found.append(_judge(event, ours, np.sqrt(moved / samples), golden, pairs))
                    else:
                        store.put(event.key, ours)
                        store.put((*event.key, "moved"), moved)

                runner.run(np.random.default_rng((seed, sample)), take)
    progress(len(stages) * runs, len(stages) * runs, "")
    if not found:
        raise BisectionError("no tensor of the golden model has a counterpart: correct [modules] and [arrays]")
    return [c for c in found if only(c.module)], logits[0] if logits else None


def _is_logits(event: _Event, known: names.Names) -> bool:
    return (
        event.comparison == FREE
        and event.kind == "out"
        and event.case.params["path"] == ""
        and event.name == known.logits
    )


def first(compared: Iterable[Compared], comparison: str) -> Compared | None:
    """The earliest failure of one comparison."""
    failed = [c for c in compared if c.comparison == comparison and not c.verdict.passed]
    return min(failed, key=lambda c: c.order, default=None)


# ---------------------------------------------------------------- running
class _Run:
    """One way to run the Flax model, once as it is and once perturbed."""

    def __init__(self, target: Target, golden: Golden, known: names.Names, pairs: Mapping[str, str], comparison: str):
        self.target, self.golden, self.known, self.comparison = target, golden, known, comparison
        ours = {o: g for g, o in pairs.items()}
        self.cases = {(c.params["path"], c.params["call"]): c for c in golden.calls}
        self.golden_of = ours
        self.forced = comparison == FORCED

    def _owner(self, case: Capture) -> Capture:
        """The call around a call."""
        paths = _ancestors(case.params["path"])
        return next(
            (self.cases[key] for p in paths if (key := (p, case.params["call"])) in self.cases), self.golden.root
        )

    def run(self, rng: np.random.Generator | None, take: Callable[[_Event], None]) -> None:
        """Run a copy of the model; `take` gets each tensor to compare, in the golden layout, when it is there."""
        order = itertools.count()
        counts: dict[str, int] = {}

        def around(path, module, function, args, kwargs):
            call = counts[path] = counts.get(path, -1) + 1
            case = self.cases.get((self.golden_of.get(path), call))
            if case is None:
                result = function(*args, **kwargs)
                return (
                    result if self.forced or rng is None else capture.walk(result, "y", lambda _, x: _moved(x, rng))[0]
                )
            terms = _largest(module)

            def visit(kind: str, values: Mapping[str, Any]) -> Callable[[str, Any], Any]:
                arrays, _ = capture.flatten(values)
                if any(isinstance(x, Tracer) for x in arrays.values()):
                    raise BisectionError(
                        f"{path or 'the model'} is called inside a compiled function; call it without jit, or pass "
                        "--disable-jit"
                    )
                golden = case.inputs if kind == "in" else case.outputs
                shown = {**golden, **described(case, kind)}
                layouts = names.match(shown, arrays, self.known, case.params["path"], kind)
                for name, layout in layouts.items():
                    whole, rows = layout.golden(np.array(arrays[layout.ours])), kept(case, kind, name)
                    array, cut = some(whole, rows), None
                    if kind == "in" and rows is None and path:  # the rest is not golden
                        array = some(whole, cut := fed(self._owner(case), whole.shape[captures.row_axis(whole.shape)]))
                    if kind == "out" or (self.forced and path):
                        most = max(terms, *whole.shape, 1)
                        take(_Event(self.comparison, case, kind, name, array, next(order), most, cut))
                back = {layout.ours: (name, layout) for name, layout in layouts.items()}

                def leaf(name: str, x: Any) -> Any:
                    if not self.forced:
                        return x if rng is None else _moved(x, rng)
                    if name not in back:
                        return x
                    theirs, layout = back[name]
                    value = layout.back(replaced(case, kind, theirs, layout, x), x.shape)
                    if rng is not None:
                        value = self_noise.perturb(value, self_noise.coarser(value.dtype, x.dtype), rng)
                    return jnp.asarray(value.astype(x.dtype))

                return leaf

            bound = inspect.signature(function).bind(*args, **kwargs)
            leaf = visit("in", bound.arguments)
            for name, value in bound.arguments.items():
                bound.arguments[name] = capture.walk(value, name, leaf)[0]
            result = function(*bound.args, **bound.kwargs)
            leaf = visit("out", capture.results(result))
            if isinstance(result, Mapping):
                return type(result)({k: capture.walk(v, str(k), leaf)[0] for k, v in result.items()})  # type: ignore
            return capture.walk(result, "y", leaf)[0]

        model = nnx.clone(self.target.model)
        with _nnx_calls.intercept(model, around):
            self.target(model, self.golden.root.inputs)


def _moved(x: Any, rng: np.random.Generator) -> Any:
    if isinstance(x, Tracer) or not metrics.is_float(x.dtype):
        return x
    return jnp.asarray(self_noise.perturb(np.asarray(x), x.dtype, rng))


def _largest(module: nnx.Module) -> int:
    shapes = [x.shape for x in jax.tree.leaves(nnx.state(module)) if hasattr(x, "shape")]
    return max((n for s in shapes for n in s), default=1)


# ---------------------------------------------------------------- judging
def _judge(event: _Event, ours: np.ndarray, moved: np.ndarray, golden: Golden, pairs: Mapping[str, str]) -> Compared:
    path = event.case.params["path"]
    owner, output = path, event.name
    if event.kind == "in":
        owner = next(p for p in _ancestors(path) if p in pairs)
        output = f"{event.name} into {path.removeprefix(owner + '.') if owner else path}"
    expected = event.case.inputs[event.name] if event.kind == "in" else event.case.outputs[event.name]
    expected = some(expected, event.rows)
    if golden.mode == "full":
        verdict, error = self_noise.full(expected, ours, moved, event.terms)
    else:
        dtype = np.dtype(event.case.params["tensors"][f"out.{event.name}"][0])
        check = self_noise.statistics if golden.mode == "statistics" else self_noise.hashes
        verdict, error = check(expected, dtype, ours, moved, event.terms)
    return Compared(
        module=owner, ours=pairs[owner], call=event.case.params["call"], output=output, comparison=event.comparison,
        verdict=verdict, order=event.order, error=error,
    )  # fmt: skip


def _ancestors(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path
