"""Calls of Flax NNX modules, seen from outside: what `jaxattn.capture` and the bisection hang on."""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.core import Tracer

from jaxattn import capture

_PATH = "_capture_path"  # attribute that tells a module's copies inside jit where they belong
_numbers = itertools.count()


@contextlib.contextmanager
def intercept(model: Any, around: Callable, methods: Sequence[str] = ("__call__",)) -> Iterator[None]:
    """Let every call of an NNX module in `model` run through `around(path, module, function, args, kwargs)`.

    `function(*args, **kwargs)` is the call itself. Copies that `nnx.jit` makes of the modules keep their paths.

    Args:
        model: the root.
        around: what runs instead, and returns the result.
        methods: names of the methods that count as calls.
    """
    nnx = sys.modules["flax.nnx"]
    modules = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
    stack: list[int] = []
    number = next(_numbers)  # part of the graph definition: jit must trace again, not run another block's callbacks

    def wrap(original: Callable) -> Callable:
        def call(self, *args, **kwargs):
            owner, path = vars(self).get(_PATH, (None, ""))
            if owner != number or (stack and stack[-1] == id(self)):  # not of this model; or super().__call__
                return original(self, *args, **kwargs)
            stack.append(id(self))
            try:
                return around(path, self, original.__get__(self), args, kwargs)
            finally:
                stack.pop()

        return call

    with contextlib.ExitStack() as undo:
        for path, module in modules.items():
            setattr(module, _PATH, (number, path))
            undo.callback(delattr, module, _PATH)
        for cls in {type(m) for m in modules.values()}:
            for name in methods:
                if not callable(original := getattr(cls, name, None)):
                    continue
                if name in vars(cls):
                    undo.callback(setattr, cls, name, original)
                else:
                    undo.callback(delattr, cls, name)
                setattr(cls, name, wrap(original))
        yield


def recorder(wanted: Callable[[str], bool], deliver: Callable[..., None]) -> Callable:
    """What `intercept` needs to hand every wanted call to `deliver`, from inside jit by an ordered callback."""
    nnx = sys.modules["flax.nnx"]

    def around(path, module, function, args, kwargs):
        if not wanted(path):
            return function(*args, **kwargs)
        inputs, described = capture.flatten(capture.arguments(function, args, kwargs))
        result = function(*args, **kwargs)
        outputs, returned = capture.flatten(capture.results(result))
        if not outputs:
            return result
        variables = {n: v for n, v in vars(module).items() if isinstance(v, nnx.Variable)}
        shapes = {n: list(v.get_value().shape) for n, v in variables.items() if hasattr(v.get_value(), "shape")}
        params = capture.params(module, shapes, described, returned)
        if any(isinstance(x, Tracer) for x in (*inputs.values(), *outputs.values())):
            jax.debug.callback(lambda i, o: deliver(path, params, i, o), inputs, outputs, ordered=True)
        else:
            deliver(path, params, inputs, outputs)
        return result

    return around
