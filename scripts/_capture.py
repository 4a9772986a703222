"""What the capture scripts share: cases and their random numbers, paged inputs, calls of a model's modules, provenance,
the command line.

Inputs are drawn with numpy, from a seed that depends on the case alone: a case keeps its inputs when others come and
go. Runs on Python 3.11; never imports torch by itself.
"""

import argparse
import datetime
import fnmatch
import hashlib
import os
import platform
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from parity import captures  # noqa: E402
from parity.captures import CaseData  # noqa: E402

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FP8_MAX = float(ml_dtypes.finfo(FP8).max)


@dataclass(frozen=True)
class Recipe:
    """A case that can be captured."""

    family: str
    name: str
    run: Callable[[np.random.Generator], CaseData | dict[str, CaseData]]
    """What it returns is the case of this name, or cases under names of their own."""


@dataclass
class Recipes:
    """The cases of a producer; `@recipes.add("family", "name")` above a function of a generator adds one."""

    producer: str
    cases: list[Recipe] = field(default_factory=list)

    def add(self, family: str, name: str) -> Callable:
        """Decorator that keeps a function as the case `family/name`."""

        def keep(run):
            if any((r.family, r.name) == (family, name) for r in self.cases):
                raise ValueError(f"case {family}/{name} exists already; give the new one another name")
            self.cases.append(Recipe(family, name, run))
            return run

        return keep

    def families(self) -> list[str]:
        """Names of the families, sorted."""
        return sorted({r.family for r in self.cases})


@dataclass(frozen=True)
class Machine:
    """What the outputs depend on besides the inputs."""

    versions: Mapping[str, str]
    device: str
    driver: str
    alive: Callable[[], bool] = lambda: True
    """False after a failure that no later case of the same process would survive."""


def main(recipes: Recipes, script: str, machine: Callable[[], Machine], argv: Sequence[str] | None = None) -> int:
    """The command line of a capture script; returns the exit status.

    0: everything asked for was captured; 1: some cases failed, the rest was written; 2: wrong arguments or no case.
    A case that takes the device down is left out, and its family is begun again in a new process.
    """
    parser = argparse.ArgumentParser(prog=script, description=f"Write captures of {recipes.producer}.")
    parser.add_argument("out", type=Path, nargs="?", help="directory for PRODUCER-FAMILY.safetensors")
    parser.add_argument("--family", action="append", choices=recipes.families(), help="repeatable; default: all")
    parser.add_argument("--only", default="*", metavar="GLOB", help="cases by name; needs an OUT without the file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="commit of this script, where git cannot tell it")
    parser.add_argument("--list", action="store_true", help="print the cases and the bytes of their arrays, run none")
    parser.add_argument("--failed", action="append", default=[], help=argparse.SUPPRESS)  # FAMILY/CASE, left out
    args = parser.parse_args(argv)
    families = args.family or recipes.families()
    if args.list:
        return _list([r for r in _chosen(recipes, args.only) if r.family in families], args.only)
    if args.out is None:
        parser.error("OUT is required: the directory for the files")
    here = machine()
    commit = args.commit or _commit(script)
    if commit is None:
        parser.error("the commit of the script is recorded, and git cannot tell it here: pass --commit SHA")
    args.out.mkdir(parents=True, exist_ok=True)
    failed: list[str] = list(args.failed)
    written = 0
    for i, family in enumerate(families):
        path = args.out / f"{recipes.producer}-{family}.safetensors"
        chosen = [r for r in _chosen(recipes, args.only) if r.family == family]
        if not chosen:
            continue
        if args.only != "*" and path.exists():
            parser.error(f"--only writes a file with some of the cases, but {path} exists: choose another directory")
        cases: dict[str, CaseData] = {}
        for r in chosen:
            if f"{family}/{r.name}" in args.failed:
                continue
            data = _run(r, args.seed, failed)
            cases |= data
            if not data and not here.alive():
                print(f"the device is lost after {family}/{r.name}; beginning {family} again without it", flush=True)
                _again(args, families[i:], commit, failed)
        if not cases:
            continue
        only = "" if args.only == "*" else f" --only {args.only!r}"
        provenance = {
            "producer": recipes.producer,
            "versions": {**here.versions, "python": platform.python_version(), "numpy": np.__version__},
            "device": here.device,
            "driver": here.driver,
            "seed": args.seed,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "commit": commit,
            "command": f"python {script} --family {family} --seed {args.seed}{only}",
        }
        captures.write(path, family, cases, provenance)
        written += len(cases)
        print(f"{path}: {len(cases)} cases, {path.stat().st_size / 1024:.0f} KiB", flush=True)
    if failed:
        print(f"{len(failed)} of {len(failed) + written} cases failed: {', '.join(failed)}", file=sys.stderr)
    elif not written:
        print(f"no case matches --only {args.only!r}", file=sys.stderr)
        return 2
    return 1 if failed else 0


def _chosen(recipes: Recipes, only: str) -> list[Recipe]:
    return [r for r in recipes.cases if fnmatch.fnmatch(r.name, only)]


def _list(chosen: Sequence[Recipe], only: str) -> int:
    """One line per case, `family/name` and the bytes of its arrays where they are known before it runs."""
    for r in chosen:
        count = getattr(r.run, "nbytes", None)
        print(f"{r.family}/{r.name}" + (f" {count()}" if count else ""))
    if not chosen:
        print(f"no case matches --only {only!r}", file=sys.stderr)
    return 0 if chosen else 2


def _again(args: argparse.Namespace, families: Sequence[str], commit: str, failed: Sequence[str]) -> None:
    """Replace this process by one that captures these families without the cases that failed."""
    options = {"--family": families, "--failed": failed, "--only": [args.only], "--commit": [commit]}
    words = [word for option, values in options.items() for value in values for word in (option, value)]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, sys.argv[0], str(args.out), "--seed", str(args.seed), *words])


def _run(recipe: Recipe, seed: int, failed: list[str]) -> dict[str, CaseData]:
    """A recipe's cases, or none after reporting why; a NaN in an output is a failure."""
    name = f"{recipe.family}/{recipe.name}"
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    try:
        made = recipe.run(np.random.default_rng(list(digest)))
        found = {recipe.name: made} if isinstance(made, CaseData) else made
        for case, key, array in [(case, *item) for case, data in found.items() for item in data.outputs.items()]:
            bad = np.argwhere(np.isnan(array.astype(np.float64)))
            if bad.size:
                where = f"{len(bad)} NaN of {array.size} values, the first at {bad[0].tolist()}"
                raise ArithmeticError(f"{'' if case == recipe.name else f'{case}: '}output {key} holds {where}")
    except Exception as e:
        print(f"FAILED {name}: {type(e).__name__}: {e}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        failed.append(name)
        return {}
    print(f"captured {name}", flush=True)
    return found


def _commit(script: str) -> str | None:
    """Commit of the working tree, with -dirty if a file that shapes the captures differs from it."""
    shaping = [script, ":(glob)scripts/_capture*.py", "parity/captures.py", "jaxattn/capture.py"]
    try:
        head = _git("rev-parse", "HEAD")
        return head + ("-dirty" if _git("status", "--porcelain", "--", *shaping) else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*command: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=True).stdout.strip()


Rows = Callable[[str, str], Sequence[int] | None]
"""`rows(path, "in.x")` of a call's tensor: which rows to keep, None = all, empty = not the tensor."""


def module_cases(
    calls: Sequence[Any], run: str, rows: Rows = lambda path, key: None, **more: Any
) -> dict[str, CaseData]:
    """Calls that `jaxattn.capture` handed over, as the cases of a run; those without an output are left out.

    Args:
        calls: in their order.
        run: its name, the first part of the cases' names.
        rows: of a tensor, counted along its first axis that is longer than 1.
        more: parameters of every case.
    """
    found: dict[str, CaseData] = {}
    for call in calls:
        params = {k: v for k, v in call.params.items() if k not in ("arguments", "result")} | {"run": run} | more
        taken: dict[str, dict[str, np.ndarray]] = {"in": {}, "out": {}}
        for kind, side in (("in", call.inputs), ("out", call.outputs)):
            for name, array in side.items():
                chosen = rows(call.path, f"{kind}.{name}")
                if chosen is None:
                    taken[kind][name] = array
                elif len(chosen):
                    key, axis = f"{kind}.{name}", captures.row_axis(array.shape)
                    params.setdefault("tensors", {})[key] = [array.dtype.name, list(array.shape)]
                    params.setdefault("rows", {})[key] = list(chosen)
                    taken[kind][name] = np.take(array, list(chosen), axis)
        if taken["out"]:
            found[captures.hook.case_name(call, found, run)] = CaseData(params, taken["in"], taken["out"])
    return found


@dataclass(frozen=True)
class Paged:
    """Shape of a paged attention case: request b has `queries[b]` new tokens and `lengths[b]` keys in all."""

    queries: tuple[int, ...]
    lengths: tuple[int, ...]
    H: int = 4
    K: int = 1
    D: int = 64
    page: int = 16
    dtype: str = "bfloat16"
    cache_dtype: str | None = None
    """None = dtype; float8_e4m3fn draws `k_scale` and `v_scale`."""
    causal: bool = True
    window: int = 0
    """0 = none."""
    softcap: float = 0.0
    """0 = none."""
    sinks: tuple[float, ...] | None = None
    """One per head, repeated as needed; None = no sinks."""
    gain: float = 1.0
    """Factor on q: wide scores make masks, sinks and the soft cap matter."""
    spare_pages: int = 1
    """Pages in the pool that no request owns; unused table entries point to the first."""
    dead: float = float("nan")
    """What slots hold that no query may read."""

    @property
    def scale(self) -> float:
        """Softmax scale."""
        return self.D**-0.5

    def params(self, kernel: str, **more: Any) -> dict[str, Any]:
        """Parameters of the case as they are stored."""
        options = {"scale": self.scale, "causal": self.causal, "window": self.window, "softcap": self.softcap}
        return options | {"kernel": kernel} | more

    def first_key(self, b: int) -> int:
        """The first key that a query of request b sees."""
        return max(0, self.lengths[b] - self.queries[b] - self.window + 1) if self.window else 0

    def inputs(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Arrays under vLLM's names, pages shuffled; slots that no query reads hold `dead`."""
        counts = [-(-n // self.page) for n in self.lengths]
        pool = sum(counts) + self.spare_pages
        order = rng.permutation(pool).astype(np.int32)
        owned, spare = order[: sum(counts)], order[sum(counts) :]
        table = np.full((len(counts), max(counts)), spare[0] if spare.size else 0, np.int32)
        live = np.zeros((pool, self.page), bool)
        for b, pages in enumerate(np.split(owned, np.cumsum(counts)[:-1])):
            table[b, : pages.size] = pages
            slots = np.arange(self.first_key(b), self.lengths[b]) if self.queries[b] else np.arange(0)
            live[pages[slots // self.page], slots % self.page] = True
        q = rng.standard_normal((sum(self.queries), self.H, self.D)) * self.gain
        k, v = (rng.standard_normal((pool, self.page, self.K, self.D)) for _ in range(2))
        arrays = {
            "block_table": table,
            "cu_seqlens_q": np.concatenate([[0], np.cumsum(self.queries)]).astype(np.int32),
            "seq_lens": np.array(self.lengths, np.int32),
        }
        if self.cache_dtype == FP8.name:
            for name, pages in (("k", k), ("v", v)):
                arrays[f"{name}_scale"] = rng.uniform(0.01, 0.05, 1).astype(np.float32)
                pages[:] = np.clip(pages / arrays[f"{name}_scale"], -FP8_MAX, FP8_MAX)
        for name, pages in (("k", k), ("v", v)):
            pages[~live] = self.dead
            arrays[name] = pages.astype(self.cache_dtype or self.dtype)
        if self.sinks is not None:
            arrays["sinks"] = np.resize(np.array(self.sinks, np.float32), self.H)
        return {"q": q.astype(self.dtype)} | arrays
