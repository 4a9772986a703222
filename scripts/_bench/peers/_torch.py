"""Between JAX and PyTorch without copies, and vLLM's import."""

import importlib.util
import sys
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

_BITS = {1: jnp.uint8, 2: jnp.int16, 4: jnp.int32, 8: jnp.int64}


def install() -> None:
    """Make vLLM's kernels importable: stand-ins for what only its server needs, where a module `vllm_env` has them."""
    if importlib.util.find_spec("vllm_env") is not None:
        import vllm_env

        vllm_env.install()
    import vllm.platforms  # noqa: F401


def tensor(x: Any, *, copy: bool = False):
    """A PyTorch tensor in the memory of a JAX array; `copy=True` for what is written to."""
    import torch

    x = jax.block_until_ready(jnp.asarray(x))
    kind = x.dtype
    try:
        dtype = getattr(torch, kind.name)
    except AttributeError:
        raise TypeError(f"PyTorch has no {kind.name}") from None
    shared = kind.kind in "iubf" or kind.name == "bfloat16"  # 8-bit floats do not travel as such
    out = torch.from_dlpack(x if shared else x.view(_BITS[kind.itemsize])).view(dtype)
    return out.clone() if copy else out


def tensors(args: dict[str, Any], *, copy: tuple[str, ...] = ()) -> dict[str, Any]:
    """Every array of `args` as a tensor, options as they are."""
    return {
        k: tensor(v, copy=k in copy) if isinstance(v, jax.Array | np.ndarray | np.generic) else v
        for k, v in args.items()
    }


def negation(numbers: int):
    """A call of PyTorch that reads and writes so many bfloat16 numbers; None unless it is loaded and has a GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    x = torch.ones(numbers, dtype=torch.bfloat16, device="cuda")
    y = torch.empty_like(x)
    return lambda: torch.neg(x, out=y)


def numpy(x: Any) -> np.ndarray:
    """An array with the bits of a tensor, or of a JAX array."""
    if not hasattr(x, "detach"):
        return np.asarray(x)
    import torch

    x = x.detach().contiguous().cpu()
    name = str(x.dtype).removeprefix("torch.")
    if not hasattr(ml_dtypes, name):
        return x.numpy()
    ours = np.dtype(getattr(ml_dtypes, name))
    return x.view({1: torch.uint8, 2: torch.int16}[ours.itemsize]).numpy().view(ours)
