"""Compiling kernels to sm_90a machine code on machines without a GPU, and what compiler and profiler say of them."""

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from pallas_kernels import _mosaic

H200 = Path(__file__).with_name("h200_target.txtpb")


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
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), warnings.catch_warnings():
        # JAX keeps such a program in its cache, but cannot read it without a GPU, and then compiles it again
        warnings.filterwarnings("ignore", "Error reading persistent compilation cache entry")
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
            command = [sys.executable, "-m", "pallas_kernels._aot", program, str(out), *rest]
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
    root = next((root for root in _mosaic._cuda_wheels() if (root / "bin" / "ptxas").exists()), None)
    if root is None:
        return {}
    return {"PATH": os.pathsep.join([str(root / "bin"), *os.get_exec_path()])}


def _processor_seconds() -> float:
    return sum(os.times()[:4])


def _compile_main(program: str, out: str, *names: str) -> None:
    import importlib

    # what the next JAX will not have any more fails here as it does in the tests
    warnings.filterwarnings("error", category=DeprecationWarning, module=r"(pallas_kernels|jaxattn)\b")

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


# ---------------------------------------------------------------- timing
def kernel_times(run: Callable[[], object]) -> list[tuple[str, float]]:
    """Name and microseconds of every GPU kernel of this process that starts while `run()` runs, by CUPTI.

    Kernels of other libraries in the process count as well; memory copies do not. `run` must wait for its work.

    Raises:
        RuntimeError: this jax cannot measure.
    """
    start, stop = _mosaic.profiler()
    start()
    try:
        run()
    finally:
        seen = stop(True)
    return [(name, milliseconds * 1e3) for name, milliseconds in seen]


if __name__ == "__main__":
    _compile_main(*sys.argv[1:])
