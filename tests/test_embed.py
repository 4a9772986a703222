"""Offline embeddings: options, values, and an output that survives a kill."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxattn.models.pooling import Embedder
from jaxattn.nn import PagedAttention, PagedBatch, PagedKVCache
from parity import tolerances
from scripts import _embed, embed

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "parity" / "data" / "models" / "deepseek_v2_lite"
PROMPTS = [[5, 4, 3, 2, 1, 6, 7, 8, 9, 10, 11], [90], [2, 3, 5, 7, 11, 13]]


class Decoder(nnx.Module):
    """Embedding and one layer of attention."""

    def __init__(self):
        rngs = nnx.Rngs(3)
        self.embed = nnx.Param(jax.random.normal(rngs.params(), (128, 16)))
        self.attn = PagedAttention(16, 2, 1, 8, dtype="float32", rngs=rngs)

    def __call__(self, tokens, cache, batch, rows=None):
        x = self.embed[...][tokens]
        x = x + self.attn(x, cache, batch)
        return x if rows is None else x[rows]


class Model(nnx.Module):
    """What an `Embedder` needs; what it must not read is NaN."""

    def __init__(self):
        self.model = Decoder()
        self.config = SimpleNamespace(features=16, vocab_size=128, max_positions=128)

    def make_cache(self, requests, capacity):
        pages = -(-capacity // 4)
        cache = PagedKVCache(requests * pages, 4, 1, 8, "float32")
        for pool in (cache.k, cache.v):
            pool[...] = jnp.full_like(pool[...], jnp.nan)
        return cache, jnp.arange(requests * pages, dtype=jnp.int32)[::-1].reshape(requests, pages)

    def make_batch(self, tables, lengths, query_start, *, tokens):
        return PagedBatch.from_lengths(tables, lengths, query_start, tokens=tokens, page=4)


@pytest.fixture(scope="module")
def model():
    return Model()


@nnx.jit
def states(model, prompt, n):
    cache, tables = model.make_cache(1, 64)
    batch = model.make_batch(tables, n[None], jnp.stack([jnp.int32(0), n]), tokens=len(prompt))
    return model.model(prompt, cache, batch)


# ---------------------------------------------------------------- values
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_pooled_states_are_the_models(model, pooling):
    embedder = Embedder(model, 4, 16, pooling=pooling, chunk=5)  # prompts cross steps; one place stays empty
    got = embedder(PROMPTS, normalize=False)
    padded = [
        np.asarray(states(model, jnp.array(p + [0] * (11 - len(p)), jnp.int32), jnp.int32(len(p)))) for p in PROMPTS
    ]
    own = [s[: len(p)] for s, p in zip(padded, PROMPTS, strict=True)]
    expected = [s[-1] if pooling == "last" else s.mean(0) for s in own]
    bound = tolerances.SAME_SUMS * np.abs(expected).max()
    np.testing.assert_allclose(got, expected, rtol=0, atol=bound)
    again = embedder(PROMPTS[::-1])[::-1]  # a used cache leaves nothing behind
    np.testing.assert_allclose(again, got / np.linalg.norm(got, axis=-1, keepdims=True), rtol=0, atol=bound)


@pytest.mark.parametrize(
    ("options", "prompts", "said"),
    [
        ({"pooling": "max"}, None, "embed: pooling must be last or mean, got 'max'"),
        ({"capacity": 999}, None, "embed: capacity must stay within the model's 128 positions, got 999"),
        ({}, [[1]] * 3, "embed: at most 2 prompts are required, got 3"),
        ({}, [[1] * 9], "embed: prompts must have at most 8 tokens, got 9"),
    ],
)
def test_embedder_messages(options, prompts, said):
    model = SimpleNamespace(config=SimpleNamespace(max_positions=128, vocab_size=50))
    with pytest.raises(ValueError, match=re.escape(said)):
        embedder = Embedder(model, 2, **{"capacity": 8} | options)
        embedder(prompts)


# ---------------------------------------------------------------- options
def parse(*more):
    return _embed.parse(["--model", "m", "--input", "i", "--output", "o", *more], "")


def test_engine_and_script_options_are_apart():
    engine, script = parse("--dtype", "float32", "--max-num-seqs", "3", "--no-normalize")
    assert engine == _embed.EngineOptions(model=Path("m"), dtype="float32", max_num_seqs=3)
    assert script == _embed.ScriptOptions(input=Path("i"), output=Path("o"), normalize=False)
    with pytest.raises(FrozenInstanceError):
        engine.dtype = "auto"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--max-model-length", "3"), "unknown option '--max-model-length'; did you mean --max-model-len?"),
        (("--poling=mean",), "unknown option '--poling=mean'; did you mean --pooling?"),
        (("--max-num", "3"), "unknown option '--max-num'; did you mean --max-num-seqs?"),
        (("--dtype", "float"), "argument --dtype: invalid choice: 'float'"),
        (("--max-num-seqs", "0"), "--max-num-seqs must be at least 1, got 0"),
        (("--max-model-len", "x"), "argument --max-model-len: invalid int value: 'x'"),
    ],
)
def test_wrong_options_are_explained(more, said):
    with pytest.raises(_embed.UsageError, match=re.escape(said)):
        parse(*more)


def test_missing_options_and_files_exit_with_2(tmp_path, capsys):
    assert embed.main(["--model", "m"]) == 2
    assert "--input" in capsys.readouterr().err
    assert embed.main(["--model", "m", "--inptu=x", "--output", "o"]) == 2  # misspelt, not missing
    assert "unknown option '--inptu=x'; did you mean --input?" in capsys.readouterr().err
    line = ["--model", "m", "--input", str(tmp_path / "none"), "--output", str(tmp_path / "o")]
    assert embed.main(line) == 2
    assert "--input must name a JSONL file, found none at" in capsys.readouterr().err
    (tmp_path / "none").write_text('{"tokens": [1]}\n')
    assert embed.main(line) == 2
    assert "config.json" in capsys.readouterr().err


# ---------------------------------------------------------------- files
class Fake:
    """An embedder whose vectors tell the prompt, and which a test can stop."""

    capacity = 6
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=100))

    def __init__(self, calls=1000):
        self.calls = calls

    def __call__(self, prompts, normalize):
        self.calls -= 1
        if self.calls < 0:
            raise KeyboardInterrupt
        x = np.array([[p[0], len(p)] for p in prompts], np.float32)
        return x / np.linalg.norm(x, axis=-1, keepdims=True) if normalize else x


def write(path, count=20):
    lines = [json.dumps({"id": f"r{i}", "tokens": [i, *range(i % 4)]}) for i in range(count)]
    path.write_text("\n".join(lines) + "\n")


def options(tmp_path, *more):
    return ["--model", "m", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out"), *more]


def results(tmp_path):
    return [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]


def test_stopped_run_goes_on_where_it_was(tmp_path, monkeypatch):
    write(tmp_path / "in")
    monkeypatch.setattr(embed, "_load", lambda engine, script: Fake())
    whole = options(tmp_path, "--max-num-seqs", "3")
    assert embed.main(whole) == 0
    expected = (tmp_path / "out").read_bytes()
    line = 1 + expected.index(b"\n")
    for cut in (0, 1, line - 1, line, line + 20, len(expected) // 2, len(expected) - 1):  # killed at any byte
        (tmp_path / "out").write_bytes(expected[:cut])
        assert embed.main(whole) == 0
        assert (tmp_path / "out").read_bytes() == expected
    (tmp_path / "out").unlink()
    monkeypatch.setattr(embed, "_load", lambda engine, script: Fake(2))
    with pytest.raises(KeyboardInterrupt):
        embed.main(whole)
    assert [r["index"] for r in results(tmp_path)] == list(range(6))
    monkeypatch.setattr(embed, "_load", lambda engine, script: Fake(5))
    assert embed.main(whole) == 0
    assert (tmp_path / "out").read_bytes() == expected
    monkeypatch.setattr(embed, "_load", pytest.fail)  # nothing left: no model is loaded
    assert embed.main(whole) == 0


def test_lines_with_errors_are_results_too(tmp_path, monkeypatch, capsys):
    bad = {
        '{"tokens": []}': "'tokens' must be a list of at least one token id",
        '{"tokens": [1.5]}': "'tokens' must be a list of at least one token id",
        '{"tokens": [1, 200]}': "'tokens' must be ids from 0 to 99, found 200",
        '{"tokens": [1, 2, 3, 4, 5, 6, 7]}': "'tokens' must have at most 6 tokens, found 7",
        '{"token": [1]}': "either 'tokens' or 'text' is required, found token",
        '{"tokens": [1], "text": "a"}': "either 'tokens' or 'text' is required, found tokens, text",
        '{"text": 3}': "'text' must be a string, found int",
        "[1]": "a JSON object is required, found list",
        "{": "Expecting property name enclosed in double quotes",
    }
    (tmp_path / "in").write_text("\n".join([*bad, "", '{"tokens": [7, 1], "id": "good"}']))
    monkeypatch.setattr(embed, "_load", lambda engine, script: Fake())
    assert embed.main(options(tmp_path, "--no-normalize")) == 1
    assert f"{len(bad) + 1} lines, {len(bad)} with an error" in capsys.readouterr().out
    found = results(tmp_path)
    assert [said in r["error"] for r, said in zip(found, bad.values(), strict=False)] == [True] * len(bad)
    assert found[-1] == {"index": len(bad) + 1, "id": "good", "tokens": 2, "embedding": [7.0, 2.0]}


def test_score_is_the_cosine(tmp_path, monkeypatch):
    (tmp_path / "in").write_text('{"tokens_1": [3, 1], "tokens_2": [4]}\n{"tokens_1": [3]}\n')
    monkeypatch.setattr(embed, "_load", lambda engine, script: Fake())
    assert embed.main(options(tmp_path, "--task", "score", "--no-normalize")) == 1
    good, bad = results(tmp_path)
    a, b = np.array([3, 2]), np.array([4, 1])
    expected = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    assert good["score"] == pytest.approx(expected, rel=tolerances.SAME_SUMS)
    assert bad["error"] == "either 'tokens_2' or 'text_2' is required, found tokens_1"


def test_another_runs_output_is_not_continued(tmp_path, monkeypatch, capsys):
    write(tmp_path / "in", 3)
    monkeypatch.setattr(embed, "_load", lambda engine, script: Fake())
    assert embed.main(options(tmp_path)) == 0
    assert embed.main(options(tmp_path, "--pooling", "mean")) == 2
    assert "out was begun with pooling 'last', now 'mean'; name another or pass --overwrite" in capsys.readouterr().err
    write(tmp_path / "in", 4)
    assert embed.main(options(tmp_path)) == 2
    assert "was begun with input" in capsys.readouterr().err
    assert embed.main(options(tmp_path, "--overwrite")) == 0
    assert len(results(tmp_path)) == 4
    (tmp_path / "out").write_text("text\n")
    assert embed.main(options(tmp_path)) == 2
    assert "byte 0: a result is required, found b'text\\n'; pass --overwrite" in capsys.readouterr().err
    (tmp_path / "out.options.json").unlink()
    assert embed.main(options(tmp_path)) == 2
    assert "exists and is no output of this script" in capsys.readouterr().err


def test_text_needs_a_tokenizer(tmp_path, monkeypatch, capsys):
    (tmp_path / "in").write_text('{"text": "a word"}\n')
    monkeypatch.setattr(embed, "_load", lambda engine, script: Fake())
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert embed.main(options(tmp_path)) == 2
    assert "requests with text need the tokenizers package: pip install tokenizers" in capsys.readouterr().err
    fake = SimpleNamespace(from_file=lambda path: SimpleNamespace(encode=lambda text: SimpleNamespace(ids=[len(text)])))
    monkeypatch.setitem(sys.modules, "tokenizers", SimpleNamespace(Tokenizer=fake))
    assert embed.main(options(tmp_path)) == 2
    assert "tokenizer.json: requests with text need the checkpoint's tokenizer.json" in capsys.readouterr().err
    (tmp_path / "tokenizer.json").touch()
    line = [str(tmp_path) if x == "m" else x for x in options(tmp_path, "--overwrite", "--no-normalize")]
    assert embed.main(line) == 0
    assert results(tmp_path)[0]["embedding"] == [6.0, 1.0]


def test_killed_process_loses_nothing(tmp_path):
    """SIGKILL in the middle of a run of the tiny checkpoint, then the same command again."""
    count = 12
    write(tmp_path / "in", count)
    line = [
        sys.executable,
        "scripts/embed.py",
        *options(tmp_path, "--max-num-seqs", "1", "--max-num-batched-tokens", "4"),
    ]
    line = [str(TINY) if x == "m" else x for x in [*line, "--max-model-len", "8"]]
    out = tmp_path / "out"
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        for _ in range(6000):
            if (out.exists() and out.read_bytes().count(b"\n") >= 3) or process.poll() is not None:
                break
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
    kept = out.read_bytes()
    assert 3 <= kept.count(b"\n") < count
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{out}: {count} lines\n"), done.stderr
    assert out.read_bytes().startswith(kept[: kept.rindex(b"\n") + 1])
    assert [r["id"] for r in results(tmp_path)] == [f"r{i}" for i in range(count)]
    sizes = [np.linalg.norm(r["embedding"]) for r in results(tmp_path)]
    np.testing.assert_allclose(sizes, 1, rtol=tolerances.SAME_SUMS, atol=0)
