"""What a mechanism is timed against: `peers/<stem>.py` holds `PEERS`, implementations by the library that has them.

    PEERS = {"vllm": (Peer("merge_attn_states", build),)}

`build(args)` gets the op's prepared arguments (JAX arrays on the GPU) and returns a function that launches one call
and returns its outputs by the op's names and in its layout, or raises `Unsupported`. What need not happen in every
call (allocating, scheduling, packing weights) belongs into `build`. `_torch.tensors(args)` gives the same memory as
PyTorch tensors. A mechanism without a file, or without a `jax` entry there, has its own reference under `jax.jit` as
the peer `jax`.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxattn import _checks
from jaxattn._mechanism import Mechanism

LIBRARIES = ("vllm", "torch", "jax")

type Call = Callable[[], Mapping[str, Any]]


class Unsupported(Exception):
    """The peer cannot compute these arguments; the message says why."""


@dataclass(frozen=True)
class Peer:
    """One implementation of another library."""

    name: str
    build: Callable[[dict[str, Any]], Call]


def find(mechanism: Mechanism, library: str) -> tuple[Peer, ...]:
    """The peers of a mechanism in `library`; empty if nobody wrote one."""
    name = f"{__name__}.{mechanism.name}"
    known: Mapping[str, tuple[Peer, ...]] = {}
    if importlib.util.find_spec(name) is not None:
        known = importlib.import_module(name).PEERS
        unknown = set(known) - set(LIBRARIES)
        if unknown:
            raise ValueError(f"{name}: PEERS has {', '.join(sorted(unknown))}; libraries are {', '.join(LIBRARIES)}")
    if library == "jax" and "jax" not in known:
        return (Peer("XLA (the reference under jit)", lambda args: _reference(mechanism, args)),)
    return tuple(known.get(library, ()))


def _reference(mechanism: Mechanism, args: dict[str, Any]) -> Call:
    arrays = {k: v for k, v in args.items() if _checks.is_array(v)}
    static = {k: v for k, v in args.items() if k not in arrays}
    names = mechanism.outputs(**args)
    function = jax.jit(lambda arrays: mechanism.reference(**arrays, **static))

    def call():
        out = function(arrays)
        return dict(zip(names, out if isinstance(out, tuple) else (out,), strict=True))

    return call
