"""The timing tables of the pages: made of stored lines, newest run, fastest peer."""

import json

import pytest

from jaxattn import MECHANISMS
from scripts import _tables, timing_table
from scripts._bench import targets


def line(**changes):
    base = {
        "mechanism": "merge_states",
        "case": "T1",
        "kernel": "mosaic",
        "us": 47.12,
        "peer": "vllm: a",
        "peer_us": 50.0,
        "ratio_to_peer": 0.9424,
        "floor_us": 46.0,
        "roofline": 0.976,
        "tb_s": 4.2,
        "tflop_s": 1.0,
        "device": "NVIDIA H200",
        "commit": "0123456789abcdef",
        "date": "2026-11-29T10:00:00+00:00",
        "versions": {"jax": "0.11.2", "vllm": "0.26.0", "python": "3.12"},
    }
    return base | changes


def test_a_table_shows_the_fastest_peer_of_the_newest_run():
    text = timing_table.table(
        [
            line(),
            line(peer="vllm: b", peer_us=40.0, ratio_to_peer=1.178),
            line(peer="vllm: old", peer_us=1.0, date="2026-11-28T10:00:00+00:00"),
            line(case="T2", peer=None, peer_us=None, ratio_to_peer=None, tflop_s=600.0),
        ]
    )
    assert "| T1 | mosaic | 47.1 | 98% | 4.20 TB/s | vllm: b | 40.0 | 1.18 |" in text
    assert "| T2 | mosaic | 47.1 | 98% | 600 TFLOP/s | - | - | - |" in text
    assert "Measured on NVIDIA H200, 2026-11-29, commit 0123456789ab, jax 0.11.2, vllm 0.26.0." in text


def test_the_pages_are_written_and_checked(tmp_path, capsys):
    (tmp_path / "docs/results").mkdir(parents=True)
    old, new = line(us=99.0, date="2026-11-01T00:00:00+00:00"), line()
    (tmp_path / "docs/results/a.jsonl").write_text("".join(json.dumps(x) + "\n" for x in (new, old)))
    for page in ("benchmarks", "merge_states"):
        (tmp_path / f"docs/{page}.md").write_text(f"# x\n\n{timing_table.BEGIN}\n{timing_table.END}\nrest\n")
    with (tmp_path / "docs/benchmarks.md").open("a") as f:
        f.write("{}\n{}\nrest\n".format(*timing_table.TARGETS))
    with (tmp_path / "docs/results/a.jsonl").open("a") as f:
        f.write(json.dumps(line(mechanism="cache_write")) + "\n")
    (tmp_path / "docs/cache_write.md").write_text("no place for a table\n")
    for page in ("rope", "megamoe_staged"):
        (tmp_path / f"docs/{page}.md").write_text(f"{timing_table.BEGIN}\n{timing_table.END}\n")
    assert timing_table.main(["--check"], tmp_path) == 1
    assert "out of date" in capsys.readouterr().out
    assert timing_table.main([], tmp_path) == 0
    assert timing_table.main(["--check"], tmp_path) == 0
    for page in ("benchmarks", "merge_states"):
        text = (tmp_path / f"docs/{page}.md").read_text()
        assert "| T1 | mosaic | 47.1 |" in text and "99.0" not in text and text.endswith("rest\n")
    assert (tmp_path / "docs/cache_write.md").read_text() == "no place for a table\n"
    assert "`python scripts/bench.py --mechanism rope` makes some" in (tmp_path / "docs/rope.md").read_text()
    assert "no case to time" in (tmp_path / "docs/megamoe_staged.md").read_text()


def test_targets_say_what_was_measured():
    asked = {x.case: x for x in targets.TARGETS if x.mechanism in ("mla", "mhc_post") or x.own}
    mla, mhc, fp4 = (asked[x] for x in ("B64-S8192-H128", "N4096-C4-M4096", "mxfp4-T4096-A6-E256-M4096-F2048"))
    old = line(mechanism="mla", case=mla.case, us=90.0, peer="vllm: FlashMLA", peer_us=100.0, date="2026-11-01")
    new = old | {"us": 110.0, "date": "2026-11-02"}
    lines = [
        old,
        new,
        new | {"peer": "vllm: Triton", "peer_us": 10.0},
        line(mechanism="mhc_post", case=mhc.case, us=70.0),
    ]
    lines += [line(mechanism="experts", case=fp4.case, us=100.0), line(mechanism="experts", case=fp4.peer, us=100.0)]
    text = targets.table(lines)
    assert text.startswith(f"2 of {len(targets.TARGETS)} targets are met")
    assert "| mla | B64-S8192-H128 | FlashMLA | 1.05 | 1.10 | 110.0 | missed |" in text
    assert "| TileLang | 0.95 | 0.88 | 70.0 | met; the peer's 79.2 us are of another run |" in text
    assert f"| our {fp4.peer} | 1.11 | 1.00 | 100.0 | met |" in text
    assert "| - | - | not measured |" in text


def test_targets_are_of_cases_that_are_timed():
    timed = {(m.name, c.name) for m in MECHANISMS for c in m.cases if "bench" in c.tags}
    for target in targets.TARGETS:
        assert (target.mechanism, target.case) in timed
        assert not target.own or (target.mechanism, target.peer) in timed


def test_a_page_without_markers_and_a_foreign_line_are_errors(tmp_path):
    with pytest.raises(ValueError, match=r"docs/x.md must hold these two lines once"):
        _tables.insert("no markers", "", "docs/x.md", timing_table.BEGIN, timing_table.END)
    (tmp_path / "a.jsonl").write_text('{"mechanism": "x"}\n')
    with pytest.raises(ValueError, match=r"a.jsonl:1 lacks case, kernel, us, .*; write it with scripts/bench.py"):
        timing_table.read(tmp_path)
