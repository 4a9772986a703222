"""What processes of tests share: the parametrized cases, and the compiled programs.

For machines with little time, `TEST_SHARE=N` keeps about one in N of the parametrized cases. The first case of
every function and mechanism always stays, the others are drawn by the hash of their names, so that every machine runs
the same ones. The comparisons of one capture, which are computed together, stay or go together. Tests that are not
parametrized, or are marked `smoke` where they are written, are not touched.
"""

import contextlib
import gc
import multiprocessing
import os
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import jax
import pytest

CACHE = "JAX_COMPILATION_CACHE_DIR"
FEW_PASSES = "JAX_DISABLE_MOST_OPTIMIZATIONS"
PLAIN = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true --xla_cpu_parallel_codegen_split_count=1"


def asked() -> int:
    """N, of whose cases one is to run; 1 = all.

    Raises:
        ValueError: TEST_SHARE is no positive integer.
    """
    text = os.environ.get("TEST_SHARE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"TEST_SHARE must be a positive integer (one case in so many is run), got {text!r}")
    return int(text)


def thin(config: Any, items: list[Any]) -> None:
    """Deselect what is not in the share that the environment asks for."""
    share, first, kept, left = asked(), {}, [], []
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else None
        group = item.nodeid if params is None else (item.path, item.originalname, *_about(params))
        edge = next(filter(_is_edge, (params or {}).values()), None)
        case = item.name if edge is None else edge[1]
        chosen = first.setdefault(group, case) == case or zlib.crc32(case.encode()) % share == 0
        chosen = chosen or item.get_closest_marker("smoke") is not None
        (kept if chosen else left).append(item)
    if left:
        items[:] = kept
        config.hook.pytest_deselected(items=left)


def _is_edge(value: Any) -> bool:
    """True for an edge of the triangle: mechanism, case, output, comparison."""
    return isinstance(value, tuple) and len(value) == 4


def _about(params: dict[str, Any]) -> list[str]:
    """Mechanism, kernel and comparison, as far as a test's parameters name them."""
    found: list[str] = []
    for value in params.values():
        if hasattr(value, "reference") or hasattr(value, "why_not"):
            found.append(getattr(value, "name", type(value).__name__))
        elif _is_edge(value):
            found.append(value[0])
        elif isinstance(value, str) and "/" in value:  # a program of test_compile
            found.append("/".join(value.split("/")[:2]))
    return found


def together(items: list[Any], names: Iterable[str]) -> None:
    """Mark what belongs to one mechanism, or to one file, for one process (`pytest -n N --dist loadgroup`).

    Two processes would each compile the programs, and compute the results, that such tests share.

    Args:
        items: the tests.
        names: the mechanisms' names.
    """
    longest = sorted(names, key=len, reverse=True)
    for item in items:
        if item.get_closest_marker("xdist_group"):
            continue
        about = _about(item.callspec.params) if hasattr(item, "callspec") else []
        stem = item.path.stem.removeprefix("test_")
        found = [n for n in longest if n in about] or [n for n in longest if f"{stem}_".startswith(f"{n}_")]
        name = found[0] if found else f"{item.path.parent.name}/{stem}"
        if item.get_closest_marker("optimized"):  # few groups: programs are forgotten at the ends of each
            name = f"optimized {zlib.crc32(name.encode()) % 2}"
        item.add_marker(pytest.mark.xdist_group(name))
    if "PYTEST_XDIST_WORKER" in os.environ:
        long_ones_first(items)


def long_ones_first(items: list[Any]) -> None:
    """Order groups by how long they may take, so that at the end no process waits long for the other.

    xdist would count tests (`--no-loadscope-reorder` keeps it from that), but one of a whole model takes as long as
    ten others.
    """
    weights: dict[str, int] = {}
    for item in items:
        weights[_group(item)] = weights.get(_group(item), 0) + (10 if _is_of_a_model(item) else 1)
    items.sort(key=lambda item: (-weights[_group(item)], _group(item)))


def _group(item: Any) -> str:
    return item.get_closest_marker("xdist_group").args[0]


def _is_of_a_model(item: Any) -> bool:
    return item.path.parent.name == "models" or item.path.stem in ("test_bench_model", "test_embed", "test_tutorial")


def compile_for(item: Any) -> None:
    """Few of the compiler's passes on a CPU, where they take the time, but for tests marked `optimized` or `aot`.

    Programs of few passes round otherwise than those that users run (fewer fused multiply-adds, other orders of sums).
    JAX keeps compiled programs without regard to this setting; they are forgotten wherever it changes, so that no
    test is served a program of the other kind.
    """
    whole = any(item.get_closest_marker(name) for name in ("optimized", "aot"))
    wanted = jax.default_backend() == "cpu" and not whole
    if jax.config.read("jax_disable_most_optimizations") != wanted:
        jax.clear_caches()
        jax.config.update("jax_disable_most_optimizations", wanted)


def compile_plainly(marks: str) -> None:
    """Compile small programs in a third of the time where no test marked `optimized` runs; before anything is compiled.

    XLA emits a CPU's loops by way of MLIR, whose contexts and passes take longer than the rest of the compiler, and can
    still do without. It also cuts programs into parts for as many threads, which costs more than it gives where
    processes share the processors. It reads its flags when it compiles the first program of a process, at times while
    tests are collected, so that the choice is one for all tests: `scripts/test.sh` runs those marked `optimized` apart.

    Processes that tests start compile alike, and with few passes (see `compile_for`).

    Args:
        marks: pytest's `-m`.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "not optimized" not in marks:
        return
    os.environ.setdefault(FEW_PASSES, "true")
    if "xla_backend_extra_options" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {PLAIN}".strip()


def collect_rarely() -> None:
    """Let Python's collector leave alone what exists, and look at the rest less often: JAX keeps much, and for good."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 10)


@contextlib.contextmanager
def workers(jobs: int) -> Iterator[ProcessPoolExecutor | None]:
    """A pool of so many processes, each with its own compiled programs; None for fewer than two."""
    if jobs < 2:
        yield None
        return
    # spawned: a fork of a process that runs jax may hang
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), keep_apart) as pool:
        yield pool


def keep_apart(process: str | None = None) -> None:
    """Give a process that runs beside others its own folder of compiled programs, if programs are kept at all.

    JAX would read what another process is still writing. Processes that this one starts take the same folder.

    Args:
        process: its name, the same in the next run; empty = it is alone, None = a worker of a pool.
    """
    process = multiprocessing.current_process().name if process is None else process
    folder = os.environ.get(CACHE)
    if folder and process and Path(folder).name != process:
        os.environ[CACHE] = str(Path(folder) / process)
        jax.config.update("jax_compilation_cache_dir", os.environ[CACHE])
