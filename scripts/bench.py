"""Time kernels beside their peers on a GPU, after proving on the same inputs that they are right.

python scripts/bench.py --mechanism M [--peer vllm|torch|jax]... [--case GLOB] [--tune | --try NAME=VALUE,...]
    [--jobs N] --out FILE

Adds one JSON line for each case, kernel and peer to FILE. Exit code: 0 everything asked for was measured, 1 a case
failed its gate or could not run (said on stderr; the rest is written), 2 nothing to measure here.
"""

import argparse
import ast
import concurrent.futures
import dataclasses
import datetime
import fnmatch
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # peers need memory, too

import jax  # noqa: E402

from jaxattn import registry  # noqa: E402
from jaxattn._mechanism import Args, Mechanism  # noqa: E402
from pallas_kernels import _mosaic, _tuned  # noqa: E402
from parity import execution  # noqa: E402
from scripts._bench import ceilings, contest, peers, timing  # noqa: E402

NOTHING = 2
PACKAGES = ("jax", "jaxlib", "torch", "triton", "vllm")


def main(argv: Sequence[str] | None = None, timer: timing.Timer = timing.cupti) -> int:
    """Run the command line; returns the exit code. Tests bring their own timer."""
    args = _parse(argv)
    if args.jobs > 1:
        return _in_processes(args)
    if args.turns:
        timing.take_turns(args.turns)
    if timer is timing.cupti and (reason := _mosaic.why_not_here()):
        contest.say(f"bench: {reason}")
        return NOTHING
    chosen = [
        (mechanism, case)
        for mechanism in args.mechanism
        for case in mechanism.cases
        if "bench" in case.tags and fnmatch.fnmatch(case.name, args.case)
    ]
    if not chosen:
        names = ", ".join(m.name for m in args.mechanism)
        contest.say(f"bench: no case of {names} is tagged `bench` and named like {args.case!r}")
        return NOTHING
    if "vllm" in args.peer:
        from scripts._bench.peers import _torch

        _torch.install()
    top = ceilings.Ceilings(
        *timing.once("ceilings", lambda: dataclasses.astuple(ceilings.measure(timer, *args.ceiling_sizes)))
    )
    where = provenance(args.commit, argv)
    print(
        f"copy {top.copy / 1e12:.2f} TB/s, bf16 {top.matmul / 1e12:.0f}, fp8 {top.matmul8 / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    failed = []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for mechanism, case in chosen:
        name = f"{mechanism.name} {case.name}"
        print(name, flush=True)
        try:
            lines = contest.run(
                mechanism,
                case,
                libraries=args.peer,
                timer=timer,
                ceilings=top,
                seed=args.seed,
                rounds=args.rounds,
                tune=_tuner(mechanism, where) if args.tune else None,
                tries=dict(args.tries),
            )
        except Exception as e:
            contest.say(f"FAILED {execution.message(f'{name}:', e)}")
            failed.append(name)
            continue
        if not lines:
            failed.append(name)
        with args.out.open("a", encoding="utf-8") as f:
            for line in lines:
                ceiling = {"copy_tb_s": top.copy / 1e12, "matmul_tflop_s": top.matmul / 1e12}
                f.write(json.dumps(line | ceiling | where) + "\n")
                print(f"  {describe(line)}", flush=True)
                for label, x in line.get("tried", {}).items():
                    bits = "the same bits" if x["same_bits"] else f"error {x['error']:.1e}"
                    print(f"    with {label} {x['us']:.1f} us: {x['us'] / line['us']:.2f}x, {bits}", flush=True)
    if failed:
        contest.say(f"{len(failed)} of {len(chosen)} cases were not measured: {', '.join(failed)}")
    return 1 if failed else 0


def _in_processes(args: argparse.Namespace) -> int:
    """A process for each mechanism, `--jobs` at a time: they compile side by side and measure in turns."""
    args.out.parent.mkdir(parents=True, exist_ok=True)
    turns = args.turns or args.out.with_name(f"{args.out.name}.{os.getpid()}")
    own = ["--case", args.case, "--out", str(args.out), "--rounds", str(args.rounds), "--seed", str(args.seed)]
    own += [word for peer in args.peer for word in ("--peer", peer)] + ["--turns", str(turns)]
    own += ["--commit", args.commit] if args.commit else []
    own += ["--tune"] if args.tune else []
    own += [word for label, _ in args.tries for word in ("--try", label)]
    own += ["--ceiling-sizes", *map(str, args.ceiling_sizes)]

    def one(mechanism: Mechanism) -> int:
        command = [sys.executable, str(Path(__file__).resolve()), "--mechanism", mechanism.name, *own]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=args.limit)
            code, text = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired as e:
            parts = (x.decode(errors="replace") if isinstance(x, bytes) else x or "" for x in (e.stdout, e.stderr))
            code, text = 1, f"{''.join(parts)}stopped after {args.limit} s\n"
        contest.say(f"== {mechanism.name}: exit code {code}\n{text}")
        return code

    asked = {m.name: m for m in args.mechanism}.values()
    timed = [m for m in asked if any("bench" in c.tags for c in m.cases)]
    timed.sort(key=lambda m: -sum("bench" in c.tags for c in m.cases))  # the long ones first
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        codes = list(pool.map(one, timed))
    for file in [] if args.turns else turns.parent.glob(f"{turns.name}*"):
        file.unlink()
    if codes and all(code == NOTHING for code in codes):
        return NOTHING
    return int(any(code not in (0, NOTHING) for code in codes))


def describe(line: dict[str, Any]) -> str:
    """One line for the terminal."""
    text = f"{line['kernel']} {line['us']:.1f} us, {line['roofline']:.0%} of the ceiling, {line['tb_s']:.2f} TB/s"
    text += f", {line['tflop_s']:.0f} TFLOP/s, error {line['error']:.1e}"
    if line["peer"] is not None:
        text += f"; {line['peer']} {line['peer_us']:.1f} us: {line['ratio_to_peer']:.2f}x"
    return text


def provenance(commit: str | None, argv: Sequence[str] | None) -> dict[str, Any]:
    """Where and with what the lines of this run were measured."""
    device = jax.devices()[0]
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            module = sys.modules.get(package)
            if module is not None:
                versions[package] = str(getattr(module, "__version__", "unknown"))
    return {
        "device": device.device_kind,
        "runtime": " ".join(str(getattr(device.client, "platform_version", "")).split()),
        "versions": versions,
        "commit": commit or _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python scripts/bench.py", *(sys.argv[1:] if argv is None else argv)]),
    }


def _tuner(mechanism: Mechanism, where: dict[str, Any]):
    """Times every legal configuration and writes the best with its evidence to `pallas_kernels/tuned`."""

    def tune(kernel: str, args: Args, time_of: Callable[[Any], float | str]) -> Any:
        candidates = list(dict.fromkeys(mechanism.kernels[kernel].configs(**args)))
        times, refused = {}, {}
        for config in candidates:
            seen = time_of(config)
            print(f"  {config}: {seen if isinstance(seen, str) else f'{seen:.1f} us'}", flush=True)
            (refused if isinstance(seen, str) else times)[config] = seen
        if not times:
            raise RuntimeError(f"none of {len(candidates)} configurations of {kernel} is right: {refused}")
        ranking = sorted(times, key=times.__getitem__)
        evidence = {
            "kernel": kernel,
            "us": times[ranking[0]],
            "others": [{"config": str(c), "us": times[c]} for c in ranking[1:4]],
            "tried": len(candidates),
            "failed": len(refused),
            "device": where["device"],
            "versions": where["versions"],
            "commit": where["commit"],
            "date": where["date"],
        }
        print(f"  tuned: {_tuned.write(mechanism.name, args, ranking[0], evidence)}", flush=True)
        return ranking[0]

    return tune


def _commit() -> str | None:
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _mechanisms(name: str) -> list[Mechanism]:
    try:
        return list(registry.MECHANISMS) if name == "all" else [registry.find(name)]
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def _changes(text: str) -> tuple[str, dict[str, Any]]:
    """`NAME=VALUE,...` and what it says."""
    try:
        found = {}
        for part in text.split(","):
            name, value = part.split("=")
            found[name.strip()] = ast.literal_eval(value.strip())
    except (ValueError, SyntaxError):
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE,... with Python numbers, got {text!r}") from None
    return text, found


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--mechanism", action="extend", type=_mechanisms, required=True, help="a name, or all; repeatable"
    )
    parser.add_argument("--peer", action="append", choices=peers.LIBRARIES, default=[], help="repeatable")
    parser.add_argument("--case", default="*", metavar="GLOB", help="cases by name")
    parser.add_argument("--tune", action="store_true", help="time all configurations first, keep the best as data")
    parser.add_argument(
        "--try",
        action="append",
        dest="tries",
        type=_changes,
        default=[],
        metavar="NAME=VALUE,...",
        help="time the configuration with these changes beside it; repeatable",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON lines are added to it")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved sessions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="commit of the kernels, where git cannot tell it")
    parser.add_argument("--jobs", type=int, default=1, help="mechanisms at a time, each in a process")
    parser.add_argument("--limit", type=float, help="seconds for a mechanism, with --jobs")
    parser.add_argument("--turns", type=Path, metavar="FILE", help="measure in turns with processes of the same FILE")
    parser.add_argument("--ceiling-sizes", type=int, nargs=2, default=(8192, 2**29), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
