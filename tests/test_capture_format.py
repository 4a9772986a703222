"""What format 3 of captures adds: tensors that are stored once, calls of modules, and conversion of older files."""

import hashlib
import json

import numpy as np
import pytest

from jaxattn import capture as hook
from parity import captures
from parity.captures import CaptureError, CaseData
from scripts import convert_captures
from tests.test_captures import PROVENANCE, file, pack, refuse, unpack

__all__ = ["file"]  # a fixture


def shared(path):
    """A file with the same bytes three times: as another case's input, and in another shape."""
    x = np.arange(6, dtype=np.float32)
    first = CaseData({"kernel": "k"}, {"x": np.ones(2, np.int32)}, {"y": x.reshape(2, 3)})
    cases = {"a": first, "b": CaseData({"kernel": "k"}, {"x": x.reshape(2, 3), "flat": x}, {"y": x + 1})}
    captures.write(path, "fam", cases, PROVENANCE)
    return cases


def test_equal_tensors_are_stored_once(tmp_path):
    path = tmp_path / "torch-fam.safetensors"
    cases = shared(path)
    header, data = unpack(path)
    assert set(header) == {"__metadata__", "a/in.x", "a/out.y", "b/out.y"} and len(data) == 2 * 24 + 8
    for found, expected in zip(captures.read(path), cases.values(), strict=True):
        for mine, theirs in ((found.inputs, expected.inputs), (found.outputs, expected.outputs)):
            assert set(mine) == set(theirs)
            for name, x in theirs.items():
                np.testing.assert_array_equal(mine[name], x, strict=True)


@pytest.mark.parametrize(
    "value",
    [["a/out.none", [6]], ["a/out.y", [5]], ["a/out.y", [-6]], ["a/out.y"], "a/out.y", ["b/in.x", [2, 3]]],
    ids=["unknown", "size", "negative", "no-shape", "no-list", "chain"],
)
def test_bad_alias(tmp_path, value, monkeypatch):
    path = tmp_path / "torch-fam.safetensors"
    shared(path)
    header, data = unpack(path)
    aliases = json.loads(header["__metadata__"]["aliases"])
    header["__metadata__"]["aliases"] = json.dumps(aliases | {"b/in.flat": value})
    pack(path, header, data)
    refuse(path, "a parameter, shape, dtype or the provenance was edited: sha256")
    monkeypatch.setattr(captures, "_check_hashes", lambda *args: True)
    refuse(path, "alias 'b/in.flat' must give a stored tensor and a shape of its size, found ")


def old_format(path):
    """The file as format 2, which has no aliases, would be."""
    header, data = unpack(path)
    meta = header["__metadata__"]
    assert json.loads(meta.pop("aliases")) == {}
    provenance = json.loads(meta["provenance"]) | {"format": 2}
    entries = {key: entry for key, entry in header.items() if key != "__metadata__"}
    parts = (meta["family"], provenance, json.loads(meta["cases"]), entries, json.loads(meta["tensors"]))
    header["__metadata__"] = meta | {"provenance": json.dumps(provenance), "digest": captures._digest(*parts)}
    pack(path, header, data)


def summary(path):
    """Everything in a file but for its provenance."""
    return [
        (c.name, c.params, *({k: (x.dtype, x.shape, x.tobytes()) for k, x in side.items()} for side in sides))
        for c in captures.read(path)
        for sides in [(c.inputs, c.outputs)]
    ]


def test_older_files_are_converted(file, tmp_path, capsys):
    assert convert_captures.main([str(file)]) == 0
    assert "has format 3" in capsys.readouterr().out
    new = summary(file)
    old_format(file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert {c.provenance["format"] for c in captures.read(file)} == {2}
    assert convert_captures.main([str(file)]) == 0
    assert summary(file) == new
    assert captures.read(file)[0].provenance["converted"] == {"format": 2, "sha256": digest}
    file.write_bytes(b"{}")
    assert convert_captures.main([str(file)]) == 1
    assert "not a safetensors file" in capsys.readouterr().err


# ---------------------------------------------------------------- calls of modules
X = np.arange(24, dtype=np.float32).reshape(1, 4, 6)


def call(path, order, number=0, **more):
    return {"kernel": "k", "path": path, "call": number, "order": order, "mode": "full", "run": "f32"} | more


def write(path, *params):
    cases = {f"case{i}": CaseData(p, {}, {"y": X[:, :2]}) for i, p in enumerate(params)}
    captures.write(path, "fam", cases, PROVENANCE)


def test_calls_come_back_by_run_and_path(tmp_path):
    path = tmp_path / "torch-fam.safetensors"
    rows = {"rows": {"out.y": [0, 3]}, "tensors": {"out.y": ["float32", [1, 4, 6]]}}
    write(path, call("a.b", 3, **rows), call("a.b", 5, 1), call("", 9), call("", 0, run="bf16"), {"kernel": "k"})
    runs = captures.runs(captures.read(path))
    assert {name: list(calls) for name, calls in runs.items()} == {"f32": ["a.b", ""], "bf16": [""]}
    assert runs["f32"]["a.b"].case == "case0"


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ([call("a", 0), call("a", 1)], "case case1: a call is missing or misplaced: call 1 with an order above 0"),
        ([call("a", 0, 1)], "call 0 with an order above -1 is required, found call 1 with order 0"),
        ([call("a", 4), call("b", 4)], "call 0 with an order above 4 is required, found call 0 with order 4"),
        ([{"kernel": "k", "path": "a"}], "case case0: 'call' of a call must be a int, found None"),
        (
            [call("a", 0, rows={"out.y": [0, 1]})],
            "out.y: rows [0, 1] of None are required, found shape [1, 2, 6]",
        ),
        (
            [call("a", 0, rows={"out.y": [0, 4]}, tensors={"out.y": ["float32", [1, 4, 6]]})],
            "tensor out.y: rows [0, 4] of [1, 4, 6] are required, found shape [1, 2, 6]",
        ),
        (
            [call("a", 0, rows={"out.y": [0]}, tensors={"out.y": ["float32", [1, 4, 6]]})],
            "tensor out.y: rows [0] of [1, 4, 6] are required, found shape [1, 2, 6]",
        ),
    ],
    ids=["number", "first", "order", "fields", "no-shape", "beyond", "count"],
)
def test_incomplete_calls_are_refused(tmp_path, params, said):
    path = tmp_path / "torch-fam.safetensors"
    with pytest.raises(CaptureError) as e:
        write(path, *params)
    assert said in str(e.value) and not path.exists()


def test_module_cases_keep_the_rows_that_are_asked_for(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(captures.SHIPPED.parents[1] / "scripts"))
    common = __import__("_capture")
    made = [
        hook.Call("a.b", n, n, call("a.b", n, n, arguments={}, result={}), {"x": X}, {"y": X, "z": X[0]})
        for n in range(2)
    ]
    kept = {"in.x": None, "out.y": [1, 3], "out.z": ()}
    found = common.module_cases(made, "bf16", lambda path, key: kept[key], checkpoint="c")
    assert list(found) == ["bf16.a.b", "bf16.a.b+1"]
    one = found["bf16.a.b"]
    assert one.params == call("a.b", 0) | {
        "run": "bf16", "checkpoint": "c", "rows": {"out.y": [1, 3]}, "tensors": {"out.y": ["float32", [1, 4, 6]]}
    }  # fmt: skip
    np.testing.assert_array_equal(one.inputs["x"], X)
    assert list(one.outputs) == ["y"]
    np.testing.assert_array_equal(one.outputs["y"], X[:, [1, 3]])
    captures.write(tmp_path / "torch-fam.safetensors", "fam", found, PROVENANCE)  # is complete
    assert common.module_cases(made, "bf16", lambda path, key: ()) == {}
