"""Models and captures by name: `package.module:factory`, `folder/file.py:factory`, `golden.safetensors`."""

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxattn import capture
from parity import bisection


class UsageError(ValueError):
    """Input that cannot be used; the message says what to do."""


def attribute(spec: str) -> Any:
    """What `module:name` or `file.py:name` refers to.

    Raises:
        UsageError: the spec does not read so, or leads nowhere.
    """
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise UsageError(f"a model must be given as package.module:factory or file.py:factory, got {spec!r}")
    if where.endswith(".py"):
        path = Path(where)
        if not path.is_file():
            raise UsageError(f"{spec}: no file {path}")
        sys.path.insert(0, str(path.parent.resolve()))  # the file's own imports
        loader = importlib.util.spec_from_file_location(path.stem, path)
        assert loader is not None and loader.loader is not None
        module = importlib.util.module_from_spec(loader)
        sys.modules[path.stem] = module
        loader.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(where)
        except ModuleNotFoundError as e:
            raise UsageError(f"{spec}: {e}; run from the folder that holds the package, or set PYTHONPATH") from e
    if not hasattr(module, name):
        raise UsageError(f"{spec}: {where} has no {name}")
    return getattr(module, name)


def target(spec: str) -> bisection.Target:
    """The Flax model of a factory, which returns an `nnx.Module` or one and `call(model, inputs)`.

    Raises:
        UsageError: it returns something else.
    """
    made = attribute(spec)()
    model, call = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    try:
        producer = capture.framework(model)
    except capture.HookError:
        producer = ""
    if producer != "jax" or not (call is None or callable(call)):
        raise UsageError(
            f"{spec} must return a flax.nnx.Module, or one and a function call(model, inputs), returned {type(made)}"
        )
    return bisection.Target(model, call)


def golden(spec: str, run: str | None, mode: str, memory: int, out: Path) -> bisection.Golden:
    """The captured calls in a file, or those of a PyTorch model, which is run once and captured to `out`.

    A factory returns the module and its arguments, as a tuple or by name.

    Raises:
        UsageError: the factory returns something else.
        parity.captures.CaptureError, parity.bisection.BisectionError: the file cannot be used.
    """
    if spec.endswith(".safetensors"):
        return bisection.load(Path(spec), run)
    made = attribute(spec)()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], tuple | list | Mapping)):
        raise UsageError(f"{spec} must return a torch.nn.Module and its arguments, returned {type(made)}")
    module, args = made
    if capture.framework(module) != "torch":
        raise UsageError(f"{spec} must return a torch.nn.Module and its arguments, returned {type(module)}")
    path = out / "golden.safetensors"
    with sys.modules["torch"].no_grad(), capture.capture(module, path, mode=mode, memory=memory):
        module(**args) if isinstance(args, Mapping) else module(*args)
    return bisection.load(path)


def size(text: str) -> int:
    """Bytes of `512M`, `2G` or a plain number.

    Raises:
        UsageError: it is none of them.
    """
    units = {"K": 10, "M": 20, "G": 30}
    digits = text.rstrip("bB").rstrip("i")
    shift = units.get(digits[-1:].upper(), 0)
    try:
        return int(float(digits[:-1] if shift else digits) * (1 << shift))
    except ValueError as e:
        raise UsageError(f"a size must read like 512M or 2G, got {text!r}") from e
