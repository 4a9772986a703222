"""One case: prove the kernel right, then time it beside its peers."""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn import _checks, _mechanism
from jaxattn._mechanism import Args, Case, Mechanism
from parity import cases, execution, tolerances, triangle
from scripts._bench import peers, timing
from scripts._bench.ceilings import Ceilings
from scripts._bench.peers import _torch

ROWS, LARGE = 512, 2**24
"""Outputs of more numbers than `LARGE` are judged at so many rows."""

type Arrays = dict[str, np.ndarray]


class WrongResultError(Exception):
    """A kernel that is not right is not timed; the message says which output and how far off."""


class Port:
    """A kernel of ours on rotated inputs; caches that it returns are donated and go into the next call."""

    def __init__(self, mechanism: Mechanism, kernel: str, sets: Sequence[Args], config: Any):
        """Compile nothing yet; `sets` are prepared arguments; config None = the default; `reference` is a kernel."""
        self.names = mechanism.outputs(**sets[0])
        self.carried = _carried(mechanism, sets[0])
        static = {k: v for k, v in sets[0].items() if not _checks.is_array(v)}
        self._sets = [{k: v for k, v in args.items() if k not in static} for args in sets]
        self._next = 0
        self._last: Any = None

        def run(carried, arrays):
            args = {**carried, **arrays, **static}
            if kernel == _mechanism.REFERENCE:
                return mechanism.reference(**args)
            how = _mechanism.default_config(mechanism, mechanism.kernels[kernel], args) if config is None else config
            return mechanism.kernels[kernel].run(config=how, **args)

        self._run = jax.jit(run, donate_argnums=(0,))

    def launch(self) -> Any:
        """One call on the next input set."""
        arrays = self._sets[self._next]
        self._next = (self._next + 1) % len(self._sets)
        carried = {k: arrays[k] for k in self.carried}
        out = self._run(carried, {k: v for k, v in arrays.items() if k not in carried})
        out = out if isinstance(out, tuple) else (out,)
        self._last = dict(zip(self.names, out, strict=True))
        arrays |= {k: self._last[k] for k in self.carried}
        return self._last

    def wait(self) -> None:
        """Until the last call is done."""
        timing.wait_for(self._last)


class Other:
    """A peer on the same input sets."""

    def __init__(self, peer: peers.Peer, sets: Sequence[Args]):
        """Build one call for each input set."""
        self._calls = [peer.build(dict(args)) for args in sets]
        self._next = 0
        self._last: Any = None

    def launch(self) -> Mapping[str, Any]:
        """One call on the next input set."""
        call = self._calls[self._next]
        self._next = (self._next + 1) % len(self._calls)
        self._last = call()
        return self._last

    def wait(self) -> None:
        """Until the last call is done."""
        timing.wait_for(self._last)


def truths(mechanism: Mechanism, args: Args, rng: np.random.Generator) -> tuple[Any, Arrays, Arrays]:
    """(rows, float64 truth, reference) of a case: of some rows if the record has a `probe` or the outputs are large.

    Probed rows are few, so that the processor computes them; compiling for a GPU would take longer. Large outputs are
    computed whole and judged at `ROWS` rows, the first and the last ones among them. Rows: None = all.
    """
    if mechanism.probe is None:
        rows = _some_rows(mechanism, args, rng)
        return rows, *(_reference(mechanism, args, wide, rows) for wide in (True, False))
    fewer, rows = mechanism.probe(rng, **args)
    fewer = {k: np.asarray(v) if _checks.is_array(v) else v for k, v in fewer.items()}
    with jax.default_device(jax.devices("cpu")[0]):
        return rows, *(_reference(mechanism, fewer, wide) for wide in (True, False))


def _some_rows(mechanism: Mechanism, args: Args, rng: np.random.Generator) -> Any:
    """`ROWS` indices of the outputs' first axis if that is one axis of all and they are large, else None."""
    outputs = jax.tree.leaves(jax.eval_shape(lambda: mechanism.reference(**args)))
    counts = {x.shape[0] if x.ndim else 0 for x in outputs}
    if len(counts) != 1 or min(counts) <= ROWS or sum(x.size for x in outputs) <= LARGE:
        return None
    (count,), ends = counts, ROWS // 8
    middle = rng.choice(np.arange(ends, count - ends), ROWS - 2 * ends, replace=False)
    return np.sort(np.concatenate([np.arange(ends), middle, np.arange(count - ends, count)]))


def _reference(mechanism: Mechanism, args: Args, wide: bool, rows: Any = None) -> Arrays:
    """Outputs of the reference on prepared arguments, in float64 if `wide`, at some rows."""
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        args = _checks.upcast(args) if wide else args
        static = {k: v for k, v in args.items() if not _checks.is_array(v)}
        out = jax.jit(lambda arrays: mechanism.reference(**arrays, **static))(
            {k: v for k, v in args.items() if k not in static}
        )
        out = out if isinstance(out, tuple) else (out,)
        names = mechanism.outputs(**args)
        return {name: np.asarray(x if rows is None else x[rows]) for name, x in zip(names, out, strict=True)}


def rows_of(outputs: Mapping[str, Any], rows: Any) -> Arrays:
    """The probed rows on the host."""

    def some(x):
        return x[rows] if isinstance(x, jax.Array) else x[rows.tolist()]

    return {name: _torch.numpy(x if rows is None else some(x)) for name, x in outputs.items()}


def check(mechanism: Mechanism, truth: Arrays, same: Arrays, got: Arrays) -> float:
    """The worst relative RMS error of any output of ours.

    Raises:
        WrongResultError: an output does not keep the contract.
    """
    for name, x in got.items():
        spec = cases.find(mechanism.name).outputs[name]
        sides = {"reference": same[name], "kernel": x}
        verdict = triangle.edge(spec, "reference_vs_kernel", truth[name], sides, details=False)
        if not verdict.passed:
            raise WrongResultError(f"{name}: {verdict.reason}")
    return max(error(got[name], truth[name]) for name in got)


def error(x: np.ndarray, truth: np.ndarray) -> float:
    """Root mean square of the error over that of the truth, where the truth is finite."""
    good = np.isfinite(truth.astype(np.float64))
    t, d = truth[good].astype(np.float64), x[good].astype(np.float64)
    size = float(np.sqrt(np.mean(t**2))) if t.size else 0.0
    off = float(np.sqrt(np.mean((d - t) ** 2))) if t.size else 0.0
    return off / size if size else off


def gate(
    mechanism: Mechanism,
    libraries: Sequence[str],
    sets: Sequence[Args],
    distance: Callable[[Mapping[str, Any]], float],
    goal: str,
    limit: float | None = None,
    missing: Mapping[str, str] | None = None,
) -> tuple[dict[str, tuple[Other, float]], dict[str, str]]:
    """Peers that compute the same thing, with their distance from it, and why the others are not timed.

    Args:
        mechanism: the record.
        libraries: whose peers.
        sets: prepared arguments, one call each.
        distance: of a peer's outputs from `goal`, relative RMS.
        goal: what a peer is compared with, in a word or two.
        limit: seconds that a peer may take to be built, compiled and called once; None = any.
        missing: library -> why none of its peers can run here.
    """
    found, why_not = {}, {}
    for library in libraries:
        for peer in peers.find(mechanism, library):
            name = f"{library}: {peer.name}"
            if reason := (missing or {}).get(library):
                why_not[name] = reason
                continue
            try:
                with timing.at_most(limit):
                    other = Other(peer, sets)
                    out = other.launch()
                    other.wait()
                    off = distance(out)
            except peers.Unsupported as e:
                why_not[name] = str(e)
            except Exception as e:
                why_not[name] = execution.message("raised", e)
            else:
                if off <= tolerances.SAME_COMPUTATION:
                    found[name] = other, off
                else:
                    why_not[name] = f"{off:.2g} away from {goal}, computes something else; not timed"
    return found, why_not


def rivals(
    mechanism: Mechanism, libraries: Sequence[str], sets: Sequence[Args], truth: Arrays, rows: Any
) -> tuple[dict[str, Other], dict[str, float]]:
    """Peers that compute the same thing, and their errors; what cannot or does not is said on stderr."""
    for library in libraries:
        if not peers.find(mechanism, library):
            say(f"{mechanism.name}: no {library} peer; write scripts/_bench/peers/{mechanism.name}.py")

    def distance(outputs: Mapping[str, Any]) -> float:
        return max(error(x, truth[k]) for k, x in rows_of(outputs, rows).items() if k in truth)

    found, why_not = gate(mechanism, libraries, sets, distance, "the truth")
    for name, why in why_not.items():
        say(f"  {name}{'' if why.startswith('raised ') else ':'} {why}")
    return {name: other for name, (other, _) in found.items()}, {name: off for name, (_, off) in found.items()}


def run(
    mechanism: Mechanism,
    case: Case,
    *,
    libraries: Sequence[str],
    timer: timing.Timer,
    ceilings: Ceilings,
    seed: int = 0,
    rounds: int = 7,
    tune: Callable[[str, Args, Callable[[Any], float | str]], Any] | None = None,
    tries: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Result lines of one case, one for each kernel that supports it and each peer (or without one).

    A mechanism without kernels is timed as its reference under `jax.jit`, which is what its calls run.

    Args:
        mechanism: the record.
        case: one of its cases.
        libraries: whose peers to time.
        timer: `timing.cupti`, or a test's.
        ceilings: of this run.
        seed: of the inputs.
        rounds: of interleaved sessions.
        tune: `tune(kernel, args, time_of)` -> the configuration to take; None = the kernel's default.
        tries: changes of that configuration, by what to call them, to time beside it.

    Raises:
        WrongResultError: a kernel failed the gate.
    """
    clock = Clock()
    args = mechanism.prepare(**case.make(np.random.default_rng(seed)))
    cost = mechanism.cost(**args)
    flops, moved = (int(x) for x in cost)
    total = sum(x.size * x.dtype.itemsize for x in args.values() if _checks.is_array(x))
    sets = [args] + [_copied(args) for _ in range(timing.copies(moved, total) - 1)]
    clock("inputs")
    rows, truth, same = truths(mechanism, args, np.random.default_rng(seed))
    clock("truth")
    floor = ceilings.floor_us(flops, moved, eight_bit(args, case))
    lines: list[dict[str, Any]] = []
    others, errors = rivals(mechanism, libraries, sets, truth, rows)
    clock("peers")
    for name, kernel in (mechanism.kernels or {_mechanism.REFERENCE: None}).items():
        if kernel and (reason := kernel.why_not(**args) or kernel.why_not_here()):
            say(f"  {name}: {reason}")
            continue

        def port(config, name=name):
            own = map(_copied, sets) if _carried(mechanism, args) else sets  # what is donated is gone afterwards
            one = Port(mechanism, name, [dict(x) for x in own], config)
            out = one.launch()
            one.wait()
            judged = rows_of(out, rows)
            bits = [np.asarray(x).tobytes() for x in judged.values()] if tries else []
            return one, check(mechanism, truth, same, judged), bits

        def time_of(config, port=port) -> float | str:
            try:
                one, *_ = port(config)
                return timing.compare({"port": (one.launch, one.wait)}, timer, rounds=3)["port"].median
            except Exception as e:
                return execution.message("raised", e)

        config = None
        if kernel:
            config = _mechanism.default_config(mechanism, kernel, args) if tune is None else tune(name, args, time_of)
        one, off, bits = port(config)
        tried: dict[str, dict[str, Any]] = {}
        contestants = {"port": one} | others
        for label, changes in (tries or {}).items():
            try:
                changed = dataclasses.replace(config, **changes)
                contestants[label], error, found = port(changed)
                tried[label] = {"config": str(changed), "error": error, "same_bits": found == bits}
            except Exception as e:
                say(f"  {name} with {label}: {execution.message('raised', e)}")
        clock("kernel")
        times = timing.compare({k: (c.launch, c.wait) for k, c in contestants.items()}, timer, rounds)
        ours = times.pop("port")
        for label, found in tried.items():
            found["us"] = times.pop(label).median
        clock("timing")
        line = {
            "mechanism": mechanism.name,
            "case": case.name,
            "kernel": name,
            "config": dataclasses.asdict(config) if dataclasses.is_dataclass(config) else str(config),
            "us": ours.median,
            "us_p10": ours.p10,
            "us_p90": ours.p90,
            "launches": ours.launches,
            "peer": None,
            "peer_us": None,
            "ratio_to_peer": None,
            "floor_us": floor,
            "roofline": floor / ours.median,
            "tb_s": moved / ours.median / 1e6,
            "tflop_s": flops / ours.median / 1e6,
            "error": off,
            "peer_error": None,
        }
        first = len(lines)
        for peer, x in times.items():
            lines.append(
                line
                | {
                    "peer": peer,
                    "peer_us": x.median,
                    "ratio_to_peer": ours.median / x.median,
                    "peer_error": errors[peer],
                }
            )
        if not times:
            lines.append(line)
        if tried:
            lines[first] |= {"tried": tried}
    say(f"  took {clock}")
    return lines


class Clock:
    """Where a benchmark's own time goes."""

    def __init__(self):
        """Start."""
        self._last, self._parts = time.perf_counter(), []

    def __call__(self, part: str) -> None:
        """End a part."""
        now = time.perf_counter()
        self._parts.append(f"{part} {now - self._last:.1f} s")
        self._last = now

    def __str__(self):
        return ", ".join(self._parts)


def eight_bit(args: Args, case: Case) -> bool:
    """Do the products run on 8-bit units? Asked of the first two matrices, or said by the tag `eight_bit`."""
    matrices = [x for x in args.values() if _checks.is_array(x) and x.ndim >= 2][:2]
    return "eight_bit" in case.tags or (len(matrices) == 2 and all(jnp.dtype(x.dtype).itemsize == 1 for x in matrices))


def _carried(mechanism: Mechanism, args: Args) -> list[str]:
    """Outputs that take the place of the argument of their name: caches, say. Others only share a name."""
    out = jax.eval_shape(lambda: mechanism.reference(**args))
    out = dict(zip(mechanism.outputs(**args), out if isinstance(out, tuple) else (out,), strict=True))
    given = {name: x for name, x in args.items() if name in out and _checks.is_array(x)}
    return [name for name, x in given.items() if (x.shape, x.dtype) == (out[name].shape, out[name].dtype)]


def _copied(args: Args) -> Args:
    return {k: jnp.array(v, copy=True) if _checks.is_array(v) else v for k, v in args.items()}


def say(text: str) -> None:
    """One line on stderr, at once."""
    print(text, file=sys.stderr, flush=True)
