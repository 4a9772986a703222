"""The bisection: planted faults are named exactly, a clean model is not accused, and what the report says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxattn import capture
from parity import bisection, captures, logits, metrics, names, self_noise, tolerances
from parity.captures import CaseData
from scripts import bisect as script
from scripts._bisection import command, loading
from scripts._report import schema
from tests import planted_llama
from tests.test_diff_report import Page

ROOT = Path(__file__).resolve().parents[1]
LLAMA = ROOT / "examples" / "llama"
PLANTED = ROOT / "tests" / "planted_llama.py"
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@pytest.fixture(scope="module")
def golden():
    return {name: bisection.load(LLAMA / f"golden-{name}.safetensors") for name in DTYPES}


@pytest.fixture(scope="module")
def file(golden, tmp_path_factory):
    """The drafted names file."""
    target = bisection.Target(*planted_llama.clean())
    path = tmp_path_factory.mktemp("names") / "names.toml"
    path.write_text(names.draft(golden["float32"].modules(), target.modules(golden["float32"]), ["logits"]))
    return path


def run(golden, file, model, **options):
    target = bisection.Target(*model)
    known = names.read(file)
    pairs = names.check(known, golden.paths, [m.path for m in target.modules(golden)], str(file))
    return bisection.run(target, golden, known, pairs, **options)


# ---------------------------------------------------------------- the finding
@pytest.mark.parametrize("dtype", DTYPES)
def test_clean_model_is_not_accused(golden, file, dtype):
    compared, found = run(golden[dtype], file, planted_llama.clean(DTYPES[dtype]))
    assert [c.verdict.reason for c in compared if not c.verdict.passed] == []
    assert {c.comparison for c in compared} == {bisection.FORCED, bisection.FREE}
    modules = {c.module for c in compared if c.comparison == bisection.FORCED}
    assert modules == set(golden[dtype].paths) - {"model", "model.rotary_emb"}
    result = logits.compare(
        found.ours, found.golden, logits.bound(found.ours, found.golden, found.moved, found.terms), np.zeros((1, 12))
    )
    assert {c["status"] for c in result["checks"]} == {"pass"}


@pytest.mark.parametrize(
    ("fault", "dtype"),
    [(fault, "float32") for fault in planted_llama.FAULTS]
    + [(fault, "bfloat16") for fault in ("wrong_rope", "swapped_gate_up", "missing_mscale")],
)
def test_planted_fault_is_named(golden, file, fault, dtype):
    compared, _ = run(golden[dtype], file, getattr(planted_llama, fault)(DTYPES[dtype]), samples=1)
    found = bisection.first(compared, bisection.FORCED)
    assert (found.ours, found.output) == planted_llama.FAULTS[fault]
    # local: only modules of the same kind fail, because the others get golden inputs
    kinds = {names.template(c.ours)[0] for c in compared if c.comparison == bisection.FORCED and not c.verdict.passed}
    allowed = (
        {"layers.*.mlp.up", "layers.*.mlp.gate"} if fault == "swapped_weights" else {names.template(found.ours)[0]}
    )
    assert kinds == allowed
    # free: the fault spreads from there
    free = [c for c in compared if c.comparison == bisection.FREE and not c.verdict.passed]
    inside = (found.module, f"{found.module}.o_proj", f"{found.module}.down_proj")
    assert min(free, key=lambda c: c.order).module in inside
    assert {"lm_head", ""} <= {c.module for c in free}


def reduced(golden, mode, path):
    """A full capture as `capture` would have written it in another mode."""
    change = capture.statistics if mode == "statistics" else capture.digest
    cases = {}
    for c in golden.calls:
        sides = {"in": c.inputs, "out": c.outputs}
        table = {f"{s}.{k}": [x.dtype.name, list(x.shape)] for s, xs in sides.items() for k, x in xs.items()}
        params = c.params | {"mode": mode, "tensors": table}
        inputs = c.inputs if c.case == "root" else {k: change(x) for k, x in c.inputs.items()}
        cases[c.case] = CaseData(params, inputs, {k: change(x) for k, x in c.outputs.items()})
    captures.write(path, "model", cases, {k: v for k, v in golden.calls[0].provenance.items() if k != "verified"})
    return bisection.load(path)


@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_are_enough_to_find_the_place(golden, file, tmp_path, dtype):
    less = reduced(golden[dtype], "statistics", tmp_path / "golden.safetensors")
    clean, found = run(less, file, planted_llama.clean(DTYPES[dtype]), samples=1)
    assert found is None
    assert [c.verdict.reason for c in clean if not c.verdict.passed] == []
    assert {c.comparison for c in clean} == {bisection.FREE}
    full, _ = run(golden[dtype], file, planted_llama.missing_mscale(DTYPES[dtype]), samples=1)
    less, _ = run(less, file, planted_llama.missing_mscale(DTYPES[dtype]), samples=1)
    assert bisection.first(less, bisection.FREE).module == bisection.first(full, bisection.FREE).module
    assert bisection.first(less, bisection.FREE).module == "model.layers.0.self_attn.o_proj"


def test_hashes_name_the_first_other_bit(golden, file, tmp_path):
    less = reduced(golden["float32"], "hash", tmp_path / "golden.safetensors")
    compared, _ = run(less, file, planted_llama.clean(), samples=1)
    passed = {c.module for c in compared if c.verdict.passed}
    assert passed >= {"model.embed_tokens"}
    assert "not equal to the bit" in bisection.first(compared, bisection.FREE).verdict.reason


# ---------------------------------------------------------------- memory, jit, options
def test_tensors_beyond_the_limit_go_to_files(tmp_path):
    store = bisection.Store(100, tmp_path)
    arrays = {i: np.full((5, 4), i, ml_dtypes.bfloat16) for i in range(4)}  # 40 bytes each
    for i, x in arrays.items():
        store.put(i, x)
    assert store.spilled == 2
    assert len(list(tmp_path.iterdir())) == 2
    for i, x in arrays.items():
        assert i in store
        got = store.take(i)
        assert (got == x).all()
        assert got.dtype == x.dtype
        assert i not in store
    assert not list(tmp_path.iterdir())
    store.put("again", np.zeros(100, np.uint8))
    assert store.spilled == 2


def test_result_does_not_depend_on_the_limit(golden, file):
    for memory in (0, 1 << 30):
        compared, _ = run(golden["float32"], file, planted_llama.clean(), samples=1, memory=memory)
        headrooms = [c.verdict.headroom for c in compared]
        first = headrooms if memory == 0 else first
    assert headrooms == first


def test_compiled_model_is_refused_and_runs_without_jit(tmp_path, capsys):
    model, call = planted_llama.compiled()
    path = tmp_path / "golden.safetensors"  # a golden side in Flax, for once
    with capture.capture(model, path):
        call(model, {"x": np.ones((2, 3), np.float32)})
    line = ["--flax", f"{PLANTED}:compiled", "--golden", str(path), "--names", str(tmp_path / "names.toml")]
    line += ["--samples", "1", "--out", str(tmp_path)]
    assert command.main(line) == 2
    said = "the model is called inside a compiled function; call it without jit, or pass --disable-jit"
    assert said in capsys.readouterr().err
    assert command.main([*line, "--disable-jit"]) == 0


def test_report_names_the_module_and_how_to_repeat(golden, tmp_path, capsys):
    file, out = tmp_path / "names.toml", tmp_path / "out"
    line = ["--flax", f"{PLANTED}:wrong_rope", "--golden", str(golden["bfloat16"].path), "--names", str(file)]
    line += ["--samples", "1", "--out", str(out)]
    assert command.main([*line, "--draft"]) == 0
    assert file.exists()
    assert command.main(line) == 1
    printed = capsys.readouterr().out
    report = schema.read(out / "report.json")
    found = report["model"]["finding"]
    assert (found["ours"], found["output"]) == planted_llama.FAULTS["wrong_rope"]
    assert (
        f"diverges first: layers.0.attn (golden model.layers.0.self_attn), input into o_proj: {found['reason']}"
        in printed
    )
    assert found["repro"].endswith(f"--out {out} --only 'model.layers.0.self_attn'")
    nodes = {n["ours"]: n for n in report["model"]["tree"]}
    assert nodes["layers.0.attn"]["teacher_forced"]["status"] == "fail"
    assert nodes["layers.0.mlp"]["teacher_forced"]["status"] == "pass"
    assert [nodes[n]["depth"] for n in ("", "layers.0", "layers.0.attn", "layers.0.attn.o")] == [0, 1, 2, 3]
    assert [nodes[n]["name"] for n in ("", "layers.0", "layers.0.attn")] == ["model", "layers.0", "attn"]
    assert [c["name"] for c in report["model"]["end_to_end"]["checks"]][:3] == [
        "top-1 agreement",
        "top-5 overlap",
        "KL mean",
    ]
    page = (out / "report.html").read_text()
    assert "layers.0.attn diverges first" in page
    parsed = Page(page)
    assert all(ref.removeprefix("#") in parsed.ids for ref in parsed.refs)
    assert not re.search(r"https?:|url\((?!#)|@import", page)
    assert "over" in re.search(r'<tr><th[^>]*title="layers.0.attn".*?</tr>', page).group()
    assert "layers.0.attn (golden" in (out / "report.md").read_text()
    again = [*line, "--only", "layers.0.attn"]
    assert command.main(again) == 1
    assert {r["case"] for r in schema.read(out / "report.json")["results"]} == {"model/model.layers.0.self_attn"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"--flax": "x"}, "a model must be given as package.module:factory or file.py:factory, got 'x'"),
        ({"--flax": "nowhere.py:make"}, "nowhere.py:make: no file nowhere.py"),
        ({"--flax": "no_such_package:make"}, "no_such_package:make: No module named 'no_such_package'; run from"),
        ({"--flax": f"{PLANTED}:absent"}, "planted_llama.py has no absent"),
        ({"--flax": "time:time"}, "time:time must return a flax.nnx.Module, or one and a function call(model, inputs)"),
        ({"--memory": "2X"}, "a size must read like 512M or 2G, got '2X'"),
        (
            {"--golden": "time:time"},
            "time:time must return a torch.nn.Module and its arguments, returned <class 'float'>",
        ),
        (
            {"--golden": str(captures.SHIPPED / "torch-attention.safetensors")},
            "a capture of a model's calls is required",
        ),
        ({"--only": "nothing"}, "--only nothing matches no module that was compared"),
    ],
)
def test_messages(golden, file, tmp_path, capsys, change, said):
    options = {"--flax": f"{PLANTED}:clean", "--golden": str(golden["float32"].path), "--names": str(file)}
    options |= {"--out": str(tmp_path), "--samples": "1"} | change
    line = [x for pair in options.items() for x in pair]
    assert command.main(line) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_the_standard_library_keeps_its_module():
    program = "import sys; sys.path.insert(0, 'scripts'); import bisect, random; print(bisect.bisect([1, 2], 1))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
    line = [sys.executable, str(ROOT / "scripts" / "bisect.py"), "--help"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: bisect.py")
    assert script.main is command.main


# ---------------------------------------------------------------- names
def test_draft_is_complete(file):
    text = file.read_text()
    assert names.read(file).ours("model.layers.17.self_attn.q_proj") == "layers.17.attn.q"
    assert len(names.read(file).modules) == 16
    assert text.endswith('# golden modules without a counterpart:\n# "model.rotary_emb"\n# "model"\n')


def test_draft_says_what_it_doubts():
    shape = (((4, 4),), ((2, 4),))
    theirs = [names.Module("a", *shape, 0.1), names.Module("b", *shape, 0.2)]
    ours = [names.Module("x", *shape, 0.1), names.Module("y", *shape, 0.2), names.Module("z", *shape, 0.15)]
    text = names.draft(theirs, ours, ["p", "q"])
    assert "logits" not in text
    assert "# or 'z'" in text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[modules", "a names file must be TOML"),
        ("[module]\n", "unknown entry 'module'; did you mean 'modules'?"),
        ("[modules]\n'a.*' = 'b'\n", "[modules] 'a.*' must name a module with as many *, found 'b'"),
        ("[modules]\n'lm_hea' = 'head'\n", "no golden module is called 'lm_hea'; did you mean 'lm_head'?"),
        (
            "[modules]\n'lm_head' = 'heads'\n",
            "'lm_head' leads to 'heads', which the Flax model does not call; did you mean",
        ),
        ("", "at least one pair of modules is required in [modules], found none"),
        ("[arrays.lm_head]\n'y' = 'y'\n", """[arrays."lm_head"] 'y' must read "in.name" or "out.name" = "ours\""""),
        ("[arrays.lm_head]\n'out.y' = {axes = [0]}\n", "found {'axes': [0]}"),
    ],
)
def test_wrong_names_are_explained(tmp_path, content, said):
    path = tmp_path / "names.toml"
    path.write_text(content)
    with pytest.raises(names.NamesError, match=re.escape(said)):
        names.check(names.read(path), ["", "lm_head"], ["", "head"], str(path))


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ((1, 12, 32), (12, 32), True),
        ((2, 6, 32), (12, 32), True),
        ((2, 6, 4, 8), (12, 32), True),
        ((12, 4, 8), (12, 8, 4), False),
        ((6, 4), (4, 6), False),
        ((12, 32), (12, 31), False),
        ((2, 6, 32), (3, 4, 32), False),
        ((), (1,), True),
    ],
)
def test_shapes_that_hold_the_same(a, b, same):
    assert names.regrouped(a, b) is same
    assert names.regrouped(b, a) is same


def test_arrays_are_matched_by_file_name_place_and_shape():
    x = {"a": np.zeros((2, 3, 4)), "b": np.arange(6).reshape(1, 6), "c": np.zeros((5, 7)), "d": np.zeros(9)}
    y = {"c": np.zeros((7, 5)), "q": np.zeros((6, 4)), "d": np.zeros(9), "p": np.arange(6)}
    found = names.match(x, y, names.Names({}, {"m": {"in.d": "d"}}), "m", "in")
    assert {k: v.ours for k, v in found.items()} == {"a": "q", "b": "p", "c": "c", "d": "d"}
    assert found["c"].axes == (1, 0)
    z = np.arange(35.0).reshape(7, 5)
    assert (found["c"].back(found["c"].golden(z), z.shape) == z).all()
    for given, said in (("e", "m: in.d leads to 'e'; there is c, q, d, p"), ("q", "must have as many elements")):
        with pytest.raises(names.NamesError, match=re.escape(said)):
            names.match(x, y, names.Names({}, {"m": {"in.d": given}}), "m", "in")
    given = names.Names({}, {"l.*": {"out.y": {"ours": "c", "axes": [1, 0]}}})
    assert names.match({"y": x["c"]}, y, given, "l.3", "out")["y"].axes == (1, 0)


# ---------------------------------------------------------------- the yardstick
def test_perturbation_moves_by_one_unit():
    rng = np.random.default_rng(0)
    for dtype in (np.float32, ml_dtypes.bfloat16):
        x = np.array([0, 1.25, -1.5, 3e30, np.inf, np.nan, float(ml_dtypes.finfo(dtype).max)], dtype)
        y = self_noise.perturb(x, dtype, rng)
        assert metrics.ulp_distance(x[1:4], y[1:4]).tolist() == [1, 1, 1]
        assert y[0] == 0 and np.isinf(y[4]) and np.isnan(y[5]) and np.isfinite(y[6].astype(np.float32))
    assert self_noise.perturb(np.arange(3), np.int64, rng).tolist() == [0, 1, 2]


def test_integers_may_differ_where_the_noise_moves_them():
    golden, ours = np.array([1, 2, 3]), np.array([1, 5, 3], np.int32)
    verdict, _ = self_noise.full(golden, ours, np.array([0.0, 1.0, 0.0]), 3)
    assert verdict.passed and "1 more change" in verdict.reason
    verdict, _ = self_noise.full(golden, ours, np.zeros(3), 3)
    assert verdict.reason == "1 of 3 elements differ, first at (1,): ours 5, golden 2"


def test_factor_grows_with_sums_in_float32_only():
    factors = [tolerances.local(n, eps, 64).checks[0].factor for n in (16, 4096) for eps in (2.0**-23, 2.0**-7)]
    assert factors[1] == pytest.approx(2, rel=tolerances.FLOAT64 * 2**32)
    assert factors[0] < 3 < factors[2] < 20
    assert factors[3] < 2.001


def test_noise_of_a_long_sum_in_float32_stays_within_the_factor(rng):
    """The derivation, measured: a sum one after the other against numpy's pairwise one."""
    n = 4096
    x, w = (rng.standard_normal((64, n)).astype(np.float32) for _ in range(2))
    exact = (x.astype(np.float64) * w).sum(-1)
    slow = np.cumsum(x * w, -1, dtype=np.float32)[:, -1]
    noise = ((self_noise.perturb(x, np.float32, rng).astype(np.float64) - x) * w).sum(-1)
    factor = tolerances.local(n, 2.0**-23, 64).checks[0].factor
    error, unit = (float(np.sqrt(np.square(e).mean())) for e in (slow - exact, noise))
    assert error < factor * unit
    assert error > factor * unit / 8  # and the allowance is not out of proportion


@pytest.mark.parametrize("size", [16, 192, 10_000])
def test_largest_of_honest_errors_stays_within_the_factor_for_extremes(rng, size):
    """The derivation, measured: one in 10,000 errors, one in 100 self-noises, so that few of 2,000 tensors fail."""
    error = np.abs(rng.standard_normal((2000, size))).max(1)
    noise = np.sqrt(np.square(rng.standard_normal((2, 2000, size))).mean(0)).max(1)
    ratio = error / noise
    assert (ratio > tolerances.extreme(size)).sum() <= 1
    assert ratio.max() > tolerances.extreme(size) / 2  # and the allowance is not out of proportion


# ---------------------------------------------------------------- end to end
def test_metrics_of_logits_follow_their_bound(rng):
    golden = rng.standard_normal((2, 9, 50)).astype(np.float32)
    d = 1e-3
    ours = (golden + rng.uniform(-d, d, golden.shape)).astype(np.float32)
    tokens = rng.integers(0, 50, (2, 9))
    good = logits.compare(ours, golden, np.full((2, 9), d * 1.01), tokens)
    assert {c["status"] for c in good["checks"]} == {"pass"}
    bad = logits.compare(ours, golden, np.full((2, 9), d / 20), tokens)
    assert {c["name"]: c["status"] for c in bad["checks"]}["KL max"] == "fail"
    assert {c["name"]: c["status"] for c in bad["checks"]}["logprob, largest difference"] == "fail"


def test_first_diverging_token_and_ties():
    golden = np.tile(np.arange(8.0), (1, 5, 1))
    ours = golden.copy()
    ours[0, 3, 2] = 9.0
    found = logits.compare(ours, golden, np.full((1, 5), 0.25))
    assert found["first_divergence"] == {
        "position": 3, "batch": 0, "ours": 2, "golden": 7, "margin": 1.0, "allowed": 0.5
    }  # fmt: skip
    checks = {c["name"]: c for c in found["checks"]}
    assert checks["top-1 agreement"]["value"] == 0.8
    assert checks["top-1 agreement"]["text"] == "1 of 5 positions differ beyond the bound, first at position 3"
    assert checks["top-5 overlap"]["value"] == pytest.approx(0.96, rel=tolerances.FLOAT64)
    close = logits.compare(ours, golden, np.full((1, 5), 0.5))
    assert {c["name"]: c["status"] for c in close["checks"]}["top-1 agreement"] == "pass"
    assert logits.first_divergence([1, 2, 3], [1, 2, 4, 5]) == 2
    assert logits.first_divergence([1, 2], [1, 2, 4]) is None
    for a, b, said in ((ours, ours[:, :4], "of one shape"), (ours * np.nan, ours, "a side holds NaN")):
        with pytest.raises(ValueError, match=said):
            logits.compare(a, b, np.ones(()))


def test_kl_is_that_of_the_probabilities(rng):
    golden, ours = rng.standard_normal((2, 1, 3, 7))
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (golden, ours))
    expected = (p * np.log(p / q)).sum(-1)
    found = logits.compare(ours, golden, np.ones((1, 3)))
    np.testing.assert_allclose(found["kl"], expected[0], rtol=tolerances.DIVERGENCE, atol=0)


def test_model_report_is_strict_json(golden, file, tmp_path):
    line = ["--flax", f"{PLANTED}:poisoned", "--golden", str(golden["float32"].path), "--names", str(file)]
    assert command.main([*line, "--samples", "1", "--out", str(tmp_path)]) == 1
    report = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert report["model"]["end_to_end"]["reason"] == "logits must be numbers, and a side holds NaN"
    assert "nan disagrees" in report["model"]["finding"]["reason"]


def test_torch_model_is_captured_on_the_way(file, tmp_path):
    pytest.importorskip("torch")
    line = ["--flax", f"{PLANTED}:swapped_gate_up", "--golden", f"{LLAMA}/capture_llama.py:make", "--names", str(file)]
    assert command.main([*line, "--samples", "1", "--out", str(tmp_path)]) == 1
    found = schema.read(tmp_path / "report.json")["model"]["finding"]
    assert (found["ours"], found["output"]) == planted_llama.FAULTS["swapped_gate_up"]
    assert f"--golden {tmp_path}/golden.safetensors" in found["repro"]
    line += ["--mode", "statistics", "--samples", "1", "--out", str(tmp_path)]
    assert command.main(line) == 1
    assert schema.read(tmp_path / "report.json")["model"]["finding"]["ours"] == "layers.0.mlp.down"


def test_sizes():
    assert [loading.size(t) for t in ("7", "1K", "2M", "1.5G", "3GiB")] == [7, 1024, 2 << 20, 3 << 29, 3 << 30]
