"""The mechanisms that a piece of a model calls, each timed alone on the arguments of the call, beside its peers."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
from flax import nnx

from jaxattn import _checks, _mechanism
from jaxattn._mechanism import Args, Mechanism
from scripts._bench import contest, timing

ROWS = 256
"""Of each output, from the first, that a peer is compared on."""


@dataclasses.dataclass
class Call:
    """Calls of one mechanism with the same shapes and options, by the arguments of the first."""

    mechanism: Mechanism
    implementation: str
    """What `_mechanism.choose` takes: a kernel's name or `reference`."""
    args: Args
    count: int = 1

    @property
    def key(self) -> Any:
        """Equal for calls that take the same time: mechanism, implementation, shapes, options."""
        return self.mechanism.name, self.implementation, tuple((k, _said(v)) for k, v in self.args.items())


def calls(function: Callable[..., Any], *args: Any) -> list[Call]:
    """What `function(*args)` calls, in order; mechanisms that a mechanism calls belong to it.

    The function runs once, compiled, and hands the arguments over as its results.
    """
    original, inside = _mechanism.run, []
    made: list[tuple[Mechanism, str, Args]] = []

    def keep(mechanism: Mechanism, prepared: Args, implementation: str | None, config: Any = None) -> Any:
        if inside:
            return original(mechanism, prepared, implementation, config)
        made.append((mechanism, _mechanism.choose(mechanism, prepared, implementation), prepared))
        inside.append(mechanism)
        try:
            return original(mechanism, prepared, implementation, config)
        finally:
            inside.pop()

    def traced(*args):
        made.clear()
        function(*args)
        return [{k: v for k, v in prepared.items() if _checks.is_array(v)} for _, _, prepared in made]

    with mock.patch.object(_mechanism, "run", keep):
        arrays = nnx.jit(traced)(*args)
    found: dict[Any, Call] = {}
    for (mechanism, name, prepared), values in zip(made, arrays, strict=True):
        call = Call(mechanism, name, prepared | values)
        found.setdefault(call.key, dataclasses.replace(call, count=0)).count += 1
    return list(found.values())


def _said(value: Any) -> str:
    return f"{value.dtype.name}{list(value.shape)}" if _checks.is_array(value) else repr(value)


def line(
    call: Call,
    libraries: Sequence[str],
    timer: timing.Timer,
    rounds: int,
    limit: float | None = None,
    missing: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Microseconds of a call, ours and of the fastest peer, and why the others are not timed; for JSON.

    Args:
        call: what a part calls.
        libraries: whose peers.
        timer: of `timing`.
        rounds: of interleaved sessions.
        limit: seconds that a peer's first call, with all that it compiles, may take; None = any.
        missing: library -> why none of its peers can run.
    """
    args = call.args
    size = sum(x.size * x.dtype.itemsize for x in args.values() if _checks.is_array(x))
    copies = timing.copies(size, size) if timer is timing.cupti else 1
    sets = [args] + [contest._copied(args) for _ in range(copies - 1)]
    ours = contest.Port(call.mechanism, call.implementation, [contest._copied(x) for x in sets], None)
    expected = _first(ours.launch())
    same, why_not = contest.gate(
        call.mechanism, libraries, sets, lambda out: _distance(_first(out), expected), "ours", limit, missing
    )
    contestants: dict[str, Any] = {"port": ours, **{name: other for name, (other, _) in same.items()}}
    times = timing.compare({k: (c.launch, c.wait) for k, c in contestants.items()}, timer, rounds)
    us = times.pop("port").median
    best = min(times, key=lambda name: times[name].median, default=None)
    return {
        "op": call.mechanism.name,
        "implementation": call.implementation,
        "shapes": {k: _said(v) for k, v in args.items() if _checks.is_array(v)},
        "us": us,
        "peer": best,
        "peer_us": None if best is None else times[best].median,
        "not_timed": why_not,
    }


def summed(ops: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The sums over a part's calls: all of ours; ours and the peers' where there is a peer; what has none."""
    paired = [op for op in ops if op["peer"] is not None]
    return {
        "ops_us": sum(op["calls"] * op["us"] for op in ops),
        "paired_us": sum(op["calls"] * op["us"] for op in paired),
        "peer_us": sum(op["calls"] * op["peer_us"] for op in paired) if paired else None,
        "no_peer": sorted({op["op"] for op in ops if op["peer"] is None}),
    }


def _first(outputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: x[:ROWS] if x.ndim else x for name, x in contest.rows_of(outputs, None).items()}


def _distance(theirs: dict[str, np.ndarray], ours: dict[str, np.ndarray]) -> float:
    """The largest relative RMS distance of outputs that both have; rows of integers may have any order."""

    def sorted_rows(x: np.ndarray) -> np.ndarray:
        return np.sort(x, -1) if x.dtype.kind in "iu" and x.ndim and x.dtype.itemsize > 1 else x

    both = [name for name in theirs if name in ours]
    if not both:
        raise ValueError(f"none of its outputs {', '.join(theirs)} is one of {', '.join(ours)}")
    return max(contest.error(sorted_rows(theirs[name]), sorted_rows(ours[name])) for name in both)


def wall(launch: Callable[[], Any], wait: Callable[[], None], launches: int) -> Sequence[float]:
    """A timer for machines without a GPU: the wall clock of all launches, shared out."""
    begin = time.perf_counter()
    for _ in range(launches):
        launch()
    wait()
    return [(time.perf_counter() - begin) / launches * 1e6]


def timer() -> timing.Timer:
    """CUPTI on a GPU, else the wall clock."""
    return timing.cupti if jax.default_backend() == "gpu" else wall
