"""Hugging Face checkpoint folders: what they hold, and how it gets into a model, one tensor at a time.

A model's variables are named as in the checkpoint: `model.layers.0.input_layernorm.weight` of the checkpoint fills
`model.model.layers[0].input_layernorm.weight`. Where a variable is stored otherwise (transposed, or in pieces that are
stacked over experts), a rule for the module's type says so, see `Rules`.
"""

import fnmatch
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from jaxattn.models._safetensors import CheckpointError, Stored, header
from jaxattn.nn.moe import Frozen
from jaxattn.nn.quantized_linear import QuantizedParam

__all__ = ["Checkpoint", "CheckpointError", "Piece", "Rules", "linear_rule", "load", "whole"]

LOADED = (nnx.Param, QuantizedParam, Frozen)
"""Kinds of variables that a checkpoint fills; tables, caches and counters are the model's own."""

_LISTED = 20
"""Problems that a message lists one by one."""
_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_EXACT = {  # stored dtype -> dtypes that hold all of its numbers
    "bfloat16": ("float32", "float64"),
    "float16": ("float32", "float64"),
    "float32": ("float64",),
}


@dataclass(frozen=True)
class Checkpoint:
    """A folder with `config.json` and its tensors, listed from the headers of its files."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Stored]

    @classmethod
    def open(cls, folder: str | Path) -> "Checkpoint":
        """List a folder's tensors: those of `model.safetensors`, or of the shards that its index names.

        Raises:
            CheckpointError: a file is missing or broken, or index and shards disagree.
        """
        folder = Path(folder)
        config = _json(folder / "config.json")
        if (folder / _INDEX).is_file():
            return cls(folder, config, _sharded(folder, _json(folder / _INDEX)))
        if (folder / _ONE).is_file():
            return cls(folder, config, header(folder / _ONE))
        shards = sorted(p.name for p in folder.glob("*.safetensors"))
        there = f"the folder has {', '.join(shards[:3])}{' and more' if len(shards) > 3 else ''}" if shards else "none"
        raise CheckpointError(f"{folder}: {_ONE} or, for several shards, {_INDEX} is required; {there}")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A stored tensor and the part of a variable that it fills."""

    name: str
    """In the checkpoint, relative to the module whose rule names it."""
    shape: tuple[int, ...]
    """As stored."""
    dtypes: tuple[str, ...] = ()
    """As stored; () = the variable's, or one whose numbers the variable's dtype holds exactly."""
    at: tuple[int | slice, ...] = ()
    """Where in the variable; () = all of it."""
    convert: Callable[[np.ndarray], np.ndarray] | None = None
    """What becomes of it before it is put there."""


type Rules = Mapping[type, Callable[[Any], Mapping[str, tuple[Piece, ...]]]]
"""Type of a module -> function of such a module that gives the pieces of its own variables, by attribute; attributes
that it leaves out are stored under their own names."""


def linear_rule(module: nnx.Linear) -> dict[str, tuple[Piece, ...]]:
    """`nnx.Linear`: the kernel [M, F] is `weight` [F, M] transposed."""
    shape = tuple(module.kernel.shape)
    return {"kernel": (Piece(name="weight", shape=shape[::-1], convert=np.transpose),)}


def _embed_rule(module: nnx.Embed) -> dict[str, tuple[Piece, ...]]:
    return {"embedding": (Piece(name="weight", shape=tuple(module.embedding.shape)),)}


_RULES: Rules = {nnx.Linear: linear_rule, nnx.Embed: _embed_rule}


def whole(name: str, variable: Any, **options: Any) -> tuple[Piece, ...]:
    """The one piece that fills all of a variable, stored in its shape."""
    return (Piece(name=name, shape=tuple(variable.shape), **options),)


type Plan = list[tuple[nnx.Variable, tuple[Piece, ...]]]


def pieces(model: nnx.Module, rules: Rules | None = None, rename: Callable[[str], str] = str) -> Plan:
    """What fills each variable of `LOADED` kinds, under full names; what is shared, under the name next to the root."""
    rules = {**_RULES, **(rules or {})}
    found: Plan = []
    seen: set[int] = set()
    queue: deque[tuple[str, Any]] = deque([("", model)])
    while queue:
        prefix, module = queue.popleft()
        if id(module) in seen:
            continue
        seen.add(id(module))
        rule = next((rules[kind] for kind in type(module).__mro__ if kind in rules), None)
        stated = {} if rule is None else rule(module)
        for name, variable in vars(module).items():
            if isinstance(variable, LOADED) and id(variable) not in seen:
                seen.add(id(variable))
                own = stated.get(name) or whole(name, variable)
                found.append((variable, tuple(replace(p, name=rename(prefix + p.name)) for p in own)))
        children = nnx.iter_children(module)
        queue.extend((f"{prefix}{name}.", child) for name, child in children if isinstance(child, nnx.Pytree))
    return found


@dataclass
class _Problems:
    found: list[tuple[Any, str, str]] = field(default_factory=list)
    """File or folder, tensor, what is wrong."""

    def add(self, where: Any, name: str, what: str) -> None:
        self.found.append((where, name, what))

    def lines(self) -> list[str]:
        """One for each; of many, one for each kind: what is wrong alike with names that differ in numbers."""
        if len(self.found) <= _LISTED:
            return [f"  {where}: {name}: {what}" for where, name, what in self.found]
        kinds: dict[tuple[str, str], list[tuple[Any, str, str]]] = {}
        for problem in self.found:
            kinds.setdefault((re.sub(r"\d+", "*", problem[1]), problem[2]), []).append(problem)
        lines = []
        for (pattern, _), ((where, name, what), *rest) in kinds.items():
            lines.append(f"  {where}: {name}: {what}" + (f" ({len(rest)} more of {pattern})" if rest else ""))
        return lines


def load[M: nnx.Module](
    make: Callable[[], M],
    checkpoint: Checkpoint,
    *,
    rules: Rules | None = None,
    rename: Callable[[str], str] = str,
    ignore: Iterable[str] = (),
    progress: bool = True,
) -> M:
    """The model that `make` gives, with the checkpoint's tensors in place of its parameters.

    Names, shapes and dtypes are compared before the first tensor is read. Parameters are never drawn: `make` is traced
    for its shapes, and what no checkpoint holds (tables, say) is computed alone.

    Args:
        make: makes the model; must be traceable.
        checkpoint: an opened folder.
        rules: for modules that are stored otherwise than they stand in the model.
        rename: full name of a piece in the model -> in the checkpoint, where no rule of one module can say it.
        ignore: glob patterns of stored names that the model does not want.
        progress: show a bar.

    Raises:
        CheckpointError: tensors are missing, unknown, or have another shape or dtype; all of them are named.
    """
    model = nnx.eval_shape(make)
    plan = pieces(model, rules, rename)
    _check(type(model).__name__, checkpoint, plan, tuple(ignore))

    def others():
        return nnx.split(make(), nnx.Any(*LOADED), ...)[2]

    rest = jax.jit(others)()
    for variable, value in _read(checkpoint, plan, progress):
        variable.set_value(value)
    nnx.update(model, rest)
    return model


def _check(model: str, checkpoint: Checkpoint, plan: Plan, ignore: tuple[str, ...]) -> None:
    problems, used = _Problems(), set()
    for variable, parts in plan:
        for piece in parts:
            stored = checkpoint.tensors.get(piece.name)
            if stored is None:
                problems.add(checkpoint.folder, piece.name, f"missing; must have shape {list(piece.shape)}")
                continue
            used.add(piece.name)
            if stored.shape != piece.shape:
                problems.add(
                    stored.file.name,
                    piece.name,
                    f"shape must be {list(piece.shape)}, got {list(stored.shape)}",
                )
            given, own = stored.dtype, jnp.dtype(variable.dtype).name
            allowed = piece.dtypes or (own, *(d for d, wider in _EXACT.items() if own in wider))
            if given not in allowed:
                problems.add(stored.file.name, piece.name, f"dtype must be {' or '.join(allowed)}, got {given}")
    for name in sorted(set(checkpoint.tensors) - used):
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignore):
            problems.add(checkpoint.tensors[name].file.name, name, "unknown; the model has no place for it")
    if problems.found:
        count, lines = len(problems.found), problems.lines()
        if 2 * len(used) < sum(len(parts) for _, parts in plan):
            lines.insert(0, "  most of them are not there: config.json may be that of another checkpoint")
        raise CheckpointError(
            f"{model}: the checkpoint {checkpoint.folder} must hold the model's tensors, got {count} "
            f"problem{'s' if count > 1 else ''}:\n" + "\n".join(lines)
        )


def _read(checkpoint: Checkpoint, plan: Plan, progress: bool) -> list[tuple[nnx.Variable, jax.Array]]:
    """Arrays of all variables; at most one variable's numbers are on the host at a time."""
    stored = [checkpoint.tensors[piece.name] for _, parts in plan for piece in parts]
    size = sum(tensor.stop - tensor.start for tensor in stored)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    values = []
    with Progress(*columns, disable=not progress, transient=True) as bar:
        task = bar.add_task(f"loading {checkpoint.folder.name}", total=size)
        for variable, parts in plan:
            shape, dtype = tuple(variable.shape), jnp.dtype(variable.dtype)
            host = np.empty(shape, dtype) if parts[0].at else np.empty(0, dtype)
            for piece in parts:
                tensor = checkpoint.tensors[piece.name]
                numbers = tensor.read() if piece.convert is None else piece.convert(tensor.read())
                if piece.at:
                    host[piece.at] = numbers
                else:
                    host = numbers.astype(dtype).reshape(shape)
                bar.update(task, advance=tensor.stop - tensor.start)
            values.append((variable, jnp.array(host)))  # a copy: nothing may point into the mapped file
    return values


def _sharded(folder: Path, index: dict[str, Any]) -> dict[str, Stored]:
    """Tensors of the shards that an index names."""
    where = index.get("weight_map")
    if not isinstance(where, dict) or not where:
        raise CheckpointError(f"{folder / _INDEX}: 'weight_map' must map tensors to files, got {where!r}")
    files = sorted(set(where.values()))
    missing = [f for f in files if not (folder / f).is_file()]
    if missing:
        raise CheckpointError(f"{folder}: {_INDEX} names {', '.join(missing)}, which are missing; fetch them")
    found: dict[str, Stored] = {}
    for file in files:
        own = header(folder / file)
        odd = sorted({n for n in own if where.get(n) != file} | {n for n, f in where.items() if f == file} - set(own))
        if odd:
            raise CheckpointError(
                f"{folder / file}: {_INDEX} and the shard must name the same tensors, only one of them has "
                f"{', '.join(odd)}"
            )
        found |= own
    return found


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path}: the file is required, found none")
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as e:
        raise CheckpointError(f"{path}: must be JSON: {e}") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must be a JSON object, got {type(value).__name__}")
    return value
