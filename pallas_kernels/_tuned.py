"""Tuned launch configurations as data: `tuned/<device>/<stem>.json`, written by `scripts/bench.py --tune`.

An entry belongs to one `signature` (shapes, dtypes and static options of a call) and keeps its evidence: the time of
the winner and of the others, the device, versions, commit and date. Lookup is a pure function of the signature.
"""

import dataclasses
import functools
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).with_name("tuned")
DEVICE = "nvidia_h200"
"""Whose measurements every sm_90a GPU uses; there are no others yet."""


def signature(**args: Any) -> str:
    """What a configuration may depend on: `name=dtype[shape]` of arrays, `name=value` of static options.

    Single numbers that happen to be arrays (scales) count by their dtype alone; options that are None are left out.
    """
    parts = []
    for name, x in sorted(args.items()):
        if x is None:
            continue
        if hasattr(x, "shape") and hasattr(x, "dtype"):
            parts.append(f"{name}={np.dtype(x.dtype).name}{list(x.shape)}".replace(" ", ""))
        else:
            parts.append(f"{name}={x}")
    return ";".join(parts)


def config[C](stem: str, kind: type[C], /, **args: Any) -> C | None:
    """The tuned configuration of these arguments, of the dataclass `kind` or one below it; None if there is no entry.

    Raises:
        ValueError: the entry does not fit `kind`: the kernel changed after it was tuned.
    """
    entry = entries(stem).get(signature(**args))
    if entry is None:
        return None
    module, _, name = entry["kind"].partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
        if not issubclass(found, kind):
            raise TypeError(f"{name} of {module}")
        return found(**{name: tuple(x) if isinstance(x, list) else x for name, x in entry["config"].items()})
    except (ImportError, AttributeError, TypeError, ValueError) as e:
        raise ValueError(
            f"{path(stem)}: the tuned configuration {entry['config']} is not a {kind.__name__} ({e}); tune again with "
            f"scripts/bench.py --mechanism {stem} --tune"
        ) from e


def path(stem: str) -> Path:
    """Where the entries of one mechanism stand."""
    return FOLDER / DEVICE / f"{stem}.json"


@functools.cache
def entries(stem: str) -> dict[str, dict[str, Any]]:
    """Signature -> entry; empty if nothing was tuned."""
    file = path(stem)
    return json.loads(file.read_text("utf-8")) if file.exists() else {}


def write(stem: str, args: dict[str, Any], chosen: Any, evidence: dict[str, Any]) -> Path:
    """Add or replace the entry of these arguments.

    Args:
        stem: mechanism.
        args: its prepared arguments.
        chosen: the winner, a dataclass.
        evidence: JSON values.
    """
    kind = f"{type(chosen).__module__}:{type(chosen).__qualname__}"
    new = entries(stem) | {signature(**args): {"kind": kind, "config": dataclasses.asdict(chosen), **evidence}}
    file = path(stem)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(dict(sorted(new.items())), indent=1) + "\n", "utf-8")
    entries.cache_clear()
    return file
