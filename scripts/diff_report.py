"""Compare references and kernels with captured outputs of vLLM and torch, and write the numeric diff report.

python scripts/diff_report.py [--captures DIR]... [--mechanism M]... [--backend B] [--full] --out DIR
python scripts/diff_report.py --diff OLD.json NEW.json [--out DIR]

Exit code: 0 everything that was compared passes, 1 a failure (or a planted fault that the judge missed), 2 nothing was
compared or the input cannot be used. With --diff: 0 nothing got worse, 1 something did, 2 no common result.
"""

import argparse
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts._report import compare, html, schema, text  # noqa: E402

NOTHING = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = _parse(argv)
    os.environ.setdefault("NPROC", "16")  # XLA's threads: interpreted warpgroups wait for each other
    if args.jobs > 1:  # several processes share the GPU's memory
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    console = Console()
    errors = Console(stderr=True)
    try:
        if args.diff:
            return _diff(*args.diff, args.step, args.out, console)
        full = args.full or bool(args.mechanism)
        report = judge(
            args.captures, args.mechanism, args.backend, args.mutations, full=full, jobs=args.jobs, console=errors
        )
    except (schema.ReportError, UsageError) as e:
        errors.print(f"diff_report: {e}", style="red", markup=False, highlight=False, soft_wrap=True)
        return NOTHING
    paths = write(report, args.out)
    text.show(report, console)
    console.print("\n".join(f"{path}" for path in paths), style="dim", markup=False, highlight=False, soft_wrap=True)
    return schema.exit_code(report)


class UsageError(ValueError):
    """Input that the report cannot be made from; the message says what to do."""


def judge(
    directories: Sequence[Path],
    names: Sequence[str],
    backend: str,
    mutations: bool,
    *,
    full: bool = True,
    jobs: int = 1,
    console: Console,
) -> schema.Report:
    """Judge the shipped captures and those of `directories`.

    Args:
        directories: further directories of captures.
        names: mechanisms to judge, empty for all.
        backend: `auto`, `reference`, `interpret` or `gpu`.
        mutations: whether to test the judge too.
        full: without a GPU, interpret the kernels on every capture, and test the judge on the mechanisms' own cases.
        jobs: processes that share the cases.
        console: where the progress bar goes.

    Raises:
        UsageError: unknown mechanism, or captures that cannot be loaded.
    """
    from jaxattn import registry
    from parity import captures, triangle

    try:
        chosen = [registry.find(name) for name in dict.fromkeys(names)] if names else list(registry.MECHANISMS)
        loaded = captures.load([captures.SHIPPED, *directories])
    except ValueError as e:
        raise UsageError(str(e)) from e
    with _progress(console) as advance:
        results = triangle.run(chosen, loaded, backend, lambda *state: advance("comparing", *state), jobs, full)
        untested = {m.name: "left out by --no-mutations" for m in chosen}
        own = full or triangle.resolve(backend) != "interpret"
        tested = _mutations(chosen, loaded, advance, jobs, own) if mutations else schema.mutations([], untested)
    claimed = {capture.name: capture.params for _, capture in triangle.pair(chosen, loaded)}
    return schema.complete(
        triangle.report(results, loaded, backend),
        sentences={key: triangle.blame(edges) for key, edges in triangle.group(results).items()},
        mutations=tested,
        mechanisms=[m.name for m in chosen],
        cases=claimed,
        unclaimed=[c.name for c in loaded if c.name not in claimed],
    )


def write(report: schema.Report, out: Path) -> list[Path]:
    """Write `report.json`, `report.md` and `report.html` into a directory; returns their paths.

    Raises:
        UsageError: the directory cannot be made.
    """
    _make(out)
    paths = [out / f"report.{kind}" for kind in ("json", "md", "html")]
    schema.write(report, paths[0])
    paths[1].write_text(text.markdown(report), encoding="utf-8")
    paths[2].write_text(html.page(report), encoding="utf-8")
    return paths


def _mutations(
    chosen: Sequence[Any], loaded: Sequence[Any], advance: Callable[..., None], jobs: int, own: bool
) -> dict[str, Any]:
    """Plant the known faults of every mechanism that has captures, and count what the judge catches.

    `own`: also in kernels on the mechanisms' own cases, whose references take long to compile.
    """
    from parity import mutations, sharing, triangle

    stored: dict[str, list[tuple[Path, str]]] = {}
    for mechanism, capture in triangle.pair(chosen, loaded):
        stored.setdefault(mechanism.name, []).append((capture.path, capture.case))
    untested = {m.name: "no capture of it was loaded" for m in chosen if m.name not in stored}
    for name in list(stored):
        try:
            mutations.find(name)
        except ValueError as e:
            untested[name] = str(e)
            del stored[name]
    mutants = []
    with sharing.workers(min(jobs, len(stored))) as pool:
        waiting = [
            pool.submit(mutations.every, *one, own).result if pool else functools.partial(mutations.every, *one, own)
            for one in stored.items()
        ]
        for i, (name, done) in enumerate(zip(stored, waiting, strict=True)):
            advance("testing the judge", i, len(stored), name)
            mutants += done()
    advance("testing the judge", len(stored), len(stored), "")
    if not own:
        untested["kernels on the mechanisms' own cases"] = "left out to save time; --full plants faults there too"
    return schema.mutations([m.to_json() for m in mutants], untested)


def _diff(old: Path, new: Path, step: float, out: Path | None, console: Console) -> int:
    difference = compare.compare(schema.read(old), schema.read(new), step)
    if out is not None:
        _make(out)
        (out / "diff.md").write_text(compare.markdown(difference, str(old), str(new)), encoding="utf-8")
    compare.show(difference, console)
    return difference.exit_code


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UsageError(f"--out must name a directory that can be written, got {out}: {e.strerror}") from e


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str, int, int, str], None]]:
    """A progress bar per stage; yields `advance(stage, done, total, what)`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[what]}", style="dim", markup=False),
    )
    stages: dict[str, Any] = {}
    with Progress(*columns, console=console, transient=True) as bar:

        def advance(stage: str, done: int, total: int, what: str) -> None:
            if stage not in stages:
                stages[stage] = bar.add_task(stage, total=total, what=what)
            bar.update(stages[stage], completed=done, total=total, what=what)

        yield advance


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="diff_report.py", description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--captures", type=Path, action="append", default=[], metavar="DIR", help="more captures")
    parser.add_argument("--mechanism", action="append", default=[], metavar="M", help="only this one; repeatable")
    parser.add_argument("--backend", choices=("auto", "reference", "interpret", "gpu"), default="auto")
    parser.add_argument("--no-mutations", dest="mutations", action="store_false", help="do not test the judge itself")
    parser.add_argument(
        "--full",
        action="store_true",
        help="without a GPU: interpret kernels on every capture, not on one each, as with --mechanism; takes long",
    )
    parser.add_argument(
        "--jobs", type=int, default=min(os.cpu_count() or 1, 16), metavar="N", help="processes (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the files go")
    parser.add_argument("--diff", type=Path, nargs=2, metavar=("OLD", "NEW"), help="what got worse between two reports")
    parser.add_argument(
        "--step",
        type=float,
        default=compare.STEP,
        help="growth of measured / allowed that --diff tolerates (%(default)s)",
    )
    args = parser.parse_args(argv)
    if not args.diff and args.out is None:
        parser.error("--out DIR is required: the directory that report.json, report.md and report.html go to")
    return args


if __name__ == "__main__":
    raise SystemExit(main())
