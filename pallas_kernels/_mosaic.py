"""The one file that knows JAX's private parts: interpreting, compiling for sm_90a without a GPU, device facts.

Mosaic GPU says of itself that it may change from week to week; whatever a new jax release breaks should break here.
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import config as jax_config
from jax._src import hardware_utils
from jax._src.lib import cuda_path, cuda_versions
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as _interpreter
from jax.experimental import topologies
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _exact

SMEM_BYTES = 232_448
"""Shared memory that one thread block may use on sm_90."""
H200 = Path(__file__).with_name("h200_target.txtpb")
_CUDA_EXTRAS = (12, 13)
_INSTALL = "install jaxattn[cuda13] (or [cuda12])"
_NEED = "needs an sm_90a GPU (H100, H200)"


# ---------------------------------------------------------------- names that jax's type stubs hide
ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
"""Accumulator of wgmma."""


def swizzled(span_bytes: int, *, bytes_per_value: int, rows: int = 8) -> tuple[Any, ...]:
    """Transforms in shared memory: tiles of 8 rows, as wgmma wants them, by a swizzle span of 32, 64 or 128 bytes."""
    tiling = plgpu.TilingTransform((rows, span_bytes // bytes_per_value))  # pyright: ignore[reportAbstractUsage]
    return tiling, plgpu.SwizzleTransform(span_bytes)  # pyright: ignore[reportAbstractUsage]


def strips(dtype: Any, span_bytes: int) -> Any:
    """Register layout between plain memory and 16-bit `swizzled` tiles: each lane holds 16 bytes of a swizzle span.

    Fits blocks of 64 k columns and 32 k rows (16 k for a span of 32 bytes) of `dtype`, and what they are cast to.
    """
    values = 16 // max(2, jnp.dtype(dtype).itemsize)
    span = span_bytes // 2
    rows = 32 * values // span
    side_by_side = span < 32  # the four warps on 64 columns, else on consecutive rows
    tiling = plgpu.Tiling(((rows, 4 * span) if side_by_side else (4 * rows, span), (rows, span), (values,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-4 if side_by_side else -5,), lane_dims=(-3, -2), vector_dim=-1)


def either(names: Iterable[Any]) -> str:
    """`a, b or c`, for messages."""
    *rest, last = map(str, names)
    return f"{', '.join(rest)} or {last}"


def smem_bytes(scratch: Iterable[Any]) -> int:
    """Shared memory of scratch types: each buffer starts at a multiple of 1024 bytes, one more holds the barriers."""
    buffers = [s for s in scratch if not isinstance(s, plgpu.Barrier)]
    return 1024 + sum(-(-math.prod(s.shape) * jnp.dtype(s.dtype).itemsize // 1024) * 1024 for s in buffers)


# ---------------------------------------------------------------- interpreting
@contextlib.contextmanager
def interpret(*, detect_races: bool = True) -> Iterator[None]:
    """Run every Mosaic kernel traced inside on the CPU, simulated; uninitialised memory is NaN.

    Raises:
        RuntimeError: on leaving, if `detect_races` and two threads or copies raced.
    """
    params = plgpu.InterpretGPUParams(
        detect_races=detect_races, out_of_bounds_reads="raise", uninitialized_memory="nan"
    )
    _interpreter.reset_gpu_interpret_mode_state()
    try:
        with plgpu.force_gpu_interpret_mode(params), warnings.catch_warnings():
            # numpy multiplies the NaN of uninitialised or poisoned memory and at times says so
            warnings.filterwarnings("ignore", "invalid value encountered in matmul", RuntimeWarning)
            yield
            jax.effects_barrier()
            if detect_races and _races_found():
                raise RuntimeError("race detected in an interpreted Mosaic kernel; see the log above")
    finally:
        _interpreter.reset_gpu_interpret_mode_state()


def _races_found() -> bool:
    try:
        return bool(_interpreter.get_races().races_found)
    except AssertionError:  # nothing was interpreted
        return False


def interpreting() -> bool:
    """True inside `interpret()`; part of jit's cache key, so a traced function is never reused across the border."""
    return jax_config.pallas_tpu_interpret_mode_context_manager.value is not None


# ---------------------------------------------------------------- device code
def divide(x: jax.Array, y: jax.Array, layout: Any) -> jax.Array:
    """`x / y` in float32, rounded to nearest even; inside a kernel, both in `layout`.

    See `_exact.divide`, for code outside kernels, for what a plain `/` does.
    """
    if interpreting():
        return _exact.divide(x, y)
    out = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)

    def div_rn(context, a, b):
        del context
        return a._pointwise(a._lift_fast_instr("div.rn.f32"), b)

    inline: Any = plgpu.inline_mgpu(arg_types=(layout, layout), return_type=out)
    return inline(div_rn)(plgpu.layout_cast(x, layout), plgpu.layout_cast(y, layout))


def store(ref: Any, value: jax.Array) -> None:
    """Write all of `ref`, in global memory, in whatever layout `value` has.

    From jax 0.12 on a plain assignment insists on whole 32-byte sectors; before, it took any layout.
    """
    unplanned = getattr(plgpu, "store", None)
    if unplanned is None:
        ref[...] = value
    else:
        unplanned(ref, value, optimized=False)


# ---------------------------------------------------------------- device facts
def why_not_here() -> str | None:
    """None if Mosaic kernels can run in this process (GPU, interpreted, or being compiled for one), else why not."""
    if interpreting():
        return None
    kind = _abstract_gpu()
    if kind is not None:
        return None if _is_hopper(kind) else _wrong_gpu(kind)
    device = _default_device()
    if device.platform not in ("gpu", "cuda"):
        return _why_no_gpu(device.platform)
    capability = getattr(device, "compute_capability", None)
    if str(capability) != "9.0":
        return _wrong_gpu(f"{device.device_kind} (compute capability {capability})")
    if _cuda_versions() is None:
        return f"needs JAX's CUDA plugin, which is not installed; {_INSTALL}"
    return _why_no_driver() or _why_no_compiler()


def _wrong_gpu(kind: str) -> str:
    return f"{_NEED}, got {kind}; use the reference there"


def _is_hopper(kind: str) -> bool:
    return bool(re.search(r"\b(H100|H200|H800|H20|GH200)\b", kind))


def _abstract_gpu() -> str | None:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device is not None and device.platform == "gpu" else None


def _default_device() -> Any:
    """The `jax.Device` that computations go to."""
    device = jax.config.jax_default_device
    if isinstance(device, str):
        return jax.devices(device)[0]
    return device if device is not None else jax.devices()[0]


def _why_no_gpu(platform: str) -> str:
    """Why JAX runs on `platform`: there is no GPU, or the first thing that keeps JAX from it."""
    start = f"{_NEED}, but this process runs on {platform}"
    if not _nvidia_gpu_visible():
        return f"{start}; on a machine with one, {_INSTALL}"
    if _cuda_versions() is None:
        return f"{start}: the machine has an NVIDIA GPU, but JAX's CUDA plugin is not installed; {_INSTALL}"
    driver = _why_no_driver()
    if driver is not None:
        return f"{start}: {driver}"
    chosen = _jax_platforms()
    if chosen and not {"cuda", "gpu"} & set(chosen.split(",")):
        return f"{start}: JAX was told so (jax_platforms={chosen!r}); unset JAX_PLATFORMS"
    return f"{start}: JAX could not start CUDA and logged why; {_INSTALL}"


def _nvidia_gpu_visible() -> bool:
    return hardware_utils.has_visible_nvidia_gpu()


def _jax_platforms() -> str | None:
    return jax.config.jax_platforms


def _cuda_versions() -> Any:
    """JAX's module of CUDA versions, None without the CUDA plugin."""
    return cuda_versions


def _why_no_compiler() -> str | None:
    if find_ptxas() is None:
        return f"needs ptxas to compile kernels, found none; {_INSTALL}, or put ptxas of CUDA 12.8 or newer on PATH"
    return None


def find_ptxas() -> Path | None:
    """Where ptxas is: JAX's CUDA directory or the usual one, the CUDA wheels beside JAX, or PATH."""
    for root in (Path(cuda_path or "/usr/local/cuda"), *_cuda_wheels()):
        if (root / "bin" / "ptxas").exists():
            return root / "bin" / "ptxas"
    found = shutil.which("ptxas")
    return Path(found) if found else None


def _cuda_wheels() -> list[Path]:
    """Where CUDA 13's and CUDA 12's compiler packages may lie."""
    return [Path(entry) / "nvidia" / name for entry in sys.path for name in ("cu13", "cuda_nvcc")]


def _why_no_driver() -> str | None:
    """The driver must offer the CUDA major version that the plugin was built for."""
    versions = _cuda_versions()
    built, driver = versions.cuda_runtime_build_version() // 1000, versions.cuda_driver_get_version()
    if driver // 1000 >= built:
        return None
    if driver == 0:
        return "no NVIDIA driver was found; install one"
    other = f" or install jaxattn[cuda{driver // 1000}]" if driver // 1000 in _CUDA_EXTRAS else ""
    return (
        f"JAX's CUDA plugin was built for CUDA {built}, but the driver offers only {driver // 1000}."
        f"{driver % 1000 // 10}; update the driver{other}"
    )


def num_sms() -> int:
    """Streaming multiprocessors of the device that is traced for; 132 where nothing tells (H100, H200 SXM)."""
    mesh = jax.sharding.get_abstract_mesh().abstract_device
    if mesh is not None and mesh.num_cores:
        return mesh.num_cores
    return getattr(jax.devices()[0], "core_count", None) or 132


# ---------------------------------------------------------------- compiling without a GPU
@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler said about one function, compiled for an H200 on a machine without a GPU."""

    name: str
    seconds: float
    """Processor time of tracing and compiling, of this process and the compiler's: the same on a busy machine."""
    kernels: tuple[str, ...]
    registers: int
    spill_bytes: int
    error: str | None = None


def compile_h200(fn: Callable, *args: Any, donate: Sequence[int] = ()):
    """`fn` compiled to sm_90a machine code, in this process; `args` are arrays or `jax.ShapeDtypeStruct`.

    Needs the CUDA plugin, ptxas and libdevice, but no GPU; raises the compiler's error. A broken kernel can abort the
    process: `compile_report` runs it in another one.
    """
    if not jax.tree.leaves(args):
        raise ValueError("compile_h200 needs at least one array argument, else XLA compiles for the host")
    description = topologies.get_topology_desc(platform="cuda", target_config=H200.read_text(), topology="1x1x1")
    mesh = topologies.make_mesh(description, (1,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(fn, donate_argnums=tuple(donate)).trace(*specs).lower(lowering_platforms=("cuda",)).compile()


def compile_report(program: str, names: Sequence[str], *, timeout_s: float = 600) -> list[Compiled]:
    """Compile named functions in a subprocess and read the compiler's resource report.

    Args:
        program: `module:function`; `function(name)` returns (callable, args) for each of `names`.
        names: what to compile. After a crash the rest is compiled in a fresh process.
        timeout_s: for each process.

    Returns:
        One record per name; a missing lowering, too much shared memory or a crash is its `error`.
    """
    done: dict[str, Compiled] = {}
    while rest := [n for n in names if n not in done]:
        with tempfile.TemporaryDirectory() as tmp:
            out = Path(tmp) / "out.jsonl"
            env = dict(os.environ, JAX_PLATFORMS="cpu", MOSAIC_GPU_DUMP_PTXAS="1", **_installed_compiler())
            command = [sys.executable, "-m", "pallas_kernels._mosaic", program, str(out), *rest]
            try:
                process = subprocess.run(
                    command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
                )
                last = process.stderr.strip().splitlines()[-1:]
                message = "; ".join([f"exit code {process.returncode}", *last])
            except subprocess.TimeoutExpired:
                message = f"no result after {timeout_s:.0f} s"
            lines = out.read_text().splitlines() if out.exists() else []
        for line in lines:
            record = json.loads(line)
            done[record["name"]] = Compiled(**(record | {"kernels": tuple(record["kernels"])}))
        crashed = next((n for n in rest if n not in done), None)
        if crashed is not None:
            done[crashed] = Compiled(crashed, 0.0, (), 0, 0, f"the compiler process died: {message}")
    return [done[n] for n in names]


def _installed_compiler() -> dict[str, str]:
    """The variable that makes XLA take the packages' ptxas, of a known version, before the machine's."""
    root = next((root for root in _cuda_wheels() if (root / "bin" / "ptxas").exists()), None)
    if root is None:
        return {}
    return {"PATH": os.pathsep.join([str(root / "bin"), *os.get_exec_path()])}


def _processor_seconds() -> float:
    return sum(os.times()[:4])


def _compile_main(program: str, out: str, *names: str) -> None:
    import importlib

    module, _, function = program.partition(":")
    build = getattr(importlib.import_module(module), function)
    for name in names:
        with tempfile.TemporaryFile("w+") as log:
            start, error = _processor_seconds(), None
            try:
                with _captured_stdout(log):
                    fn, args = build(name)
                    compile_h200(fn, *args)
            except Exception as e:
                error = f"{type(e).__name__}: {' '.join(str(e).split())[:500]}"
            seconds = _processor_seconds() - start
            log.seek(0)
            text = log.read()
        record = Compiled(
            name,
            seconds,
            tuple(re.findall(r"Compiling entry function '?([\w$]+)", text)),
            max(map(int, re.findall(r"Used (\d+) registers", text)), default=0),
            sum(map(int, re.findall(r"(\d+) bytes spill", text))),
            error,
        )
        with Path(out).open("a") as f:
            f.write(json.dumps(dataclasses.asdict(record)) + "\n")


@contextlib.contextmanager
def _captured_stdout(file) -> Iterator[None]:
    """Redirect the process's file descriptor 1 and 2: the compiler writes past Python."""
    sys.stdout.flush()
    saved = os.dup(1), os.dup(2)
    try:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, old in zip((1, 2), saved, strict=True):
            os.dup2(old, fd)
            os.close(old)


if __name__ == "__main__":
    _compile_main(*sys.argv[1:])
