"""The golden side of a bisection: one run of a model out of a capture file, whole or in some rows of its tensors."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parity import captures, names
from parity.captures import Capture


class BisectionError(ValueError):
    """Models or captures that cannot be compared; the message says what to do."""


@dataclass(frozen=True)
class Golden:
    """A model's captured calls."""

    calls: tuple[Capture, ...]
    """In the order in which they ended."""
    mode: str
    path: Path

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        """Paths of the modules that were called, each once."""
        return tuple(dict.fromkeys(c.params["path"] for c in self.calls))

    @property
    def root(self) -> Capture:
        """The first call of the whole model."""
        return next(c for c in self.calls if c.params["path"] == "" and c.params["call"] == 0)

    def modules(self) -> list[names.Module]:
        """The modules for a draft of names."""
        count = self.calls[-1].params["order"] + 1
        return [_module(c, count) for c in self.calls if c.params["call"] == 0]


def load(path: Path, run: str | None = None) -> Golden:
    """The calls of one run in a capture file; `run` may be left out where there is one.

    Raises:
        BisectionError: it is no capture of a model, the root or its inputs are not in it, or there is no such run.
        parity.captures.CaptureError: the file cannot be trusted.
    """
    found = captures.read(path)
    by_run = captures.runs(found)
    if not by_run:
        raise BisectionError(
            f"{path}: a capture of a model's calls is required; write one with jaxattn.capture.capture"
        )
    whole = [name for name, calls in by_run.items() if "" in calls and calls[""].inputs]
    if not whole:
        raise BisectionError(f"{path}: the call of the whole model is required; capture it with '' or '*' in only=")
    chosen = whole[0] if run is None and len(whole) == 1 else run
    if chosen not in whole:
        raise BisectionError(f"{path} holds {len(whole)} runs: name one, --run {' or '.join(whole)}, got {run}")
    calls = tuple(c for c in found if "order" in c.params and c.params.get("run", "") == chosen)
    return Golden(calls, calls[0].params["mode"], path)


def _module(c: Capture, count: int) -> names.Module:
    table = c.params.get("tensors", {})
    shapes = [tuple(v[1]) for k, v in table.items() if k.startswith("out.")] or [y.shape for y in c.outputs.values()]
    known = c.params["parameters"]
    parameters = None if known is None else tuple(tuple(s) for s in known.values())
    return names.Module(c.params["path"], parameters, tuple(shapes), c.params["order"] / count)


def described(case: Capture, kind: str) -> dict[str, Any]:
    """Arrays of no size in memory with the shapes and dtypes of tensors that were reduced."""
    table = {k.partition(".")[2]: v for k, v in case.params.get("tensors", {}).items() if k.startswith(f"{kind}.")}
    return {k: np.broadcast_to(np.zeros((), np.dtype(d)), s) for k, (d, s) in table.items()}


def kept(case: Capture, kind: str, name: str) -> Sequence[int] | None:
    """The rows of a tensor that the capture kept, None = all."""
    return case.params.get("rows", {}).get(f"{kind}.{name}")


def fed(case: Capture, length: int) -> Sequence[int] | None:
    """Of tensors with so many rows in a module, those that golden inputs of the module decide; None = all."""
    for key, rows in case.params.get("rows", {}).items():
        shape = case.params["tensors"][key][1]
        if key.startswith("in.") and shape[captures.row_axis(shape)] == length:
            return rows
    return None


def some(x: np.ndarray, rows: Sequence[int] | None) -> np.ndarray:
    """These rows of a tensor in the golden layout."""
    return x if rows is None else np.take(x, rows, captures.row_axis(x.shape))


def replaced(case: Capture, kind: str, name: str, layout: names.Layout, ours: Any) -> np.ndarray:
    """The golden tensor; rows that the capture left out are ours."""
    golden = (case.inputs if kind == "in" else case.outputs)[name]
    rows = kept(case, kind, name)
    if rows is None:
        return golden
    whole = np.array(layout.golden(np.asarray(ours)).astype(golden.dtype))
    whole[(slice(None),) * captures.row_axis(whole.shape) + (rows,)] = golden
    return whole
