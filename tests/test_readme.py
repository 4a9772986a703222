"""What the pages say is true: the example runs, links lead somewhere, generated tables are those of the code."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxattn import MECHANISMS
from scripts import support_table

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(p.relative_to(ROOT).as_posix() for p in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")))


def examples(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)


def test_example_of_the_readme_is_short():
    (example,) = examples("README.md")
    assert len([line for line in example.splitlines() if line]) <= 11


@pytest.mark.parametrize("page", ["README.md", *(m.docs for m in MECHANISMS)])
def test_examples_run(page):
    program = "\n".join([*examples(page), "print(y.dtype, bool(jnp.isfinite(y).all()))"])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "bfloat16 True\n"), done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text("utf-8"))
    local = [t.partition("#")[0] for t in targets if not t.startswith(("https://", "#"))]
    assert [t for t in local if not ((ROOT / page).parent / t).exists()] == []


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_every_mechanism_is_named(page):
    text = (ROOT / page).read_text("utf-8")
    assert [m.name for m in MECHANISMS if f"{Path(m.docs).name})" not in text] == []


# ---------------------------------------------------------------- support tables
@pytest.fixture
def copy(tmp_path):
    """The pages alone, in a folder that may be written."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


def test_support_tables_are_up_to_date():
    assert support_table.main(["--check"]) == 0


def test_a_stale_table_is_found_and_mended(copy, capsys):
    page = copy / "README.md"
    page.write_text(page.read_text("utf-8").replace("got 80 |", "got 81 |"), "utf-8")
    assert support_table.main(["--check"], copy) == 1
    assert "README.md" in capsys.readouterr().out
    assert support_table.main([], copy) == 0
    assert support_table.main(["--check"], copy) == 0
    assert page.read_text("utf-8") == (ROOT / "README.md").read_text("utf-8")


def test_a_page_without_markers_raises(copy):
    (copy / "README.md").write_text("no table here\n", "utf-8")
    with pytest.raises(ValueError, match=r"README\.md must hold these two lines once, in this order"):
        support_table.main([], copy)


@pytest.mark.parametrize("text", ["{end}{begin}", "{begin}{begin}{end}", "{begin}"])
def test_markers_in_disorder_raise(text):
    with pytest.raises(ValueError, match="once, in this order"):
        support_table.insert(text.format(begin=support_table.BEGIN, end=support_table.END), "", "README.md")
