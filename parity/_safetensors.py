"""The safetensors container, read from bytes: numpy alone cannot name bfloat16 and float8."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
CODES = {np.dtype(t): code for code, t in DTYPES.items()}
_MAX_HEADER = 100_000_000  # the limit of the format


class MalformedError(ValueError):
    """Bytes that do not follow the format; the message says what is required and what was found."""


def parse(path: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Any], np.ndarray]:
    """Tensor table, metadata and payload (uint8, mapped read-only) of a file.

    Raises:
        MalformedError: the file is missing, empty, truncated, longer than its tensors, or no safetensors file.
    """
    if not path.is_file():
        raise MalformedError("no such file")
    size = path.stat().st_size
    if size == 0:
        raise MalformedError("the file is empty (0 bytes)")
    if size < 8:
        raise MalformedError(f"not a safetensors file: at least 8 bytes are required, found {size}")
    whole = np.memmap(path, np.uint8, mode="r")
    length = int.from_bytes(whole[:8].tobytes(), "little")
    if length > _MAX_HEADER or (size > 8 and whole[8:9].tobytes() != b"{"):
        raise MalformedError("not a safetensors file: it must start with the size of a JSON header and that header")
    if 8 + length > size:
        raise MalformedError(f"truncated: the header needs {8 + length} bytes, the file has {size}")
    header = decode("the header", whole[8 : 8 + length].tobytes())
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise MalformedError(f"__metadata__ must be a JSON object, found {type(metadata).__name__}")
    data = whole[8 + length :]
    end = 0
    for key, entry in sorted(header.items(), key=lambda item: _offsets(*item)):
        start, stop = _offsets(key, entry)
        dtype, shape = entry.get("dtype"), entry.get("shape")
        if dtype not in DTYPES:
            raise MalformedError(f"{key}: dtype must be one of {', '.join(DTYPES)}, found {dtype!r}")
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise MalformedError(f"{key}: shape must be a list of sizes, found {shape!r}")
        need = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
        if stop - start != need:
            raise MalformedError(f"{key}: shape {shape} of {dtype} needs {need} bytes, the table gives {stop - start}")
        if start != end:
            raise MalformedError(f"{key}: must start at byte {end} of the data, the table says {start}")
        end = stop
    if data.size < end:
        raise MalformedError(f"truncated: the tensors need {end} bytes, the file has {data.size}")
    if data.size > end:
        raise MalformedError(f"the tensors need {end} bytes, the file has {data.size - end} more")
    return header, metadata, data


def _offsets(key: str, entry: Any) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(type(n) is int for n in offsets)):
        raise MalformedError(f"{key}: data_offsets must be two byte positions, found {offsets!r}")
    return offsets[0], offsets[1]


def decode(what: str, text: str | bytes) -> dict[str, Any]:
    """A JSON object in which no name occurs twice; `what` it is stands in the message.

    Raises:
        MalformedError: it is none.
    """

    def unique(pairs):
        for key, count in Counter(key for key, _ in pairs).items():
            if count > 1:
                raise MalformedError(f"{what} names {key!r} twice; every case and tensor must be unique")
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except MalformedError:
        raise
    except ValueError as e:
        raise MalformedError(f"{what} must be JSON: {e}") from e
    if not isinstance(value, dict):
        raise MalformedError(f"{what} must be a JSON object, found {type(value).__name__}")
    return value
