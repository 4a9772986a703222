"""`docs/port_a_model.md` does what it says: its files are written, its commands run, its output is theirs."""

import ast
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from scripts._bisection import command

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "port_a_model.md"
BLOCK = re.compile(r"```(\w+)(?: (\S+))?\n(.*?)```\n", re.DOTALL)
NUMBER = re.compile(r"[-+]?\d[\d.,]*(e[-+]?\d+)?")


def masked(text):
    """Lines without their numbers, which depend on the processor, and without the padding around them."""
    return [" ".join(NUMBER.sub("#", line).replace("< #", "#").split()) for line in text.strip().splitlines()]


def same(line, found):
    """True if a line of the page stands for a printed one; dots at its end stand for the rest."""
    return found.startswith(line.removesuffix("...")) if line.endswith("...") else found == line


def run(line, capsys):
    """What a command of the page prints; ours run in this process, which spares compiling everything again."""
    words = shlex.split(line)
    if words[:2] == ["python", "scripts/bisect.py"]:
        assert command.main(words[2:]) in (0, 1)
        return capsys.readouterr().out
    words = [sys.executable, *words[1:]] if words[0] == "python" else words
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def test_tutorial(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("examples", "jaxattn"):
        (tmp_path / name).symlink_to(ROOT / name)
    printed, checked, written = "", 0, set()
    for kind, what, content in BLOCK.findall(PAGE.read_text("utf-8")):
        if kind == "bash" and (what != "torch" or find_spec("torch")):
            printed = "".join(run(line, capsys) for line in content.splitlines())
        elif kind == "python" and what:  # later definitions replace earlier ones
            with (tmp_path / what).open("a") as f:
                f.write(f"\n\n{content}" if what in written else content)
            written.add(what)
        elif kind == "toml":
            assert (tmp_path / what).read_text() == content
            checked += 1
        elif kind == "text":
            found = masked(printed)
            assert [line for line in masked(content) if not any(same(line, f) for f in found)] == []
            checked += 1
    assert checked == 6
    assert "no module diverges" in printed


def definitions(source):
    return {node.name: ast.dump(strip(node)) for node in ast.parse(source).body if hasattr(node, "name")}


def strip(node):
    """The definition without docstrings."""
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(part) and len(part.body) > 1:
            part.body = part.body[1:]
    return node


def test_tutorial_ends_with_the_example():
    source = "\n\n".join(c for k, w, c in BLOCK.findall(PAGE.read_text("utf-8")) if k == "python" and w)
    assert definitions(source) == definitions((ROOT / "examples/llama/llama_flax.py").read_text("utf-8"))


def test_stored_captures_are_small():
    stored = [p for p in (ROOT / "examples" / "llama").iterdir() if p.suffix != ".py" and p.is_file()]
    assert {p.name for p in stored} == {"golden-bfloat16.safetensors", "golden-float32.safetensors", "weights.npz"}
    assert sum(p.stat().st_size for p in stored) < 1 << 19
