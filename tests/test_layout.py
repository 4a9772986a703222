"""The shape of the repository: stems, import direction, sizes, private parts, side effects."""

import ast
import dataclasses
import importlib
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import jaxattn
from jaxattn import registry
from jaxattn._mechanism import REFERENCE
from scripts import evidence, support_table, timing_table

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("jaxattn", "pallas_kernels", "parity", "scripts", "tests", "examples")
LIBRARY = ("jaxattn", "pallas_kernels")
MOSAIC = "pallas_kernels/_mosaic.py"
AOT = "pallas_kernels/_aot.py"
MODULE, LONG = 400, 600  # lines; kernels and tests may be long
NUMERIC = {"jax", "jaxtyping", "ml_dtypes", "numpy"}
ALLOWED = (
    ("pallas_kernels/", NUMERIC | {"pallas_kernels"}),
    ("jaxattn/nn/", NUMERIC | {"pallas_kernels", "jaxattn", "flax"}),
    ("jaxattn/models/", NUMERIC | {"pallas_kernels", "jaxattn", "flax", "rich"}),
    ("jaxattn/", NUMERIC | {"pallas_kernels", "jaxattn"}),
)
FOREIGN = {"torch", "transformers", "triton", "vllm"}
TOLERANCES = {"abs_tol", "atol", "rel_tol", "rtol", "tol", "tolerance"}
COMPARISONS = {"allclose": 2, "approx": 1, "assert_allclose": 2, "isclose": 2}  # name -> tolerances to give
CRUDE = ("assert_almost_equal", "assert_array_almost_equal", "assertAlmostEqual")
SECTIONS = {  # of every mechanism's page, in this order -> how a line of it begins
    "Formula": ("$$", "|", "```", "1."),
    "Arguments": ("|",),
    "Example": ("```python",),
    "Edges": ("|",),
    "What runs where": (support_table.BEGIN,),
    "Known differences from vLLM": ("|", "- "),
    "Evidence": (evidence.BEGIN,),
}
records = pytest.mark.parametrize("record", registry.MECHANISMS, ids=lambda m: m.name)


def sources(*folders):
    paths = sorted(p.relative_to(ROOT).as_posix() for f in folders for p in (ROOT / f).rglob("*.py"))
    assert paths, f"no Python files in {folders}"
    return paths


def tree(path):
    return ast.parse((ROOT / path).read_text("utf-8"), path)


def imports(module):
    """(line, full module name) of every import in a parsed file, also inside functions."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def wrong_imports(path, module):
    """`path:line imports x` for each import that points the wrong way."""
    allowed = next((names for prefix, names in ALLOWED if path.startswith(prefix)), None)
    capture = Path(path).name.startswith(("capture_", "_capture")) or path.startswith("scripts/_bench/peers/")
    for line, name in imports(module):
        package = name.partition(".")[0]
        if allowed is not None:
            wrong = package not in allowed | sys.stdlib_module_names
        else:
            wrong = (package in FOREIGN and not capture) or (path.startswith("parity/") and package == "tests")
        if wrong:
            yield f"{path}:{line} imports {name}"


def environment_reads(path, module):
    """`path:line` for each use of the environment; compiling hands the whole of it to its subprocess, as a copy."""
    copies = [
        call.args[0]
        for call in ast.walk(module)
        if path == AOT and isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "dict"
        if call.args
    ]
    for node in ast.walk(module):
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "name", None)
        if name in ("environ", "environb", "getenv", "getenvb") and node not in copies:
            yield f"{path}:{node.lineno}"


def literal_tolerances(path, module):
    """`path:line` for each comparison with a tolerance that is a number in the code, or the function's default."""
    for node in ast.walk(module):
        if not isinstance(node, ast.Call):
            continue
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        names = TOLERANCES | ({"abs", "rel"} if function == "approx" else set())
        given = {k.arg: k.value for k in node.keywords if k.arg in names}
        if function in CRUDE or len(given) < COMPARISONS.get(function, 0) or any(map(is_number, given.values())):
            yield f"{path}:{node.lineno}"


def is_number(value):
    """True for an expression made of numbers alone, zero excepted."""
    parts = list(ast.walk(value))
    return not any(isinstance(x, ast.Name) for x in parts) and any(
        isinstance(x, ast.Constant) and x.value for x in parts
    )


# ---------------------------------------------------------------- stems
@records
def test_one_stem_in_every_layer(record):
    stem = record.name
    assert record.op.__name__ == stem
    assert record.op.__module__ == f"jaxattn.ops.{stem}"
    assert record.docs == f"docs/{stem}.md"
    expected = [f"jaxattn/ops/{stem}.py", f"tests/ops/test_{stem}.py", record.docs]
    expected += [f"parity/cases/{stem}.py"] if record.captures else []
    assert [path for path in expected if not (ROOT / path).is_file()] == []
    if record.kernels:
        assert (ROOT / f"pallas_kernels/{stem}.py").is_file() or (ROOT / f"pallas_kernels/{stem}").is_dir()


def page_faults(record, page):
    """What the text of a mechanism's page lacks: its sections once and in order, each with what it is for."""
    timed = record.kernels or any("bench" in case.tags for case in record.cases)
    sections = SECTIONS | ({"Speed": (timing_table.BEGIN,)} if timed else {})
    titles = [line[3:] for line in page.splitlines() if line.startswith("## ")]
    if [title for title in titles if title in sections] != list(sections):
        yield f"needs the sections {', '.join(sections)}, once and in this order; has {', '.join(titles)}"
        return
    for title, begins in sections.items():
        text = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        if not any(line.startswith(begins) for line in text.splitlines()):
            yield f"section {title} needs a line that begins with {' or '.join(begins)}"


@records
def test_page_has_the_agreed_sections(record):
    assert list(page_faults(record, (ROOT / record.docs).read_text("utf-8"))) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("## Edges\n", "## Corners\n", "needs the sections"),
        ("## Formula\n", "## Formula\n\n## Formula\n", "needs the sections"),
        ("```python\n", "```text\n", "section Example"),
        (support_table.BEGIN, "", "section What runs where"),
        (evidence.BEGIN, "", "section Evidence"),
        ("## Speed\n", "", "needs the sections"),
    ],
)
def test_a_page_without_them_is_found(old, new, fault):
    record = registry.find("mhc_post")
    page = (ROOT / record.docs).read_text("utf-8")
    assert old in page
    assert [found[: len(fault)] for found in page_faults(record, page.replace(old, new))] == [fault]


@pytest.mark.parametrize("folder", ["jaxattn/ops", "pallas_kernels", "parity/cases"])
def test_no_file_without_a_mechanism(folder):
    names = {p.stem for p in (ROOT / folder).iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()}
    stems = {m.name for m in registry.MECHANISMS}
    assert {name for name in names if not name.startswith("_")} - stems == set()


# ---------------------------------------------------------------- the registry
def test_registry_is_a_literal_tuple_of_unique_names():
    assigned = [n for n in tree("jaxattn/registry.py").body if isinstance(n, ast.AnnAssign | ast.Assign)]
    value = next(n.value for n in assigned if ast.unparse(getattr(n, "target", n)).startswith("MECHANISMS"))
    assert isinstance(value, ast.Tuple)
    names = [m.name for m in registry.MECHANISMS]
    assert len(names) == len(set(names)) == len(value.elts)


@records
def test_record_is_complete(record):
    assert record.source
    assert not record.kernels or (record.captures and record.support)
    assert set(record.kernels) <= {"mosaic", "decoded", "triton"}
    labels = [label for label, _ in record.support]
    assert len(labels) == len(set(labels))
    names = [case.name for case in record.cases]
    assert len(names) == len(set(names))
    assert {tag for case in record.cases for tag in case.tags} <= {"smoke", "full", "bench", "eight_bit", "parity"}
    assert any("smoke" in case.tags for case in record.cases)
    if record.module:
        module, _, name = record.module.partition(":")
        assert inspect.isclass(getattr(importlib.import_module(module), name))


@records
def test_op_is_public_and_takes_the_usual_options(record):
    assert getattr(jaxattn, record.name) is record.op
    assert record.name in jaxattn.__all__
    options = inspect.signature(record.op).parameters
    for name in ("implementation", "config"):
        assert options[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert options[name].default is None
    assert not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in options.values())


@records
def test_kernels_have_frozen_hashable_configs(record):
    for name, kernel in record.kernels.items():
        _, args = next((label, a) for label, a in record.support if kernel.why_not(**record.prepare(**a)) is None)
        prepared = record.prepare(**args)
        configs = [kernel.default_config(**prepared), *kernel.configs(**prepared)]
        assert len(configs) > 1, name
        for config in configs:
            assert dataclasses.is_dataclass(config)
            hash(config)
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(config, next((f.name for f in dataclasses.fields(config)), "rows"), None)


def test_reference_is_no_kernel():
    assert not any(REFERENCE in m.kernels for m in registry.MECHANISMS)


# ---------------------------------------------------------------- what files may hold
def test_imports_point_one_way():
    assert [e for path in sources(*FOLDERS) for e in wrong_imports(path, tree(path))] == []


def test_one_file_knows_the_private_parts_of_jax():
    private = "jax" + "._src"
    found = {
        path
        for path in sources(*FOLDERS)
        for _, name in imports(tree(path))
        if name == private or name.startswith(f"{private}.")
    }
    assert found == {MOSAIC}
    assert [path for path in sources(*FOLDERS) if path != MOSAIC and private in (ROOT / path).read_text("utf-8")] == []


def test_files_stay_short():
    def limit(path):
        name = Path(path).name
        table = path == "parity/tolerances.py"  # one table by rule, and mostly derivations
        return LONG if path.startswith("pallas_kernels/") or name.startswith("test_") or table else MODULE

    lengths = {path: len((ROOT / path).read_text("utf-8").splitlines()) for path in sources(*FOLDERS)}
    assert {path: n for path, n in lengths.items() if n > limit(path)} == {}


def test_library_reads_no_environment():
    assert [e for path in sources(*LIBRARY) for e in environment_reads(path, tree(path))] == []


def test_tolerances_stand_in_one_table():
    paths = [path for path in sources(*FOLDERS) if path != "parity/tolerances.py"]
    assert [e for path in paths for e in literal_tolerances(path, tree(path))] == []


def test_tuned_configurations_are_data():
    data = {p for f in LIBRARY for p in (ROOT / f).rglob("*") if p.suffix in (".json", ".jsonl", ".csv", ".toml")}
    assert [p for p in data if not p.is_relative_to(ROOT / "pallas_kernels/tuned")] == []
    for path in sources("pallas_kernels"):
        for node in ast.walk(tree(path)):
            assert not isinstance(node, ast.Dict) or len(node.keys) <= 20, f"{path}:{node.lineno} is a table"


@pytest.mark.parametrize(
    ("check", "path", "source", "found"),
    [
        (wrong_imports, "pallas_kernels/x.py", "import jaxattn.ops", True),
        (wrong_imports, "pallas_kernels/x.py", "def f():\n    from flax import nnx", True),
        (wrong_imports, "jaxattn/ops/x.py", "from flax import nnx", True),
        (wrong_imports, "jaxattn/nn/x.py", "from flax import nnx", False),
        (wrong_imports, "jaxattn/ops/x.py", "import parity.judge", True),
        (wrong_imports, "parity/x.py", "import torch", True),
        (wrong_imports, "scripts/capture_x.py", "import torch, vllm", False),
        (wrong_imports, "scripts/_bench/peers/x.py", "import torch, vllm", False),
        (wrong_imports, "scripts/_bench/x.py", "import torch", True),
        (environment_reads, "jaxattn/x.py", "import os\nos.environ.get('A')", True),
        (environment_reads, "jaxattn/x.py", "from os import getenv", True),
        (environment_reads, AOT, "import os\nenv = dict(os.environ, A='1')", False),
        (environment_reads, AOT, "import os\nenv = os.environ['A']", True),
        (literal_tolerances, "tests/x.py", "np.testing.assert_allclose(a, b, rtol=1e-3, atol=0)", True),
        (literal_tolerances, "tests/x.py", "np.testing.assert_allclose(a, b)", True),
        (literal_tolerances, "tests/x.py", "assert x == pytest.approx(1)", True),
        (literal_tolerances, "tests/x.py", "assert x == pytest.approx(1, abs=2 * 1e-3)", True),
        (literal_tolerances, "tests/x.py", "assert x == pytest.approx(1, abs=2 * eps)", False),
        (literal_tolerances, "tests/x.py", "np.testing.assert_allclose(a, b, rtol=bound, atol=0)", False),
    ],
)
def test_the_checks_can_fail(check, path, source, found):
    assert bool(list(check(path, ast.parse(source)))) is found


# ---------------------------------------------------------------- importing and packaging
IMPORT = """
import os, sys, warnings
import jax
def state():
    return dict(os.environ), list(warnings.filters), dict(jax.config.values)
before = state()
import jaxattn
assert state() == before
assert not {"flax", "torch", "vllm", "triton", "parity"} & set(sys.modules)
import jaxattn.nn
assert dict(jax.config.values) == before[2]
"""


def test_importing_has_no_side_effects(monkeypatch):
    # a platform that does not exist: initialising a backend would raise
    monkeypatch.setenv("JAX_PLATFORMS", "nowhere")
    done = subprocess.run([sys.executable, "-c", IMPORT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_version_stands_in_one_form():
    assert jaxattn.__version__ == project()["version"]
    assert f"## [{jaxattn.__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_tested_versions_satisfy_the_declared_ones():
    pins = {}
    for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines():
        if not line.startswith("#"):
            name, _, version = line.partition("==")
            pins[name.lower().replace("_", "-")] = version
    extras = project()["optional-dependencies"]
    for text in project()["dependencies"] + extras["test"] + extras["cuda12"] + extras["cuda13"]:
        wanted = Requirement(text)
        pinned = pins[wanted.name.lower().replace("_", "-")]
        assert pinned in wanted.specifier, f"{text} is pinned to {pinned}"


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
