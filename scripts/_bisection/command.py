"""The command line of `scripts/bisect.py`."""

import argparse
import contextlib
import fnmatch
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from scripts._bisection import loading, report
from scripts._report import html, schema, text

NOTHING = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = _parse(argv)
    os.environ.setdefault("NPROC", "16")  # XLA's threads: interpreted warpgroups wait for each other
    console, errors = Console(), Console(stderr=True)
    try:
        found = bisect(args, console)
    except (loading.UsageError, *_problems()) as e:
        errors.print(f"bisect: {e}", style="red", markup=False, highlight=False, soft_wrap=True)
        return NOTHING
    if found is None:
        return 0
    schema.write(found, args.out / "report.json")
    (args.out / "report.md").write_text(text.markdown(found), encoding="utf-8")
    (args.out / "report.html").write_text(html.page(found), encoding="utf-8")
    text.show(found, console)
    console.print(f"{args.out / 'report.html'}", style="dim", markup=False, highlight=False, soft_wrap=True)
    return schema.exit_code(found)


def bisect(args: argparse.Namespace, console: Console) -> schema.Report | None:
    """The report, or None where only the names file was asked for."""
    import jax

    from parity import bisection, names

    args.out.mkdir(parents=True, exist_ok=True)
    memory = loading.size(args.memory)
    target = loading.target(args.flax)
    golden = loading.golden(args.golden, args.run, args.mode, memory, args.out)
    with jax.disable_jit() if args.disable_jit else contextlib.nullcontext():
        ours = target.modules(golden)
        if args.draft or not args.names.exists():
            if args.names.exists():
                raise loading.UsageError(f"{args.names} exists; a draft does not overwrite it")
            args.names.write_text(names.draft(golden.modules(), ours, list(_outputs(golden))), encoding="utf-8")
            console.print(f"drafted {args.names}; correct it where it is wrong", soft_wrap=True, highlight=False)
            if args.draft:
                return None
        known = names.read(args.names)
        pairs = names.check(known, golden.paths, [m.path for m in ours], str(args.names))

        def wanted(path: str) -> bool:
            return not args.only or any(
                fnmatch.fnmatchcase(x, p) for p in args.only for x in (path, pairs.get(path, ""))
            )

        columns = (TextColumn("{task.description}"), BarColumn(bar_width=28), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=None)
            compared, found = bisection.run(
                target, golden, known, pairs, memory=memory, only=wanted, samples=args.samples, seed=args.seed,
                progress=lambda done, total, what: bar.update(task, completed=done, total=total, description=what),
            )  # fmt: skip
    if not compared:
        raise loading.UsageError(f"--only {' '.join(args.only)} matches no module that was compared")
    line = [
        "python",
        "scripts/bisect.py",
        "--flax",
        args.flax,
        "--golden",
        str(golden.path),
        "--names",
        str(args.names),
    ]
    line += ["--run", args.run] if args.run else []
    line += ["--seed", str(args.seed)] * bool(args.seed) + ["--disable-jit"] * args.disable_jit
    unmatched = {
        "golden": [p for p in golden.paths if p not in pairs],
        "ours": [m.path for m in ours if m.path not in pairs.values()],
    }
    repro = shlex.join([*line, "--out", str(args.out)])
    return report.build(compared, golden, pairs, found, known, unmatched, repro)


def _outputs(golden) -> list[str]:
    return list(golden.root.outputs)


def _problems() -> tuple[type[Exception], ...]:
    from jaxattn.capture import HookError
    from parity.bisection import BisectionError
    from parity.captures import CaptureError
    from parity.names import NamesError

    return HookError, BisectionError, CaptureError, NamesError


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    import scripts.bisect as script

    summary, _, rest = (script.__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="bisect.py", description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flax", required=True, metavar="FACTORY", help="returns the NNX module, or it and call()")
    parser.add_argument("--golden", required=True, help="a capture, or a factory of a torch module and its arguments")
    parser.add_argument("--run", help="of a capture that holds several")
    parser.add_argument("--names", required=True, type=Path, metavar="FILE", help="which module is which; TOML")
    parser.add_argument("--draft", action="store_true", help="write the names file and stop")
    parser.add_argument(
        "--mode", choices=("full", "statistics", "hash"), default="full", help="what a factory is captured as"
    )
    parser.add_argument("--only", action="append", default=[], metavar="PATH", help="report these modules; repeatable")
    parser.add_argument("--memory", default="1G", metavar="SIZE", help="tensors held in memory (%(default)s)")
    parser.add_argument("--samples", type=int, default=2, metavar="N", help="perturbed runs (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the perturbations")
    parser.add_argument("--disable-jit", action="store_true", help="run compiled functions of the model eagerly")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where the report goes")
    return parser.parse_args(argv)
