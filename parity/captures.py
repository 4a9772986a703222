"""Reading and writing of captures: outputs of a foreign implementation with everything needed to repeat them.

A capture file is a safetensors file with keys `case/in.name` and `case/out.name`; the header's metadata holds
`provenance` (JSON: who made it, with what, where, when, format number) and `cases` (JSON: case -> parameters, among
them the kernel that ran). Format 2 adds `family`, `tensors` (JSON: key -> sha256 of its bytes) and `digest`, a sha256
over family, provenance, cases and every tensor's dtype, shape and hash: no part can change unnoticed. Format 1 has no
hashes; known files of that format stand with their own sha256 in `data/known_files.json`.

Runs on Python 3.11 and needs neither jax nor safetensors, because capture scripts import it beside a foreign stack.
"""

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parity._safetensors import CODES, DTYPES, MalformedError, decode, parse

SHIPPED = Path(__file__).parent / "data"
"""Directory of the captures that come with the repository."""

FORMAT = 2
_FORMATS = (1, FORMAT)
_KNOWN = SHIPPED / "known_files.json"
_SCRIPTS = {"vllm": "scripts/capture_vllm.py", "torch": "scripts/capture_torch.py"}
_CASE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
_KEY = re.compile(rf"({_CASE.pattern})/(in|out)\.([A-Za-z_][A-Za-z0-9_]*)")
_PROVENANCE = {"producer": str, "device": str, "driver": str, "seed": int, "date": str, "format": int}
_PROVENANCE_2 = {"versions": dict, "commit": str, "command": str}


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
    family = metadata.get("family") if number == FORMAT else path.stem
    _check_provenance(path, provenance, number)
    _check_cases(path, cases, entries, provenance, number)
    if number == FORMAT:
        verified = _check_hashes(path, family, provenance, cases, entries, metadata, data)
    else:
        verified = _check_known(path, provenance, cases, data)
    return _captures(path, family, provenance | {"verified": verified}, cases, entries, data)


def write(path: Path, family: str, cases: Mapping[str, CaseData], provenance: Mapping[str, Any]) -> None:
    """Write a capture file of format 2 and read it back; equal arguments give equal bytes.

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
    tensors = {
        f"{case}/{kind}.{name}": np.asarray(array, order="C")
        for case, data in cases.items()
        for kind, arrays in (("in", data.inputs), ("out", data.outputs))
        for name, array in arrays.items()
    }
    for key, array in tensors.items():
        if array.dtype not in CODES:
            raise TypeError(f"{path}: {key} has dtype {array.dtype}; a capture holds {', '.join(map(str, CODES))}")
    entries, chunks, offset = {}, [], 0
    for key in sorted(tensors, key=lambda k: (-tensors[k].itemsize, k)):  # keeps every tensor aligned
        raw = tensors[key].tobytes()
        shape, end = list(tensors[key].shape), offset + len(raw)
        entries[key] = {"dtype": CODES[tensors[key].dtype], "shape": shape, "data_offsets": [offset, end]}
        chunks.append(raw)
        offset = end
    full = dict(provenance) | {"format": FORMAT}
    params = {case: data.params for case, data in cases.items()}
    hashes = {key: hashlib.sha256(raw).hexdigest() for key, raw in zip(entries, chunks, strict=True)}
    metadata = {
        "family": family,
        "provenance": _canonical(full),
        "cases": json.dumps(params, allow_nan=False),
        "tensors": _canonical(hashes),
        "digest": _digest(family, full, params, entries, hashes),
    }
    header = json.dumps({"__metadata__": metadata, **entries}).encode()
    header += b" " * (-len(header) % 8)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(b"".join([struct.pack("<Q", len(header)), header, *chunks]))
    try:
        read(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _json(path: Path, metadata: Mapping[str, Any], field: str, provenance: Mapping[str, Any] | None = None):
    text = metadata.get(field)
    if not isinstance(text, str):
        raise _error(path, f"header metadata {field!r} is required, found {sorted(metadata)}", provenance)
    try:
        return decode(f"header metadata {field!r}", text)
    except MalformedError as e:
        raise _error(path, str(e), provenance) from e


def _check_provenance(path: Path, provenance: Mapping[str, Any], number: int) -> None:
    required = _PROVENANCE | (_PROVENANCE_2 if number == FORMAT else {})
    for field, kind in required.items():
        value = provenance.get(field)
        if type(value) is not kind or value in ("", {}):
            raise _error(path, f"provenance {field!r} must be a {kind.__name__}, found {value!r}", provenance)
    producer = provenance["producer"]
    versions = provenance["versions"] if number == FORMAT else provenance
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
        if number == FORMAT and not isinstance(params.get("kernel"), str):
            raise _error(path, f"case {case}: 'kernel' must name the code that ran, found {sorted(params)}", provenance)
        if case not in outputs:
            raise _error(path, f"case {case}: at least one tensor {case}/out.* is required, found none", provenance)


def _check_hashes(path, family, provenance, cases, entries, metadata, data) -> bool:
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
    expected, found = metadata.get("digest"), _digest(family, provenance, cases, entries, hashes)
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
    for key, entry in entries.items():
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


def _digest(family, provenance, cases, entries, hashes) -> str:
    table = {key: [e["dtype"], e["shape"], hashes[key]] for key, e in entries.items()}
    return hashlib.sha256(_canonical([family, provenance, cases, table]).encode()).hexdigest()


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
