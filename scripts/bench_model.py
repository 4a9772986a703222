"""Time a DeepSeek-V4 decoder layer and a stack of layers with random weights: prefill, decode, parts, memory.

python scripts/bench_model.py [--size flash|tiny] [--what layer|stack]... [--prefill 4096] [--batch 64] [--peer vllm] \
    --out FILE

Adds one JSON line for each model, phase and part to FILE: the whole step first, then its parts alone, on the same rows.
With --peer, a part's line also has the mechanisms that it calls, each timed alone beside the library's kernels on the
same arguments in this process, and their sums. A decode step runs with transfers forbidden, compiled for one set of
shapes; memory is what the compiled step needs, and what the process holds by the device's count, against the bytes of
weights and caches. On a GPU, a whole step is on the wall clock, parts and mechanisms are the sums of their kernels by
CUPTI. Exit code: 0 all is well, 1 a check failed (said on stderr; the line is there).
"""

import argparse
import dataclasses
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402

from jaxattn.models import DeepseekV4Config, DeepseekV4ForCausalLM, generation  # noqa: E402
from jaxattn.models.config import Rope  # noqa: E402
from jaxattn.models.sampling import Sampling  # noqa: E402
from jaxattn.nn.moe import MoEConfig  # noqa: E402
from jaxattn.ops.rms_norm_quant import rms_norm_quant  # noqa: E402
from pallas_kernels import _aot  # noqa: E402
from scripts import bench  # noqa: E402
from scripts._bench import parts as mechanisms  # noqa: E402
from scripts._bench import peers, timing  # noqa: E402

MEMORY = 1.05
"""A step may need so many times the bytes of weights and caches."""
GROUP, ROOM = 20, 64
"""Most steps between two looks at the clock, and tokens that a request has room for behind its context."""
STACKS = {"layer": (4,), "stack": (1, 4, 128, 4)}
SIZES: dict[str, dict[str, Any]] = {
    "flash": {
        "model": {"vocab_size": 129280, "features": 4096, "heads": 64, "q_rank": 1024, "groups": 8, "o_rank": 1024},
        "attention": {"window": 128, "index_heads": 64, "index_dim": 128, "index_topk": 512},
        "experts": {"features": 4096, "experts": 256, "width": 2048, "top_k": 6, "shared_width": 2048},
    },
    "tiny": {
        "model": {"vocab_size": 64, "features": 128, "heads": 4, "q_rank": 128, "groups": 2, "o_rank": 128},
        "attention": {"window": 16, "index_heads": 4, "index_dim": 128, "index_topk": 8},
        "experts": {"features": 128, "experts": 8, "width": 128, "top_k": 2, "shared_width": 128},
    },
}


@dataclasses.dataclass(frozen=True)
class Part:
    """A piece of a step: a function of arrays."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    carried: int | None = None
    """Place of the argument that is updated."""

    def compiled(self) -> tuple[Callable[[], Any], Callable[[], None]]:
        """(launch, wait) of one compiled call; what is updated is donated and goes into the next call."""
        split = [nnx.split(x) if isinstance(x, nnx.Module) else (None, x) for x in self.args]
        states = [state for _, state in split]

        def run(carried, states):
            states = [carried if i == self.carried else x for i, x in enumerate(states)]
            args = [x if d is None else nnx.merge(d, x) for (d, _), x in zip(split, states, strict=True)]
            out = self.function(*args)
            return out, None if self.carried is None else nnx.state(args[self.carried])

        step, last = jax.jit(run, donate_argnums=0), [None]
        kept = [None if self.carried is None else jax.tree.map(jnp.copy, states[self.carried])]
        rest = [None if i == self.carried else x for i, x in enumerate(states)]

        def launch():
            last[0], kept[0] = step(kept[0], rest)
            return last[0]

        return launch, lambda: timing.wait_for((last[0], kept[0]))


def config(size: str, ratios: tuple[int, ...], chunk: int, positions: int) -> DeepseekV4Config:
    """A model in V4's proportions: FP8 linears, MXFP4 experts, FP8 caches, no MTP block."""
    s = SIZES[size]
    moe = MoEConfig(
        **s["experts"],
        scoring="sqrtsoftplus",
        correction_bias=True,
        scaling=1.5,
        limit=10.0,
        format="mxfp4",
        act_group=32,
        weight_on="activation",
    )
    rope = {"dim": 64, "length": positions, "mscale": 0.0, "mscale_all_dim": 0.0}
    stretched = Rope(**rope, theta=160000.0, factor=16.0, original=65536)
    return DeepseekV4Config(
        **s["model"],
        **s["attention"],
        ratios=ratios,
        mtp_blocks=0,
        moe=(moe,) * len(ratios),
        window_rope=Rope(**rope),
        rope=stretched,
        linear_format="fp8_block",
        output_format="fp8_block",
        chunk=chunk,
    )


def make(config: DeepseekV4Config, seed: int = 0) -> DeepseekV4ForCausalLM:
    """The model with random numbers of a sensible size, made one variable at a time on the device."""

    def empty():
        return DeepseekV4ForCausalLM(config, rngs=nnx.Rngs(0))

    model = nnx.eval_shape(empty)
    tables = jax.jit(lambda: [rope.table() for rope in (config.window_rope, config.rope)])()
    by_ratio = {layer.attn.ratio > 1: layer.attn.table for layer in model.layers}
    for compressed, variable in by_ratio.items():
        variable.set_value(tables[int(compressed)])
    key = jax.random.key(seed)
    for i, (path, variable) in enumerate(nnx.to_flat_state(nnx.state(model))):
        if path[-1] != "table":
            variable.set_value(_fill(jax.random.fold_in(key, i), str(path[-1]), variable.shape, variable.dtype))
    return model


def _fill(key, name: str, shape: tuple[int, ...], dtype) -> jax.Array:
    """Numbers of one variable: rows of matrices have norm 1 or so, norms and scales are 1, biases 0."""
    return _filled(key, name, tuple(shape), jnp.dtype(dtype).name)


@jax.jit(static_argnums=(1, 2, 3))
def _filled(key, name, shape, dtype):
    if dtype == "uint8":
        # E2M1 codes of random bits have a root mean square of 2.9
        return jnp.full(shape, 119, dtype) if name.endswith("scale") else jax.random.bits(key, shape, dtype)
    if name in ("weight_scale_inv", "wo_a_scale"):
        return jnp.full(shape, 2.0**-6, dtype)
    if dtype == "float8_e4m3fn" or len(shape) > 1:
        inputs = shape[0] if name in ("kernel", "wkv", "wgate") else shape[-1]
        width = 1.0 if dtype == "float8_e4m3fn" or name == "embedding" else inputs**-0.5
        return (jax.random.normal(key, shape) * width).astype(dtype)
    return jnp.zeros(shape, dtype) if name in ("correction_bias", "attn_sink", "base") else jnp.ones(shape, dtype)


def parts(model: DeepseekV4ForCausalLM, cache: Any, tables: Any, lengths: Any, start: Any, rows: int) -> Iterator[Part]:
    """The pieces of a step of `rows` rows: each layer's attention, and of the first, for all are alike, the others."""
    M, C = model.config.features, model.config.streams
    x = jax.random.normal(jax.random.key(1), (rows, M)).astype(jnp.bfloat16)
    streams = jnp.broadcast_to(x[:, None], (rows, C, M))
    eps = model.config.eps

    def attention(layer, pages, x, tables, lengths, start):
        batch = model.make_batch(tables, lengths, start, tokens=rows)
        return layer.attn(rms_norm_quant(x, layer.attn_norm[...], eps=eps), pages, batch[pages.ratio])

    def experts(layer, x):
        return layer.ffn(rms_norm_quant(x, layer.ffn_norm[...], eps=eps))

    def hyper(layer, streams, y):
        x, post, comb = layer.attn_hc.pre(streams)
        x, post, comb, streams = layer.ffn_hc.pre(streams, y=y, post=post, comb=comb)
        return layer.ffn_hc.post(streams, x, post, comb)

    def logits(model, streams):
        return model.logits(streams)

    for i, (layer, pages) in enumerate(zip(model.layers, cache.layers, strict=True)):
        yield Part(f"layers.{i}.attn ratio {pages.ratio}", attention, (layer, pages, x, tables, lengths, start), 1)
    yield Part("layers.0.ffn", experts, (model.layers[0], x))
    yield Part("layers.0 hyper-connections", hyper, (model.layers[0], streams, x))
    yield Part("logits", logits, (model, streams[: len(lengths)]))


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


def compile_step(step: Any, runner: generation.Runner, state: generation.State, more: tuple[Any, ...]) -> Any:
    """A step of `generation` for these arrays alone: the program that is timed, and whose memory is known."""
    args = (runner.definition, runner.weights, runner.pages, runner.tables, state, *more)
    return step.lower(*args).compile()


def advance(runner: generation.Runner, compiled: Any, state: generation.State, more: tuple[Any, ...]) -> Any:
    """Run a compiled step; `state` is used up."""
    runner.pages, state = compiled(runner.weights, runner.pages, runner.tables, state, *more)
    return state


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


def phase_lines(args: argparse.Namespace, what: str, phase: str) -> Iterator[dict[str, Any]]:
    """Lines of one model in one phase: prefill of one request, or a decode step of a batch."""
    requests, rows = (1, args.prefill) if phase == "prefill" else (args.batch, args.batch)
    context = args.prefill if phase == "prefill" else args.context
    capacity, before = context + ROOM, in_use()
    model = make(config(args.size, STACKS[what], max(rows, 64), capacity))
    how: dict[str, Any] = {"how": Sampling(), "stops": jnp.zeros(0, jnp.int32)}
    runner = generation.Runner(model, requests, capacity, **how)
    weights, cache = bytes_of(runner.weights), bytes_of(runner.pages)
    sequences = np.random.default_rng(0).integers(0, model.config.vocab_size, (requests, capacity), np.int32)
    base = {"model": "deepseek_v4", "size": args.size, "what": what, "phase": phase, "rows": rows, "context": context}
    base |= {"weights_bytes": weights, "cache_bytes": cache}

    def state(lengths: int) -> generation.State:
        full = jnp.full(requests, lengths, jnp.int32)
        return generation.State(jnp.asarray(sequences), full, full + 10**6, jnp.zeros(requests, bool))

    problems: list[str] = []
    if phase == "prefill":
        chunk = next(generation._chunks(sequences, np.array([context], np.int32), rows))
        more = (runner.key, runner.stops, *map(jnp.asarray, chunk))
        compiled = compile_step(generation._prefill, runner, state(context), more)

        def prefill():
            return advance(runner, compiled, state(context), more).lengths

        launch, restart = prefill, None
    else:
        more, running = (runner.key, runner.stops), state(context)
        compiled = compile_step(generation._decode, runner, running, more)
        running = advance(runner, compiled, running, more)
        try:
            with jax.transfer_guard("disallow"):
                for _ in range(4):
                    running = advance(runner, compiled, running, more)
        except Exception as e:
            problems.append(f"a decode step waits for the host, or does not fit the step before: {e}")
            running = state(context)
        kept = [running]

        def decode():
            kept[0] = advance(runner, compiled, kept[0], more)
            return kept[0].lengths

        def again():  # the steps of a group must find room in the caches
            kept[0] = jax.block_until_ready(state(context))

        launch, restart = decode, again

    whole = times(launch, args.rounds, restart or (lambda: None))
    after = in_use()
    found = {"a step needs": step_memory(compiled), "the process holds": _difference(after, before)}
    for said, used in found.items():
        if used is not None and phase == "decode" and args.size != "tiny" and used / (weights + cache) > MEMORY:
            problems.append(f"{said} {used / (weights + cache):.3f} of the bytes of weights and caches")
    base |= {"step_bytes": found["a step needs"], "held_bytes": found["the process holds"]}
    base["memory_ratio"] = max((x for x in found.values() if x is not None), default=0) / (weights + cache)
    per_second = rows / (whole.median * 1e-6)
    yield base | _line("whole", whole) | {"tokens_s": per_second, "problems": problems}
    if args.kernels:
        seen: dict[str, float] = {}
        for name, us in _aot.kernel_times(lambda: jax.block_until_ready(launch())):
            seen[name] = seen.get(name, 0.0) + us
        top = sorted(seen.items(), key=lambda item: -item[1])[:20]
        yield base | {"part": "kernels", "us": sum(seen.values()), "kernels": dict(top)}
    lengths, start = (
        jnp.full(requests, context, jnp.int32),
        jnp.arange(requests + 1, dtype=jnp.int32) * (rows // requests),
    )
    pages = model.make_cache(requests, capacity)[0]
    for part in parts(model, pages, runner.tables, lengths, start, rows):
        timer = mechanisms.timer()
        line = base | _line(part.name, timing.compare({"part": part.compiled()}, timer, args.rounds)["part"])
        if args.peer:
            calls = mechanisms.calls(part.function, *part.args)
            line["ops"] = list(mechanisms.lines(calls, args.peer, timer, args.rounds))
            line |= mechanisms.summed(line["ops"])
        yield line


def show(line: dict[str, Any]) -> None:
    """Print a part's mechanisms beside their peers, and the sums."""
    for op in line.get("ops", ()):
        said = f"{op['peer_us']:.0f} us {op['peer']}" if op["peer"] else "no peer"
        first = " ".join(
            shape.partition("[")[2].rstrip("]").replace(", ", "x") for shape in list(op["shapes"].values())[:2]
        )
        name = f"{op['op']} {first} ({op['implementation']})" + (f" x {op['calls']}" if op["calls"] > 1 else "")
        print(f"    {name}: {op['us']:.0f} us, {said}", flush=True)
        for peer, why in op["not_timed"].items():
            print(f"        {peer}: {why}", file=sys.stderr)
    if line.get("peer_us") is not None:
        rest = f"; no peer: {', '.join(line['no_peer'])}" if line["no_peer"] else ""
        print(
            f"    sum where there is a peer: {line['paired_us']:.0f} us, theirs {line['peer_us']:.0f} us{rest}",
            flush=True,
        )


def _line(part: str, t: timing.Times) -> dict[str, Any]:
    return {"part": part, "us": t.median, "us_p10": t.p10, "us_p90": t.p90, "launches": t.launches}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/bench_model.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="flash")
    parser.add_argument("--what", choices=STACKS, action="append", help="repeatable; default: all")
    parser.add_argument("--phase", choices=("prefill", "decode"), action="append", help="repeatable; default: both")
    parser.add_argument("--prefill", type=int, default=4096, help="tokens of the prompt")
    parser.add_argument("--batch", type=int, default=64, help="requests of a decode step")
    parser.add_argument("--context", type=int, default=4096, help="tokens of each of them")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kernels", action="store_true", help="add the longest kernels of a step, on a GPU")
    parser.add_argument(
        "--peer", choices=peers.LIBRARIES, action="append", default=[], help="repeatable; default: none"
    )
    parser.add_argument("--commit", help="commit of the code, where git cannot tell it")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON lines are added to it")
    args = parser.parse_args(argv)
    where = bench.provenance(args.commit, argv)
    where["command"] = " ".join(["python scripts/bench_model.py", *(sys.argv[1:] if argv is None else argv)])
    failed = False
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for what in args.what or STACKS:
        for phase in args.phase or ("prefill", "decode"):
            for line in phase_lines(args, what, phase):
                with args.out.open("a", encoding="utf-8") as f:
                    f.write(json.dumps(line | where) + "\n")
                text = f"{what} {phase} {line['part']}: {line['us']:.0f} us"
                print(text + (f", {line['tokens_s']:.0f} tokens/s" if "tokens_s" in line else ""), flush=True)
                show(line)
                for problem in line.get("problems", ()):
                    print(f"bench_model: {what} {phase}: {problem}", file=sys.stderr)
                    failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
