"""Time a DeepSeek-V4 decoder layer and a stack of layers with random weights: steps, parts, peers, memory.

python scripts/bench_model.py [--size flash|tiny] [--what layer|stack]... [--phase prefill|decode]... \
    [--piece steps|parts|peers]... [--prefill 4096] [--batch 64] [--peer vllm] [--limit SECONDS] --out FILE

Adds a JSON line to FILE as soon as something is measured, in this order: every whole step; the parts of a step, each
alone on as many rows, and their sums for each model; with --peer, the mechanisms that the parts call, each alone
beside the library's kernels on the same arguments in this process, and the sums of those. So whatever stops a run, and
--limit does so in an orderly way, the lines before are there. A decode step runs with transfers forbidden, compiled for
one set of shapes; memory is what the compiled step needs, and what the process holds by the device's count, against the
bytes of weights and caches. On a GPU, a whole step is on the wall clock, parts and mechanisms are the sums of their
kernels by CUPTI. Exit code: 0 all is well, 1 a check failed or something was left out (said on stderr).
"""

import argparse
import concurrent.futures
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from pallas_kernels import _aot  # noqa: E402
from scripts import bench  # noqa: E402
from scripts._bench import contest, peers, timing, v4  # noqa: E402
from scripts._bench import parts as mechanisms  # noqa: E402

MEMORY = 1.05
"""A decode step may need so many times the bytes of weights and caches."""
GROUP = 20
"""Most steps between two looks at the clock."""
STEPS = 8
"""Steps whose kernels are looked at."""
PIECES, PHASES = ("steps", "parts", "peers"), ("prefill", "decode")

type Line = dict[str, Any]


class OutOfTime(Exception):
    """The limit of the run is reached."""


class Run:
    """The lines of one run of this script."""

    def __init__(self, args: argparse.Namespace):
        """Nothing is made yet."""
        self.args, self.begin = args, time.perf_counter()
        self.whats, self.phases = (tuple(dict.fromkeys(x)) for x in (args.what or v4.STACKS, args.phase or PHASES))
        self.pieces = tuple(args.piece or (PIECES if args.peer else PIECES[:2]))
        largest = max(self.whats, key=lambda what: len(v4.STACKS[what]))
        self.whats = (*(x for x in self.whats if x != largest), largest)  # whose model the parts are taken from

    def left(self) -> float | None:
        """Seconds until the limit.

        Raises:
            OutOfTime: there are none.
        """
        if self.args.limit is None:
            return None
        left = self.args.limit - (time.perf_counter() - self.begin)
        if left <= 0:
            raise OutOfTime
        return left

    def step(self, what: str, phase: str) -> v4.Step:
        """Sizes of a step."""
        a = self.args
        if phase == "prefill":
            return v4.Step(what, phase, 1, a.prefill, a.prefill)
        return v4.Step(what, phase, a.batch, a.batch, a.context)

    def base(self, step: v4.Step) -> Line:
        """What every line of a step says."""
        sizes = {"rows": step.rows, "context": step.context}
        return {"model": "deepseek_v4", "size": self.args.size, "phase": step.phase} | sizes

    def lines(self) -> Iterator[Line]:
        """All lines.

        Raises:
            OutOfTime: before something is begun that the limit leaves no time for.
        """
        model = None
        for what in self.whats:
            if "steps" not in self.pieces and what != self.whats[-1]:
                continue
            model, before = None, in_use()
            steps = [self.step(what, phase) for phase in self.phases]
            positions = max(step.capacity for step in steps)
            model = v4.make(v4.config(self.args.size, v4.STACKS[what], max(x.rows for x in steps), positions))
            if "steps" in self.pieces:
                yield from self.steps(model, steps, before)
        if "parts" in self.pieces:
            yield from self.parts(model)
        if "peers" in self.pieces:
            yield from self.peers(model)

    def prepared_parts(self, model: Any, phase: str) -> tuple[v4.Step, list[v4.Part]]:
        """The pieces of a step of the largest model."""
        step = self.step(self.whats[-1], phase)
        v4.set_chunk(model, step.rows)
        cache, tables = model.make_cache(step.requests, step.capacity)
        lengths = jnp.full(step.requests, step.context, jnp.int32)
        start = jnp.arange(step.requests + 1, dtype=jnp.int32) * (step.rows // step.requests)
        return step, list(v4.parts(model, cache, tables, lengths, start, step.rows))

    def steps(self, model: Any, steps: Sequence[v4.Step], before: int | None) -> Iterator[Line]:
        """A line for each whole step; `before` = bytes in use before the model was made."""
        lowered = []
        for step in steps:
            self.left()
            lowered.append(v4.Ready(model, step).lower())
        compiled = self.compile(lowered)
        for step, program in zip(steps, compiled, strict=True):
            self.left()
            yield from self.whole(v4.Ready(model, step), program, before)

    def compile(self, lowered: Sequence[Any]) -> list[Any]:
        """All programs, compiled side by side; nothing is measured meanwhile.

        Raises:
            OutOfTime: the limit was reached; the compiler goes on until the process ends.
        """
        begin, pool = time.perf_counter(), concurrent.futures.ThreadPoolExecutor()
        started = [pool.submit(x.compile) for x in lowered]
        late = concurrent.futures.wait(started, self.left()).not_done
        pool.shutdown(wait=False, cancel_futures=True)
        if late:
            raise OutOfTime
        done = [x.result() for x in started]
        contest.say(f"  compiled {len(done)} programs in {time.perf_counter() - begin:.1f} s")
        return done

    def whole(self, ready: v4.Ready, compiled: Any, before: int | None) -> Iterator[Line]:
        """The line of a whole step, and of its kernels if they are asked for."""
        step, weights, cache = ready.step, bytes_of(ready.runner.weights), bytes_of(ready.runner.pages)
        problems: list[str] = []
        kept: list[Any] = [None]

        def again():  # the steps of a group must find room in the caches
            kept[:] = jax.block_until_ready([ready.state() for _ in range(1 if step.phase == "decode" else GROUP)])

        def decode():
            kept[0] = ready.advance(compiled, kept[0])
            return kept[0].lengths

        def prefill():
            return ready.advance(compiled, kept.pop()).lengths

        launch = prefill if step.phase == "prefill" else decode
        if step.phase == "decode":
            again()
            decode()
            try:
                with jax.transfer_guard("disallow"):
                    for _ in range(4):
                        decode()
            except Exception as e:
                problems.append(f"a decode step waits for the host, or does not fit the step before: {e}")
        with timing.turn():
            taken = times(launch, self.args.rounds, again)
            kernels = step_kernels(launch, again) if mechanisms.timer() is timing.cupti else None
        found = {"a step needs": step_memory(compiled), "the process holds": _difference(in_use(), before)}
        ratios = {said: used / (weights + cache) for said, used in found.items() if used is not None}
        for said, ratio in ratios.items():
            if ratio > MEMORY and step.phase == "decode" and self.args.size != "tiny":
                problems.append(f"{said} {ratio:.3f} of the bytes of weights and caches")
        base = self.base(step) | {"what": step.what, "weights_bytes": weights, "cache_bytes": cache}
        base |= {"step_bytes": found["a step needs"], "held_bytes": found["the process holds"]}
        base["memory_ratio"] = max(ratios.values(), default=None)
        base |= {"gpu_launches": kernels and kernels[0], "gpu_us": kernels and sum(kernels[1].values())}
        per_second = step.rows / (taken.median * 1e-6)
        yield base | _line("whole", taken) | {"tokens_s": per_second, "problems": problems}
        if self.args.kernels and kernels is not None:
            top = sorted(kernels[1].items(), key=lambda item: -item[1])[:20]
            yield base | {"part": "kernels", "us": base["gpu_us"], "kernels": dict(top)}

    def parts(self, model: Any) -> Iterator[Line]:
        """A line for each part of a step, how often each model has it, and for each model the sum."""
        found: dict[tuple[str, v4.Step], list[float]] = {}
        for phase in self.phases:
            self.left()
            step, pieces = self.prepared_parts(model, phase)
            prepared = []
            for part in pieces:
                self.left()
                prepared.append((part, *part.prepared()))
            compiled = self.compile([lowered for _, lowered, _ in prepared])
            for (part, _, runs), program in zip(prepared, compiled, strict=True):
                self.left()
                taken = timing.compare({"part": runs(program)}, mechanisms.timer(), self.args.rounds)["part"]
                counts = self.counts(part)
                yield self.base(step) | _line(part.name, taken) | {"launches": taken.launches, "count": counts}
                for what, count in counts.items():
                    found.setdefault((what, step), []).append(count * taken.median)
        for (what, step), each in found.items():
            yield self.base(step) | {"what": what, "part": "sum of parts", "us": sum(each)}

    def counts(self, part: v4.Part) -> dict[str, int]:
        """How often each model has a part."""
        return {what: part.count(v4.STACKS[what]) for what in self.whats}

    def peers(self, model: Any) -> Iterator[Line]:
        """A line for each mechanism that a part calls, beside its peers, and for each model the sums."""
        self.left()
        why_not = install(self.args.peer)
        for phase in self.phases:
            sums: dict[str, list[Line]] = {what: [] for what in self.whats}
            step, pieces = self.prepared_parts(model, phase)
            known: dict[str, Line] = {}
            for part in pieces:
                calls = mechanisms.calls(part.function, *part.args)
                for call in calls:
                    left = self.left()
                    if call.key not in known:
                        limit = min(x for x in (self.args.peer_limit, left) if x is not None)
                        known[call.key] = mechanisms.line(
                            call, self.args.peer, mechanisms.timer(), self.args.rounds, limit, why_not
                        )
                    op = known[call.key] | {"calls": call.count}
                    yield self.base(step) | {"part": part.name, "count": self.counts(part)} | op
                    for what, count in self.counts(part).items():
                        sums[what].append(op | {"calls": count * call.count})
            for what, ops in sums.items():
                yield self.base(step) | {"what": what, "part": "sum of mechanisms"} | mechanisms.summed(ops)


def install(libraries: Sequence[str]) -> dict[str, str]:
    """Import what the peers need, once: library -> why it cannot be had."""
    if "vllm" not in libraries:
        return {}
    from scripts._bench.peers import _torch

    begin = time.perf_counter()
    try:
        _torch.install()
    except Exception as e:
        return {"vllm": f"cannot be imported: {type(e).__name__}: {e}"}
    contest.say(f"  imported vLLM in {time.perf_counter() - begin:.1f} s")
    return {}


def times(launch: Callable[[], Any], rounds: int, restart: Callable[[], None] = lambda: None) -> timing.Times:
    """Microseconds of a call on the wall clock, launched in groups of at most `GROUP` without waiting in between.

    `restart()` runs before each group, outside of the clock.
    """
    restart()
    jax.block_until_ready(launch())
    begin = time.perf_counter()
    jax.block_until_ready(launch())
    group = max(1, min(GROUP, int(0.2 / max(1e-6, time.perf_counter() - begin))))
    found = []
    for _ in range(rounds):
        restart()
        begin, out = time.perf_counter(), None
        for _ in range(group):
            out = launch()
        jax.block_until_ready(out)
        found.append((time.perf_counter() - begin) / group * 1e6)
    return timing.summary(found)


def step_kernels(launch: Callable[[], Any], restart: Callable[[], None]) -> tuple[float, dict[str, float]]:
    """How many kernels a step launches on the GPU, and name -> microseconds of a step; copies do not count.

    Means of several steps without a pause, because the clock of a GPU that has just rested is higher.
    """

    def run():
        out = None
        for _ in range(STEPS):
            out = launch()  # the next step uses up what this one returns
        jax.block_until_ready(out)

    restart()
    seen = _aot.kernel_times(run)
    found: dict[str, float] = {}
    for name, us in seen:
        found[name] = found.get(name, 0.0) + us / STEPS
    return len(seen) / STEPS, found


def bytes_of(tree: Any) -> int:
    """Bytes of all arrays."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def step_memory(compiled: Any) -> int | None:
    """Bytes that a compiled step needs besides its code, or None where the compiler does not say."""
    m = compiled.memory_analysis()
    if m is None:
        return None
    return m.argument_size_in_bytes + m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes


def in_use() -> int | None:
    """Bytes that arrays take on the device now, None where it does not count."""
    gc.collect()
    return (jax.devices()[0].memory_stats() or {}).get("bytes_in_use")


def _difference(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before


def _line(part: str, t: timing.Times) -> Line:
    return {"part": part, "us": t.median, "us_p10": t.p10, "us_p90": t.p90}


def said(line: Line) -> str:
    """A line for the terminal."""
    text = " ".join(str(line[name]) for name in ("what", "phase", "part") if name in line)
    if "op" in line:
        sizes = (shape.partition("[")[2].rstrip("]").replace(", ", "x") for shape in list(line["shapes"].values())[:2])
        peer = f"{line['peer_us']:.0f} us {line['peer']}" if line["peer"] else "no peer"
        calls = f" x {line['calls']}" if line["calls"] > 1 else ""
        return (
            f"    {text}: {line['op']} {' '.join(sizes)} ({line['implementation']}){calls}: {line['us']:.0f} us, {peer}"
        )
    if "peer_us" in line:
        rest = f"; no peer: {', '.join(line['no_peer'])}" if line["no_peer"] else ""
        peer = f", where there is a peer {line['paired_us']:.0f} us, theirs {line['peer_us']:.0f} us"
        return f"{text}: {line['ops_us']:.0f} us{peer if line['peer_us'] is not None else ''}{rest}"
    text = f"{text}: {line['us']:.0f} us" + (f", {line['tokens_s']:.0f} tokens/s" if "tokens_s" in line else "")
    return text + (f", {line['gpu_launches']:.0f} kernels of {line['gpu_us']:.0f} us" if line.get("gpu_us") else "")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = _parse(argv)
    if args.turns:
        timing.take_turns(args.turns)
    where = bench.provenance(args.commit, argv)
    where["command"] = " ".join(["python scripts/bench_model.py", *(sys.argv[1:] if argv is None else argv)])
    where["xla_flags"] = os.environ.get(
        "XLA_FLAGS", ""
    )  # without autotuning, XLA's own products take many times as long
    run, failed = Run(args), False
    args.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        for line in run.lines():
            with args.out.open("a", encoding="utf-8") as f:
                f.write(json.dumps(line | where) + "\n")
            print(said(line), flush=True)
            for peer, why in line.get("not_timed", {}).items():
                contest.say(f"        {peer}: {why}")
            for problem in line.get("problems", ()):
                contest.say(f"bench_model: {line['what']} {line['phase']}: {problem}")
                failed = True
    except OutOfTime:
        contest.say(f"bench_model: stopped after {args.limit:g} s; what is measured is in {args.out}")
        failed = True
    return int(failed)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench_model.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=v4.SIZES, default="flash")
    parser.add_argument("--what", choices=v4.STACKS, action="append", help="repeatable; default: all")
    parser.add_argument("--phase", choices=PHASES, action="append", help="repeatable; default: both")
    parser.add_argument("--piece", choices=PIECES, action="append", help="repeatable; default: all, peers if any")
    parser.add_argument("--prefill", type=int, default=4096, help="tokens of the prompt")
    parser.add_argument("--batch", type=int, default=64, help="requests of a decode step")
    parser.add_argument("--context", type=int, default=4096, help="tokens of each of them")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kernels", action="store_true", help="add the longest kernels of a step, on a GPU")
    parser.add_argument(
        "--peer", choices=peers.LIBRARIES, action="append", default=[], help="repeatable; default: none"
    )
    parser.add_argument("--peer-limit", type=float, default=45.0, help="seconds that a peer's first call may take")
    parser.add_argument("--limit", type=float, help="seconds after which nothing more is begun")
    parser.add_argument("--turns", type=Path, metavar="FILE", help="measure in turns with processes of the same FILE")
    parser.add_argument("--commit", help="commit of the code, where git cannot tell it")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON lines are added to it")
    args = parser.parse_args(argv)
    if "peers" in (args.piece or ()) and not args.peer:
        parser.error("--piece peers needs --peer vllm, torch or jax")
    return args


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # not to wait for programs that the compiler is still busy with
