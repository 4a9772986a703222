"""Times of GPU kernels: every contestant on the same rotated inputs, in turns, by CUPTI.

A contestant is a function that launches one call and does not wait for it. Between two launches on one input set lie
enough others to push it out of the L2 cache, as in a model, where other layers come in between.
"""

import contextlib
import fcntl
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from pallas_kernels import _aot

L2_BYTES = 50 * 2**20
"""L2 cache of an H200."""
MAX_BYTES = 24 * 2**30
"""What all input sets of a case may take together."""
WARM_UP_S, SESSION_S = 0.1, 0.02


_turns: list[Path] = []


def take_turns(file: Path) -> None:
    """From now on this process measures only while no other does that was given the same file."""
    _turns[:] = [file]


def once(name: str, measure: Callable[[], Sequence[float]]) -> Sequence[float]:
    """What `measure()` returns; of processes that take turns, one measures it and the others read what it got."""
    with contextlib.ExitStack() as stack:
        if not _turns:
            return measure()
        file = stack.enter_context(_turns[0].with_name(f"{_turns[0].name}.{name}").open("a+"))
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if text := file.read():
            return json.loads(text)
        found = measure()
        file.write(json.dumps(found))
        return found


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """The time in which this process measures."""
    with contextlib.ExitStack() as stack:
        for path in _turns:
            fcntl.flock(stack.enter_context(path.open("a")), fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def at_most(seconds: float | None) -> Iterator[None]:
    """Raise TimeoutError in what is inside after so many seconds, None = never; main thread only.

    Native code that does not return to Python for longer is not interrupted before it does.
    """
    if seconds is None:
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Timer(Protocol):
    """`timer(launch, wait, launches)` -> microseconds of each of `launches` calls of `launch()`."""

    def __call__(self, launch: Callable[[], Any], wait: Callable[[], None], launches: int) -> Sequence[float]:
        """Measure."""
        ...


@dataclass(frozen=True)
class Times:
    """Microseconds of one call's kernels."""

    median: float
    p10: float
    p90: float
    launches: int


def cupti(launch: Callable[[], Any], wait: Callable[[], None], launches: int) -> Sequence[float]:
    """The sum of the kernels' durations of each launch; their mean where kernels cannot be told apart by launch."""

    def run():
        for _ in range(launches):
            launch()
        wait()

    seen = _aot.kernel_times(run)
    if not seen:
        raise RuntimeError("CUPTI saw no kernel; is another profiler attached?")
    each, rest = divmod(len(seen), launches)
    names = [name for name, _ in seen]
    if rest or any(names[i * each : (i + 1) * each] != names[:each] for i in range(launches)):
        return [sum(us for _, us in seen) / launches]
    return [sum(us for _, us in seen[i * each : (i + 1) * each]) for i in range(launches)]


def compare(
    contestants: Mapping[str, tuple[Callable[[], Any], Callable[[], None]]], timer: Timer, rounds: int = 7
) -> dict[str, Times]:
    """Time (launch, wait) pairs in turns; medians over all launches of all rounds."""
    with turn():
        return _compare(contestants, timer, rounds)


def _compare(
    contestants: Mapping[str, tuple[Callable[[], Any], Callable[[], None]]], timer: Timer, rounds: int
) -> dict[str, Times]:
    counts, samples = {}, {name: [] for name in contestants}
    for name, (launch, wait) in contestants.items():
        end = time.perf_counter() + WARM_UP_S
        launch()
        wait()
        first = timer(launch, wait, 3)
        counts[name] = max(3, min(100, math.ceil(SESSION_S * 1e6 / max(1.0, float(np.median(first))))))
        while timer is cupti and time.perf_counter() < end:
            launch()
            wait()
    for _ in range(rounds):
        for name, (launch, wait) in contestants.items():
            samples[name] += list(timer(launch, wait, counts[name]))
    return {name: summary(x) for name, x in samples.items()}


def summary(samples: Sequence[float]) -> Times:
    """Median and deciles."""
    p10, median, p90 = (float(x) for x in np.percentile(samples, (10, 50, 90)))
    return Times(median, p10, p90, len(samples))


def copies(touched: int, total: int) -> int:
    """How many input sets keep a call from finding its own in L2; `total` bytes each, `touched` of them read."""
    wanted = 1 + math.ceil(2 * L2_BYTES / max(1, touched))
    return max(1, min(wanted, 64, MAX_BYTES // max(1, total)))


def wait_for(results: Any) -> None:
    """Wait for JAX arrays, and for PyTorch's device if it is in use."""
    jax.block_until_ready([x for x in jax.tree.leaves(results) if isinstance(x, jax.Array)])
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()
