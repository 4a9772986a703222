"""The share of the cases that runs where time is short."""

import os
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from parity import sharing
from parity.triangle import COMPARISONS


def item(stem, title, *marks, **params):
    return SimpleNamespace(
        get_closest_marker=lambda name: name if name in marks else None,
        path=Path(f"tests/{stem}.py"),
        originalname=title.partition("[")[0],
        name=title,
        nodeid=f"tests/{stem}.py::{title}",
        callspec=SimpleNamespace(params=params),
    )


def thin(items):
    dropped = []
    hook = SimpleNamespace(pytest_deselected=lambda items: dropped.extend(items))
    kept = list(items)
    sharing.thin(SimpleNamespace(hook=hook), kept)
    assert [i for i in items if i in kept] == kept
    assert len(kept) + len(dropped) == len(items)
    return kept


def test_the_first_of_each_group_stays_and_about_one_in_n(monkeypatch):
    names = [f"{kernel}/mosaic/case/{i}" for kernel in ("a", "b") for i in range(300)]
    items = [item("test_compile", f"test_c[{n}]", name=n) for n in names]
    monkeypatch.delenv("TEST_SHARE", raising=False)
    assert thin(items) == items
    monkeypatch.setenv("TEST_SHARE", "6")
    kept = thin(items)
    assert items[0] in kept
    assert items[300] in kept
    assert 60 < len(kept) < 140
    monkeypatch.setenv("TEST_SHARE", "1000000")
    assert thin(items) == [items[0], items[300]]


def test_the_comparisons_of_a_capture_stay_or_go_together(monkeypatch):
    edges = [("mla", f"case{i}", output, vs) for i in range(200) for output in ("o", "lse") for vs in COMPARISONS]
    items = [item("test_parity", f"test_triangle[{':'.join(edge[1:])}]", edge=edge) for edge in edges]
    for share, least, most in (("6", 20, 50), ("1000000", 1, 1)):
        monkeypatch.setenv("TEST_SHARE", share)
        kept = [i.callspec.params["edge"] for i in thin(items)]
        cases = {edge[1] for edge in kept}
        assert "case0" in cases
        assert kept == [edge for edge in edges if edge[1] in cases]
        assert least <= len(cases) <= most


def test_smoke_tests_stay(monkeypatch):
    monkeypatch.setenv("TEST_SHARE", "1000000")
    items = [
        item("test_compile", f"test_c[a/b/case/{i}]", *["smoke"] * (i == 7), name=f"a/b/case/{i}") for i in range(9)
    ]
    assert thin(items) == [items[0], items[7]]


def test_what_is_not_parametrized_stays(monkeypatch):
    monkeypatch.setenv("TEST_SHARE", "1000000")
    items = [item("test_other", f"test_{i}") for i in range(20)]
    for plain in items:
        del plain.callspec
    assert thin(items) == items


def test_a_mechanism_and_a_file_each_stay_in_one_process(monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    names = ["mla", "sparse_mla", "attention"]
    mechanism = SimpleNamespace(name="sparse_mla", reference=None)
    edge = ("mla", "case", "o", "capture_vs_kernel")
    items = [
        item("test_contract", "test_c[a]", kernel="attention", mechanism=mechanism),
        item("test_parity", "test_t[a]", edge=edge),
        item("test_mla_kernel", "test_a"),
        item("test_mlab", "test_a[1]", n=1),
        item("test_compile", "test_a"),
    ]
    del items[2].callspec
    marks = [[] for _ in items]
    for i, mine in zip(items, marks, strict=True):
        i.add_marker, i.get_closest_marker = mine.append, lambda _: None
    items[4].get_closest_marker = lambda _: "another"
    wants_all = [
        item("test_contract", f"test_o[{n}]", mechanism=SimpleNamespace(name=n, reference=None)) for n in names
    ]
    for i in wants_all:
        i.get_closest_marker = lambda name: name == "optimized" or None
        i.add_marker = marks[4].append
    sharing.together(items + wants_all, names)
    assert [m.args[0] for mine in marks[:4] for m in mine] == ["sparse_mla", "mla", "mla", "tests/mlab"]
    assert {m.args[0] for m in marks[4]} == {"optimized 0", "optimized 1"}


def test_groups_that_may_take_long_come_first(monkeypatch):
    counts = {"test_few": 1, "models/test_layers": 2, "test_many": 12, "test_some": 3, "test_embed": 1}
    items = [item(stem, f"test_{i}") for i in range(12) for stem, count in counts.items() if i < count]
    for one in items:
        marks = []
        one.add_marker, one.get_closest_marker = marks.append, lambda name, m=marks: m[0] if m else None
        del one.callspec
    given = list(items)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    sharing.together(items, [])
    assert items == given
    sharing.long_ones_first(items)
    order = ["models/layers", "tests/many", "tests/embed", "tests/some", "tests/few"]
    assert list(dict.fromkeys(i.get_closest_marker("xdist_group").args[0] for i in items)) == order
    for stem in counts:  # tests of a file keep their order
        mine = [i for i in items if i.path == Path(f"tests/{stem}.py")]
        assert mine == [i for i in given if i in mine]


def test_only_where_no_test_wants_all_passes_programs_are_compiled_plainly(monkeypatch):
    for marks, given, wanted in (
        ("not aot and not optimized", "", sharing.PLAIN),
        ("not optimized", "--xla_cpu_x=1", f"--xla_cpu_x=1 {sharing.PLAIN}"),
        ("not optimized", "--xla_backend_extra_options=y", "--xla_backend_extra_options=y"),
        ("optimized and not aot", "", ""),
        ("not aot", "", ""),
        ("", "", ""),
    ):
        monkeypatch.setenv("XLA_FLAGS", given)
        monkeypatch.setenv(sharing.FEW_PASSES, "")  # so that it is put back
        monkeypatch.delenv(sharing.FEW_PASSES)
        sharing.compile_plainly(marks)
        assert os.environ["XLA_FLAGS"] == wanted
        assert (sharing.FEW_PASSES in os.environ) == ("not optimized" in marks)  # for processes that tests start


def test_a_share_that_is_no_number(monkeypatch):
    monkeypatch.setenv("TEST_SHARE", "some")
    with pytest.raises(ValueError, match=r"TEST_SHARE must be a positive integer .*, got 'some'"):
        thin([])


def test_processes_keep_their_programs_apart(monkeypatch, tmp_path):
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv(sharing.CACHE, str(tmp_path))
    try:
        sharing.keep_apart("")
        assert os.environ[sharing.CACHE] == str(tmp_path)
        for _ in range(2):
            sharing.keep_apart("gw1")
            assert jax.config.jax_compilation_cache_dir == os.environ[sharing.CACHE] == str(tmp_path / "gw1")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    monkeypatch.delenv(sharing.CACHE)
    sharing.keep_apart("gw2")
    assert sharing.CACHE not in os.environ


def test_programs_of_few_passes_are_never_served_to_a_test_that_wants_all(monkeypatch):
    if jax.default_backend() != "cpu":
        pytest.skip("there is a GPU, and all tests are compiled as users do it")
    forgotten = []
    monkeypatch.setattr(sharing.jax, "clear_caches", lambda: forgotten.append(1))
    item = {
        mark: SimpleNamespace(get_closest_marker=lambda name, mark=mark: name == mark or None)
        for mark in ("optimized", "aot", "smoke")
    }
    before = jax.config.read("jax_disable_most_optimizations")
    try:
        for mark, few, times in (("smoke", True, 0), ("optimized", False, 1), ("aot", False, 1), ("smoke", True, 2)):
            if mark == "smoke" and not times:
                jax.config.update("jax_disable_most_optimizations", True)
            sharing.compile_for(item[mark])
            assert (jax.config.read("jax_disable_most_optimizations"), len(forgotten)) == (few, times), mark
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
        monkeypatch.undo()
        jax.clear_caches()


def test_the_installed_xdist_can_name_a_group_in_the_id_of_a_test(request):
    """It writes `id@group` where pytest 9.2 does not look: then every process gets something of every group."""
    remote = pytest.importorskip("xdist.remote")
    item = pytest.Function.from_parent(request.node.parent, name="test_x", callobj=lambda: None)
    item.add_marker(pytest.mark.xdist_group("some"))
    config = SimpleNamespace(getvalue=lambda name: name == "loadgroup")
    remote.WorkerInteractor.pytest_collection_modifyitems(None, config, [item])
    assert item.nodeid.endswith("::test_x@some")
