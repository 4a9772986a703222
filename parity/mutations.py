"""Mutation tests of the judge: known faults are planted, and every one must be caught.

A fault stands once in the reference (then truth and reference are both wrong, and only the captures can tell) and once
in the kernel (then reference and captures are right). Faulty outputs come from a small numpy twin of the op, which
without a fault passes every comparison; a judge that lets a planted fault pass everywhere is broken.
"""

import functools
import importlib
import importlib.util
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxattn import _checks, registry
from jaxattn._mechanism import Case, Mechanism
from parity import captures, cases, execution, tolerances, triangle
from parity.judge import judge

if TYPE_CHECKING:
    from parity.captures import Capture

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]
type Implementation = Callable[[Args, bool], Arrays]
"""`implementation(args, wide)` -> outputs; `wide` computes in float64."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A wrong implementation of an op."""

    name: str
    what: str
    """What is wrong, in a few words."""
    run: Implementation
    applies: Callable[[Args], bool] = lambda args: True
    """False where the fault changes nothing by construction."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """A mechanism's twin and what may be wrong with it."""

    twin: Implementation
    faults: tuple[Fault, ...]


@dataclass(kw_only=True)
class Mutant:
    """What became of one fault planted at one place."""

    mechanism: str
    fault: str
    what: str
    planted: str
    """`reference`, `kernel`, or `contract` (a kernel judged on the mechanism's own cases)."""
    applicable: int = 0
    caught: int = 0
    """Cases in which at least one comparison failed."""
    by: dict[str, int] = field(default_factory=dict)
    """Comparison -> cases in which it failed."""
    example: str = ""
    """The reason of the first failure."""

    def to_json(self) -> dict[str, Any]:
        """The mutant as the report stores it."""
        return {**vars(self), "killed": self.caught > 0}


def on_host(args: Args) -> Args:
    """Arguments with their arrays in numpy; options stay what they are."""
    return {name: np.asarray(x) if _checks.is_array(x) else x for name, x in args.items()}


def find(mechanism: str) -> Faults:
    """The faults of a mechanism.

    Raises:
        ValueError: nobody wrote any.
    """
    name = f"parity.faults.{mechanism}"
    if importlib.util.find_spec(name) is None:
        raise ValueError(f"{mechanism} has no faults; write parity/faults/{mechanism}.py")
    return importlib.import_module(name).FAULTS


def every(mechanism: str, stored: Sequence[tuple[Path, str]], own: bool = True) -> list[Mutant]:
    """All faults of a mechanism, on captures and on its own cases; what a process of a pool does.

    Args:
        mechanism: its name.
        stored: (file, case) of each capture.
        own: plant them on the mechanism's own cases too.
    """
    files = dict.fromkeys(path for path, _ in stored)
    found = [c for path in files for c in captures.read(path) if (path, c.case) in stored]
    # many small references, which a GPU would only compile
    with jax.default_device(jax.devices("cpu")[0]):
        return run([registry.find(mechanism)], found) + (contract(registry.find(mechanism)) if own else [])


def run(mechanisms: Iterable[Mechanism], captures: Iterable["Capture"]) -> list[Mutant]:
    """Plant every fault in reference and kernel and judge it on every capture it applies to."""
    mutants: dict[tuple[str, str, str], Mutant] = {}
    for mechanism, capture in triangle.pair(mechanisms, captures):
        for name, planted, fault, reasons in _on_capture(mechanism, capture):
            mutant = mutants.setdefault(
                (mechanism.name, name, planted),
                Mutant(mechanism=mechanism.name, fault=name, what=fault.what, planted=planted),
            )
            _count(mutant, reasons, capture.name)
    return list(mutants.values())


def contract(mechanism: Mechanism, share: int = 1) -> list[Mutant]:
    """Plant every fault in a kernel and judge it by the contract on the mechanism's sharpest cases.

    These are its smoke cases in float32 and those with a float8 cache, whose scales exist nowhere else.

    Args:
        mechanism: of the registry.
        share: above 1, of these cases only the first of each fault that applies to any, and one in so many.
    """
    faults, adapter = find(mechanism.name).faults, cases.find(mechanism.name)
    mutants = {
        fault.name: Mutant(mechanism=mechanism.name, fault=fault.name, what=fault.what, planted="contract")
        for fault in faults
    }
    new = list(faults)  # no case has shown them yet
    for case in mechanism.cases:
        drawn = zlib.crc32(case.name.encode()) % share == 0
        if not (drawn or new) or not _sharp(mechanism, case):  # it takes long to make a case
            continue
        args = on_host(_made(mechanism.name, case.name))
        if not (drawn or any(fault.applies(args) for fault in new)):
            continue
        applicable = [fault for fault in faults if fault.applies(args)]
        new = [fault for fault in new if fault not in applicable]
        truth, same = own(mechanism.name, case.name)
        for fault in applicable:
            wrong = fault.run(args, False)
            reasons = {}
            for output, x in wrong.items():
                spec = adapter.outputs[output]
                verdict = judge(
                    tolerances.find(spec.contract),
                    truth=truth[output],
                    subject=x,
                    peer=same[output],
                    names=("kernel", "reference"),
                    axes=spec.axes,
                    slice_rank=spec.slice_rank,
                    details=False,
                )
                if not verdict.passed:
                    reasons.setdefault(output, verdict.reason)
            _count(mutants[fault.name], reasons, case.name)
    return [mutant for mutant in mutants.values() if mutant.applicable]


def _sharp(mechanism: Mechanism, case: Case) -> bool:
    """True for cases whose errors are not hidden by the roundings of 16-bit numbers."""
    if "smoke" not in case.tags:
        return False
    arrays = [x for x in _made(mechanism.name, case.name).values() if _checks.is_array(x) and x.ndim > 1]
    return any(name == "float32" or name.startswith("float8") for name in map(_checks.dtype_name, arrays))


@functools.lru_cache(maxsize=64)
def _made(mechanism: str, case: str) -> Args:
    return next(c for c in registry.find(mechanism).cases if c.name == case).make(np.random.default_rng(0))


@functools.cache
def own(mechanism: str, case: str) -> tuple[Arrays, Arrays]:
    """Float64 truth and the reference's outputs of one of a mechanism's own cases."""
    args = _made(mechanism, case)
    truth, same = (execution.reference(registry.find(mechanism), args, wide=wide) for wide in (True, False))
    return truth, same


def _on_capture(mechanism: Mechanism, capture: "Capture"):
    """Yield (fault, where it stands, fault record, comparison -> reason of failure)."""
    faults, adapter = find(mechanism.name), cases.find(mechanism.name)
    args = on_host(adapter.arguments(capture))
    expected = adapter.expected(capture)

    def compute(implementation: Implementation, wide: bool) -> Arrays:
        return adapter.convention(capture, implementation(args, wide))

    truth, same = (compute(faults.twin, wide) for wide in (True, False))
    explained = adapter.explain(capture, args)
    for fault in faults.faults:
        if not fault.applies(args):
            continue
        wrong_truth, wrong = (compute(fault.run, wide) for wide in (True, False))
        for planted, base, sides in (
            ("reference", wrong_truth, {"reference": wrong, "kernel": same}),
            ("kernel", truth, {"reference": same, "kernel": wrong}),
        ):
            reasons = {}
            for output, spec in adapter.outputs.items():
                if output not in expected:
                    continue
                arrays = {"capture": expected[output]} | {side: x[output] for side, x in sides.items()}
                for comparison in triangle.COMPARISONS:
                    if (planted == "reference") != (comparison == "capture_vs_reference"):
                        continue
                    yardstick = triangle.yardstick(explained, output)
                    verdict = triangle.edge(spec, comparison, base[output], arrays, yardstick, details=False)
                    if not verdict.passed:
                        reasons.setdefault(comparison, f"{output}: {verdict.reason}")
            yield fault.name, planted, fault, reasons


def _count(mutant: Mutant, reasons: dict[str, str], case: str) -> None:
    mutant.applicable += 1
    mutant.caught += bool(reasons)
    for comparison, reason in reasons.items():
        mutant.by[comparison] = mutant.by.get(comparison, 0) + 1
        mutant.example = mutant.example or f"{case}: {reason}"
