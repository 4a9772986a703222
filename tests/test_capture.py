"""The two-line hook: what it records of NNX modules, eager and compiled, and that the file is a capture."""

import itertools
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jaxattn import capture as hook
from jaxattn.capture import capture
from parity import captures, tolerances

ROOT = Path(__file__).resolve().parents[1]


class Gate(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16)

    def __call__(self, x, scale=2.0, *, mask=None):
        return {"out": self.linear(x) * scale, "rest": (x, None)}


class Model(nnx.Module):
    def __init__(self, rngs):
        self.gates = nnx.List([Gate(rngs), Gate(rngs)])
        self.named = nnx.Dict({"a b": nnx.RMSNorm(4, rngs=rngs)})

    def __call__(self, x):
        for gate in self.gates:
            x = gate(x, mask=jnp.ones(3, bool))["out"]
        return self.named["a b"](self.gates[0](x)["out"])


@pytest.fixture
def model():
    return Model(nnx.Rngs(0))


X = np.arange(12.0, dtype=np.float32).reshape(3, 4) / 7


def eager(model, x):
    return model(x)


def compiled(model, x):
    return nnx.jit(lambda m, x: m(x))(model, x)


def split(model, x):
    graph, state = nnx.split(model)
    return jax.jit(lambda s, x: nnx.merge(graph, s)(x))(state, x)


# ---------------------------------------------------------------- the file
@pytest.mark.parametrize("run", [eager, compiled, split])
def test_every_call_is_in_the_file(model, tmp_path, run):
    path = tmp_path / "golden.safetensors"
    with capture(model, path):
        y = run(model, jnp.asarray(X))
    calls = captures.read(path)
    assert [c.case for c in calls] == [
        "gates.0.linear", "gates.0", "gates.1.linear", "gates.1", "gates.0.linear+1", "gates.0+1", "named.a-b", "root"
    ]  # fmt: skip
    assert [c.params["order"] for c in calls] == list(range(8))
    by_name = {c.case: c for c in calls}
    assert (by_name["root"].inputs["x"] == X).all()
    assert (by_name["root"].outputs["y"] == np.asarray(y)).all()
    gate = by_name["gates.1"]
    assert gate.params | {"order": 0} == {
        "kernel": f"{Gate.__module__}.Gate",
        "parameters": {},
        "arguments": {"x": {"array": "x"}, "mask": {"array": "mask"}},
        "result": {"out": {"array": "out"}, "rest": {"list": [{"array": "rest_0"}, {"value": None}]}},
        "path": "gates.1", "call": 0, "order": 0, "mode": "full",
    }  # fmt: skip
    assert gate.outputs["out"].dtype == ml_dtypes.bfloat16
    assert gate.inputs["mask"].dtype == bool
    assert by_name["gates.0.linear"].params["parameters"] == {"kernel": [4, 4], "bias": [4]}
    assert by_name["named.a-b"].params["path"] == "named.a b"
    provenance = calls[0].provenance
    assert (provenance["producer"], provenance["verified"]) == ("jax", True)
    assert provenance["versions"]["flax"]
    assert [p.name for p in tmp_path.iterdir()] == ["golden.safetensors"]


def test_hook_leaves_nothing_behind(model, tmp_path):
    traces = []

    @nnx.jit
    def run(m, x):
        traces.append(1)
        return m(x)

    calls = {cls: cls.__call__ for cls in (Model, Gate, nnx.Linear, nnx.RMSNorm)}
    before = run(model, X)
    for _ in range(2):  # a block never runs the callbacks of another
        seen = []
        with capture(model, seen.append):
            run(model, X)
            run(model, X)
        assert [c.call for c in seen if not c.path] == [0, 1]
        assert [c.order for c in seen] == list(range(16))
    assert len(traces) == 3
    assert (run(model, X) == before).all()
    assert len(traces) == 3
    assert {cls: cls.__call__ for cls in calls} == calls
    assert not any("_capture_path" in vars(m) for _, m in nnx.iter_modules(model))


def test_calls_in_a_loop_arrive_in_order():
    norm = nnx.RMSNorm(4, rngs=nnx.Rngs(0))

    @nnx.jit
    def run(m, x):
        graph, state = nnx.split(m)
        return jax.lax.scan(lambda x, _: (nnx.merge(graph, state)(x) + 1, None), x, length=3)[0]

    seen = []
    with capture(norm, seen.append):
        run(norm, X)
    assert [c.call for c in seen] == [0, 1, 2]
    for a, b in itertools.pairwise(seen):
        assert (a.outputs["y"] + 1 == b.inputs["x"]).all()


def test_only_and_methods(model):
    class Tied(nnx.Module):
        def __init__(self):
            self.embed = nnx.Embed(5, 4, rngs=nnx.Rngs(0))

        def __call__(self, t):
            return self.embed.attend(self.embed(t))

    seen = []
    with capture(model, seen.append, only=["gates.*"]):
        model(X)
    assert {c.path for c in seen} == {"gates.0", "gates.0.linear", "gates.1", "gates.1.linear"}
    seen.clear()
    tied = Tied()
    with capture(tied, seen.append, methods=("__call__", "attend")):
        tied(jnp.arange(3))
    assert [(c.path, *c.inputs) for c in seen] == [("embed", "inputs"), ("embed", "query"), ("", "t")]


def test_super_is_one_call():
    class Base(nnx.Module):
        def __call__(self, x):
            return x + 1

    class Child(Base):
        def __call__(self, x):
            return 2 * super().__call__(x)

    class Both(nnx.Module):
        def __init__(self):
            self.a, self.b = Base(), Child()

        def __call__(self, x):
            return self.b(self.a(x))

    seen = []
    both = Both()
    with capture(both, seen.append):
        both(jnp.ones(2))
    assert [c.path for c in seen] == ["a", "b", ""]
    assert "__call__" in vars(Child) and Child.__call__(Child(), 1) == 4


# ---------------------------------------------------------------- modes, memory
def test_statistics_estimate_the_difference(rng):
    x = rng.standard_normal((70, 1001)).astype(np.float32)
    d = 1e-3 * rng.standard_normal(x.shape)
    a, b = hook.statistics(x), hook.statistics((x + d).astype(np.float32))
    head = len(hook.STATISTICS)
    rms = np.sqrt(np.square(d).mean())
    estimate = np.sqrt(np.square(a[head:] - b[head:]).mean())
    assert rms / tolerances.PROJECTED < estimate < rms * tolerances.PROJECTED
    wide = x.astype(np.float64)
    expected = [wide.mean(), np.sqrt(np.square(wide).mean()), np.abs(wide).max(), 0, 0]
    np.testing.assert_allclose(a[:head], expected, rtol=tolerances.FLOAT64 * x.size, atol=0)
    assert (hook.statistics(x.reshape(1001, 70)) == a).all()
    x[0, :3] = np.nan, np.inf, -np.inf
    bad = hook.statistics(x)
    assert bad[3:5].tolist() == [1, 2]
    assert np.isfinite(bad).all()
    assert hook.statistics(np.zeros((0, 3))).tolist() == [0.0] * (head + hook.PROJECTIONS)


@pytest.mark.parametrize("mode", ["statistics", "hash"])
def test_reduced_modes_keep_shapes(model, tmp_path, mode):
    path = tmp_path / "small.safetensors"
    with capture(model, path, mode=mode):
        model(X)
    calls = {c.case: c for c in captures.read(path)}
    gate = calls["gates.0"]
    assert gate.params["tensors"]["out.out"] == ["bfloat16", [3, 4]]
    assert gate.params["tensors"]["in.mask"] == ["bool", [3]]
    function = hook.statistics if mode == "statistics" else hook.digest
    assert (calls["gates.0"].inputs["x"] == function(X)).all()
    assert (calls["root"].inputs["x"] == X).all()  # the other model must be run on them


def test_tensors_beyond_the_memory_go_to_disk(model, tmp_path, monkeypatch):
    rolled = []
    original = hook.tempfile.SpooledTemporaryFile.rollover
    monkeypatch.setattr(
        hook.tempfile.SpooledTemporaryFile, "rollover", lambda self: (rolled.append(self._max_size), original(self))
    )
    paths = [tmp_path / f"{n}.safetensors" for n in (100, 1 << 20)]
    for path in paths:
        with capture(model, path, memory=int(path.stem), provenance={"command": "make", "seed": 3}):
            model(X)
    assert rolled == [100]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert captures.read(paths[0])[0].provenance["seed"] == 3


def test_block_that_fails_writes_nothing(model, tmp_path):
    path = tmp_path / "golden.safetensors"
    with pytest.raises(ZeroDivisionError), capture(model, path):
        model(X)
        1 / 0  # noqa: B018
    assert not list(tmp_path.iterdir())
    assert "_capture_path" not in vars(model)


# ---------------------------------------------------------------- values
def test_values_are_described_and_replaced():
    from dataclasses import dataclass
    from typing import NamedTuple

    @dataclass(frozen=True)
    class Batch:
        tokens: object
        size: int

    class Pair(NamedTuple):
        a: object
        b: object

    value = Batch(Pair(jnp.ones(2), [np.zeros(3), float("inf")]), 4)
    found, described = hook.flatten({"batch": value, "key": jax.random.key(0), "4 bit": jnp.ones(2, jnp.int4)})
    assert list(found) == ["batch_tokens_0", "batch_tokens_1_0"]
    assert described["batch"]["dict"]["size"] == {"value": 4}
    assert described["batch"]["dict"]["tokens"]["list"][1]["list"][1] == {"object": "builtins.float"}
    assert "object" in described["key"] and "object" in described["4 bit"]
    changed, _ = hook.walk(value, "batch", lambda name, x: x + 1)
    assert isinstance(changed, Batch) and isinstance(changed.tokens, Pair)
    assert changed.tokens.a.tolist() == [2, 2] and changed.tokens.b[0].tolist() == [1, 1, 1]
    assert hook._host(np.array([1 + 2j], np.complex64)).tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (3, {}, "a torch.nn.Module or a flax.nnx.Module is required, got builtins.int"),
        (None, {"mode": "all"}, "mode must be one of full, statistics, hash, got 'all'"),
        (
            None,
            {"only": ["nothing"]},
            "no module call was recorded: call the model inside the with block (under jax.jit",
        ),
    ],
)
def test_messages(model, options, said, tmp_path):
    model = nnx.RMSNorm(4, rngs=nnx.Rngs(0)) if model is None else model
    with pytest.raises(hook.HookError, match=re.escape(said)), capture(model, tmp_path / "x.safetensors", **options):
        model(X)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- PyTorch
def test_stored_capture_of_torch():
    (call,) = (c for c in captures.read(ROOT / "examples/llama/golden-bfloat16.safetensors") if c.case == "root")
    assert call.provenance["producer"] == "torch"
    assert call.provenance["versions"]["torch"]
    assert call.outputs["logits"].dtype == ml_dtypes.bfloat16


def test_torch_module(tmp_path):
    torch = pytest.importorskip("torch")

    class Inner(torch.nn.Module):
        def forward(self, x, *, shift=None):
            x += 1  # in place: the recorded input must be the one before
            return x.to(torch.bfloat16), shift

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    model.add_module("inner", Inner())
    path = tmp_path / "golden.safetensors"
    with torch.no_grad(), capture(model, path):
        y, _ = model(torch.from_numpy(X.copy()))
    calls = {c.case: c for c in captures.read(path)}
    assert list(calls) == ["m0" if "m0" in calls else "0", "1", "inner", "root"]
    assert (calls["1"].outputs["y"] == calls["inner"].inputs["x"]).all()
    assert calls["inner"].outputs["y_0"].dtype == ml_dtypes.bfloat16
    assert (calls["root"].outputs["y_0"].astype(np.float32) == y.float().numpy()).all()
    assert calls["0"].params["parameters"] == {"weight": [4, 4], "bias": [4]}
    assert not model[0]._forward_hooks and not model[0]._forward_pre_hooks


def test_module_is_one_file_without_jax():
    """`capture.py` alone, as a PyTorch program would copy it, with stand-ins for torch."""
    program = f"""
import importlib.util, sys
sys.modules["jax"] = sys.modules["flax"] = sys.modules["jaxattn"] = None
spec = importlib.util.spec_from_file_location("capture", {str(ROOT / "jaxattn/capture.py")!r})
capture = importlib.util.module_from_spec(spec)
sys.modules["capture"] = capture
spec.loader.exec_module(capture)
try:
    with capture.capture(object(), "x"): pass
except capture.HookError as e:
    print(e)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "a torch.nn.Module or a flax.nnx.Module is required, got builtins.object\n", done.stderr


def test_calls_may_be_incomplete():
    assert hook.arguments(lambda a: a, (1, 2), {"b": 3}) == {"x0": 1, "x1": 2, "b": 3}
    assert hook.flatten(hook.results(SimpleNamespace())) == ({}, {"y": {"object": "types.SimpleNamespace"}})
