"""The cases of `scripts/capture_vllm.py` without a GPU: they can be listed, and are what the parity suite reads."""

import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxattn import _checks
from jaxattn.registry import MECHANISMS
from parity import captures, cases
from parity.captures import SHIPPED, Capture

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "scripts"))

import _capture  # noqa: E402
import _capture_vllm  # noqa: E402
import capture_vllm  # noqa: E402  adds the cases
from _capture_vllm import VLLM, Call, expect  # noqa: E402

NOT_CAPTURED: dict[str, str] = {}
"""Mechanism with captures -> why no case of the script is one of them."""

CALLS = {f"{r.family}/{r.name}": r for r in VLLM.cases if isinstance(r.run, Call)}
PROVENANCE = {
    "producer": "vllm",
    "versions": {"vllm": "0.0"},
    "device": "none",
    "driver": "none",
    "seed": 0,
    "date": "2026-01-31",
    "commit": "none",
    "command": "none",
}


def answering(name: str) -> Iterator:
    return (m for m in MECHANISMS if any(fnmatchcase(name, pattern) for pattern in m.captures))


# ---------------------------------------------------------------- the list
def test_listing_needs_neither_torch_nor_vllm(tmp_path):
    for name in ("torch", "vllm", "triton"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError('nothing may import this')")
    command = [sys.executable, str(ROOT / "scripts/capture_vllm.py"), "--list"]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)}, check=False)
    assert done.returncode == 0, done.stderr
    listed = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, *_ in listed] == [f"{r.family}/{r.name}" for r in VLLM.cases]
    assert {name: int(count[0]) for name, *count in listed if count} == {n: r.run.nbytes() for n, r in CALLS.items()}


def test_a_part_is_listed(capsys):
    def lines(*options):
        status = _capture.main(VLLM, "scripts/capture_vllm.py", None, ["--list", *options])
        return status, capsys.readouterr().out.splitlines()

    status, found = lines("--family", "mla", "--only", "rope_*")
    assert status == 0
    assert [line.split()[0] for line in found] == ["mla/rope_last_position_interleaved", "mla/rope_two_scales_neox"]
    assert lines("--only", "nothing") == (2, [])


def test_the_examples_of_the_page_are_cases(monkeypatch):
    """docs/captures.md says how a case is added; what it shows is added to an empty list."""
    _, paged, call = re.findall(r"```python\n(.*?)```", (ROOT / "docs/captures.md").read_text("utf-8"), re.DOTALL)
    monkeypatch.setattr(VLLM, "cases", [])
    exec(paged + call, vars(capture_vllm) | {"case": _capture_vllm.case})
    assert [(r.family, r.name) for r in VLLM.cases] == [("attention", "paged_unified_gqa6"), ("quant", "fp8_per_token")]
    made = VLLM.cases[1].run.inputs(np.random.default_rng(0))
    assert {name: (x.shape, x.dtype.name) for name, x in made.items()} == {"x": ((5, 96), "bfloat16")}


@pytest.mark.parametrize("mechanism", [m for m in MECHANISMS if m.captures], ids=lambda m: m.name)
def test_every_mechanism_with_captures_has_a_case(mechanism):
    names = [f"{r.family}/{r.name}" for r in VLLM.cases]
    found = [name for name in names if any(fnmatchcase(name, pattern) for pattern in mechanism.captures)]
    assert bool(found) != (mechanism.name in NOT_CAPTURED), f"{mechanism.name}: {found}"


def test_the_reasons_name_mechanisms():
    assert set(NOT_CAPTURED) <= {m.name for m in MECHANISMS}


# ---------------------------------------------------------------- a case that takes the GPU down
def test_a_family_is_begun_again_without_the_case_that_lost_the_device(tmp_path, monkeypatch, capsys):
    def good(rng):
        x = rng.standard_normal(3)
        return captures.CaseData({"kernel": "k"}, {"x": x}, {"o": x + 1})

    def lost(rng):
        raise RuntimeError("an illegal memory access was encountered")

    commands = []

    def execv(path, command):
        commands.append(command)
        raise SystemExit

    monkeypatch.setattr(_capture.os, "execv", execv)
    made = _capture.Recipes("torch")
    for name, run in (("early/a", good), ("fam/b", lost), ("fam/c", good), ("late/d", good)):
        made.add(*name.split("/"))(run)
    here, script = _capture.Machine({"torch": "2.0"}, "CPU", "none", lambda: False), "scripts/capture_torch.py"
    with pytest.raises(SystemExit):
        _capture.main(made, script, lambda: here, [str(tmp_path), "--commit", "abc", "--seed", "5"])
    assert [c.name for c in captures.load([tmp_path])] == ["early/a"]
    (command,) = commands
    assert _capture.main(made, script, lambda: here, command[2:]) == 1
    found = captures.load([tmp_path])
    assert [c.name for c in found] == ["early/a", "fam/c", "late/d"]
    assert found[1].provenance["command"] == f"python {script} --family fam --seed 5"
    assert capsys.readouterr().err.endswith("1 of 3 cases failed: fam/b\n")
    assert len(commands) == 1


# ---------------------------------------------------------------- the cases
@pytest.fixture(scope="module")
def blank(tmp_path_factory):
    """Every case as a capture, with zeros for what vLLM computes, written and read back; and the files' sizes."""
    directory = tmp_path_factory.mktemp("captures")
    for family in {r.family for r in CALLS.values()}:
        made = {r.name: r.run.blank(np.random.default_rng(0)) for r in CALLS.values() if r.family == family}
        captures.write(directory / f"vllm-{family}.safetensors", family, made, PROVENANCE)
    return {c.name: c for c in captures.load([directory])}, directory


def test_the_files_leave_room(blank):
    _, directory = blank
    names = {path.name for path in directory.iterdir()}
    others = [path for path in SHIPPED.glob("*.safetensors") if path.name not in names]
    assert sum(path.stat().st_size for path in (*others, *directory.iterdir())) <= 4 * 2**20


def test_every_case_is_shipped_and_of_one_commit():
    found = [c for c in captures.load([SHIPPED]) if c.provenance["producer"] == "vllm"]
    assert {c.name for c in found} == {f"{r.family}/{r.name}" for r in VLLM.cases}
    assert len({c.provenance["commit"] for c in found}) == 1


@pytest.mark.parametrize("name", CALLS)
def test_inputs_are_those_that_are_shipped(name):
    recipe = CALLS[name]
    (shipped,) = (c for c in captures.read(SHIPPED / f"vllm-{recipe.family}.safetensors") if c.case == recipe.name)
    digest = hashlib.sha256(f"{shipped.provenance['seed']}/{name}".encode()).digest()
    for key, x in recipe.run.inputs(np.random.default_rng(list(digest))).items():
        assert x.tobytes() == shipped.inputs[key].tobytes(), key


@pytest.mark.parametrize("name", CALLS)
def test_a_case_is_what_the_parity_suite_reads(name, blank):
    capture = blank[0][name]
    assert isinstance(capture.params["kernel"], str)
    mechanisms = list(answering(name))
    assert mechanisms, "no mechanism answers for this case"
    for mechanism in mechanisms:
        adapter = cases.find(mechanism.name)
        expected = adapter.expected(capture)
        assert set(expected) <= set(adapter.outputs)
        ours = adapter.convention(capture, shapes(mechanism, adapter.arguments(capture)))
        for output, array in expected.items():
            assert (ours[output].dtype, ours[output].shape) == (array.dtype, array.shape), f"{mechanism.name}: {output}"


def shapes(mechanism, args) -> dict[str, np.ndarray]:
    """Zeros where the op's reference would have its outputs."""
    arrays = {key: x for key, x in args.items() if _checks.is_array(x)}
    rest = {key: x for key, x in args.items() if key not in arrays}
    found = jax.eval_shape(lambda arrays: mechanism.op(**arrays, **rest, implementation="reference"), arrays)
    found = found if isinstance(found, tuple) else (found,)
    names = mechanism.outputs(**mechanism.prepare(**args))
    return {key: np.zeros(x.shape, x.dtype) for key, x in zip(names, found, strict=True)}


@pytest.mark.parametrize("name", CALLS)
def test_inputs_are_finite_and_repeat(name):
    first, again = (CALLS[name].run.inputs(np.random.default_rng(5)) for _ in range(2))
    for key, x in first.items():
        assert x.tobytes() == again[key].tobytes()
        assert key == "sinks" or np.isfinite(x.astype(np.float64)).all()


def test_what_vllm_returns_is_checked():
    x = np.zeros((2, 3), np.float32)
    assert expect("output", {"o": x}, {"o": ("float32", 2, 3)}) == {"o": x}
    with pytest.raises(
        ValueError, match=r"outputs must be .*'o': \('float32', 3, 2\).*, vLLM made .*\('float32', 2, 3\)"
    ):
        expect("output", {"o": x}, {"o": ("float32", 3, 2)})


# ---------------------------------------------------------------- what the inputs must hold
@pytest.mark.parametrize(
    ("name", "holds"),
    [
        ("quant/fp8_hard_token", lambda c: (np.signbit(zeros(c, "x")).any(), not np.signbit(zeros(c, "x")).all())),
        ("quant/fp8_tiny_group128", lambda c: (np.abs(c.inputs["x"].astype(np.float64)[0]) < 2.0**-126).any()),
        ("quant/int8_hard_static", lambda c: (c.inputs["x"].astype(np.float64) * 8 % 1 == 0.5).any()),
        ("moe/align_block_size_empty_experts", lambda c: len(np.unique(c.inputs["topk_ids"])) < 8),
        ("moe/experts_small_bf16", lambda c: 1 not in c.inputs["topk_ids"]),
        ("moe/router_softmax_ties", lambda c: len(np.unique(c.inputs["logits"][1])) < 32),
        ("moe/megamoe_input_staging_hard", lambda c: (c.inputs["topk_ids"] == -1).any()),
        ("mla/cache_write_hard_fp8_ds_mla", lambda c: (c.inputs["slot_mapping"] == -1).any()),
        ("mla/sparse_prefill_512_holes_sinks_empty", lambda c: (c.inputs["indices"] < 0).all(2).any()),
        ("dsv4/qnorm_rope_kv_insert_page", lambda c: (c.inputs["slot_mapping"] == -1).any()),
    ],
)
def test_edges_are_there(name, holds, blank):
    assert np.all(holds(blank[0][name]))


def zeros(capture: Capture, name: str) -> np.ndarray:
    x = capture.inputs[name].astype(np.float64)
    return x[x == 0]


def test_packed_pages_hold_their_rows(blank):
    """The page that the script packs is one that our own decoder reads as normal numbers."""
    from jaxattn import latent_cache_gather

    cache = blank[0]["dsv4/sparse_decode_two_caches_short"].inputs["cache"]
    table, lengths = np.zeros((1, 1), np.int32), np.array([64], np.int32)
    rows = np.asarray(latent_cache_gather(cache, table, lengths, rows=64, page=64, implementation="reference"))
    deviation = rows.astype(np.float64).std(-1)
    assert ((deviation > 0.5) & (deviation < 2)).all()
