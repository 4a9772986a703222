"""Headers of safetensors files, and one tensor at a time: a shard is mapped, never read as a whole."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

DTYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
_LONGEST = 100_000_000  # bytes of a header, the format's own limit


class CheckpointError(ValueError):
    """A checkpoint that cannot be taken; the message names files and tensors."""


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies: bytes `start` to `stop` of `file`."""

    name: str
    file: Path
    dtype: str
    """Name of the numpy dtype, such as "bfloat16"."""
    shape: tuple[int, ...]
    start: int
    stop: int

    def read(self) -> np.ndarray:
        """The numbers, as a read-only view of the mapped file; the system reads them when they are used."""
        if self.start == self.stop:
            return np.empty(self.shape, np.dtype(self.dtype))
        whole = np.memmap(self.file, np.uint8, mode="r", offset=self.start, shape=(self.stop - self.start,))
        return whole.view(np.dtype(self.dtype)).reshape(self.shape)


def header(path: Path) -> dict[str, Stored]:
    """Every tensor of a file, from its header alone.

    Raises:
        CheckpointError: the file is missing, truncated, longer than its tensors, or no safetensors file.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: a safetensors file is required, found none")
    size = path.stat().st_size
    with path.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > _LONGEST:
            raise CheckpointError(f"{path}: a safetensors file must start with the size of its header, {size} bytes")
        if 8 + length > size:
            raise CheckpointError(f"{path}: truncated: the header needs {8 + length} bytes, the file has {size}")
        text = f.read(length)
    try:
        table = json.loads(text)
        table.pop("__metadata__", None)
        found = {name: _stored(path, name, entry, 8 + length) for name, entry in table.items()}
    except (ValueError, AttributeError, KeyError, TypeError) as e:
        if isinstance(e, CheckpointError):
            raise
        raise CheckpointError(f"{path}: the header must be a JSON table of tensors: {e}") from e
    end = max((t.stop for t in found.values()), default=8 + length)
    if end != size:
        last = max(found.values(), key=lambda t: t.stop).name if found else "none"
        what = "truncated" if end > size else "too long"
        raise CheckpointError(f"{path}: {what}: tensors up to {last} need {end} bytes, the file has {size}")
    return found


def _stored(path: Path, name: str, entry: dict, offset: int) -> Stored:
    start, stop = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if entry["dtype"] not in DTYPES:
        raise CheckpointError(f"{path}: {name}: dtype must be one of {', '.join(DTYPES)}, got {entry['dtype']!r}")
    dtype = np.dtype(DTYPES[entry["dtype"]])
    if stop - start != math.prod(shape) * dtype.itemsize or start < 0:
        raise CheckpointError(
            f"{path}: {name}: shape {list(shape)} of {dtype.name} needs {math.prod(shape) * dtype.itemsize} bytes, the "
            f"header gives it {stop - start}"
        )
    return Stored(name, path, dtype.name, shape, offset + start, offset + stop)
