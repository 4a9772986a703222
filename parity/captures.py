"""Reading and writing of captures: outputs of a foreign implementation with everything needed to repeat them.

A capture file is a safetensors file with keys `case/in.name` and `case/out.name`; the header's metadata holds `family`,
`provenance` (JSON: who made it, with what, where, when, format number), `cases` (JSON: case -> parameters, among them
the kernel that ran), `tensors` (JSON: key -> sha256 of its bytes), `aliases` (JSON: key -> the key that holds the same
bytes, and the shape) and `digest`, a sha256 over all of them and every tensor's dtype and shape: no part can change
unnoticed. This is format 3. Format 2 has no aliases; format 1 has no family and hashes either, and known files of that
format stand with their own sha256 in `data/known_files.json`. `scripts/convert_captures.py` makes format 3 of both.

A case is one call: of a kernel, or of a module of a model (`path`, `call`, `order`, `run`), see `jaxattn/capture.py`,
whose `File` writes all files.

Runs on Python 3.11 and needs neither jax nor safetensors, because capture scripts import it beside a foreign stack.
"""

import contextlib
import hashlib
import importlib.util
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parity._safetensors import CODES, DTYPES, MalformedError, decode, parse

SHIPPED = Path(__file__).parent / "data"
"""Directory of the captures that come with the repository."""

FORMAT = 3
_FORMATS = (1, 2, FORMAT)
_KNOWN = SHIPPED / "known_files.json"
_SCRIPTS = {"vllm": "scripts/capture_vllm.py", "torch": "scripts/capture_torch.py"}
_CASE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
_KEY = re.compile(rf"({_CASE.pattern})/(in|out)\.([A-Za-z_][A-Za-z0-9_]*)")
_PROVENANCE = {"producer": str, "device": str, "driver": str, "seed": int, "date": str, "format": int}
_PROVENANCE_2 = {"versions": dict, "commit": str, "command": str}


def _hook() -> Any:
    """`jaxattn/capture.py` alone: the package needs jax, which capture scripts do without."""
    path = Path(__file__).parents[1] / "jaxattn" / "capture.py"
    spec = importlib.util.spec_from_file_location("_jaxattn_capture", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hook = _hook()


class CaptureError(ValueError):
    """A capture file that cannot be trusted; the message names file, case and tensor and how to make it again."""


@dataclass(frozen=True)
class CaseData:
    """What a capture script hands to `write` for one case."""

    params: dict[str, Any]
    """JSON values; `kernel` names the code that ran."""
    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]


@dataclass(frozen=True)
class Capture:
    """One case of a capture file; its arrays are read-only views into the mapped file."""

    family: str
    case: str
    params: dict[str, Any]
    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]
    provenance: dict[str, Any]
    """As in the file, plus `verified`: True if hashes or a known file vouch for the bytes."""
    path: Path

    @property
    def name(self) -> str:
        """`family/case`, unique among loaded captures."""
        return f"{self.family}/{self.case}"


def load(directories: Sequence[Path]) -> list[Capture]:
    """Every capture of the directories' `*.safetensors` files, checked, sorted by name.

    A directory named twice is read once.

    Raises:
        CaptureError: a directory is missing or holds no capture file, a file fails a check of `read`, or two files
            hold the same case.
    """
    found: dict[str, Capture] = {}
    for directory in dict.fromkeys(Path(d).resolve() for d in directories):
        if not directory.is_dir():
            raise CaptureError(f"{directory}: a directory of captures is required, and this is none")
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            raise CaptureError(
                f"{directory}: at least one *.safetensors file is required, found none; make one with "
                f"python {_SCRIPTS['torch']} {directory} or python {_SCRIPTS['vllm']} {directory}"
            )
        for path in paths:
            for capture in read(path):
                other = found.setdefault(capture.name, capture)
                if other is not capture:
                    raise CaptureError(
                        f"{path}: case {capture.name} is also in {other.path}; a case must be unique among the loaded "
                        f"files: leave out one of the two directories, or replace the older file by the newer"
                    )
    return [found[name] for name in sorted(found)]


def runs(captures: Iterable[Capture]) -> dict[str, dict[str, Capture]]:
    """The calls of models' modules: run -> path -> the first call, in the order in which they ended.

    The run of a file that holds one is called "".
    """
    found: dict[str, dict[str, Capture]] = {}
    for capture in captures:
        if {"path", "call", "order", "mode"} <= set(capture.params):
            found.setdefault(capture.params.get("run", ""), {}).setdefault(capture.params["path"], capture)
    return found


def read(path: Path) -> list[Capture]:
    """The captures of one file, in the order of its `cases`.

    Checked: the safetensors structure, format number, provenance, keys, that cases and tensors belong together, hashes,
    and that no floating output is NaN throughout.

    Raises:
        CaptureError: any check fails.
    """
    path = Path(path)
    try:
        entries, metadata, data = parse(path)
    except MalformedError as e:
        raise _error(path, str(e)) from e
    provenance = _json(path, metadata, "provenance")
    number = provenance.get("format")
    if number not in _FORMATS or isinstance(number, bool):
        raise _error(path, f"format {' or '.join(map(str, _FORMATS))} is required, found {number!r}", provenance)
    cases = _json(path, metadata, "cases", provenance)
    family = metadata.get("family") if number > 1 else path.stem
    aliases = _json(path, metadata, "aliases", provenance) if number > 2 else {}
    _check_provenance(path, provenance, number)
    _check_cases(path, cases, [*entries, *aliases], provenance, number)
    if number > 1:
        verified = _check_hashes(path, family, provenance, cases, entries, aliases, metadata, data)
    else:
        verified = _check_known(path, provenance, cases, data)
    known = entries | _resolved(path, entries, aliases, provenance)
    _check_calls(path, cases, known, provenance)
    return _captures(path, family, provenance | {"verified": verified}, cases, known, data)


def write(path: Path, family: str, cases: Mapping[str, CaseData], provenance: Mapping[str, Any]) -> None:
    """Write a capture file and read it back; equal arguments give equal bytes.

    Args:
        path: target, replaced only when the new file is complete and passes `read`.
        family: group of mechanisms, the first half of `Capture.name`.
        cases: case name -> data.
        provenance: producer, versions, device, driver ("none" without one), seed, date, commit, command
            (what makes the file again when the directory is appended).

    Raises:
        CaptureError: what `read` would refuse.
        TypeError: an array's dtype has no safetensors code.
    """
    path = Path(path)
    file = hook.File(path)
    with contextlib.closing(file.spool):
        for case, data in cases.items():
            file.add(case, data.params, data.inputs, data.outputs)
        file.finish(family, provenance, read)


def _json(path: Path, metadata: Mapping[str, Any], field: str, provenance: Mapping[str, Any] | None = None):
    text = metadata.get(field)
    if not isinstance(text, str):
        raise _error(path, f"header metadata {field!r} is required, found {sorted(metadata)}", provenance)
    try:
        return decode(f"header metadata {field!r}", text)
    except MalformedError as e:
        raise _error(path, str(e), provenance) from e


def _check_provenance(path: Path, provenance: Mapping[str, Any], number: int) -> None:
    required = _PROVENANCE | (_PROVENANCE_2 if number > 1 else {})
    for field, kind in required.items():
        value = provenance.get(field)
        if type(value) is not kind or value in ("", {}):
            raise _error(path, f"provenance {field!r} must be a {kind.__name__}, found {value!r}", provenance)
    producer = provenance["producer"]
    versions = provenance["versions"] if number > 1 else provenance
    if not isinstance(versions.get(producer), str):
        raise _error(path, f"provenance must give the version of {producer!r}, found {dict(versions)}", provenance)


def _check_cases(path: Path, cases: Mapping[str, Any], entries: Iterable[str], provenance, number: int) -> None:
    """Keys parse; cases and tensors belong together; every case has parameters and an output."""
    if not cases:
        raise _error(path, "at least one case is required, found none", provenance)
    outputs: set[str] = set()
    for key in entries:
        match = _KEY.fullmatch(key)
        if match is None:
            raise _error(path, f"key {key!r} must read case/in.name or case/out.name", provenance)
        case, kind, _ = match.groups()
        if case not in cases:
            raise _error(path, f"case {case}: tensor {key} has no entry in 'cases'", provenance)
        if kind == "out":
            outputs.add(case)
    for case, params in cases.items():
        if _CASE.fullmatch(case) is None:
            raise _error(path, f"case {case!r}: a name must match {_CASE.pattern}", provenance)
        if not isinstance(params, dict):
            raise _error(path, f"case {case}: parameters must be a JSON object, found {params!r}", provenance)
        if number > 1 and not isinstance(params.get("kernel"), str):
            raise _error(path, f"case {case}: 'kernel' must name the code that ran, found {sorted(params)}", provenance)
        if case not in outputs:
            raise _error(path, f"case {case}: at least one tensor {case}/out.* is required, found none", provenance)


def _resolved(path: Path, entries: Mapping[str, Any], aliases: Mapping[str, Any], provenance) -> dict[str, Any]:
    """Table entries of tensors that are stored under another key."""
    found = {}
    for key, value in aliases.items():
        of, shape = value if isinstance(value, list) and len(value) == 2 else (None, None)
        size = math.prod(shape) if isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape) else None
        if key in entries or of not in entries or size != math.prod(entries[of]["shape"]):
            raise _error(
                path, f"alias {key!r} must give a stored tensor and a shape of its size, found {value}", provenance
            )
        found[key] = entries[of] | {"shape": shape}
    return found


_CALL = {"path": str, "call": int, "order": int, "mode": str}


def _check_calls(path: Path, cases: Mapping[str, Any], tensors: Mapping[str, Any], provenance) -> None:
    """Calls of modules are complete: numbered without a gap in every run, and what is left of a tensor is told."""
    seen: dict[tuple[str, str], int] = {}
    order: dict[str, int] = {}
    for case, params in cases.items():
        if not {"path", "order"} & set(params):
            continue
        for field, kind in _CALL.items():
            if type(params.get(field)) is not kind:
                given = params.get(field)
                raise _error(
                    path, f"case {case}: {field!r} of a call must be a {kind.__name__}, found {given!r}", provenance
                )
        run = params.get("run", "")
        number = seen.get((run, params["path"]), 0)
        if params["call"] != number or params["order"] <= order.get(run, -1):
            found = f"call {params['call']} with order {params['order']}"
            wanted = f"call {number} with an order above {order.get(run, -1)}"
            raise _error(
                path, f"case {case}: a call is missing or misplaced: {wanted} is required, found {found}", provenance
            )
        seen[run, params["path"]], order[run] = number + 1, params["order"]
        for key, rows in params.get("rows", {}).items():
            whole, part = (
                params.get("tensors", {}).get(key, ("", None))[1],
                tensors.get(f"{case}/{key}", {}).get("shape"),
            )
            axis = row_axis(whole or ())
            cut = [len(rows) if i == axis else n for i, n in enumerate(whole or ())]
            if not whole or part != cut or not all(type(n) is int and 0 <= n < whole[axis] for n in rows):
                said = f"rows {rows} of {whole} are required, found shape {part}"
                raise _error(path, f"case {case}: tensor {key}: {said}", provenance)


def row_axis(shape: Sequence[int]) -> int:
    """The axis that `rows` of a case count along: the first that is longer than 1, else the first."""
    return next((i for i, n in enumerate(shape) if n > 1), 0)


def _check_hashes(path, family, provenance, cases, entries, aliases, metadata, data) -> bool:
    if not isinstance(family, str) or _CASE.fullmatch(family) is None:
        raise _error(path, f"header metadata 'family' must match {_CASE.pattern}, found {family!r}", provenance)
    hashes = _json(path, metadata, "tensors", provenance)
    if set(hashes) != set(entries):
        odd = sorted(set(hashes) ^ set(entries))
        raise _error(path, f"hashes and tensors must name the same keys, only one of them has {odd}", provenance)
    for key, entry in entries.items():
        found = hashlib.sha256(data[slice(*entry["data_offsets"])].data).hexdigest()
        if found != hashes[key]:
            raise _error(
                path, f"case {key.split('/')[0]}: tensor {key} was edited: {_unequal(hashes[key], found)}", provenance
            )
    parts = [aliases] if provenance["format"] > 2 else []
    expected, found = metadata.get("digest"), _digest(family, provenance, cases, entries, hashes, *parts)
    if expected != found:
        raise _error(
            path, f"a parameter, shape, dtype or the provenance was edited: {_unequal(expected, found)}", provenance
        )
    return True


def _check_known(path, provenance, cases, data) -> bool:
    """True if a format 1 file is a known one, False if nothing vouches for it."""
    known = json.loads(_KNOWN.read_text())
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    for entry in known:
        if entry["sha256"] == found:
            return True
    mark = fingerprint(provenance, cases)
    for entry in known:
        if entry["fingerprint"] == mark:
            same = f"{entry['set']}/{entry['file']}"
            raise _error(
                path,
                f"edited: it has the provenance and cases of {same}, but {_unequal(entry['sha256'], found)}",
                provenance,
            )
    return False


def fingerprint(provenance: Mapping[str, Any], cases: Iterable[str]) -> str:
    """What identifies a format 1 file whatever its bytes: its provenance and the names of its cases."""
    return hashlib.sha256(_canonical([dict(provenance), sorted(cases)]).encode()).hexdigest()


def _captures(path, family, provenance, cases, entries, data) -> list[Capture]:
    arrays: dict[str, dict[str, dict[str, np.ndarray]]] = {case: {"in": {}, "out": {}} for case in cases}
    for key, entry in sorted(entries.items()):
        case, rest = key.split("/")
        kind, name = rest.split(".")
        array = (
            data[slice(*entry["data_offsets"])].view(np.ndarray).view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
        )
        if kind == "out" and array.size and _is_float(array.dtype) and np.isnan(array.astype(np.float32)).all():
            raise _error(
                path,
                f"case {case}: output {name} {list(array.shape)} must hold numbers, found NaN only: the kernel did not "
                "write it",
                provenance,
            )
        arrays[case][kind][name] = array
    return [
        Capture(family, case, params, arrays[case]["in"], arrays[case]["out"], provenance, path)
        for case, params in cases.items()
    ]


def _is_float(dtype: np.dtype) -> bool:
    return CODES[dtype].startswith(("F", "BF"))


def _digest(family, provenance, cases, entries, hashes, *aliases) -> str:
    table = {key: [e["dtype"], e["shape"], hashes[key]] for key, e in entries.items()}
    return hashlib.sha256(_canonical([family, provenance, cases, table, *aliases]).encode()).hexdigest()


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _unequal(expected: Any, found: str) -> str:
    return f"sha256 {expected} was expected, found {found}"


def _error(path: Path, problem: str, provenance: Mapping[str, Any] | None = None) -> CaptureError:
    """The exception for a bad file, ending with the command that makes it again."""
    provenance = provenance or {}
    command = provenance.get("command")
    if not isinstance(command, str):
        name = path.name.removesuffix(".partial").removesuffix(".safetensors")
        producer = provenance.get("producer", "torch" if name.startswith("torch-") else "vllm")
        family = name.removeprefix(f"{producer}-")
        command = f"python {_SCRIPTS.get(producer, _SCRIPTS['vllm'])} --family {family}"
    return CaptureError(f"{path}: {problem}. Regenerate the file with: {command} {path.parent}")
