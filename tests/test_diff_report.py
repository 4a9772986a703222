"""The numeric diff report: what it says, what it exits with, and that it can be trusted with untrusted names."""

import copy
import gzip
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from parity import captures, cases, triangle
from scripts import diff_report
from scripts._report import compare, html, markup, schema, text

OUTPUT = cases.Output(axes=("token", "head", "dim"), slice_rank=2, rule="default", contract="contract")
OURS = {"jax": "0.11.2", "device": "cpu", "backend": "interpret", "git": "abc123", "date": "2026-11-20"}
THEIRS = {"producer": "vllm", "vllm": "0.26.0", "device": "NVIDIA H200", "driver": "580", "date": "2026-11-01"}


def triangle_of(case, seed=0, *, fault=None, mechanism="paged_attention", tokens=24, heads=8, dim=16):
    """Three real results of the judge; `fault` changes the kernel, or corners if it is a list of (corner, change)."""
    rng = np.random.default_rng(seed)
    truth = rng.standard_normal((tokens, heads, dim))
    noisy = {
        side: (truth + 1e-3 * rng.standard_normal(truth.shape)).astype(ml_dtypes.bfloat16)
        for side in ("capture", "reference", "kernel")
    }
    for side, change in fault if isinstance(fault, list) else [("kernel", fault)] * (fault is not None):
        noisy[side] = change(noisy[side].copy())
    results = []
    for comparison in triangle.COMPARISONS:
        verdict = triangle.edge(OUTPUT, comparison, truth, noisy)
        results.append(
            triangle.Result(
                mechanism=mechanism,
                capture="data/attention.safetensors",
                case=f"attention/{case}",
                output="o",
                comparison=comparison,
                backend="interpret",
                kernel="mosaic" if "kernel" in comparison else None,
                status=verdict.status,
                reason=verdict.reason,
                metrics=verdict.metrics,
                allowed=verdict.allowed,
                headroom=verdict.headroom,
                worst=verdict.worst,
                slices=verdict.slices,
                repro=f"python -m pytest 'parity/test_parity.py::test_triangle[{case}:{comparison}]'",
            )
        )
    return results


def scale(x):
    return (x.astype(np.float32) * 1.01).astype(x.dtype)


def zero_row(x):
    x[5, 3] = 0
    return x


def leak(x):
    x[-1, -1, -1] = np.nan
    return x


def without_kernel(results, status, reason):
    empty = {"metrics": {}, "allowed": {}, "headroom": None, "worst": [], "slices": {}, "kernel": None}
    return [replace(r, status=status, reason=reason, **empty) if "kernel" in r.comparison else r for r in results]


def mutant(killed=True, fault="scale-1-percent", planted="kernel"):
    return {
        "mechanism": "paged_attention",
        "fault": fault,
        "what": "softmax scale 1 % off",
        "planted": planted,
        "applicable": 4,
        "caught": 4 * killed,
        "by": {"reference_vs_kernel": 4} if killed else {},
        "example": "attention/paged_a: too large" if killed else "",
        "killed": killed,
    }


def report_of(results, mutants=None, mechanisms=("paged_attention",), unclaimed=()):
    base = {
        "provenance": {"ours": OURS, "captures": {"data/attention.safetensors": THEIRS}},
        "results": [r.to_json() for r in results],
    }
    return schema.complete(
        base,
        sentences={k: triangle.blame(v) for k, v in triangle.group(results).items()},
        mutations=schema.mutations([mutant()] if mutants is None else list(mutants)),
        mechanisms=mechanisms,
        cases={r.case: {"kernel": "triton_unified_attention", "window": 16} for r in results},
        unclaimed=unclaimed,
    )


@pytest.fixture(scope="module")
def mixed():
    """All four statuses, every corner blamed, NaN values, a mechanism without captures."""
    results = [
        *triangle_of("paged_good", 1),
        *triangle_of("paged_scale", 2, fault=scale),
        *triangle_of("paged_row", 3, fault=zero_row),
        *triangle_of("paged_nan", 4, fault=leak),
        *triangle_of("paged_reference", 5, fault=[("reference", scale)]),
        *without_kernel(triangle_of("paged_skipped", 6), "skipped", "D must be 64, 128 or 256, got 80"),
        *without_kernel(triangle_of("paged_alone", 7), "not_run", "backend 'reference' runs no kernel"),
    ]
    return report_of(results, mechanisms=("paged_attention", "gptq"), unclaimed=("moe/router",))


@pytest.fixture(scope="module")
def good():
    return report_of(triangle_of("paged_good", 1))


# ---------------------------------------------------------------- data
def test_report_has_the_fields_of_the_schema(mixed):
    assert mixed["schema"] == "jaxattn-diff-report/1"
    assert mixed["summary"] == {"pass": 10, "fail": 7, "skipped": 2, "not_run": 2}
    for r in mixed["results"]:
        assert set(schema.FIELDS) <= set(r)
    worst = next(r for r in mixed["results"] if r["case"].endswith("row") and r["comparison"] == "reference_vs_kernel")
    assert {"index", "got", "expected"} <= set(worst["worst"][0])
    assert worst["worst"][0]["index"][:2] == [5, 3]


def test_verdicts_blame_the_right_corner(mixed):
    blamed = {o.case.removeprefix("attention/paged_"): o.blamed for o in schema.outputs(mixed)}
    assert blamed == {
        "good": (),
        "scale": ("kernel",),
        "row": ("kernel",),
        "nan": ("kernel",),
        "reference": ("reference",),
        "skipped": (),
        "alone": (),
    }
    assert all(o.sentence for o in schema.outputs(mixed))


@pytest.mark.parametrize(
    ("sides", "blamed"), [(("reference",), ("reference",)), (("capture", "kernel"), ("reference",))]
)
def test_blame_and_sentence_agree(sides, blamed):
    """A capture and a kernel with one error are two witnesses against the reference."""
    wrong = scale(np.random.default_rng(8).standard_normal((24, 8, 16)).astype(ml_dtypes.bfloat16))
    change = (lambda x: wrong) if len(sides) == 2 else scale
    results = triangle_of("paged_x", 8, fault=[(side, change) for side in sides])
    (output,) = schema.outputs(report_of(results))
    assert output.blamed == blamed
    assert "reference" in output.sentence and "kernel is wrong" not in output.sentence


def test_json_is_strict_and_survives_a_round_trip(mixed, tmp_path):
    report = copy.deepcopy(mixed)
    report["results"][0]["metrics"]["odd"] = schema.plain(
        {"a": float("nan"), "b": np.float32("inf"), "c": np.arange(2)}
    )
    schema.write(report, tmp_path / "report.json")
    source = (tmp_path / "report.json").read_text()
    assert not re.search(r"(?<![\"\w])(NaN|-?Infinity)(?![\"\w])", source)
    assert json.loads(source)["results"][0]["metrics"]["odd"] == {"a": "nan", "b": "inf", "c": [0, 1]}
    assert schema.read(tmp_path / "report.json") == report
    packed = tmp_path / "report.json.gz"
    packed.write_bytes(gzip.compress(source.encode()))
    assert schema.read(packed) == report
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(schema.ReportError, match="cannot be read"):
        schema.read(packed)


def test_refuses_two_results_of_one_key_and_unknown_states():
    results = triangle_of("paged_good")
    with pytest.raises(schema.ReportError, match=r"repeats paged_attention / .* / o / capture_vs_reference"):
        report_of([*results, results[0]])
    with pytest.raises(schema.ReportError, match="status must be one of pass, fail, skipped, not_run, found 'ok'"):
        report_of([replace(results[0], status="ok")])


def test_coverage_counts_per_mechanism_and_names_gaps(mixed):
    lines = {line["mechanism"]: line for line in schema.coverage(mixed)}
    assert lines["paged_attention"]["cases"] == lines["paged_attention"]["outputs"] == 7
    assert lines["gptq"] == dict.fromkeys(("cases", "outputs", "pass", "fail", "skipped", "not_run"), 0) | {
        "mechanism": "gptq",
        "dtypes": [],
    }


@pytest.mark.parametrize(
    ("results", "mutants", "code"),
    [
        (triangle_of("a"), (mutant(),), 0),
        (triangle_of("a", fault=scale), (mutant(),), 1),
        (triangle_of("a"), (mutant(), mutant(False, "lse")), 1),
        (without_kernel(triangle_of("a"), "skipped", "no"), (), 0),
        (without_kernel(triangle_of("a"), "not_run", "no")[1:], (mutant(),), 2),
        ([], (), 2),
    ],
)
def test_exit_code(results, mutants, code):
    assert schema.exit_code(report_of(results, mutants)) == code


# ---------------------------------------------------------------- views
class Page(HTMLParser):
    """Collects tags, ids and references, and fails on tags that do not match."""

    def __init__(self, source):
        super().__init__()
        self.open, self.tags, self.ids, self.refs, self.words = [], [], [], [], []
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.refs += [v for k, v in attrs.items() if k in ("href", "src", "srcset", "action", "data", "poster")]
        if tag not in ("meta", "input", "br", "hr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def said(self):
        return " ".join(" ".join(self.words).split())


def test_html_is_one_file_without_the_network(mixed):
    source = html.page(mixed)
    page = Page(source)
    assert page.refs and all(ref.startswith("#") for ref in page.refs)
    assert all(ref.removeprefix("#") in page.ids for ref in page.refs)
    assert len(page.ids) == len(set(page.ids))
    assert not re.search(r"https?:|url\((?!#)|@import|//[a-z]", source, re.IGNORECASE)
    policy = next(a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none'") and "script-src 'sha256-" in policy


def test_html_shows_every_output_state_and_repro(mixed):
    said = Page(html.page(mixed)).said
    for r in mixed["results"]:
        assert r["case"] in said and " ".join(r["repro"].split()) in said and " ".join(r["reason"].split()) in said
    assert "7 of 17 comparisons fail" in said and "4 more were not compared" in said
    assert "triton_unified_attention" in said and "window 16" in said
    assert "Kill rate 100 %" in said and "not run" in said and "gptq" in said and "not compared: 1" in said


def test_html_says_what_is_good_and_what_is_not_compared(good):
    assert "All 3 comparisons pass" in Page(html.page(good)).said
    assert "Nothing was compared" in Page(html.page(report_of([]))).said
    assert "the judge is not to be trusted" in Page(html.page(report_of(triangle_of("a"), [mutant(False)]))).said


def test_untrusted_names_are_escaped_everywhere():
    evil = "<img src=x onerror=alert(1)>\"'&</script><script>alert(2)</script>|`*"
    results = [
        replace(r, mechanism=evil, case=evil, output=evil, capture=evil, reason=evil, repro=evil)
        for r in triangle_of("a", fault=scale)
    ]
    report = report_of(results, [mutant() | {"fault": evil, "what": evil, "example": evil}], [evil], [evil])
    report["provenance"]["ours"][evil] = evil
    page = Page(html.page(report))
    assert [t for t, _ in page.tags].count("script") == 1 and "img" not in [t for t, _ in page.tags]
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    outside_code = [line for line in text.markdown(report).splitlines() if not line.startswith("    ")]
    assert not re.search(r"(?<!\\)[<>`]", "\n".join(outside_code))


def test_markdown_lists_every_output_failure_and_gap(mixed):
    said = text.markdown(mixed)
    assert all(text.cell(o.label) in said for o in schema.outputs(mixed))
    assert all(r["repro"] in said for r in mixed["results"] if r["status"] == "fail")
    assert "2 × skipped: D must be 64, 128 or 256, got 80" in said  # noqa: RUF001
    assert "caught 1 of 1 planted faults" in said


def test_elements_escape_unless_marked():
    assert markup.el("p", "a<b", markup.el("b", '"'), title='"<') == '<p title="&quot;&lt;">a&lt;b<b>&quot;</b></p>'


# ---------------------------------------------------------------- difference of two reports
def changes(old, new, **options):
    difference = compare.compare(old, new, **options)
    return {kind: [f"{c.name}: {c.text}" for c in difference.of(kind)] for kind in ("worse", "better", "other")}, (
        difference.exit_code
    )


def test_diff_of_equal_reports_is_empty(mixed):
    assert changes(mixed, mixed) == ({"worse": [], "better": [], "other": []}, 0)


def test_diff_names_what_got_worse_and_what_got_better(good):
    bad = report_of(triangle_of("paged_good", 1, fault=scale))
    found, code = changes(good, bad)
    assert code == 1 and len(found["worse"]) == 2 and "pass → fail" in found["worse"][0]
    found, code = changes(bad, good)
    assert code == 0 and len(found["better"]) == 2 and "fail → pass" in found["better"][0]


def test_diff_reports_vanished_new_and_skipped_results(good):
    more = report_of([*triangle_of("paged_good", 1), *triangle_of("paged_new", 2)])
    found, code = changes(good, more)
    assert code == 0 and len(found["other"]) == 3 and "new: pass" in found["other"][0]
    found, code = changes(more, good)
    assert code == 1 and len(found["worse"]) == 3 and "vanished, was pass" in found["worse"][0]
    skipped = report_of(without_kernel(triangle_of("paged_good", 1), "skipped", "no GPU"))
    found, code = changes(good, skipped)
    assert code == 1 and all("pass → skipped" in line and "no GPU" in line for line in found["worse"])
    failing = report_of([*triangle_of("paged_good", 1), *triangle_of("paged_new", 2, fault=scale)])
    assert changes(good, failing)[1] == 1


def test_diff_watches_headroom_and_mutants(good):
    tight = copy.deepcopy(good)
    tight["results"][1]["headroom"] += 0.2
    found, code = changes(good, tight)
    assert code == 1 and len(found["worse"]) == 1 and "of allowed" in found["worse"][0]
    assert changes(good, tight, step=0.3) == ({"worse": [], "better": [], "other": []}, 0)
    survived = report_of(triangle_of("paged_good", 1), [mutant(False)])
    found, code = changes(good, survived)
    assert code == 1 and found["worse"] == [
        "mutation suite / paged_attention / scale-1-percent in the kernel: caught → missed"
    ]


def test_diff_of_unrelated_reports_compares_nothing(good):
    other = report_of(without_kernel(triangle_of("paged_other", 2), "not_run", "")[1:])
    assert changes(report_of([]), other)[1] == 2


# ---------------------------------------------------------------- command line
@pytest.fixture
def judged(monkeypatch):
    """Replaces the judge's work by given results, in this process: `--jobs 1` where there are several mechanisms."""

    def install(results, mutants=()):
        monkeypatch.setattr(triangle, "run", lambda *a, **k: list(results))
        from parity import mutations

        monkeypatch.setattr(mutations, "run", lambda *a, **k: [mutations.Mutant(**m) for m in mutants])
        monkeypatch.setattr(mutations, "contract", lambda *a, **k: [])

    return install


@pytest.mark.parametrize(
    ("results", "code", "headline"),
    [
        (triangle_of("paged_good"), 0, "3 pass"),
        (triangle_of("paged_scale", fault=scale), 1, "2 fail"),
        (without_kernel(triangle_of("paged_alone"), "not_run", "no kernel")[1:], 2, "2 not run"),
        ([], 2, "0 pass"),
    ],
)
def test_command_writes_three_files_and_exits(judged, tmp_path, capsys, results, code, headline):
    judged(results)
    assert diff_report.main(["--out", str(tmp_path / "new" / "out"), "--mechanism", "paged_attention"]) == code
    assert sorted(p.name for p in (tmp_path / "new" / "out").iterdir()) == ["report.html", "report.json", "report.md"]
    assert headline in capsys.readouterr().out
    report = schema.read(tmp_path / "new" / "out" / "report.json")
    assert report["summary"] == schema.summary(report["results"])


@pytest.mark.parametrize(
    ("more", "full"),
    [([], False), (["--full"], True), (["--mechanism", "merge_states"], True), (["--backend", "reference"], False)],
)
def test_command_leaves_out_what_takes_long_and_says_so(judged, monkeypatch, tmp_path, capsys, more, full):
    judged(triangle_of("paged_good"))
    asked = []
    monkeypatch.setattr(triangle, "run", lambda *a: asked.append(a[-1]) or triangle_of("paged_good"))
    monkeypatch.setattr(triangle, "resolve", lambda backend: "interpret" if backend == "auto" else backend)
    diff_report.main([*more, "--jobs", "1", "--out", str(tmp_path)])
    assert asked == [full]
    left_out = "the mechanisms' own cases" in " ".join(capsys.readouterr().out.split())
    assert left_out == (not full and "reference" not in more)


def test_command_repeats_failures_with_reason_and_repro(judged, tmp_path, capsys):
    results = triangle_of("paged_row", fault=zero_row)
    judged(results)
    diff_report.main(["--jobs", "1", "--out", str(tmp_path)])
    said = " ".join(capsys.readouterr().out.split())
    assert "token 5, head 3" in said and "paged_row:reference_vs_kernel" in said


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--mechanism", "paged_atention"], "did you mean 'paged_attention'?"),
        (["--captures", "/nowhere/captures"], "/nowhere/captures: a directory of captures is required"),
    ],
)
def test_command_says_what_is_wrong_and_exits_2(tmp_path, capsys, argv, message):
    assert diff_report.main([*argv, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert message in said.err and "Traceback" not in said.err and said.out == ""
    assert list(tmp_path.iterdir()) == []


def test_truncated_capture_gives_the_loaders_message(tmp_path, capsys):
    source = next(captures.SHIPPED.glob("*.safetensors"))
    broken = tmp_path / "captures" / source.name
    broken.parent.mkdir()
    shutil.copyfile(source, broken)
    broken.write_bytes(broken.read_bytes()[:-1000])
    assert diff_report.main(["--captures", str(broken.parent), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "truncated" in said and "Regenerate the file with" in said and "Traceback" not in said


def test_command_needs_an_output_directory(capsys):
    with pytest.raises(SystemExit) as e:
        diff_report.main([])
    assert e.value.code == 2 and "--out DIR is required" in capsys.readouterr().err


def test_diff_command(good, tmp_path, capsys):
    bad = report_of(triangle_of("paged_good", 1, fault=scale))
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    schema.write(good, old)
    schema.write(bad, new)
    assert diff_report.main(["--diff", str(old), str(new), "--out", str(tmp_path / "d")]) == 1
    assert "2 worse, 0 better" in capsys.readouterr().out
    assert "## Worse" in (tmp_path / "d" / "diff.md").read_text()
    assert diff_report.main(["--diff", str(new), str(old)]) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "no strict JSON"),
        ('{"schema": NaN}', "the literal NaN"),
        ('{"schema": "other/9"}', "schema 'jaxattn-diff-report/1' is required, found 'other/9'"),
        ('{"schema": "jaxattn-diff-report/1", "results": 3}', "'results' must be a list, found int"),
    ],
)
def test_diff_refuses_what_is_no_report(good, tmp_path, capsys, content, message):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    schema.write(good, old)
    if content is not None:
        new.write_text(content)
    assert diff_report.main(["--diff", str(old), str(new)]) == 2
    said = capsys.readouterr().err
    assert message in said and str(new) in said


def test_mechanism_without_faults_is_a_gap_of_the_judge(judged, tmp_path, capsys, monkeypatch):
    from parity import mutations

    def none(name):
        raise ValueError(f"{name} has no faults")

    judged(triangle_of("paged_good"))
    monkeypatch.setattr(mutations, "find", none)
    assert diff_report.main(["--jobs", "1", "--out", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "no fault planted in" in said and "paged_attention (paged_attention has no faults)" in said
    assert "No fault was planted" in Page((tmp_path / "report.html").read_text()).said


def test_mutations_can_be_left_out(judged, tmp_path, capsys):
    judged(triangle_of("paged_good"))
    diff_report.main(["--out", str(tmp_path), "--no-mutations"])
    said = capsys.readouterr().out
    assert "judge: not tested; no fault planted in paged_attention, " in said
    assert said.count("(left out by --no-mutations)") == 1


def test_docs_name_every_field_state_and_option(capsys):
    docs = (Path(schema.__file__).parents[2] / "docs" / "report.md").read_text()
    with pytest.raises(SystemExit):
        diff_report.main(["--help"])
    options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    words = {*schema.FIELDS, *schema.STATUSES, *schema.COMPARISONS, schema.SCHEMA, *options}
    assert sorted(w for w in words if f"`{w}" not in docs) == []
    for image in re.findall(r"\((images/[^)]+)\)", docs):
        assert (Path(schema.__file__).parents[2] / "docs" / image).stat().st_size < 250_000


def test_files_stay_short():
    files = [*Path(schema.__file__).parent.glob("*.*"), Path(diff_report.__file__)]
    assert all(len(f.read_text().splitlines()) <= 400 for f in files if f.suffix in (".py", ".js", ".css"))
