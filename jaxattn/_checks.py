"""Checks of arguments from shapes and dtypes; every message says what is required, what was given, what to do."""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

F64 = "float64"
FLOATS = ("bfloat16", "float16", "float32", F64)


def dtype_name(x: Any) -> str:
    """Name of an array's dtype, also for `jax.ShapeDtypeStruct`."""
    return jnp.dtype(x.dtype).name


def is_array(x: Any) -> bool:
    """True for arrays, tracers and shape-dtype structs."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def is_concrete(*arrays: Any) -> bool:
    """True if every array's values can be read now (no tracer, no shape-dtype struct)."""
    return all(
        isinstance(x, np.ndarray) or (isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)) for x in arrays
    )


def check_shapes(op: str, **named: tuple[Any, str]) -> dict[str, int]:
    """Bind dimension letters across arrays: `check_shapes("op", q=(q, "N H D"), k=(k, "P page K D"))`.

    A token is a letter, or `letter+1`. Returns letter -> size.

    Raises:
        TypeError: an argument is no array.
        ValueError: a rank or a size does not fit.
    """
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}
    for name, (x, spec) in named.items():
        if not is_array(x):
            raise TypeError(f"{op}: {name} must be an array [{spec}], got {type(x).__name__}")
        dims = spec.split()
        if len(x.shape) != len(dims):
            raise ValueError(f"{op}: {name} must have {len(dims)} dimensions [{spec}], got shape {tuple(x.shape)}")
        for size, dim in zip(x.shape, dims, strict=True):
            letter, _, plus = dim.partition("+")
            value = size - int(plus or 0)
            if letter in sizes and sizes[letter] != value:
                raise ValueError(
                    f"{op}: {name} must be [{spec}] with {letter}={sizes[letter]} (from "
                    f"{origin[letter]}), got shape {tuple(x.shape)}"
                )
            sizes.setdefault(letter, value)
            origin.setdefault(letter, name)
    return sizes


def check_dtype(op: str, name: str, x: Any, allowed: Sequence[str], hint: str = "") -> str:
    """The dtype's name if it is allowed.

    Raises:
        TypeError: it is not.
    """
    given = dtype_name(x)
    if given not in allowed:
        raise TypeError(
            f"{op}: {name} must have dtype {' or '.join(allowed)}, got {given}" + (f"; {hint}" if hint else "")
        )
    return given


def check_positive(op: str, **values: Any) -> None:
    """Each value must be None or a finite Python or numpy number greater than zero.

    Raises:
        TypeError: it is no number, but a tracer, say; ValueError: it is not positive.
    """
    for name, value in values.items():
        if value is None:
            continue
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            raise TypeError(
                f"{op}: {name} is compiled in and must be a Python number or None, got {type(value).__name__}"
            )
        if not 0 < float(value) < math.inf:
            raise ValueError(f"{op}: {name} must be positive and finite or None, got {value}")


def check_count(op: str, **values: Any) -> None:
    """Each value must be a positive integer.

    Raises:
        TypeError: it is no integer; ValueError: it is not positive.
    """
    for name, value in values.items():
        if not isinstance(value, numbers.Integral) or isinstance(value, bool):
            raise TypeError(f"{op}: {name} is compiled in and must be a Python integer, got {type(value).__name__}")
        if value < 1:
            raise ValueError(f"{op}: {name} must be at least 1, got {value}")


def number(op: str, name: str, x: Any) -> Any:
    """`x` as an array of one number (float32 if it is a Python number), or None.

    Raises:
        ValueError: it has another size.
    """
    if x is None:
        return None
    if not is_array(x):
        return jnp.float32(x)
    if math.prod(x.shape) != 1:
        raise ValueError(f"{op}: {name} must be one number, got shape {tuple(x.shape)}")
    return x


def upcast(args: Mapping[str, Any], dtype: Any = jnp.float64) -> dict[str, Any]:
    """The same arguments with every floating array in `dtype` (fp8 codes included): input of the truth.

    Call it inside `jax.enable_x64(True)` for float64.
    """
    return {
        k: jnp.asarray(np.asarray(v), dtype) if is_array(v) and jnp.issubdtype(v.dtype, jnp.floating) else v
        for k, v in args.items()
    }
