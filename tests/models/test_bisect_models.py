"""The bisection of DeepSeek-V3 and V4 against transformers' captured runs: clean, and with three planted faults."""

from pathlib import Path

import numpy as np
import pytest

from jaxattn.models import load_model
from jaxattn.nn import MLAttention
from parity import bisection, names
from scripts._bisection import loading
from tests.planted_models import FAULTS, V4_FAULTS, plant, plant_v4

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "parity" / "data" / "models" / "torch-deepseek_v3.safetensors"
V4 = ROOT / "parity" / "data" / "models" / "torch-deepseek_v4.safetensors"
examples = f"{ROOT}/examples/models_to_bisect.py"
prefill = loading.attribute(f"{examples}:prefill")


@pytest.fixture(scope="module")
def model():
    return load_model(ROOT / "parity" / "data" / "models" / "deepseek_v3", dtype="float32", progress=False)


@pytest.fixture(scope="module")
def golden():
    return bisection.load(GOLDEN, "f32")


@pytest.fixture(scope="module")
def known(model, golden, tmp_path_factory):
    """The drafted names, which pair every module that both sides call."""
    target = bisection.Target(model, prefill)
    ours = target.modules(golden)
    path = tmp_path_factory.mktemp("names") / "names.toml"
    path.write_text(names.draft(golden.modules(), ours, ["logits"]))
    found = names.read(path)
    pairs = names.check(found, golden.paths, [m.path for m in ours], str(path))
    assert pairs == {p: p for p in golden.paths if p in {m.path for m in ours}}
    assert len(pairs) == 43
    return found, pairs


def test_clean_model_is_not_accused(model, golden, known):
    compared, logits = bisection.run(bisection.Target(model, prefill), golden, *known, samples=1)
    assert [c.verdict.reason for c in compared if not c.verdict.passed] == []
    assert logits is not None


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_named(model, golden, known, fault):
    with plant(model, fault):
        compared, _ = bisection.run(
            bisection.Target(model, prefill), golden, *known, samples=1, comparisons=[bisection.FORCED]
        )
    found = bisection.first(compared, bisection.FORCED)
    assert (found.ours, found.output) == FAULTS[fault]
    failed = {c.ours for c in compared if not c.verdict.passed}
    expected = {f"model.layers.{i}.self_attn" for i in range(3)}
    if fault == "swapped_gate_up":
        expected = {f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up")}
    assert failed == expected


def test_runs_of_a_capture(golden):
    assert golden.root.inputs["input_ids"].shape == (1, 13)
    order = list(golden.paths)
    assert order[-2:] == ["lm_head", ""]
    for path in order[:-1]:
        parent = path.rpartition(".")[0]
        assert parent not in order or order.index(parent) > order.index(path)
    by_path = {c.params["path"]: c for c in golden.calls}
    attention = by_path["model.layers.1.self_attn"]
    norm = by_path["model.layers.1.input_layernorm"].outputs["y"]
    assert np.shares_memory(attention.inputs["hidden_states"], norm)  # stored once
    with pytest.raises(bisection.BisectionError, match=r"holds 4 runs: name one, --run f32 or f32\.prompt1 or bf16"):
        bisection.load(GOLDEN)
    assert MLAttention.__call__.__qualname__ == "MLAttention.__call__"  # the hook left no wrapper


# ---------------------------------------------------------------- DeepSeek-V4, with every kind of layer
@pytest.fixture(scope="module")
def v4():
    """Target, golden run, drafted names."""
    target, golden = loading.target(f"{examples}:deepseek_v4"), bisection.load(V4, "float32")
    return target, golden


@pytest.fixture(scope="module")
def v4_names(v4, tmp_path_factory):
    target, golden = v4
    ours, path = target.modules(golden), tmp_path_factory.mktemp("names") / "names.toml"
    path.write_text(names.draft(golden.modules(), ours, ["logits"]))
    found = names.read(path)
    pairs = names.check(found, golden.paths, [m.path for m in ours], str(path))
    parts = ("", ".attn", ".attn.wq_a", ".attn.wkv", ".attn.wo_b", ".ffn", ".ffn.shared_experts")
    parts += tuple(f".ffn.shared_experts.{name}_proj" for name in ("gate", "up", "down"))
    indexers = {f"layers.{i}.attn.indexer" for i in (1, 3)}
    assert set(pairs.values()) == {f"layers.{i}{part}" for i in range(4) for part in parts} | indexers | {"", "hc_head"}
    return found, pairs


def test_clean_v4_is_not_accused(v4, v4_names):
    compared, logits = bisection.run(*v4, *v4_names, samples=1)
    assert [f"{c.module} {c.output}: {c.verdict.reason}" for c in compared if not c.verdict.passed] == []
    assert {c.comparison for c in compared} == {bisection.FORCED, bisection.FREE}
    assert logits is not None and logits.ours.shape == logits.golden.shape == (1, 15, 160)


@pytest.mark.parametrize("fault", V4_FAULTS)
def test_planted_fault_of_v4_is_named(v4, v4_names, fault):
    target, golden = v4
    with plant_v4(target.model, fault):
        compared, _ = bisection.run(target, golden, *v4_names, samples=1, comparisons=[bisection.FORCED])
    found = bisection.first(compared, bisection.FORCED)
    module, output, wrong = V4_FAULTS[fault]
    assert (found.ours, found.output) == (module, output)
    assert {c.ours for c in compared if not c.verdict.passed} == wrong
