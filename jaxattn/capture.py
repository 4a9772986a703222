"""Record what every module of a model receives and returns: a two-line hook for PyTorch and Flax NNX.

    with capture(model, "golden.safetensors"):
        model(tokens)

writes the capture format of `docs/captures.md` with one case per module call; `docs/capture.md` describes the fields.
The file imports neither torch nor flax: whoever has a model of theirs has them. For PyTorch it works alone (numpy,
ml_dtypes, Python 3.11 and later), so that it can be copied beside a program that has no JAX.
"""

import contextlib
import dataclasses
import datetime
import fnmatch
import hashlib
import inspect
import json
import os
import platform
import re
import shlex
import struct
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

FORMAT = 3
MODES = ("full", "statistics", "hash")
STATISTICS = ("mean", "rms", "absmax", "nan", "inf")
"""The first of a tensor's statistics: of its finite elements, and how many are NaN and infinite; projections follow."""
PROJECTIONS = 16
MEMORY = 1 << 28
"""Bytes of recorded tensors that stay in memory; what is beyond goes to a temporary file."""

_CODES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "float32": "F32", "float64": "F64", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
_BLOCK = 1 << 16


class HookError(ValueError):
    """A model or option that the hook cannot work with; the message says what to do."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of one module."""

    path: str
    """Names from the root, joined by dots; the root's is empty."""
    call: int
    """How many calls of this module came before."""
    order: int
    """How many recorded calls of any module ended before."""
    params: dict[str, Any]
    """JSON values, see `docs/capture.md`: `kernel` (the class), `parameters`, `arguments`, `result`, `mode`."""
    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]


@contextlib.contextmanager
def capture(
    model: Any,
    to: str | os.PathLike | Callable[[Call], None],
    *,
    mode: str = "full",
    only: Sequence[str] = ("*",),
    methods: Sequence[str] = ("__call__",),
    memory: int = MEMORY,
    provenance: Mapping[str, Any] | None = None,
) -> Iterator[None]:
    """Record every module call inside the `with` block.

    Args:
        model: a `torch.nn.Module` or a `flax.nnx.Module`. NNX modules may be called eagerly, under `nnx.jit`, or under
            `jax.jit` with a graph definition that was split inside the block; compiled calls hand their tensors over by
            ordered callbacks, which JAX has on a single device only. A function that was compiled before is compiled
            again for the block, and used again after it.
        to: path of the file, replaced when the block ends without an error; or a function that gets each `Call` when it
            ends, with tensors that it may keep.
        mode: `full` tensors; `statistics`: `STATISTICS` and projections of each; `hash`: the SHA-256 of each. The
            model's own inputs are always whole.
        only: patterns of paths; calls of other modules are not recorded.
        methods: names of the methods of NNX modules that count as calls. PyTorch's hooks know `forward` alone.
        memory: bytes of tensors that are kept in memory before they go to disk, beside `to`.
        provenance: fields that replace the defaults: seed, commit, command, device, driver.

    Raises:
        HookError: the model is neither, `mode` is unknown, or no call was recorded.
    """
    if mode not in MODES:
        raise HookError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    producer = framework(model)
    file = None if callable(to) else File(Path(to), memory)
    counts: dict[str, int] = {}
    order = 0

    def deliver(path: str, params: dict[str, Any], inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        nonlocal order
        call = counts[path] = counts.get(path, -1) + 1
        params = {**params, "path": path, "call": call, "order": order, "mode": mode}
        taken = [{k: _host(v) for k, v in side.items()} for side in (inputs, outputs)]
        if mode != "full":
            sides = zip(("in", "out"), taken, strict=True)
            params["tensors"] = {f"{s}.{k}": [v.dtype.name, list(v.shape)] for s, x in sides for k, v in x.items()}
            reduce = statistics if mode == "statistics" else digest
            whole, taken = taken, [{k: reduce(v) for k, v in side.items()} for side in taken]
            taken[0] = taken[0] if path else whole[0]
        found = Call(path, call, order, params, *taken)
        if file is None:
            to(found)  # type: ignore[operator]
        else:
            file.add(case_name(found, file.cases), params, found.inputs, found.outputs)
        order += 1

    def wanted(path: str) -> bool:
        return any(fnmatch.fnmatchcase(path, p) for p in only)

    with contextlib.ExitStack() as stack:
        if file is not None:
            stack.callback(file.spool.close)
        if producer == "torch":
            stack.enter_context(_torch_hooks(model, wanted, deliver))
            yield
        else:
            import jax

            from jaxattn import _nnx_calls

            stack.enter_context(_nnx_calls.intercept(model, _nnx_calls.recorder(wanted, deliver), methods))
            yield

            jax.effects_barrier()
        if not order:
            raise HookError(
                "no module call was recorded: call the model inside the with block (under jax.jit, split it there too) "
                f"and let only={list(only)} match a module that returns an array"
            )
        if file is not None:
            file.finish("model", _provenance(producer, dict(provenance or {})))


def framework(model: Any) -> str:
    """`torch` or `jax`, whichever the module belongs to.

    Raises:
        HookError: neither.
    """
    for producer, name in (("torch", "torch.nn"), ("jax", "flax.nnx")):
        if name in sys.modules and isinstance(model, sys.modules[name].Module):
            return producer
    raise HookError(f"a torch.nn.Module or a flax.nnx.Module is required, got {_kind(type(model))}")


# ---------------------------------------------------------------- tensors in arguments and results
def walk(value: Any, name: str, leaf: Callable[[str, Any], Any]) -> tuple[Any, Any]:
    """`value` with each array replaced by `leaf(name, array)`, and its JSON description.

    Tuples, lists, mappings (which become dicts) and dataclasses are entered, and names joined by underscores. The
    description holds `{"array": name}`, `{"value": x}`, `{"list": []}`, `{"dict": {}}` or `{"object": class}`.
    """
    if _is_array(value):
        return leaf(name, value), {"array": name}
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and np.isfinite(value)):
        return value, {"value": value}
    if isinstance(value, list | tuple):
        parts = [walk(v, f"{name}_{i}", leaf) for i, v in enumerate(value)]
        items = [p[0] for p in parts]
        same = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)  # type: ignore[call-arg]
        return same, {"list": [p[1] for p in parts]}
    if isinstance(value, Mapping):
        found = {k: walk(v, f"{name}_{k}" if name else str(k), leaf) for k, v in value.items()}
        return {k: v for k, (v, _) in found.items()}, {"dict": {str(k): d for k, (_, d) in found.items()}}
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not callable(value):
        found = {f.name: walk(getattr(value, f.name), f"{name}_{f.name}", leaf) for f in dataclasses.fields(value)}
        changed = {k: v for k, (v, _) in found.items() if v is not getattr(value, k)}
        same = dataclasses.replace(value, **changed) if changed else value
        return same, {"dict": {k: d for k, (_, d) in found.items()}}
    return value, {"object": _kind(type(value))}


def arguments(function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call by the names of the function's parameters."""
    try:
        return dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {f"x{i}": a for i, a in enumerate(args)} | dict(kwargs)


def results(value: Any) -> Mapping[str, Any]:
    """What a call returned by name: a mapping's own names, else `y` (and so `y_0`, `y_1`, ... of a tuple)."""
    return value if isinstance(value, Mapping) else {"y": value}


def flatten(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays by name and the JSON description of the rest."""
    found: dict[str, Any] = {}
    described = {str(k): walk(v, re.sub(r"\W", "_", str(k)), found.setdefault)[1] for k, v in values.items()}
    return found, described


def _is_array(value: Any) -> bool:
    torch, jax = map(sys.modules.get, ("torch", "jax"))
    if torch is not None and isinstance(value, torch.Tensor):
        return not value.is_sparse and not value.is_quantized
    if isinstance(value, np.ndarray) or (jax is not None and isinstance(value, jax.Array)):
        return value.dtype.name in _CODES or value.dtype.name in ("complex64", "complex128")
    return False


def _host(x: Any) -> np.ndarray:
    """A numpy array of its own with the bits of x; complex numbers as pairs."""
    if not hasattr(x, "detach"):
        out = np.array(x, order="C")
        return out.view(f"f{out.itemsize // 2}").reshape(*out.shape, 2) if out.dtype.kind == "c" else out
    torch = sys.modules["torch"]
    x = x.detach().cpu().resolve_conj() if x.is_complex() else x.detach().cpu()
    x = torch.view_as_real(x) if x.is_complex() else x
    name, x = str(x.dtype).removeprefix("torch."), x.contiguous()
    if hasattr(ml_dtypes, name):
        bits = x.view(torch.int16 if x.element_size() == 2 else torch.uint8)
        return bits.numpy().copy().view(getattr(ml_dtypes, name)).reshape(tuple(x.shape))
    return x.numpy().copy()


def statistics(x: np.ndarray) -> np.ndarray:
    """float64 `[len(STATISTICS) + PROJECTIONS]` of any array.

    Projection j is sum(s_ij x_i) / sqrt(n) over the flattened finite elements; the signs s depend on i and j only.
    The differences of two tensors' projections have the mean square of the tensors' difference as their variance.
    """
    flat = np.ascontiguousarray(x).reshape(-1)
    signs = np.random.PCG64(2026)
    total, square, largest, nan, inf = 0.0, 0.0, 0.0, 0, 0
    projected = np.zeros(PROJECTIONS)
    for start in range(0, flat.size, _BLOCK):
        part = flat[start : start + _BLOCK].astype(np.float64)
        nan, inf = nan + int(np.isnan(part).sum()), inf + int(np.isinf(part).sum())
        part = np.where(np.isfinite(part), part, 0)
        bits = np.asarray(signs.random_raw(part.size), np.uint64)[:, None] >> np.arange(PROJECTIONS, dtype=np.uint64)
        projected += part @ (2.0 * (bits & np.uint64(1)).astype(np.float64) - 1)
        total, square = total + float(part.sum()), square + float(part @ part)
        largest = max(largest, float(np.abs(part).max()))
    n = max(flat.size - nan - inf, 1)
    return np.array([total / n, np.sqrt(square / n), largest, nan, inf, *(projected / np.sqrt(max(flat.size, 1)))])


def digest(x: np.ndarray) -> np.ndarray:
    """The SHA-256 of an array's bytes, uint8 `[32]`."""
    return np.frombuffer(hashlib.sha256(np.ascontiguousarray(x).tobytes()).digest(), np.uint8)


# ---------------------------------------------------------------- hooks
def _kind(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _torch_hooks(model: Any, wanted: Callable[[str], bool], deliver: Callable[..., None]) -> contextlib.ExitStack:
    """Records every wanted call; the hooks go when the returned context ends."""
    stack = contextlib.ExitStack()
    open_calls: list[tuple[Any, dict[str, Any], Any]] = []

    def before(module, args, kwargs):
        arrays, described = flatten(arguments(module.forward, args, kwargs))
        # copies: the module may write into its arguments
        open_calls.append((module, {k: _host(v) for k, v in arrays.items()}, described))

    def after(path, module, result):
        while open_calls:  # calls that raised are left behind
            owner, inputs, described = open_calls.pop()
            if owner is module:
                break
        else:
            return
        outputs, returned = flatten(results(result))
        if outputs:
            shapes = {n: list(p.shape) for n, p in module.named_parameters(recurse=False)}
            deliver(path, params(module, shapes, described, returned), inputs, outputs)

    for path, module in model.named_modules():
        if wanted(path):
            handles = (
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(lambda m, _, __, y, path=path: after(path, m, y), with_kwargs=True),
            )
            for handle in handles:
                stack.callback(handle.remove)
    return stack


def params(module: Any, shapes: dict, described: Any, returned: Any) -> dict[str, Any]:
    """What is said about a call: class, shapes of the module's own parameters, arguments, result."""
    return {"kernel": _kind(type(module)), "parameters": shapes, "arguments": described, "result": returned}


# ---------------------------------------------------------------- the file
class File:
    """A file of format 3 of `docs/captures.md`, written as the cases come; equal bytes are stored once."""

    def __init__(self, path: Path, memory: int = MEMORY):
        """Start one; what is beyond `memory` bytes waits on the disk beside `path`."""
        self.path = path
        self.cases: dict[str, dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self.spool = tempfile.SpooledTemporaryFile(memory, dir=str(path.parent))  # noqa: SIM115  (closed by the caller)
        self._tensors: dict[str, tuple[str, list[int], int, int, str]] = {}  # dtype, shape, start, size, hash
        self._aliases: dict[str, tuple[str, list[int]]] = {}  # the stored tensor with these bytes, shape
        self._known: dict[tuple[str, str], str] = {}

    def add(self, case: str, params: Mapping[str, Any], inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        """Add a case: parameters are JSON values, inputs and outputs arrays by name."""
        self.cases[case] = dict(params)
        for kind, side in (("in", inputs), ("out", outputs)):
            for name, array in side.items():
                key, array = f"{case}/{kind}.{'_' * name[:1].isdigit()}{name}", np.asarray(array)
                if array.dtype.name not in _CODES:
                    raise TypeError(f"{self.path}: {key} has dtype {array.dtype}; a capture holds {', '.join(_CODES)}")
                raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
                code, shape, digest = _CODES[array.dtype.name], list(array.shape), hashlib.sha256(raw).hexdigest()
                stored = self._known.setdefault((code, digest), key)
                if stored != key:
                    self._aliases[key] = stored, shape
                    continue
                self._tensors[key] = code, shape, self.spool.tell(), len(raw), digest
                self.spool.write(raw)

    def finish(self, family: str, provenance: Mapping[str, Any], check: Callable[[Path], Any] = bool) -> None:
        """Write the file, which `check` may refuse: the largest elements first, which keeps every tensor aligned."""
        size = {key: n // max(1, int(np.prod(shape))) for key, (_, shape, _, n, _) in self._tensors.items()}
        keys = sorted(self._tensors, key=lambda k: (-size[k], k))
        entries, end = {}, 0
        for key in keys:
            dtype, shape, _, count, _ = self._tensors[key]
            entries[key] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end := end + count]}
        provenance, hashes = {**provenance, "format": FORMAT}, {key: self._tensors[key][4] for key in keys}
        table = {key: [entries[key]["dtype"], entries[key]["shape"], hashes[key]] for key in keys}
        whole = _canonical([family, provenance, self.cases, table, self._aliases])
        metadata = {
            "family": family,
            "provenance": _canonical(provenance),
            "cases": json.dumps(self.cases, allow_nan=False),
            "tensors": _canonical(hashes),
            "aliases": _canonical(self._aliases),
            "digest": hashlib.sha256(whole.encode()).hexdigest(),
        }
        header = json.dumps({"__metadata__": metadata, **entries}).encode()
        header += b" " * (-len(header) % 8)
        partial = self.path.with_name(self.path.name + ".partial")
        try:
            with partial.open("wb") as out:
                out.write(struct.pack("<Q", len(header)) + header)
                for key in keys:
                    _, _, start, count, _ = self._tensors[key]
                    self.spool.seek(start)
                    for done in range(0, count, MEMORY):
                        out.write(self.spool.read(min(MEMORY, count - done)))
            check(partial)
            os.replace(partial, self.path)
        finally:
            partial.unlink(missing_ok=True)


def case_name(call: Call, taken: Collection[str] = (), run: str = "") -> str:
    """The name of a call's case: its path, `root` for the model, `+1` for its second call, behind `RUN.`."""
    name = re.sub(r"[^A-Za-z0-9_.+-]", "-", call.path) or "root"
    name = f"{run}.{name}" if run else name if name[0].isalnum() else f"m{name}"
    name += f"+{call.call}" if call.call else ""
    return next(c for n in range(len(taken) + 1) if (c := f"{name}-{n}" if n else name) not in taken)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _provenance(producer: str, given: dict[str, Any]) -> dict[str, Any]:
    known = {name: sys.modules.get(name) for name in ("torch", "transformers", "jax", "flax")}
    versions = {name: str(module.__version__) for name, module in known.items() if module is not None}
    versions |= {"python": platform.python_version(), "numpy": np.__version__}
    device, driver = _device(producer)
    command = f"python {shlex.join(sys.argv)}" if sys.argv and sys.argv[0] else "python"
    found = {"producer": producer, "versions": versions, "device": device, "driver": driver, "seed": 0}
    found |= {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "commit": "unknown", "command": command}
    return found | given


def _device(producer: str) -> tuple[str, str]:
    framework = sys.modules[producer]
    if producer == "jax":
        device = framework.devices()[0]
        return device.device_kind, " ".join(str(getattr(device.client, "platform_version", "none")).split()) or "none"
    if framework.cuda.is_available():
        return framework.cuda.get_device_name(), str(framework.version.cuda)
    return f"CPU, {framework.backends.cpu.get_cpu_capability()}", "none"
