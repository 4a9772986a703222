"""The benchmark of whole models, tiny and on the CPU: its lines, and that its checks can fail."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.ops.rms_norm_quant import rms_norm_quant
from scripts import bench_model
from scripts._bench import parts as mechanisms
from scripts._bench import peers


@pytest.fixture(autouse=True)
def one_layer(monkeypatch):
    """A window-only layer compiles fastest."""
    monkeypatch.setattr(bench_model, "STACKS", {"layer": (1,)})


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
    original = mechanisms.calls
    monkeypatch.setattr(mechanisms, "calls", lambda f, *args: original(f, *args) if len(args) == 2 else [])  # the last
    code, found = lines(tmp_path, "--phase", "decode", "--peer", "vllm")
    assert code == 0
    parts = [line["part"] for line in found]
    assert parts == ["whole", "layers.0.attn ratio 1", "layers.0.ffn", "layers.0 hyper-connections", "logits"]
    whole = found[0]
    assert whole["problems"] == [] and whole["rows"] == 3 and whole["context"] == 40
    assert whole["tokens_s"] == 3 / (whole["us"] * 1e-6)
    assert whole["memory_ratio"] > 1 and whole["weights_bytes"] > whole["cache_bytes"] > 0
    head, norm_line = found[-1]["ops"]
    assert (head["op"], head["implementation"], head["calls"]) == ("mhc_head", "reference", 1)
    assert head["peer"] is None and head["not_timed"] == {"vllm: absent": "no such card"}
    assert norm_line["op"] == "rms_norm_quant" and norm_line["peer"] == "vllm: right"
    assert "computes something else" in norm_line["not_timed"]["vllm: wrong"]
    assert found[-1]["no_peer"] == ["mhc_head"] and found[-1]["ops_us"] == head["us"] + norm_line["us"]
    assert (found[-1]["peer_us"], found[-1]["paired_us"]) == (norm_line["peer_us"], norm_line["us"])
    assert all(line["us_p10"] <= line["us"] <= line["us_p90"] and line["commit"] == "test" for line in found)


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
    original = bench_model.advance

    def waiting(runner, compiled, state, more):
        return original(runner, compiled, dataclasses.replace(state, limits=state.limits + np.ones(3, np.int32)), more)

    monkeypatch.setattr(bench_model, "advance", waiting)
    monkeypatch.setattr(bench_model, "parts", lambda *args: iter(()))
    code, found = lines(tmp_path, "--phase", "decode")
    assert code == 1 and "a decode step waits for the host" in found[0]["problems"][0]
    assert "bench_model: layer decode: a decode step waits" in capsys.readouterr().err
