"""The benchmark of whole models, tiny and on the CPU: its lines, and that its checks can fail."""

import dataclasses
import json
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.ops.rms_norm_quant import rms_norm_quant
from scripts import bench_model
from scripts._bench import parts as mechanisms
from scripts._bench import peers, timing, v4

PARTS = ["attn ratio 1", "ffn", "hyper-connections", "logits"]


@pytest.fixture(autouse=True)
def one_layer(monkeypatch):
    """A window-only layer compiles fastest."""
    monkeypatch.setattr(v4, "STACKS", {"layer": (1,)})


def lines(tmp_path, *more):
    out = tmp_path / "lines.jsonl"
    sizes = ("--size", "tiny", "--prefill", "32", "--batch", "3", "--context", "40", "--rounds", "2")
    code = bench_model.main([*sizes, *more, "--commit", "test", "--out", str(out)])
    return code, [json.loads(line) for line in out.read_text().splitlines()]


def norm(args):
    """A right peer of `rms_norm_quant` without a quantizer."""
    x, w = (np.asarray(args[name], np.float32) for name in ("x", "weight"))
    return lambda: {"o": x / np.sqrt((x * x).mean(-1, keepdims=True) + args["eps"]) * w}


def missing(args):
    raise peers.Unsupported("no such card")


def test_lines_of_a_decode_step(tmp_path, monkeypatch):
    wrong = peers.Peer("wrong", lambda args: lambda: {"o": np.ones(args["x"].shape)})
    known = {"rms_norm_quant": (peers.Peer("right", norm), wrong), "mhc_head": (peers.Peer("absent", missing),)}
    monkeypatch.setattr(peers, "find", lambda mechanism, library: known.get(mechanism.name, ()))
    monkeypatch.setattr(bench_model, "install", lambda libraries: {})
    monkeypatch.setattr(bench_model.Run, "prepared_parts", logits_alone_for_peers(bench_model.Run.prepared_parts))
    code, found = lines(tmp_path, "--phase", "decode", "--peer", "vllm")
    assert code == 0
    assert [line["part"] for line in found] == [
        "whole",
        *PARTS,
        "sum of parts",
        "logits",
        "logits",
        "sum of mechanisms",
    ]
    whole, sums = found[0], found[5]
    assert whole["problems"] == [] and whole["rows"] == 3 and whole["context"] == 40
    assert whole["gpu_launches"] is whole["gpu_us"] is None  # no GPU
    assert whole["tokens_s"] == 3 / (whole["us"] * 1e-6)
    assert whole["memory_ratio"] > 1 and whole["weights_bytes"] > whole["cache_bytes"] > 0
    assert all(line["count"] == {"layer": 1} for line in found[1:5])
    assert sums["us"] == sum(line["us"] for line in found[1:5])
    head, norm_line = found[6:8]
    assert (head["op"], head["implementation"], head["calls"]) == ("mhc_head", "reference", 1)
    assert head["peer"] is None and head["not_timed"] == {"vllm: absent": "no such card"}
    assert norm_line["op"] == "rms_norm_quant" and norm_line["peer"] == "vllm: right"
    assert "computes something else" in norm_line["not_timed"]["vllm: wrong"]
    assert found[-1]["no_peer"] == ["mhc_head"] and found[-1]["ops_us"] == head["us"] + norm_line["us"]
    assert (found[-1]["peer_us"], found[-1]["paired_us"]) == (norm_line["peer_us"], norm_line["us"])
    assert all(line["us_p10"] <= line["us"] <= line["us_p90"] for line in found[:5])
    assert all(line["commit"] == "test" for line in found)


def logits_alone_for_peers(prepared):
    """The mechanisms of other parts take long to compile."""
    seen = []

    def parts(self, model, phase):
        step, found = prepared(self, model, phase)
        seen.append(step)
        return step, found if len(seen) == 1 else [part for part in found if part.name == "logits"]

    return parts


def test_a_part_is_counted_as_often_as_a_model_has_it():
    attention, ffn = v4.Part("a", len, (), ratio=4), v4.Part("b", len, ())
    head = v4.Part("c", len, (), once=True)
    assert [[part.count(x) for x in ((4,), (1, 4, 128, 4))] for part in (attention, ffn, head)] == [
        [1, 2],
        [1, 4],
        [1, 1],
    ]


def test_the_limit_keeps_what_is_measured(tmp_path, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(bench_model.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(bench_model, "times", lambda *args: now.__setitem__(0, 11.0) or timing.Times(1.0, 1.0, 1.0, 1))
    code, found = lines(tmp_path, "--phase", "decode", "--limit", "10")
    assert code == 1 and [line["part"] for line in found] == ["whole"]
    assert "bench_model: stopped after 10 s; what is measured is in" in capsys.readouterr().err


def test_the_limit_does_not_wait_for_the_compiler(tmp_path):
    run = bench_model.Run(bench_model._parse(["--limit", "0.2", "--out", str(tmp_path / "lines.jsonl")]))
    free = threading.Event()

    class Slow:
        def compile(self):
            free.wait(30)

    begin = time.monotonic()
    with pytest.raises(bench_model.OutOfTime):
        run.compile([Slow()])
    free.set()
    assert time.monotonic() - begin < 30


def test_a_peer_that_hangs_or_cannot_be_imported_blocks_nothing(monkeypatch):
    x = jnp.ones((4, 32))
    call = mechanisms.calls(lambda x: rms_norm_quant(x, jnp.ones(32), eps=1e-6), x)[0]
    hangs = peers.Peer("hangs", lambda args: time.sleep(60))
    monkeypatch.setattr(peers, "find", lambda mechanism, library: (hangs, peers.Peer("right", norm)))
    begin = time.monotonic()
    line = mechanisms.line(call, ["vllm"], mechanisms.wall, 1, 0.2)
    assert time.monotonic() - begin < 30
    assert line["peer"] == "vllm: right"
    assert line["not_timed"] == {"vllm: hangs": "raised TimeoutError: took more than 0.2 s"}
    line = mechanisms.line(call, ["vllm"], mechanisms.wall, 1, None, {"vllm": "cannot be imported: no such file"})
    assert line["peer"] is None and line["us"] > 0
    assert line["not_timed"] == dict.fromkeys(("vllm: hangs", "vllm: right"), "cannot be imported: no such file")


def test_vllm_is_imported_once_or_not_at_all(monkeypatch):
    from scripts._bench.peers import _torch

    def fail():
        raise ImportError("No module named 'vllm'")

    monkeypatch.setattr(_torch, "install", fail)
    assert bench_model.install(["vllm"]) == {"vllm": "cannot be imported: ImportError: No module named 'vllm'"}
    assert bench_model.install(["torch"]) == {}


def test_calls_of_mechanisms_are_told_apart_by_shape():
    x, w = jnp.ones((4, 32)), jnp.ones(32)
    found = mechanisms.calls(lambda x: [rms_norm_quant(y, w, eps=1e-6) for y in (x, 2 * x, x[:2])], x)
    assert [(c.mechanism.name, c.implementation, c.count) for c in found] == [
        ("rms_norm_quant", "reference", 2),
        ("rms_norm_quant", "reference", 1),
    ]
    np.testing.assert_array_equal(found[0].args["x"], x)
    assert found[1].args["x"].shape == (2, 32) and found[1].args["eps"] == 1e-6


def test_a_step_that_waits_fails(tmp_path, monkeypatch, capsys):
    original = v4.Ready.advance

    def waiting(self, compiled, state):
        return original(self, compiled, dataclasses.replace(state, limits=state.limits + np.ones(3, np.int32)))

    monkeypatch.setattr(v4.Ready, "advance", waiting)
    code, found = lines(tmp_path, "--phase", "decode", "--piece", "steps")
    assert code == 1 and "a decode step waits for the host" in found[0]["problems"][0]
    assert "bench_model: layer decode: a decode step waits" in capsys.readouterr().err


def test_the_kernels_of_a_step_are_counted_on_a_gpu(tmp_path, monkeypatch):
    def seen(run):
        run()
        return [("long", 3.0), ("short", 0.5), ("short", 0.5)] * bench_model.STEPS

    monkeypatch.setattr(bench_model.mechanisms, "timer", lambda: timing.cupti)
    monkeypatch.setattr(bench_model._aot, "kernel_times", seen)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=4")
    code, (whole, kernels) = lines(tmp_path, "--phase", "prefill", "--piece", "steps", "--kernels")
    assert code == 0 and (whole["gpu_launches"], whole["gpu_us"]) == (3, 4)
    assert "launches" not in whole and whole["xla_flags"] == "--xla_gpu_autotune_level=4"
    assert bench_model.said(whole).endswith(" tokens/s, 3 kernels of 4 us")
    assert kernels["part"] == "kernels" and kernels["kernels"] == {"long": 3.0, "short": 1.0}


def test_peers_need_a_library(tmp_path, capsys):
    with pytest.raises(SystemExit):
        lines(tmp_path, "--piece", "peers")
    assert "--piece peers needs --peer vllm, torch or jax" in capsys.readouterr().err


def test_kernels_of_steps_that_use_up_what_the_step_before_returned(monkeypatch):
    step, state = jax.jit(lambda x: x + 1, donate_argnums=0), [jnp.zeros(3)]

    def launch():
        state[0] = step(state[0])
        return state[0]

    def three_a_step(run):
        run()
        return [("multiply", 2.0), ("add", 1.0), ("multiply", 4.0)] * bench_model.STEPS

    monkeypatch.setattr(bench_model._aot, "kernel_times", three_a_step)
    assert bench_model.step_kernels(launch, lambda: None) == (3, {"multiply": 6.0, "add": 1.0})
    assert state[0][0] == bench_model.STEPS
