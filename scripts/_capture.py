"""What the capture scripts share: cases and their random numbers, paged inputs, provenance, the command line.

Inputs are drawn with numpy, from a seed that depends on the case alone: a case keeps its inputs when others come and
go. Runs on Python 3.11; never imports torch by itself.
"""

import argparse
import datetime
import fnmatch
import hashlib
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
    run: Callable[[np.random.Generator], CaseData]


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


def main(recipes: Recipes, script: str, machine: Callable[[], Machine], argv: Sequence[str] | None = None) -> int:
    """The command line of a capture script; returns the exit status.

    0: everything asked for was captured; 1: some cases failed, the rest was written; 2: wrong arguments or no case.
    """
    parser = argparse.ArgumentParser(prog=script, description=f"Write captures of {recipes.producer}.")
    parser.add_argument("out", type=Path, help="directory for PRODUCER-FAMILY.safetensors")
    parser.add_argument("--family", action="append", choices=recipes.families(), help="repeatable; default: all")
    parser.add_argument("--only", default="*", metavar="GLOB", help="cases by name; needs an OUT without the file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="commit of this script, where git cannot tell it")
    args = parser.parse_args(argv)
    commit = args.commit or _commit(script)
    if commit is None:
        parser.error("the commit of the script is recorded, and git cannot tell it here: pass --commit SHA")
    here = machine()
    args.out.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    written = 0
    for family in args.family or recipes.families():
        path = args.out / f"{recipes.producer}-{family}.safetensors"
        chosen = [r for r in recipes.cases if r.family == family and fnmatch.fnmatch(r.name, args.only)]
        if not chosen:
            continue
        if args.only != "*" and path.exists():
            parser.error(f"--only writes a file with some of the cases, but {path} exists: choose another directory")
        cases = {r.name: data for r in chosen if (data := _run(r, args.seed, failed)) is not None}
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


def _run(recipe: Recipe, seed: int, failed: list[str]) -> CaseData | None:
    """A case's data, or None after reporting why there is none; a NaN in an output is a failure."""
    name = f"{recipe.family}/{recipe.name}"
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    try:
        data = recipe.run(np.random.default_rng(list(digest)))
        for key, array in data.outputs.items():
            bad = np.argwhere(np.isnan(array.astype(np.float64)))
            if bad.size:
                where = bad[0].tolist()
                raise ArithmeticError(f"output {key} holds {len(bad)} NaN of {array.size} values, the first at {where}")
    except Exception as e:
        print(f"FAILED {name}: {type(e).__name__}: {e}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        failed.append(name)
        return None
    print(f"captured {name}", flush=True)
    return data


def _commit(script: str) -> str | None:
    """Commit of the working tree, with -dirty if a file that shapes the captures differs from it."""
    shaping = [script, "scripts/_capture.py", "parity/captures.py"]
    try:
        head = _git("rev-parse", "HEAD")
        return head + ("-dirty" if _git("status", "--porcelain", "--", *shaping) else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*command: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=True).stdout.strip()


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
