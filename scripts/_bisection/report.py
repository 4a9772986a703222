"""A bisection as the report's data: results, the finding, the tree of modules, end-to-end metrics."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from parity import bisection, logits, names, triangle
from parity.bisection import FORCED, FREE, Compared, Golden, Logits
from scripts._report import schema

_NAME = "bisection"


def build(
    compared: Sequence[Compared],
    golden: Golden,
    pairs: Mapping[str, str],
    found_logits: Logits | None,
    known: names.Names,
    unmatched: Mapping[str, Sequence[str]],
    repro: str,
) -> schema.Report:
    """The whole report.

    Args:
        compared: what was judged.
        golden: the captured calls.
        pairs: golden path -> our path.
        found_logits: of the free run.
        known: the names file.
        unmatched: side -> modules without a counterpart.
        repro: command line that repeats a module's comparisons when its path is appended.
    """
    capture = golden.path.resolve().parent.name + "/" + golden.path.name
    results = [_result(c, capture, repro) for c in compared]
    parts = {**pairs, "": pairs.get("", "")}
    model = {
        "mode": golden.mode,
        "finding": _finding(bisection.first(compared, FORCED), repro),
        "free": _finding(bisection.first(compared, FREE), repro),
        "tree": tree(compared, golden, parts),
        "end_to_end": end_to_end(found_logits, golden, known),
        "unmatched": {side: list(paths) for side, paths in unmatched.items()},
    }
    if golden.mode != "full":  # there are no golden inputs to feed
        model["finding"] = model["free"]
    sentences = {
        (_NAME, capture, _case(c), c.output): _sentence(c, [d for d in compared if _same(c, d)]) for c in compared
    }
    provenance = {"ours": triangle.provenance("reference"), "captures": {capture: golden.calls[0].provenance}}
    provenance["ours"]["backend"] = jax.default_backend()
    cases = {_case(c): _params(golden, c) for c in compared}
    return schema.complete(
        {"provenance": provenance, "results": results},
        sentences=sentences,
        mutations=schema.mutations([]),
        mechanisms=[_NAME],
        cases=cases,
        model=model,
    )


def _case(c: Compared) -> str:
    return f"model/{c.module}" + (f"+{c.call}" if c.call else "")


def _same(a: Compared, b: Compared) -> bool:
    return (a.module, a.call, a.output) == (b.module, b.call, b.output)


def _params(golden: Golden, c: Compared) -> dict[str, Any]:
    case = next((x for x in golden.calls if x.params["path"] == c.module), None)
    params = case.params if case is not None else {"kernel": "unknown", "parameters": {}}
    return {"kernel": params["kernel"], "parameters": params["parameters"], "ours": c.ours or "the whole model"}


def _repro(c: Compared, repro: str) -> str:
    return f"{repro} --only '{c.module}'"


def _result(c: Compared, capture: str, repro: str) -> dict[str, Any]:
    v = c.verdict
    return {
        "mechanism": _NAME, "capture": capture, "case": _case(c), "output": c.output, "comparison": c.comparison,
        "backend": jax.default_backend(), "kernel": None, "status": v.status, "reason": v.reason,
        "metrics": v.metrics | {"relative": c.error}, "allowed": v.allowed, "headroom": v.headroom, "worst": v.worst,
        "slices": v.slices, "repro": _repro(c, repro), "time_us": None,
    }  # fmt: skip


def _finding(c: Compared | None, repro: str) -> dict[str, Any] | None:
    if c is None:
        return None
    return {
        "module": c.module, "ours": c.ours, "call": c.call, "output": c.output, "case": _case(c),
        "comparison": c.comparison, "reason": c.verdict.reason, "repro": _repro(c, repro),
    }  # fmt: skip


def _sentence(c: Compared, both: Iterable[Compared]) -> str:
    status = {d.comparison: d.verdict.passed for d in both}
    name = c.ours or "the whole model"
    if status.get(FORCED) is False:
        where = f"its own code before {c.output.rpartition(' into ')[2]}" if " into " in c.output else "its result"
        return f"{name} is wrong by itself: on golden inputs {where} leaves the golden tensor"
    if status.get(FREE) is False:
        return f"{name} only passes on what came before" if FORCED in status else f"{name} leaves the golden tensor"
    return f"{name} agrees"


# ---------------------------------------------------------------- the tree
def tree(compared: Sequence[Compared], golden: Golden, pairs: Mapping[str, str]) -> list[dict[str, Any]]:
    """One node per pair of modules, parents before children, children in the order of the golden run."""
    order = {path: i for i, path in enumerate(golden.paths)}
    above = {p: next((a for a in _ancestors(p) if a in pairs), None) for p in pairs}
    nodes: list[dict[str, Any]] = []

    def add(path: str, depth: int) -> None:
        case = next(c for c in golden.calls if c.params["path"] == path)
        sides = {c: _worst([x for x in compared if x.module == path and x.comparison == c]) for c in (FORCED, FREE)}
        parent = above[path]
        name = pairs[path].removeprefix(f"{pairs[parent]}." if parent else "") or "model"
        node = {
            "path": path,
            "name": name,
            "ours": pairs[path],
            "kernel": case.params["kernel"].rpartition(".")[2],
            "depth": depth,
        }
        nodes.append(node | sides)
        for child in sorted((p for p, a in above.items() if a == path and p), key=lambda p: order[p]):
            add(child, depth + 1)

    add("", 0)
    return nodes


def _ancestors(path: str) -> Iterable[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path


def _worst(found: Sequence[Compared]) -> dict[str, Any]:
    if not found:
        return {"status": "not_run", "share": None, "error": None}

    def share(c: Compared) -> float:
        return c.verdict.headroom if c.verdict.headroom is not None else 0.0 if c.verdict.passed else math.inf

    worst = max(found, key=share)
    return {"status": "pass" if all(c.verdict.passed for c in found) else "fail", "share": share(worst),
            "error": worst.error}  # fmt: skip


# ---------------------------------------------------------------- end to end
def end_to_end(found: Logits | None, golden: Golden, known: names.Names) -> dict[str, Any]:
    """The metrics of `parity.logits`, or why there are none."""
    if known.logits is None:
        return {"reason": "the names file names no logits"}
    if golden.mode != "full":
        return {"reason": f"the capture holds {golden.mode}, no logits"}
    if found is None:
        return {"reason": f"the root has no output {known.logits!r} that both models return"}
    shape = found.golden.shape[:-1]
    tokens = [x for x in golden.root.inputs.values() if x.shape == shape and np.issubdtype(x.dtype, np.integer)]
    allowed = logits.bound(found.ours, found.golden, found.moved, found.terms)
    try:
        return logits.compare(found.ours, found.golden, allowed, tokens[0] if tokens else None)
    except ValueError as e:
        return {"reason": str(e)}
