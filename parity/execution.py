"""Running an op for a comparison: float64 truth, reference, and a kernel that is interpreted or compiled."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxattn import _checks, _mechanism
from jaxattn._mechanism import Kernel, Mechanism
from pallas_kernels import _mosaic

type Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Outcome:
    """What became of the kernel: outputs, or why there are none."""

    outputs: Arrays | None
    status: str = "pass"
    reason: str = ""
    name: str | None = None
    time_us: float | None = None


def reference(mechanism: Mechanism, args: dict[str, Any], wide: bool = False) -> Arrays:
    """Outputs of the mechanism's reference through its front door; `wide` gives the float64 truth."""
    if wide:
        with jax.enable_x64(True):
            return call(mechanism, _checks.upcast(args), "reference")
    return call(mechanism, args, "reference")


def call(mechanism: Mechanism, args: dict[str, Any], implementation: str | None) -> Arrays:
    """The op under jit, as numpy arrays by output name."""
    arrays = {k: v for k, v in args.items() if _checks.is_array(v)}
    static = {k: v for k, v in args.items() if k not in arrays}
    out = jax.jit(lambda arrays: mechanism.op(**arrays, **static, implementation=implementation))(arrays)
    out = out if isinstance(out, tuple) else (out,)
    names = mechanism.outputs(**mechanism.prepare(**args))
    return {name: np.asarray(x) for name, x in zip(names, out, strict=True)}


@contextlib.contextmanager
def compiled() -> Iterator[None]:
    """Within it, an op that is called eagerly is one compiled program, kept for the next call, instead of hundreds."""
    original = _mechanism.run

    def run(mechanism: Mechanism, args: dict[str, Any], implementation: str | None, config: Any = None) -> Any:
        arrays = {k: v for k, v in args.items() if _checks.is_array(v)}
        static = {k: v for k, v in args.items() if k not in arrays}
        key = mechanism.name, mechanism.reference, implementation, repr(config), repr(sorted(static.items()))
        if key not in _PROGRAMS:
            _PROGRAMS[key] = jax.jit(lambda arrays: original(mechanism, arrays | static, implementation, config))
        return _PROGRAMS[key](arrays)

    _mechanism.run = run
    try:
        yield
    finally:
        _mechanism.run = original


_PROGRAMS: dict[Any, Callable[[dict[str, Any]], Any]] = {}


def supported(mechanism: Mechanism, args: dict[str, Any]) -> tuple[str | None, str]:
    """The first kernel that supports these arguments, or None and the sentence of the preferred one."""
    prepared = mechanism.prepare(**args)
    reasons: dict[str, str | None] = {name: _why_not(k, prepared) for name, k in mechanism.kernels.items()}
    for name, reason in reasons.items():
        if reason is None:
            return name, ""
    return None, "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or "there is no kernel"


def _why_not(kernel: Kernel, prepared: dict[str, Any]) -> str | None:
    return kernel.why_not(**prepared) or kernel.why_not_here()


def run_kernel(mechanism: Mechanism, args: dict[str, Any], backend: str) -> Outcome:
    """The first supported kernel on `reference` (nothing runs), `interpret` or `gpu`; exceptions become a failure."""
    if backend == "reference":
        return Outcome(None, "not_run", "backend 'reference' runs no kernel")
    interpreted = backend == "interpret"
    try:
        with _mosaic.interpret() if interpreted else contextlib.nullcontext():
            name, reason = supported(mechanism, args)
            if name is None:
                return Outcome(None, "skipped", reason)
            outputs = call(mechanism, args, name)
            return Outcome(outputs, name=name, time_us=None if interpreted else _time_us(mechanism, args, name))
    except Exception as e:
        return Outcome(None, "fail", message("the kernel raised", e))


def _time_us(mechanism: Mechanism, args: dict[str, Any], name: str) -> float:
    """Best wall time of one call after warm-up; for orientation, the benchmark script measures properly."""
    arrays = {k: jax.device_put(v) for k, v in args.items() if _checks.is_array(v)}
    static = {k: v for k, v in args.items() if k not in arrays}
    fn = jax.jit(lambda arrays: mechanism.op(**arrays, **static, implementation=name))
    jax.block_until_ready(fn(arrays))
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(fn(arrays))
        best = min(best, time.perf_counter() - start)
    return best * 1e6


def message(what: str, error: Exception) -> str:
    """One line that says what raised which error."""
    return f"{what} {type(error).__name__}: {' '.join(str(error).split())[:600]}"
