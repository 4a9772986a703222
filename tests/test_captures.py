import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors

from parity import captures
from parity.captures import SHIPPED, CaptureError, CaseData

ROOT = Path(__file__).parents[1]
TORCH_FILE = SHIPPED / "torch-attention.safetensors"
PROVENANCE = {
    "producer": "torch",
    "versions": {"torch": "2.0"},
    "device": "CPU",
    "driver": "none",
    "seed": 3,
    "date": "2026-01-31",
    "commit": "0123abc",
    "command": "python scripts/capture_torch.py --family fam --seed 3",
}


def make_cases():
    rng = np.random.default_rng(0)
    return {
        "first": CaseData(
            {"kernel": "k1", "scale": 0.5},
            {"q": rng.standard_normal((3, 2)).astype(ml_dtypes.bfloat16), "n": np.array([1, 2], np.int32)},
            {"o": rng.standard_normal((3, 2)).astype(np.float32), "codes": np.arange(5, dtype=np.uint8)},
        ),
        "second": CaseData(
            {"kernel": "k2"},
            {"x": np.linspace(-448, 448, 7).astype(ml_dtypes.float8_e4m3fn)},
            {"empty": np.zeros((0, 4), np.float16), "scalar": np.array(2.5)},
        ),
    }


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "torch-fam.safetensors"
    captures.write(path, "fam", make_cases(), PROVENANCE)
    return path


def unpack(path):
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + size]), bytearray(raw[8 + size :])


def pack(path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def edit(path, change):
    """Apply change(header, cases, provenance, data) to a file without mending its hashes."""
    header, data = unpack(path)
    meta = header["__metadata__"]
    cases, provenance = json.loads(meta["cases"]), json.loads(meta["provenance"])
    change(header, cases, provenance, data)
    meta["cases"], meta["provenance"] = json.dumps(cases), json.dumps(provenance)
    pack(path, header, data)


def refuse(path, *parts):
    """Loading fails; the message names the file, every part and the command that makes the file again."""
    with pytest.raises(CaptureError) as e:
        captures.load([path.parent])
    message = str(e.value)
    for part in (str(path), *parts):
        assert part in message, f"{part!r} is missing in: {message}"
    assert re.search(
        rf"Regenerate the file with: python scripts/capture_\w+\.py .*--family \w+.* {path.parent}$", message
    )
    return message


def test_what_was_written_comes_back(file):
    first, second = captures.load([file.parent])
    assert (first.name, second.name) == ("fam/first", "fam/second")
    assert first.path == file
    assert first.provenance == PROVENANCE | {"format": 3, "verified": True}
    for capture, data in zip((first, second), make_cases().values(), strict=True):
        assert capture.params == data.params
        for kind in ("inputs", "outputs"):
            found, expected = getattr(capture, kind), getattr(data, kind)
            assert set(found) == set(expected)
            for name, array in expected.items():
                assert found[name].dtype == array.dtype
                assert found[name].shape == array.shape
                assert found[name].tobytes() == array.tobytes()
                assert not found[name].flags.writeable


def test_writing_is_repeatable_and_other_readers_understand_it(file, tmp_path):
    again = tmp_path / "again.safetensors"
    captures.write(again, "fam", make_cases(), PROVENANCE)
    assert again.read_bytes() == file.read_bytes()
    with safetensors.safe_open(file, framework="numpy") as f:
        assert set(f.keys()) == {
            "first/in.q", "first/in.n", "first/out.o", "first/out.codes",
            "second/in.x", "second/out.empty", "second/out.scalar",
        }  # fmt: skip
        np.testing.assert_array_equal(f.get_tensor("first/out.o"), make_cases()["first"].outputs["o"])


def test_the_same_directory_counts_once(file):
    assert len(captures.load([file.parent, file.parent / ".." / file.parent.name])) == 2


def test_every_payload_bit_and_header_value_is_guarded(file):
    good, size = file.read_bytes(), int.from_bytes(file.read_bytes()[:8], "little")
    for position in range(8 + size, len(good)):
        bad = bytearray(good)
        bad[position] ^= 1
        file.write_bytes(bad)
        refuse(file, "was edited: sha256")
    for position in range(0, 8 + size, 7):
        bad = bytearray(good)
        bad[position] ^= 2
        file.write_bytes(bad)
        if captures_or_none(file) is not None:
            assert json.loads(bad[8 : 8 + size]) == json.loads(good[8 : 8 + size]), f"byte {position} went unnoticed"


def captures_or_none(path):
    try:
        return captures.read(path)
    except CaptureError:
        return None


def test_edited_tensor(file):
    def change(header, cases, provenance, data):
        data[header["first/out.o"]["data_offsets"][0]] ^= 1

    edit(file, change)
    message = refuse(file, "case first: tensor first/out.o was edited: sha256", "was expected, found")
    assert "python scripts/capture_torch.py --family fam --seed 3" in message


@pytest.mark.parametrize(
    "change",
    [
        lambda header, cases, provenance, data: cases["first"].update(scale=0.25),
        lambda header, cases, provenance, data: cases["second"].update(more=1),
        lambda header, cases, provenance, data: header["first/in.q"].update(shape=[2, 3]),
        lambda header, cases, provenance, data: header["first/in.q"].update(dtype="F16"),
        lambda header, cases, provenance, data: provenance.update(device="another"),
        lambda header, cases, provenance, data: header["__metadata__"].update(family="other"),
        lambda header, cases, provenance, data: header["__metadata__"].pop("digest"),
    ],
    ids=["parameter", "new-parameter", "shape", "dtype", "provenance", "family", "no-digest"],
)
def test_edited_header(file, change):
    edit(file, change)
    refuse(file, "a parameter, shape, dtype or the provenance was edited: sha256")


def test_truncated_data(file):
    header, data = unpack(file)
    pack(file, header, data[:-3])
    refuse(file, f"truncated: the tensors need {len(data)} bytes, the file has {len(data) - 3}")


def test_truncated_header(file):
    raw = file.read_bytes()
    file.write_bytes(raw[:100])
    refuse(file, f"truncated: the header needs {8 + int.from_bytes(raw[:8], 'little')} bytes, the file has 100")


def test_bytes_behind_the_tensors(file):
    header, data = unpack(file)
    pack(file, header, data + b"123")
    refuse(file, f"the tensors need {len(data)} bytes, the file has 3 more")


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "the file is empty (0 bytes)"),
        (b"1234", "not a safetensors file: at least 8 bytes are required, found 4"),
        (b"PK\x03\x04 something else altogether", "not a safetensors file: it must start with"),
        ((40).to_bytes(8, "little") + b"no json" + b" " * 40, "not a safetensors file: it must start with"),
        ((9).to_bytes(8, "little") + b"{no json}", "the header must be JSON: Expecting property name"),
    ],
    ids=["empty", "short", "zip", "not-an-object", "not-json"],
)
def test_not_safetensors(tmp_path, raw, said):
    path = tmp_path / "vllm-fam.safetensors"
    path.write_bytes(raw)
    assert "capture_vllm.py --family fam" in refuse(path, said)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}, "dtype must be one of BOOL, U8"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "shape must be a list of sizes, found [-1]"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "shape [2] of F32 needs 8 bytes, the table gives 4"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, "must start at byte 0 of the data, the table says 4"),
        ({"dtype": "F32", "shape": [1]}, "data_offsets must be two byte positions, found None"),
        ([], "data_offsets must be two byte positions, found None"),
    ],
)
def test_bad_table(tmp_path, entry, said):
    path = tmp_path / "torch-fam.safetensors"
    pack(path, {"case/out.o": entry}, bytes(8))
    refuse(path, f"case/out.o: {said}")


def test_metadata_must_be_an_object(tmp_path):
    path = tmp_path / "torch-fam.safetensors"
    pack(path, {"__metadata__": 3}, b"")
    refuse(path, "__metadata__ must be a JSON object, found int")


@pytest.mark.parametrize("number", [0, 4, "3", None, True])
def test_wrong_format_number(file, number):
    edit(file, lambda header, cases, provenance, data: provenance.update(format=number))
    refuse(file, f"format 1 or 2 or 3 is required, found {number!r}")


@pytest.mark.parametrize("field", ["provenance", "cases"])
def test_metadata_field_is_missing(file, field):
    header, data = unpack(file)
    del header["__metadata__"][field]
    pack(file, header, data)
    refuse(file, f"header metadata {field!r} is required, found [")


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_metadata_field_is_no_object(file, text):
    header, data = unpack(file)
    header["__metadata__"]["cases"] = text
    pack(file, header, data)
    refuse(file, "header metadata 'cases' must be")


@pytest.mark.parametrize("field", ["producer", "device", "driver", "seed", "date", "versions", "commit", "command"])
def test_provenance_field_is_missing(file, field):
    edit(file, lambda header, cases, provenance, data: provenance.pop(field))
    refuse(file, f"provenance {field!r} must be a ", "found None")


def test_version_of_the_producer_is_missing(file):
    edit(file, lambda header, cases, provenance, data: provenance.update(versions={"numpy": "2"}))
    refuse(file, "provenance must give the version of 'torch', found {'numpy': '2'}")


def test_case_without_tensors(file):
    edit(file, lambda header, cases, provenance, data: cases.update(third={"kernel": "k"}))
    refuse(file, "case third: at least one tensor third/out.* is required, found none")


def test_tensors_without_a_case(file):
    edit(file, lambda header, cases, provenance, data: cases.pop("second"))
    refuse(file, "case second: tensor second/", "has no entry in 'cases'")


def test_no_case_at_all(file):
    header, _ = unpack(file)
    header = {"__metadata__": header["__metadata__"] | {"cases": "{}"}}
    pack(file, header, b"")
    refuse(file, "at least one case is required, found none")


def test_case_twice_in_a_file(file):
    header, data = unpack(file)
    header["__metadata__"]["cases"] = '{"first": {"kernel": "k"}, "first": {"kernel": "l"}}'
    pack(file, header, data)
    refuse(file, "header metadata 'cases' names 'first' twice")


def test_tensor_twice_in_a_file(tmp_path):
    entry = b'"a/out.o": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}'
    path = tmp_path / "torch-fam.safetensors"
    pack(path, b"{" + entry + b", " + entry + b"}", bytes(1))
    refuse(path, "the header names 'a/out.o' twice")


def test_case_in_two_files(file):
    other = file.with_name("torch-other.safetensors")
    captures.write(other, "fam", {"second": make_cases()["second"]}, PROVENANCE)
    with pytest.raises(CaptureError, match=f"{other}: case fam/second is also in {file}; a case must be unique"):
        captures.load([file.parent])


@pytest.mark.parametrize("key", ["first", "first/o", "first/out.", "first/inout.x", "a/b/out.o", "first/out.o.p"])
def test_key_does_not_parse(file, key):
    edit(file, lambda header, cases, provenance, data: header.update({key: header.pop("first/out.o")}))
    refuse(file, f"key {key!r} must read case/in.name or case/out.name")


def test_case_name_does_not_parse(file):
    edit(file, lambda header, cases, provenance, data: cases.update({"a b": {"kernel": "k"}}))
    refuse(file, "case 'a b': a name must match")


def test_parameters_are_no_object(file):
    edit(file, lambda header, cases, provenance, data: cases.update(first=[1]))
    refuse(file, "case first: parameters must be a JSON object, found [1]")


def test_kernel_is_missing(file):
    edit(file, lambda header, cases, provenance, data: cases["first"].pop("kernel"))
    refuse(file, "case first: 'kernel' must name the code that ran, found ['scale']")


def test_hashes_do_not_cover_the_tensors(file):
    def change(header, cases, provenance, data):
        hashes = json.loads(header["__metadata__"]["tensors"])
        del hashes["first/in.q"]
        header["__metadata__"]["tensors"] = json.dumps(hashes)

    edit(file, change)
    refuse(file, "hashes and tensors must name the same keys, only one of them has ['first/in.q']")


def test_family_is_missing(file):
    edit(file, lambda header, cases, provenance, data: header["__metadata__"].pop("family"))
    refuse(file, "header metadata 'family' must match", "found None")


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_output_of_nan_only(tmp_path, dtype):
    path = tmp_path / "torch-fam.safetensors"
    data = CaseData({"kernel": "k"}, {}, {"o": np.full((2, 3), np.nan, dtype)})
    with pytest.raises(CaptureError, match=r"case a: output o \[2, 3\] must hold numbers, found NaN only"):
        captures.write(path, "fam", {"a": data}, PROVENANCE)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(file):
    before = file.read_bytes()
    with pytest.raises(CaptureError, match="at least one tensor a/out"):
        captures.write(file, "fam", {"a": CaseData({"kernel": "k"}, {}, {})}, PROVENANCE)
    assert file.read_bytes() == before


def test_dtype_without_a_code(tmp_path):
    data = CaseData({"kernel": "k"}, {}, {"o": np.zeros(2, np.complex64)})
    with pytest.raises(TypeError, match=r"a/out\.o has dtype complex64; a capture holds bool"):
        captures.write(tmp_path / "x.safetensors", "fam", {"a": data}, PROVENANCE)


def test_directory_is_missing(tmp_path):
    with pytest.raises(CaptureError, match="no_such: a directory of captures is required, and this is none"):
        captures.load([tmp_path / "no_such"])


def test_directory_is_empty(tmp_path):
    with pytest.raises(CaptureError, match=r"at least one \*.safetensors file is required, found none; make one with"):
        captures.load([tmp_path])


def test_file_is_missing(tmp_path):
    with pytest.raises(CaptureError, match=r"torch-x.safetensors: no such file. Regenerate"):
        captures.read(tmp_path / "torch-x.safetensors")


@pytest.fixture
def old(tmp_path):
    """A file of format 1, which has no hashes."""
    path = tmp_path / "quant.safetensors"
    provenance = {
        "producer": "vllm",
        "vllm": "0.26.0",
        "device": "GPU",
        "driver": "1",
        "seed": 0,
        "date": "d",
        "format": 1,
    }
    header = {
        "__metadata__": {"provenance": json.dumps(provenance), "cases": json.dumps({"a": {}})},
        "a/out.o": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
    }
    pack(path, header, np.float32(3).tobytes())
    return path


def know(monkeypatch, path):
    header, _ = unpack(path)
    meta = header["__metadata__"]
    mark = captures.fingerprint(json.loads(meta["provenance"]), json.loads(meta["cases"]))
    sha = hashlib.sha256(path.read_bytes()).hexdigest()
    table = path.with_name("known.json")
    table.write_text(json.dumps([{"set": "s", "file": path.name, "sha256": sha, "fingerprint": mark}]))
    monkeypatch.setattr(captures, "_KNOWN", table)


def test_format_1_that_nobody_vouches_for(old):
    (capture,) = captures.load([old.parent])
    assert capture.name == "quant/a"
    assert capture.provenance["verified"] is False


def test_format_1_that_is_known(old, monkeypatch):
    know(monkeypatch, old)
    assert captures.load([old.parent])[0].provenance["verified"] is True


@pytest.mark.parametrize("part", ["byte", "parameter"])
def test_format_1_that_is_known_and_edited(old, monkeypatch, part):
    know(monkeypatch, old)
    if part == "byte":
        old.write_bytes(old.read_bytes()[:-1] + b"\x41")
    else:
        edit(old, lambda header, cases, provenance, data: cases["a"].update(scale=1))
    refuse(old, "edited: it has the provenance and cases of s/quant.safetensors, but sha256", "was expected, found")


def test_known_files_are_complete():
    known = json.loads((SHIPPED / "known_files.json").read_text())
    assert [(e["set"], e["file"]) for e in known] == [
        ("vllm-0.26.0-h200", f"{family}.safetensors")
        for family in ("attention", "dsv4", "mla", "moe", "quant", "turboquant")
    ]
    assert all(re.fullmatch("[0-9a-f]{64}", e[x]) for e in known for x in ("sha256", "fingerprint"))


def test_shipped_captures():
    found = captures.load([SHIPPED])
    assert all(c.provenance["verified"] and c.provenance["format"] == captures.FORMAT for c in found)
    assert not any(c.provenance["commit"].endswith("-dirty") for c in found)
    assert sum(p.stat().st_size for p in SHIPPED.glob("*.safetensors")) <= 4 * 2**20
    families = {(c.provenance["producer"], c.family) for c in found}
    assert families >= {("torch", "attention"), ("vllm", "attention")}


def test_shipped_torch_attention_covers_the_edges():
    found = [c for c in captures.read(TORCH_FILE) if c.case.startswith("paged_")]
    params = [c.params for c in found]
    heads = {c.inputs["q"].shape[1] // c.inputs["k"].shape[2] for c in found}
    assert {1, 4, 6, 7} <= heads
    assert {c.inputs["q"].shape[2] for c in found} == {64, 128, 256}
    assert {c.inputs["q"].dtype.name for c in found} == {"bfloat16", "float32"}
    assert {bool(p["window"]) for p in params} == {bool(p["softcap"]) for p in params} == {True, False}
    assert {p["causal"] for p in params} == {True, False}
    assert any("sinks" in c.inputs for c in found)
    assert any((np.diff(c.inputs["cu_seqlens_q"]) == 0).any() for c in found)
    for c in found:
        tokens, heads_of_q, _ = c.inputs["q"].shape
        assert c.outputs["lse"].shape == (tokens, heads_of_q)
        assert (c.params["lse_includes_sink"], c.params["lse_layout"]) == (False, "TH")
        assert np.isnan(c.inputs["v"].astype(np.float32)).any(), f"{c.case}: no slot is poisoned"


def test_shipped_vllm_attention_covers_the_edges():
    found = captures.read(SHIPPED / "vllm-attention.safetensors")
    unified = [c for c in found if c.params["kernel"] == "triton_unified_attention"]
    flash = [c for c in found if c.params["kernel"] == "flash_attention_3"]
    assert {1, 4, 6, 7} <= {c.inputs["q"].shape[1] // c.inputs["k"].shape[2] for c in unified}
    assert {c.inputs["q"].shape[2] for c in unified} == {64, 128, 256}
    assert {c.inputs["k"].shape[1] for c in unified} == {16, 32, 64, 128}
    assert {c.inputs["q"].dtype.name for c in unified} == {"bfloat16", "float16", "float32"}
    assert "float8_e4m3fn" in {c.inputs["k"].dtype.name for c in unified}
    assert any((np.diff(c.inputs["cu_seqlens_q"]) == 0).any() for c in unified)
    for name in ("window", "softcap", "causal"):
        assert {bool(c.params[name]) for c in unified} == {bool(c.params[name]) for c in flash} == {True, False}
    for c in unified:
        assert "kernel_unified_attention" in c.params["device_kernels"]
        assert np.isnan(c.inputs["v"].astype(np.float32)).any(), f"{c.case}: no slot is poisoned"
    for c in flash:
        assert any("FlashAttnFwdSm90" in name for name in c.params["device_kernels"])
        tokens, heads, _ = c.inputs["q"].shape
        assert c.outputs["lse"].shape == (heads, tokens)
        assert (c.params["lse_includes_sink"], c.params["lse_layout"]) == ("sinks" in c.inputs, "HT")


@pytest.fixture
def common(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import _capture

    return _capture


def recipes(common, run):
    made = common.Recipes("torch")
    made.add("fam", "a")(run)
    return made


def machine(common):
    return lambda: common.Machine({"torch": "2.0"}, "CPU", "none")


def run_case(rng):
    x = rng.standard_normal(3)
    return CaseData({"kernel": "k"}, {"x": x}, {"o": x + 1})


def test_command_line_writes_what_loads(common, tmp_path, capsys):
    arguments = [str(tmp_path), "--seed", "5", "--commit", "abc"]
    assert common.main(recipes(common, run_case), "scripts/capture_torch.py", machine(common), arguments) == 0
    (capture,) = captures.load([tmp_path])
    assert capture.provenance["command"] == "python scripts/capture_torch.py --family fam --seed 5"
    assert capture.provenance["commit"] == "abc"
    assert "torch-fam.safetensors: 1 cases" in capsys.readouterr().out
    first = captures.read(tmp_path / "torch-fam.safetensors")[0].inputs["x"].copy()
    common.main(
        recipes(common, run_case), "scripts/capture_torch.py", machine(common), [*arguments[:2], "6", *arguments[3:]]
    )
    assert not np.array_equal(first, captures.read(tmp_path / "torch-fam.safetensors")[0].inputs["x"])


def test_command_line_reports_failed_cases(common, tmp_path, capsys):
    def nan(rng):
        return CaseData({"kernel": "k"}, {}, {"o": np.array([1, np.nan])})

    made = recipes(common, run_case)
    made.add("fam", "b")(nan)
    assert common.main(made, "scripts/capture_torch.py", machine(common), [str(tmp_path), "--commit", "abc"]) == 1
    assert [c.case for c in captures.load([tmp_path])] == ["a"]
    said = capsys.readouterr().err
    assert "FAILED fam/b: ArithmeticError: output o holds 1 NaN of 2 values, the first at [1]" in said
    assert "1 of 2 cases failed: fam/b" in said


def test_command_line_only(common, tmp_path, capsys):
    made = recipes(common, run_case)
    made.add("fam", "b")(run_case)
    arguments = [str(tmp_path), "--commit", "abc", "--only", "b*"]
    assert common.main(made, "scripts/capture_torch.py", machine(common), arguments) == 0
    assert [c.case for c in captures.load([tmp_path])] == ["b"]
    with pytest.raises(SystemExit):
        common.main(made, "scripts/capture_torch.py", machine(common), arguments)
    assert "--only writes a file with some of the cases, but" in capsys.readouterr().err
    arguments = [str(tmp_path / "new"), "--commit", "abc", "--only", "z*"]
    assert common.main(made, "scripts/capture_torch.py", machine(common), arguments) == 2


def test_command_line_needs_a_commit(common, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(common, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(SystemExit):
        common.main(recipes(common, run_case), "scripts/capture_torch.py", machine(common), [str(tmp_path)])
    assert "git cannot tell it here: pass --commit SHA" in capsys.readouterr().err


def test_case_names_are_unique(common):
    made = recipes(common, run_case)
    with pytest.raises(ValueError, match="case fam/a exists already; give the new one another name"):
        made.add("fam", "a")(run_case)


def test_paged_inputs_are_poisoned_where_no_query_reads(common):
    paged = common.Paged((2, 0, 1), (20, 7, 40), window=5, sinks=(-np.inf, 1.0), H=3)
    i = paged.inputs(np.random.default_rng(1))
    assert i["k"].shape == i["v"].shape == (2 + 1 + 3 + 1, 16, 1, 64)
    np.testing.assert_array_equal(i["cu_seqlens_q"], [0, 2, 2, 3])
    np.testing.assert_array_equal(i["sinks"], np.array([-np.inf, 1, -np.inf], np.float32))
    live = np.zeros(i["k"].shape[:2], bool)
    for b, (low, high) in enumerate([(14, 20), (0, 0), (35, 40)]):
        for slot in range(low, high):
            live[i["block_table"][b, slot // 16], slot % 16] = True
    for name in ("k", "v"):
        nan = np.isnan(i[name].astype(np.float32)).all((2, 3))
        np.testing.assert_array_equal(nan, ~live)
    assert i["block_table"].min() >= 0
    assert i["block_table"].max() < i["k"].shape[0]


def test_paged_fp8_inputs_stay_finite(common):
    i = common.Paged((1,), (5,), cache_dtype="float8_e4m3fn").inputs(np.random.default_rng(0))
    assert i["k"].dtype == ml_dtypes.float8_e4m3fn
    page = i["block_table"][0, 0]
    assert np.isfinite(i["k"][page, :5].astype(np.float32)).all()
    assert i["k_scale"].shape == i["v_scale"].shape == (1,)


@pytest.mark.parametrize("name", ["torch", "vllm"])
def test_capture_scripts_say_what_is_missing(name, tmp_path):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "parity", tmp_path / "parity", ignore=shutil.ignore_patterns("__pycache__", "data"))
    shutil.copytree(ROOT / "jaxattn", tmp_path / "jaxattn", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "scripts" / "torch.py").write_text("raise ImportError('no torch for this test')")
    command = [sys.executable, f"scripts/capture_{name}.py", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"capture_{name} needs " in done.stderr
    assert "no torch for this test" in done.stderr and "pip install" in done.stderr
    assert "Traceback" not in done.stderr


def test_loading_needs_no_jax():
    code = "import sys; import parity.captures; sys.exit('jax' in sys.modules or 'safetensors' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
