"""Between vLLM and captures: the machine, tensors and arrays, which kernels a call launched, and cases as data.

Nothing here imports torch or vLLM before a case runs: the cases can be listed, and their inputs drawn, without them.
"""

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from _capture import CaseData, Machine, Recipes

if TYPE_CHECKING:
    import torch

VLLM = Recipes("vllm")

Arrays = dict[str, np.ndarray]
Tensors = dict[str, "torch.Tensor"]
Shape = tuple[Any, ...]
"""Name of a numpy or ml_dtypes dtype, then the sizes."""

_BITS = {np.dtype(ml_dtypes.bfloat16): np.int16, np.dtype(ml_dtypes.float8_e4m3fn): np.uint8}
"""Dtypes that torch and numpy hand over as integers."""


def machine() -> Machine:
    """Versions and GPU; leaves the program with a sentence where vLLM cannot run."""
    try:
        import torch
    except ImportError as e:
        sys.exit(
            f"capture_vllm needs vLLM with its PyTorch and a CUDA GPU: {e}; install them with: pip install vllm==0.26.0"
        )
    if not torch.cuda.is_available():
        sys.exit("capture_vllm needs a CUDA GPU and found none; run it on a machine with one")
    try:
        import vllm_env
    except ModuleNotFoundError:
        pass
    else:
        vllm_env.install()
    try:
        import triton
        import vllm
    except ImportError as e:
        sys.exit(f"capture_vllm needs vLLM: {e}; install it with: pip install vllm==0.26.0")
    versions = {"vllm": vllm.__version__, "torch": torch.__version__, "triton": triton.__version__}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    return Machine(versions | {"cuda": torch.version.cuda}, torch.cuda.get_device_name(), driver, _alive)


def _alive() -> bool:
    """False after an error that no later call of this process survives, such as an illegal access."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def to_gpu(array: np.ndarray) -> "torch.Tensor":
    """A tensor on the GPU with the array's bits."""
    import torch

    bits = _BITS.get(array.dtype)
    if bits is None:
        return torch.from_numpy(array.copy()).cuda()
    return torch.from_numpy(array.view(bits).copy()).cuda().view(getattr(torch, array.dtype.name))


def to_numpy(tensor: "torch.Tensor") -> np.ndarray:
    """An array with the tensor's bits."""
    import torch

    tensor = tensor.detach().contiguous().cpu()
    for ours, bits in _BITS.items():
        if tensor.dtype == getattr(torch, ours.name):
            return tensor.view(getattr(torch, np.dtype(bits).name)).numpy().view(ours)
    return tensor.numpy()


def launch(call) -> tuple[object, list[str]]:
    """What the call returns and the names of the GPU kernels that it launched, as the profiler saw them.

    The call runs twice, first without the profiler so that compiling at first use is over.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        result = call()
        torch.cuda.synchronize()
    names = [event.name for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [name[:160] for name in dict.fromkeys(names) if not name.startswith(("Memcpy", "Memset"))]
    if not kernels:
        print("warning: the profiler saw no GPU kernel; device_kernels stays empty", file=sys.stderr)
    return result, kernels


@dataclass(frozen=True)
class Call:
    """A case as data: inputs that numpy draws, a call of vLLM, and what must come back."""

    params: Mapping[str, Any]
    inputs: Callable[[np.random.Generator], Arrays]
    outputs: Mapping[str, Shape]
    call: Callable[[Tensors], Tensors]
    """The outputs by name; it must leave its tensors as they are, because it runs twice."""
    made: Mapping[str, Shape] = field(default_factory=dict)
    """Inputs that vLLM itself makes from the others."""
    make: Callable[[Tensors], Tensors] = lambda tensors: {}

    def __call__(self, rng: np.random.Generator) -> CaseData:
        """Run it.

        Raises:
            ValueError: vLLM returned other names, dtypes or shapes, or the call changed one of its inputs.
        """
        arrays = self.inputs(rng)
        tensors = {name: to_gpu(x) for name, x in arrays.items()}
        made = self.make(dict(tensors))
        arrays |= expect("input", {name: to_numpy(x) for name, x in made.items()}, self.made)
        tensors |= made
        found, kernels = launch(lambda: self.call(dict(tensors)))
        for name, x in tensors.items():
            if to_numpy(x).tobytes() != arrays[name].tobytes():
                raise ValueError(f"the call changed its input {name}; give it a clone")
        outputs = expect("output", {name: to_numpy(x) for name, x in found.items()}, self.outputs)
        return CaseData(dict(self.params) | {"device_kernels": kernels}, arrays, outputs)

    def blank(self, rng: np.random.Generator) -> CaseData:
        """The case with its inputs, and zeros where numbers of vLLM belong; needs neither vLLM nor a GPU."""
        made, outputs = (
            {name: np.zeros(shape, dtype) for name, (dtype, *shape) in shapes.items()}
            for shapes in (self.made, self.outputs)
        )
        return CaseData(dict(self.params), self.inputs(rng) | made, outputs)

    def nbytes(self) -> int:
        """Bytes of the case's arrays."""
        data = self.blank(np.random.default_rng(0))
        return sum(x.nbytes for x in (*data.inputs.values(), *data.outputs.values()))


def expect(kind: str, arrays: Arrays, shapes: Mapping[str, Shape]) -> Arrays:
    """The arrays, if their names, dtypes and shapes are those.

    Raises:
        ValueError: they are not.
    """
    found = {name: (x.dtype.name, *x.shape) for name, x in arrays.items()}
    if found != dict(shapes):
        raise ValueError(f"{kind}s must be {dict(shapes)}, vLLM made {found}")
    return arrays


def case(
    family: str,
    name: str,
    params: Mapping[str, Any],
    inputs: Callable[[np.random.Generator], Arrays],
    outputs: Mapping[str, Shape],
    **more: Any,
) -> Callable:
    """Decorator that keeps `call(tensors) -> tensors` as the case `family/name`; the arguments are those of `Call`."""

    def keep(call):
        VLLM.add(family, name)(Call(params, inputs, outputs, call, **more))
        return call

    return keep
