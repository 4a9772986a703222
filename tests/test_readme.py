"""What the pages say is true: the example runs, links lead somewhere, generated tables are those of the code."""

import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

from jaxattn import MECHANISMS, models
from parity import captures
from scripts import _tables, evidence, support_table, timing_table, turboquant_quality

ROOT = Path(__file__).resolve().parents[1]
ANSWER = "print(y.dtype, bool(jnp.isfinite(y).all()))"
PAGES = sorted(p.relative_to(ROOT).as_posix() for p in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")))


def examples(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)


def test_example_of_the_readme_is_short():
    (example,) = examples("README.md")
    assert len([line for line in example.splitlines() if line]) <= 11


def test_example_of_the_readme_runs_alone():
    program = "\n".join([*examples("README.md"), ANSWER])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "bfloat16 True\n"), done.stderr


@pytest.mark.smoke  # on every page, whatever the share
@pytest.mark.parametrize("page", ["models.md", *(Path(m.docs).name for m in MECHANISMS)])
def test_examples_run(page, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {"__name__": page}
    exec("\n".join([*examples(f"docs/{page}"), ANSWER]), names)
    assert capsys.readouterr().out == "bfloat16 True\n"
    if page == "paged_attention.md":  # the op, its configurations, the layer, and the layer in Linen
        assert len(examples(f"docs/{page}")) == 4
        assert (names["y"].shape, sorted(names["variables"])) == ((32, 256), ["kv_pages", "params"])


TINY = "parity/data/models/deepseek_v2_lite"


def test_examples_of_quantized_layers_run(capsys):
    names: dict[str, Any] = {}
    exec("\n".join(examples("docs/quantized_linear.md")), names)
    _, converted, packed = capsys.readouterr().out.splitlines()
    assert (names["y"].shape, set(names["layer"].tensors)) == ((4, 128), {"qweight", "qzeros", "scales"})
    assert converted == "{'0.down': 'gptq', '0.up': 'fp8_channel', '1.down': 'gptq'}"
    assert packed == "{'0.down': None, '1.down': None}"


def test_example_of_embeddings_runs(monkeypatch):
    monkeypatch.chdir(ROOT)
    (program,) = examples("docs/embed.md")
    assert '"CHECKPOINT"' in program and "capacity=512" in program
    names: dict[str, Any] = {}
    exec(program.replace('"CHECKPOINT"', f'"{TINY}"').replace("capacity=512", "capacity=16"), names)
    assert names["vectors"].shape == (2, names["embed"].model.config.features)


def test_example_of_the_shipped_captures_runs(capsys):
    (program,) = examples("parity/data/README.md")
    exec(program, {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(captures.load([captures.SHIPPED])) > 100
    assert any(line.startswith("quant/nvfp4_hard ") and "'vllm': '0.26.0'" in line for line in lines)


def test_example_of_captures_runs():
    program = examples("docs/captures.md")[0]
    assert '"more/captures"' in program
    names: dict[str, Any] = {}
    exec(program.replace('"more/captures"', f'"{ROOT}/parity/data/models"'), names)
    assert {"name", "params", "inputs", "outputs"} <= set(dir(names["found"][0]))


def test_example_of_the_hook_runs(tmp_path):
    (program,) = examples("docs/capture.md")
    golden = tmp_path / "golden.safetensors"
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    exec(program.replace("golden.safetensors", str(golden)), {"model": model, "tokens": jnp.ones((4, 2))})
    (call,) = captures.read(golden)
    assert [x.shape for x in call.outputs.values()] == [(4, 3)]


def test_example_of_the_largest_model_fits_its_functions(monkeypatch):
    """The checkpoint is too large: what would run is only called with what it takes."""
    done = []

    def only_bind(owner, name):
        takes = inspect.signature(getattr(owner, name))

        def bound(*args, **options):
            takes.bind(*args, **options)
            done.append(name)

        monkeypatch.setattr(owner, name, bound)

    only_bind(models.DeepseekV4ForCausalLM, "from_pretrained")
    only_bind(models, "generate")
    only_bind(models, "generate_with_drafts")
    (program,) = examples("docs/models_v4.md")
    exec(program, {})
    assert done == ["from_pretrained", "generate", "generate_with_drafts"]


def test_no_example_is_left_out():
    """Pages with examples that no test here, in `test_tutorial` or in `test_capture_suites` runs."""
    run = {f"docs/{Path(m.docs).name}" for m in MECHANISMS} | {"README.md", "docs/models.md", "docs/models_v4.md"}
    run |= {f"docs/{name}.md" for name in ("quantized_linear", "embed", "capture", "captures", "port_a_model")}
    found = {page for page in [*PAGES, "parity/data/README.md", "docs/results/README.md"] if examples(page)}
    assert found - run == {"parity/data/README.md"}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text("utf-8"))
    local = [t.partition("#")[0] for t in targets if not t.startswith(("https://", "#"))]
    assert [t for t in local if not ((ROOT / page).parent / t).exists()] == []


def missing_headings(page, root=ROOT):
    """Links of a page to a heading that does not exist."""
    for link in re.findall(r"\]\(([^)\s]*#[^)\s]+)\)", (root / page).read_text("utf-8")):
        path, _, name = link.partition("#")
        target = (root / page).parent / path if path else root / page
        if not path.startswith("https://") and target.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.MULTILINE)
            if name not in [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings]:
                yield link


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_headings(page):
    assert list(missing_headings(page)) == []


def test_a_missing_heading_is_found(tmp_path):
    (tmp_path / "a.md").write_text("# One, two\n[a](#one-two) [b](#two) [c](https://x.org/#y)\n", "utf-8")
    assert list(missing_headings("a.md", tmp_path)) == ["#two"]


def uneven_rows(text):
    """Lines of tables that have another number of cells than the line above: a bar in a cell must be `&#124;`."""
    plain = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for table in re.findall(r"(?:^\|.*\n)+", f"{plain}\n", re.MULTILINE):
        rows = table.splitlines()
        yield from (row for row in rows if row.count("|") != rows[0].count("|"))


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_even(page):
    assert list(uneven_rows((ROOT / page).read_text("utf-8"))) == []


def test_an_uneven_table_is_found():
    assert list(uneven_rows("| a | b |\n| --- | --- |\n| 1 | `2 | 3` |\n\n| c |\n")) == ["| 1 | `2 | 3` |"]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_every_mechanism_is_named(page):
    text = (ROOT / page).read_text("utf-8")
    assert [m.name for m in MECHANISMS if f"{Path(m.docs).name})" not in text] == []


# ---------------------------------------------------------------- generated tables
@pytest.fixture
def copy(tmp_path):
    """The pages alone, in a folder that may be written."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


@pytest.mark.parametrize("script", [support_table, evidence, timing_table], ids=lambda s: s.__name__.rpartition(".")[2])
def test_generated_tables_are_up_to_date(script):
    assert script.main(["--check"]) == 0


@pytest.mark.parametrize(
    ("script", "name", "written", "stale"),
    [
        (support_table, "README.md", "| mosaic: 18 of", "| mosaic: 17 of"),
        (evidence, "docs/mhc_post.md", "`dsv4/mhc_*`", "`dsv4/*`"),
    ],
    ids=["support_table", "evidence"],
)
def test_a_stale_table_is_found_and_mended(copy, capsys, script, name, written, stale):
    page = copy / name
    page.write_text(page.read_text("utf-8").replace(written, stale), "utf-8")
    assert script.main(["--check"], copy) == 1
    assert name in capsys.readouterr().out
    assert script.main([], copy) == 0
    assert script.main(["--check"], copy) == 0
    assert page.read_text("utf-8") == (ROOT / name).read_text("utf-8")


@pytest.mark.parametrize("preset", ["k8v4", "3bit_nc"])
def test_rows_of_the_quality_table_are_those_of_the_code(preset):
    """The whole table takes longer: python scripts/turboquant_quality.py --check."""
    assert turboquant_quality.row(preset, 64, False) in turboquant_quality.PAGE.read_text("utf-8").splitlines()


def test_a_page_without_markers_raises(copy):
    (copy / "README.md").write_text("no table here\n", "utf-8")
    with pytest.raises(ValueError, match=r"README\.md must hold these two lines once, in this order"):
        support_table.main([], copy)


@pytest.mark.parametrize("text", ["{end}{begin}", "{begin}{begin}{end}", "{begin}"])
def test_markers_in_disorder_raise(text):
    begin, end = support_table.BEGIN, support_table.END
    with pytest.raises(ValueError, match="once, in this order"):
        _tables.insert(text.format(begin=begin, end=end), "", "README.md", begin, end)
