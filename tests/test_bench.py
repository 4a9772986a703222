"""The benchmark script with a clock that needs no GPU: gate, lines, peers, tuned data, tables."""

import dataclasses
import importlib.util
import json
import subprocess
import sys
import threading
import time
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import _checks, _mechanism, registry
from jaxattn.ops import _attention_bench as attention_bench
from jaxattn.ops import _paged_attention_bench as paged_bench
from jaxattn.ops import attention, paged_attention
from pallas_kernels import _mosaic, _tuned
from pallas_kernels import paged_attention as paged_kernels
from pallas_kernels.paged_attention import decode
from parity import execution, tolerances
from scripts import bench, timing_table
from scripts._bench import ceilings, contest, peers, targets, timing

MERGE = registry.find("merge_states")
TOP = ceilings.Ceilings(copy=4e12, matmul=8e14, matmul8=16e14)


def clock(us=10.0):
    """A timer that calls once and then says what it is told."""

    def timer(launch, wait, launches):
        launch()
        wait()
        return [us] * launches

    return timer


def small(mechanism=MERGE, case="T7-H4-D128", **changes):
    """The record with one of its smoke cases as its only benchmark."""
    found = next(c for c in mechanism.cases if c.name == case)
    return dataclasses.replace(mechanism, cases=(dataclasses.replace(found, tags=frozenset({"bench"})),), **changes)


def broken(mechanism, name="mosaic"):
    """The record with a kernel that is 10 % off."""
    kernel = mechanism.kernels[name]

    def run(**args):
        return tuple(x * 1.1 for x in kernel.run(**args))

    return dataclasses.replace(mechanism, kernels={name: dataclasses.replace(kernel, run=run)})


@pytest.fixture
def interpreted():
    with _mosaic.interpret(detect_races=False):
        yield


@pytest.fixture
def record(monkeypatch):
    """Make the command line find the small record."""

    def use(mechanism):
        monkeypatch.setattr(bench.registry, "find", lambda name: mechanism)

    return use


def command(tmp_path, *more):
    out = tmp_path / "lines.jsonl"
    argv = ["--mechanism", "merge_states", "--out", str(out), "--ceiling-sizes", "64", "1024", "--commit", "abc", *more]
    code = bench.main(argv, timer=clock())
    return code, [json.loads(x) for x in out.read_text().splitlines()] if out.exists() else []


# ---------------------------------------------------------------- the command line
def test_a_line_says_what_ran_how_long_and_where(tmp_path, record, interpreted, capsys):
    record(small())
    code, (line,) = command(tmp_path, "--peer", "jax")
    assert code == 0
    assert set(timing_table.NEEDED) <= set(line)
    assert (line["mechanism"], line["case"], line["kernel"]) == ("merge_states", "T7-H4-D128", "mosaic")
    assert line["config"] == {"rows": 8}
    assert (line["us"], line["peer_us"], line["ratio_to_peer"]) == (10, 10, 1)
    assert line["peer"] == "jax: XLA (the reference under jit)"
    flops, moved = MERGE.cost(**MERGE.prepare(**small().cases[0].make(np.random.default_rng(0))))
    assert line["tb_s"] == moved / 10 / 1e6 and line["tflop_s"] == flops / 10 / 1e6
    assert line["roofline"] == line["floor_us"] / 10
    assert line["commit"] == "abc" and line["device"] == "cpu" and line["versions"]["jax"]
    assert "mosaic 10.0 us" in capsys.readouterr().out


def test_other_options_are_timed_beside_the_default(tmp_path, record, interpreted, capsys):
    record(small())
    code, lines = command(tmp_path, "--peer", "jax", "--try", "rows=16", "--try", "rows=3", "--try", "width=2")
    assert code == 0 and len(lines) == 1
    assert lines[0]["config"] == {"rows": 8}
    assert lines[0]["tried"] == {
        "rows=16": {"config": "Config(rows=16)", "error": lines[0]["error"], "same_bits": True, "us": 10.0}
    }
    said = capsys.readouterr()
    assert "with rows=16 10.0 us: 1.00x, the same bits" in said.out
    assert "mosaic with rows=3: raised " in said.err and "mosaic with width=2: raised TypeError" in said.err


def test_options_that_are_wrong_are_not_timed(tmp_path, record, interpreted, capsys):
    kernel = MERGE.kernels["mosaic"]

    def run(config, **args):
        return tuple(x * (1.1 if config.rows == 16 else 1) for x in kernel.run(config=config, **args))

    record(dataclasses.replace(small(), kernels={"mosaic": dataclasses.replace(kernel, run=run)}))
    code, (line,) = command(tmp_path, "--try", "rows=16")
    assert code == 0 and "tried" not in line
    assert "mosaic with rows=16: raised WrongResultError" in capsys.readouterr().err


@pytest.mark.parametrize("more", [(), ("--tune",)], ids=["plain", "tune"])
def test_a_mechanism_without_kernels_is_timed_as_its_reference(tmp_path, record, monkeypatch, more):
    permute = dataclasses.replace(small(registry.find("permute"), "T9-A2-E8-M128"), kernels={})
    record(permute)
    right = peers.Peer("right", lambda args: lambda: dict(zip(NAMES, permute.reference(**args), strict=True)))
    wrong = peers.Peer("wrong", lambda args: lambda: {"offsets": np.zeros(9)})
    monkeypatch.setattr(peers, "find", lambda mechanism, library: (right, wrong))
    code, (line,) = command(tmp_path, "--peer", "torch", *more)
    assert code == 0
    assert (line["mechanism"], line["kernel"], line["config"]) == ("permute", "reference", "None")
    assert (line["us"], line["peer"], line["ratio_to_peer"], line["error"]) == (10, "torch: right", 1, 0)


NAMES = ("permuted", "offsets", "positions")


@pytest.mark.parametrize("text", ["rows", "rows=", "rows=4=5", "rows=four"])
def test_options_that_cannot_be_read(text, tmp_path, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--mechanism", "merge_states", "--out", str(tmp_path / "x"), "--try", text])
    assert f"must be NAME=VALUE,... with Python numbers, got {text!r}" in capsys.readouterr().err


def test_lines_are_added(tmp_path, record, interpreted):
    record(small())
    command(tmp_path)
    _, lines = command(tmp_path)
    assert len(lines) == 2 and lines[0]["peer"] is None


def test_a_wrong_kernel_is_not_timed(tmp_path, record, interpreted, capsys):
    record(broken(small()))
    code, lines = command(tmp_path)
    assert (code, lines) == (1, [])
    said = capsys.readouterr().err
    assert "FAILED merge_states T7-H4-D128: WrongResultError: o: " in said
    assert "1 of 1 cases were not measured" in said


def test_mechanisms_in_processes(tmp_path, monkeypatch, capsys):
    ran = []

    def run(command, **options):
        ran.append(command)
        name = command[command.index("--mechanism") + 1]
        if name == "attention":
            raise subprocess.TimeoutExpired(command, options["timeout"], b"half a line\n", None)
        return subprocess.CompletedProcess(command, 1 if name == "router" else 0, f"{name} was here\n", "")

    monkeypatch.setattr(bench.subprocess, "run", run)
    out = tmp_path / "lines.jsonl"
    names = ("router", "attention", "merge_states", "mtp", "router")
    argv = [word for name in names for word in ("--mechanism", name)]
    argv += ["--peer", "jax", "--case", "T*", "--jobs", "2", "--limit", "9", "--out", str(out)]
    assert bench.main(argv) == 1
    assert {c[c.index("--mechanism") + 1] for c in ran} == {"router", "attention", "merge_states"}  # mtp is not timed
    assert len(ran) == 3 and len({c[c.index("--turns") + 1] for c in ran}) == 1
    assert all(c[c.index("--peer") + 1] == "jax" and c[c.index("--case") + 1] == "T*" for c in ran)
    said = capsys.readouterr().err
    assert "merge_states was here" in said and "half a line\nstopped after 9.0 s" in said


def test_processes_measure_in_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "_turns", [])
    timing.take_turns(tmp_path / "turns")
    inside, most = [], []

    def timer(launch, wait, launches):
        inside.append(1)
        time.sleep(0.01)
        most.append(len(inside))
        inside.pop()
        return [1.0] * launches

    def measure():
        timing.compare({"port": (lambda: None, lambda: None)}, timer, rounds=3)

    threads = [threading.Thread(target=measure) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 12 and max(most) == 1


def test_without_a_gpu_nothing_is_measured(tmp_path, capsys):
    if _mosaic.why_not_here() is None:
        pytest.skip("there is a GPU")
    assert bench.main(["--mechanism", "merge_states", "--out", str(tmp_path / "x")]) == bench.NOTHING
    assert "needs an sm_90a GPU (H100, H200)" in capsys.readouterr().err


def test_without_a_case_nothing_is_measured(tmp_path, record, interpreted, capsys):
    record(small())
    assert command(tmp_path, "--case", "nothing*") == (bench.NOTHING, [])
    assert "no case of merge_states is tagged `bench` and named like 'nothing*'" in capsys.readouterr().err


def test_an_unknown_mechanism_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--mechanism", "merge_state", "--out", str(tmp_path / "x")])
    assert "unknown mechanism 'merge_state' (did you mean 'merge_states'?)" in capsys.readouterr().err


@pytest.mark.parametrize("stem", ["cache_write", "combine_partials", "merge_states", "paged_attention"])
def test_every_kernel_has_something_to_time_and_a_peer(stem):
    mechanism = registry.find(stem)
    assert any("bench" in case.tags for case in mechanism.cases)
    assert peers.find(mechanism, "vllm")


# ---------------------------------------------------------------- gate and peers
def run(mechanism, **more):
    return contest.run(mechanism, mechanism.cases[0], libraries=("torch",), timer=clock(), ceilings=TOP, **more)


def give(monkeypatch, build):
    """A module of peers for merge_states that has one for torch."""
    module: Any = types.ModuleType("peers")
    module.__spec__ = importlib.util.find_spec("scripts._bench.peers.merge_states")
    module.PEERS = {"torch": (peers.Peer("other", build),)}
    monkeypatch.setitem(sys.modules, "scripts._bench.peers.merge_states", module)


def other(factor):
    def build(args):
        o, lse = MERGE.reference(**args)
        return lambda: {"o": factor * o, "lse": lse}

    return build


def test_a_peer_is_timed_on_the_same_numbers(monkeypatch, interpreted):
    give(monkeypatch, other(1))
    (line,) = run(small())
    assert line["peer"] == "torch: other" and line["peer_error"] < 2**-8


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (other(1.5), "computes something else; not timed"),
        (other(np.nan), "computes something else; not timed"),
        (lambda args: 1 / 0, "torch: other raised ZeroDivisionError"),
    ],
)
def test_a_peer_that_does_something_else_is_not_timed(monkeypatch, interpreted, capsys, build, said):
    give(monkeypatch, build)
    (line,) = run(small())
    assert line["peer"] is None
    assert said in capsys.readouterr().err


def test_a_peer_may_decline(monkeypatch, interpreted, capsys):
    def decline(args):
        raise peers.Unsupported("no heads of 128")

    give(monkeypatch, decline)
    assert run(small())[0]["peer"] is None
    assert "torch: other: no heads of 128" in capsys.readouterr().err


def test_a_library_that_is_none_is_an_error(monkeypatch):
    module: Any = types.ModuleType("peers")
    module.__spec__ = importlib.util.find_spec("scripts._bench.peers.merge_states")
    module.PEERS = {"tensorflow": ()}
    monkeypatch.setitem(sys.modules, "scripts._bench.peers.merge_states", module)
    with pytest.raises(ValueError, match="PEERS has tensorflow; libraries are vllm, torch, jax"):
        peers.find(MERGE, "vllm")


def test_caches_that_are_returned_go_into_the_next_call(interpreted):
    mechanism = registry.find("cache_write")
    case = next(c for c in mechanism.cases if c.name == "T9-K2-D64-bf16")
    args = mechanism.prepare(**case.make(np.random.default_rng(0)))
    before = np.asarray(args["k_pages"])
    config = mechanism.kernels["mosaic"].default_config(**args)
    port = contest.Port(mechanism, "mosaic", [contest._copied(args)], config)
    first = {k: np.asarray(x) for k, x in port.launch().items()}
    second = port.launch()
    assert set(first) == {"k_pages", "v_pages"}
    np.testing.assert_array_equal(first["k_pages"].view(np.uint8), np.asarray(second["k_pages"]).view(np.uint8))
    assert (first["k_pages"].view(np.uint8) != before.view(np.uint8)).any()
    np.testing.assert_array_equal(np.asarray(args["k_pages"]).view(np.uint8), before.view(np.uint8))


def test_the_error_is_relative_and_ignores_infinities():
    truth = np.array([3.0, 4.0, -np.inf])
    assert contest.error(np.array([3.0, 4.5, -np.inf]), truth) == pytest.approx(0.1, rel=tolerances.FLOAT64)
    assert contest.error(np.array([np.inf]), np.array([np.inf])) == 0


def test_every_target_has_its_case_and_its_peer():
    assert len(targets.TARGETS) > 30
    for target in targets.TARGETS:
        mechanism = registry.find(target.mechanism)
        cases = {c.name: c.tags for c in mechanism.cases}
        assert "bench" in cases[target.case], f"{target.title}: {target.case} is not timed"
        if target.own:
            assert "bench" in cases[target.peer], f"{target.title}: {target.peer} is not timed"
        else:
            library = "torch" if target.peer == "dense" else "vllm"
            assert peers.find(mechanism, library), f"{target.mechanism} has no {library} peer"


@pytest.mark.parametrize("name", ["align_block_size", "permute", "unpermute"])
def test_sorting_by_expert_has_a_peer(name):
    assert peers.find(registry.find(name), "vllm")


# ---------------------------------------------------------------- probes
def requests(rng, queries=(1, 5, 9), lengths=(40, 21, 9), **options):
    shape = {"H": 4, "K": 2, "D": 64, "page": 16}
    return paged_bench.make_inputs(rng, np.array(queries), np.array(lengths), **shape, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sinks": True, "window": 7},
        {"causal": False},
        {"cache_dtype": "float8_e4m3fn"},
        {"cache_dtype": "uint8", "per_head": True},
    ],
)
def test_probed_rows_are_rows_of_the_whole(rng, options):
    args = paged_attention.prepare(**requests(rng, **options, return_lse=True))
    fewer, rows = paged_bench.probe(rng, **args)
    same_rows(paged_attention.MECHANISM, args, fewer, rows)


@pytest.mark.parametrize("options", [{}, {"window": 5}, {"causal": False}])
def test_probed_rows_of_packed_sequences(rng, options):
    args = attention_bench.make_inputs(rng, 3, 5, H=4, K=2, D=64, Dv=32, return_lse=True, **options)
    args = attention.prepare(**args)
    fewer, rows = attention_bench.probe(rng, **args)
    same_rows(attention.MECHANISM, args, fewer, rows)


def test_what_cannot_be_taken_apart_is_said(rng):
    args = attention.prepare(*(jnp.zeros((1, 4, 2, 64)) for _ in range(3)))
    with pytest.raises(ValueError, match=r"^probe: rows of a batch cannot be taken apart; time packed sequences$"):
        attention_bench.probe(rng, **args)


def same_rows(mechanism, args, fewer, rows):
    whole, some = (execution.reference(mechanism, x, wide=True) for x in (args, fewer))
    assert {0, 14} <= set(rows.tolist()) and rows.size <= 6
    for name, x in some.items():
        np.testing.assert_allclose(x, whole[name][rows], rtol=tolerances.FLOAT64, atol=tolerances.FLOAT64)


def test_a_window_that_looks_ahead_cannot_be_probed(rng):
    args = paged_attention.prepare(**requests(rng, causal=False, window=4))
    with pytest.raises(ValueError, match="rows of a window without causality cannot be taken apart"):
        paged_bench.probe(rng, **args)


def test_a_probe_is_judged_instead_of_the_whole(interpreted):
    def probe(rng, **args):
        rows = np.array([2, 5])
        return args | {k: x[rows] for k, x in args.items() if getattr(x, "ndim", 0) >= 2}, rows

    assert run(small(probe=probe))[0]["error"] < 2**-8
    with pytest.raises(contest.WrongResultError, match="o: "):
        run(broken(small(probe=probe)))


# ---------------------------------------------------------------- time
@pytest.mark.parametrize(
    ("touched", "total", "sets"),
    [(1, 1, 64), (10 * 2**20, 10 * 2**20, 11), (2**30, 2**30, 2), (17 * 2**20, 2**32, 6), (2**33, 2**36, 1)],
)
def test_enough_input_sets_to_leave_the_cache(touched, total, sets):
    assert timing.copies(touched, total) == sets


def test_contestants_take_turns():
    calls = []

    def contestant(name):
        return (lambda: calls.append(name)), lambda: None

    def timer(launch, wait, launches):
        launch()
        return [2e4 if calls[-1] == "a" else 1.0] * launches

    times = timing.compare({"a": contestant("a"), "b": contestant("b")}, timer, rounds=2)
    assert calls == ["a", "a", "b", "b", "a", "b", "a", "b"]
    assert (times["a"].launches, times["b"].launches) == (6, 200)
    assert times["a"].median == 2e4


@pytest.mark.parametrize(
    ("seen", "launches", "expected"),
    [
        ([("k", 1.0), ("m", 2.0), ("k", 3.0), ("m", 4.0)], 2, [3.0, 7.0]),
        ([("k", 1.0), ("m", 2.0), ("k", 3.0)], 2, [3.0]),
        ([("k", 1.0), ("m", 2.0), ("m", 3.0), ("k", 4.0)], 2, [5.0]),
    ],
)
def test_kernels_are_added_up_launch_by_launch(monkeypatch, seen, launches, expected):
    ran = []
    monkeypatch.setattr(timing._aot, "kernel_times", lambda run: (run(), seen)[1])
    assert timing.cupti(lambda: ran.append(1), lambda: ran.append("wait"), launches) == expected
    assert ran == [1] * launches + ["wait"]


def test_seeing_no_kernel_is_an_error(monkeypatch):
    monkeypatch.setattr(timing._aot, "kernel_times", lambda run: [])
    with pytest.raises(RuntimeError, match="CUPTI saw no kernel; is another profiler attached"):
        timing.cupti(lambda: None, lambda: None, 1)


@pytest.mark.parametrize(
    ("flops", "moved", "eight_bit", "us"),
    [(8e8, 0, False, 1), (8e8, 0, True, 0.5), (0, 4e6, False, 1), (8e8, 8e6, True, 2)],
)
def test_the_floor_is_the_longer_of_two(flops, moved, eight_bit, us):
    assert TOP.floor_us(flops, moved, eight_bit) == pytest.approx(us, rel=tolerances.FLOAT64)


def test_products_on_8_bit_units_are_recognised():
    a8, a16 = jnp.zeros((2, 2), jnp.float8_e4m3fn), jnp.zeros((2, 2), jnp.bfloat16)
    case = MERGE.cases[0]
    tagged = dataclasses.replace(case, tags=frozenset({"bench", "eight_bit"}))
    assert contest.eight_bit({"a": a8, "b": a8, "c": a16}, case)
    assert not contest.eight_bit({"q": a16, "k": a8, "v": a8}, case)
    assert contest.eight_bit({"q": a16, "k": a8}, tagged)


# ---------------------------------------------------------------- tuned configurations
@pytest.fixture
def tuned(monkeypatch, tmp_path):
    monkeypatch.setattr(_tuned, "FOLDER", tmp_path)
    _tuned.entries.cache_clear()
    yield tmp_path
    _tuned.entries.cache_clear()


def test_tuning_keeps_the_fastest_right_configuration_with_its_evidence(
    tuned, tmp_path, record, interpreted, monkeypatch
):
    mechanism = small()
    args = mechanism.prepare(**mechanism.cases[0].make(np.random.default_rng(0)))
    kind = MERGE.kernels["mosaic"].default_config(**args)
    candidates = [type(kind)(rows=r) for r in (8, 16, 8)]
    original = MERGE.kernels["mosaic"]

    def run(*, config, **args):
        out = original.run(config=config, **args)
        return out if config.rows == 8 else tuple(x * 1.1 for x in out)

    kernel = dataclasses.replace(original, run=run, configs=lambda **_: candidates)
    record(dataclasses.replace(mechanism, kernels={"mosaic": kernel}))
    code, _ = command(tmp_path, "--tune")
    assert code == 0
    entry = json.loads((tuned / "nvidia_h200/merge_states.json").read_text())[_tuned.signature(**args)]
    assert entry["config"] == {"rows": 8}
    assert (entry["us"], entry["tried"], entry["failed"], entry["others"]) == (10, 2, 1, [])
    assert entry["device"] == "cpu" and entry["commit"] == "abc" and entry["date"] and entry["versions"]["jax"]
    assert _tuned.config("merge_states", type(kind), **args) == candidates[0]
    assert _tuned.config("merge_states", type(kind), **(args | {"return_lse": False})) is None


@dataclasses.dataclass(frozen=True)
class Shape:
    tile: tuple[int, int]


def test_a_configuration_comes_back_hashable(tuned):
    args = {"x": jnp.zeros((2, 3), jnp.bfloat16), "scale": jnp.float32(1), "window": None, "causal": True}
    assert _tuned.signature(**args) == "causal=True;scale=float32[];x=bfloat16[2,3]"
    _tuned.write("op", args, Shape((64, 128)), {"us": 1.0})
    found = _tuned.config("op", Shape, **args)
    assert found == Shape((64, 128)) and hash(found)
    assert _tuned.config("op", Shape, x=args["x"]) is None
    assert _tuned.config("another", Shape, **args) is None


def test_a_call_takes_its_tuned_configuration(tuned, interpreted):
    """Chosen by shapes, dtypes and options, also under jit; a `config` that is given wins."""
    seen = []

    def run(*, config, **args):
        seen.append(config.rows)
        return MERGE.kernels["mosaic"].run(config=config, **args)

    mechanism = small()
    kernel = dataclasses.replace(MERGE.kernels["mosaic"], run=run)
    mechanism = dataclasses.replace(mechanism, kernels={"mosaic": kernel})
    args = mechanism.prepare(**mechanism.cases[0].make(np.random.default_rng(0)))
    rule = kernel.default_config(**args)
    other = type(rule)(rows=2 * rule.rows)
    arrays = {k: x for k, x in args.items() if isinstance(x, jax.Array)}
    static = {k: x for k, x in args.items() if k not in arrays}

    def call(config=None):
        return jax.jit(lambda arrays: _mechanism.run(mechanism, arrays | static, "mosaic", config))(arrays)

    call()
    _tuned.write("merge_states", args, other, {"us": 1.0})
    call()
    call(rule)
    assert seen == [rule.rows, other.rows, rule.rows]


def test_a_mechanism_of_several_kernels_keeps_which(tuned):
    args = {"x": jnp.zeros(3)}
    _tuned.write("paged_attention", args, decode.Config(num_stages=4), {})
    assert _tuned.config("paged_attention", paged_kernels.Config, **args) == decode.Config(num_stages=4)


def test_an_entry_of_another_kernel_is_an_error(tuned):
    args = {"x": jnp.zeros(3)}
    _tuned.write("op", args, Shape((1, 2)), {})
    with pytest.raises(
        ValueError, match=r"op.json: the tuned configuration \{'tile': \[1, 2\]\} is not a Times .*--tune"
    ):
        _tuned.config("op", timing.Times, **args)


# ---------------------------------------------------------------- what is judged
def test_truths_of_a_mechanism_whose_record_prepares_its_arguments():
    mechanism = registry.find("cache_write")
    case = next(c for c in mechanism.cases if c.name == "T6-K8-D128-int4-per-head")
    args = mechanism.prepare(**case.make(np.random.default_rng(0)))
    assert set(args) - set(case.make(np.random.default_rng(0)))  # the op does not take these
    _, truth, same = contest.truths(mechanism, args, np.random.default_rng(0))
    assert truth.keys() == same.keys() == set(mechanism.outputs(**args))


def test_large_outputs_are_judged_at_some_rows(monkeypatch):
    monkeypatch.setattr(contest, "ROWS", 16)
    args = MERGE.prepare(**small().cases[0].make(np.random.default_rng(0)))
    assert contest._some_rows(MERGE, args, np.random.default_rng(0)) is None
    many = {k: jnp.concatenate([x] * 10) if _checks.is_array(x) else x for k, x in args.items()}
    monkeypatch.setattr(contest, "LARGE", 100)
    rows, truth, same = contest.truths(MERGE, many, np.random.default_rng(0))
    assert len(set(rows)) == 16 and {0, 1, 68, 69} <= set(rows) and rows.tolist() == sorted(rows)
    whole = execution.reference(MERGE, many)
    for name in same:
        assert truth[name].dtype == np.float64
        np.testing.assert_array_equal(same[name], whole[name][rows])


@pytest.mark.parametrize(
    ("name", "expected"),
    [("combine_partials", []), ("indexer_q", []), ("cache_write", ["k_pages", "v_pages"]), ("merge_states", [])],
)
def test_only_outputs_like_an_argument_take_its_place(name, expected):
    mechanism = registry.find(name)
    case = next(c for c in mechanism.cases if "smoke" in c.tags)
    args = mechanism.prepare(**case.make(np.random.default_rng(0)))
    assert contest._carried(mechanism, args) == expected
