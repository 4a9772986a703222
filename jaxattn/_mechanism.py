"""The record that ties the layers of one mechanism together, and the choice of an implementation.

A `Mechanism` is data: the op, its reference, its kernels, test cases, cost model, Flax module, captures and docs
page. Tests, parity, benchmarks and reports loop over `jaxattn.registry.MECHANISMS` and need nothing else.
"""

import difflib
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxattn import _checks
from pallas_kernels import _mosaic, _tuned

REFERENCE = "reference"
TRITON = "triton"
"""A name that every op knows, also where nobody wrote such a kernel."""
_traced: weakref.WeakKeyDictionary[Any, dict[Any, Callable]] = weakref.WeakKeyDictionary()
"""Trace -> kernel, configuration and options -> the function that all such calls of the trace share."""

type Args = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One implementation of a mechanism on an accelerator.

    Every callable takes the op's prepared arguments by name and may use only shapes, dtypes and static options, so
    that it also works on `jax.ShapeDtypeStruct`.
    """

    run: Callable[..., Any]
    """`run(*, config, **args)` computes the op."""
    why_not: Callable[..., str | None]
    """None if these arguments are supported, else one sentence that says what is."""
    why_not_here: Callable[[], str | None]
    """None if this process can run the kernel at all (device, driver, compiler), else one sentence with a remedy."""
    default_config: Callable[..., Any]
    """`default_config(**args)` -> the frozen, hashable launch configuration."""
    configs: Callable[..., Iterable[Any]]
    """`configs(**args)` -> the legal configurations, for tuning."""
    proven: bool | Callable[..., bool] = True
    """False until its cases passed on a GPU, or a function that says so of arguments; what is not proven runs only
    where it is named."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Named inputs of an op; poisoned wherever the op promises not to read."""

    name: str
    make: Callable[[np.random.Generator], Args]
    tags: frozenset[str] = frozenset()
    """`smoke` runs interpreted in every test run, `full` on a GPU only, `bench` is timed (and, alone, only timed);
    `eight_bit` says that its products run on 8-bit units."""
    shapes: Callable[[], Args] | None = None
    """The same arguments as shapes, for cases that are too large to make without need."""


def in_one_program(make: Callable[..., Args], *arrays: Any) -> Args:
    """`make(*arrays)`, its arrays computed by one program: by itself each small step of a case would be compiled."""
    others: Args = {}

    def only_arrays(*arrays):
        made = make(*arrays)
        others.update({name: x for name, x in made.items() if not _checks.is_array(x)})
        return {name: x for name, x in made.items() if name not in others}

    return jax.jit(only_arrays)(*arrays) | others


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """Everything the repository knows about one mechanism; `name` is its stem in every folder."""

    name: str
    source: str
    """Paper or code that defines the mechanism."""
    op: Callable[..., Any]
    prepare: Callable[..., Args]
    """Validates the op's arguments and fills in defaults; what it returns goes to the reference and the kernels."""
    reference: Callable[..., Any]
    outputs: Callable[..., tuple[str, ...]]
    """`outputs(**args)` -> the names of the op's outputs, in order."""
    kernels: Mapping[str, Kernel]
    """Implementation name -> kernel, preferred first."""
    cases: tuple[Case, ...]
    cost: Callable[..., tuple[int, int]]
    """`cost(**args)` -> (floating point operations, bytes that must move); reads values such as lengths."""
    grads: tuple[str, ...] = ()
    """Arguments that kernels differentiate; empty = kernels are inference only."""
    module: str | None = None
    """`package.module:Class` of the Flax module, a string so that ops never import Flax."""
    probe: Callable[..., tuple[Args, np.ndarray]] | None = None
    """`probe(rng, **args)` -> (smaller arguments, rows): the reference of these is that of `args` at rows `rows` of the
    first axis of every output. For benchmarks, whose full reference would take too long; None = take it whole."""
    captures: tuple[str, ...] = ()
    """Glob patterns `family/case` of the foreign captures that this mechanism answers for."""
    support: tuple[tuple[str, Args], ...] = field(default=())
    """Labelled shapes for the generated support table."""

    @property
    def docs(self) -> str:
        """Path of the documentation page."""
        return f"docs/{self.name}.md"


def run(mechanism: Mechanism, args: Args, implementation: str | None, config: Any = None) -> Any:
    """Run prepared arguments through the chosen implementation.

    Raises:
        ValueError: `implementation` is not one of the mechanism's, or `config` was given for the reference.
        TypeError: `config` is not of the kernel's kind.
        NotImplementedError: the implementation was asked for by name and cannot run these arguments here.
    """
    name = choose(mechanism, args, implementation)
    if name == REFERENCE:
        if config is not None:
            raise ValueError(
                f"{mechanism.name}: a config belongs to a kernel, but the reference would run; "
                f"name the kernel with implementation= (one of {', '.join(mechanism.kernels)})"
            )
        return mechanism.reference(**args)
    kernel = mechanism.kernels[name]
    kind = config_kind(kernel, args)
    if not isinstance(config, kind | None):
        raise TypeError(
            f"{mechanism.name}: config of {name!r} must be a {kind.__module__}.{kind.__qualname__}, "
            f"got {type(config).__name__}"
        )
    config = default_config(mechanism, kernel, args) if config is None else config
    if mechanism.grads:
        return kernel.run(config=config, **args)
    return _without_gradient(mechanism.name, name, kernel, config, args)


def config_kind(kernel: Kernel, args: Args) -> type:
    """Base of a kernel's configurations; kernels that share a name share it."""
    return type(kernel.default_config(**args)).__mro__[-2]


def default_config(mechanism: Mechanism, kernel: Kernel, args: Args) -> Any:
    """What a call without `config` takes: the tuned configuration of its shapes, dtypes and options, else the rule."""
    tuned = _tuned.config(mechanism.name, config_kind(kernel, args), **args)
    return kernel.default_config(**args) if tuned is None else tuned


def choose(mechanism: Mechanism, args: Args, implementation: str | None) -> str:
    """Name of the implementation that `run` takes; the exceptions are those of `run`."""
    if implementation == REFERENCE:
        return REFERENCE
    if implementation is None:
        for name, kernel in mechanism.kernels.items():
            if _proven(kernel, args) and _reason(kernel, args) is None:
                return name
        return REFERENCE
    if implementation == TRITON and TRITON not in mechanism.kernels:
        raise NotImplementedError(
            f"{mechanism.name}: implementation='triton' cannot run this call: no Triton kernel is written; leave "
            f"implementation out or name one of {', '.join((REFERENCE, *mechanism.kernels))}"
        )
    if implementation not in mechanism.kernels:
        known = (REFERENCE, *mechanism.kernels)
        raise ValueError(
            f"{mechanism.name}: implementation must be None or one of {', '.join(known)}, got "
            f"{implementation!r}{_nearest(implementation, known)}"
        )
    reason = _reason(mechanism.kernels[implementation], args)
    if reason is not None:
        raise NotImplementedError(f"{mechanism.name}: implementation={implementation!r} cannot run this call: {reason}")
    return implementation


def _reason(kernel: Kernel, args: Args, here: bool = True) -> str | None:
    reason = kernel.why_not(**args)
    if reason is None and here:
        reason = kernel.why_not_here()
    return reason


def _proven(kernel: Kernel, args: Args) -> bool:
    return kernel.proven(**args) if callable(kernel.proven) else kernel.proven


def _without_gradient(name: str, implementation: str, kernel: Kernel, config: Any, args: Args):
    """Run an inference-only kernel so that differentiation raises instead of failing inside Pallas.

    Calls with equal options and shapes in one trace are one function of the compiled program: a model of many layers
    lowers and compiles each kernel once.
    """
    arrays = {k: v for k, v in args.items() if isinstance(v, jax.Array | np.ndarray)}
    static = {k: v for k, v in args.items() if k not in arrays}
    kernel_call = _shared(kernel, config, static)

    @jax.custom_jvp
    def call(arrays):
        return kernel_call(arrays)

    @call.defjvp
    def _(primals, tangents):
        raise NotImplementedError(
            f"{name}: the {implementation} kernel is inference only; for gradients use implementation='reference'"
        )

    return call(arrays)


def _shared(kernel: Kernel, config: Any, static: Args) -> Callable[[Args], Any]:
    """The kernel as a function of its arrays, one for all equal calls of a trace."""

    def call(arrays):
        return kernel.run(config=config, **arrays, **static)

    trace = _mosaic.current_trace()
    nested = any(isinstance(x, jax.Array | np.ndarray) for x in jax.tree.leaves(static))  # tracers look alike
    if trace is None or nested or _mosaic.interpreting():
        return call
    key = kernel.run, repr(config), repr(sorted(static.items()))
    return _traced.setdefault(trace, {}).setdefault(key, jax.jit(call))


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Which implementation would run and why the others would not; `str()` gives one line each."""

    mechanism: str
    chosen: str
    reasons: Mapping[str, str | None]
    """Implementation -> None if it can run, else why not."""

    def __str__(self):
        width = max(map(len, self.reasons))
        lines = []
        for name, reason in self.reasons.items():
            state = "chosen" if name == self.chosen else "available" if reason is None else reason
            lines.append(f"  {name:{width}s}  {state}")
        return "\n".join([f"{self.mechanism}:", *lines])


def explain(mechanism: Mechanism, /, *, on_target: bool = False, **args) -> Explanation:
    """Say which implementation a call would take, from shapes and dtypes alone.

    Args:
        mechanism: the record.
        on_target: answer for a machine with a supported GPU instead of this one.
        **args: the op's arguments; arrays may be `jax.ShapeDtypeStruct`.

    Raises:
        TypeError: an argument that the op does not have, or one that is missing;
        ValueError, TypeError: as the op itself would for these arguments.
    """
    _check_names(mechanism, args)
    prepared = mechanism.prepare(**args)
    reasons = {name: _reason(kernel, prepared, here=not on_target) for name, kernel in mechanism.kernels.items()}
    for name, kernel in mechanism.kernels.items():
        if reasons[name] is None and not _proven(kernel, prepared):
            reasons[name] = f"not proven on a GPU yet; runs only with implementation={name!r}"
    reasons[REFERENCE] = None
    chosen = next(name for name, reason in reasons.items() if reason is None)
    return Explanation(mechanism=mechanism.name, chosen=chosen, reasons=reasons)


def _check_names(mechanism: Mechanism, args: Args) -> None:
    """Raise `TypeError` unless `args` are the op's, by name."""
    takes = inspect.signature(mechanism.prepare).parameters
    missing = [name for name, p in takes.items() if p.default is p.empty and name not in args]
    for name in args:
        if name not in takes:
            raise TypeError(
                f"explain: {mechanism.name} takes {', '.join(takes)}, got {name}{_nearest(name, takes)} as well"
            )
    if missing:
        raise TypeError(f"explain: {mechanism.name} needs {', '.join(missing)} as well; shapes and dtypes are enough")


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
