"""Options and files of `scripts/embed.py`."""

import argparse
import dataclasses
import difflib
import hashlib
import json
import os
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal


class UsageError(ValueError):
    """Options or files that cannot be used; the message says what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Everything that decides what the model computes, and nothing else."""

    model: Path
    """Folder of a Hugging Face checkpoint."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of activations; auto = the checkpoint's."""
    max_model_len: int | None = None
    """Tokens of a prompt at most; default: the model's positions, 4096 at most."""
    max_num_seqs: int = 8
    """Prompts of a batch."""
    max_num_batched_tokens: int = 512
    """Tokens of a prefill step."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is int and value < 1:
                raise UsageError(f"--{field.name.replace('_', '-')} must be at least 1, got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScriptOptions:
    """What is done with the results."""

    input: Path
    """JSONL, one request a line."""
    output: Path
    """JSONL, one result a line, in the same order; continued where it ends."""
    task: Literal["embed", "score"] = "embed"
    """embed: a vector for `tokens` or `text`; score: cosine of `tokens_1` and `tokens_2`, or the texts."""
    pooling: Literal["last", "mean"] = "last"
    """The state of the last token, or the mean of all."""
    normalize: bool = True
    """Vectors of length 1."""
    overwrite: bool = False
    """Start anew where the output exists."""


def parse(argv: Sequence[str] | None, description: str) -> tuple[EngineOptions, ScriptOptions]:
    """Both groups of options from a command line.

    Raises:
        UsageError: an option is unknown (the message names the nearest one) or has a wrong value.
    """
    parser = argparse.ArgumentParser(
        prog="embed.py", description=description, allow_abbrev=False, exit_on_error=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    known = []
    for cls in (EngineOptions, ScriptOptions):
        group = parser.add_argument_group(cls.__name__, (cls.__doc__ or "").rstrip("."))
        known += [name for field in dataclasses.fields(cls) for name in _add(group, cls, field)]
    words = sys.argv[1:] if argv is None else list(argv)
    # first: a required option that is misspelt is unknown, not missing
    _check_known([word for word in words if word.startswith("--")], [*known, "--help"])
    try:
        found, unknown = parser.parse_known_args(words)
    except argparse.ArgumentError as e:
        raise UsageError(str(e)) from e
    except SystemExit as e:
        if e.code:
            raise UsageError("see --help") from e
        raise
    _check_known(unknown, known)
    return tuple(
        cls(**{f.name: getattr(found, f.name) for f in dataclasses.fields(cls)})
        for cls in (EngineOptions, ScriptOptions)
    )  # type: ignore[return-value]


def _check_known(words: Sequence[str], known: Sequence[str]) -> None:
    for word in words:
        name = word.partition("=")[0]
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0)
            raise UsageError(f"unknown option {word!r}; did you mean {near[0]}?")


def _add(group: Any, cls: type, field: dataclasses.Field) -> list[str]:
    """One option of a dataclass's field; returns its spellings."""
    kind = typing.get_type_hints(cls)[field.name]
    name = f"--{field.name.replace('_', '-')}"
    required = field.default is dataclasses.MISSING
    if kind is bool:
        group.add_argument(name, action=argparse.BooleanOptionalAction, default=field.default)
        return [name, name.replace("--", "--no-", 1)]
    if typing.get_origin(kind) is Literal:
        group.add_argument(name, choices=typing.get_args(kind), default=field.default, help="(default: %(default)s)")
        return [name]
    if isinstance(kind, types.UnionType):  # int | None
        kind = next(t for t in typing.get_args(kind) if t is not type(None))
    default = None if required else field.default
    group.add_argument(name, type=kind, required=required, default=default, help=None if required else "(%(default)s)")
    return [name]


# ---------------------------------------------------------------- input and output
@dataclasses.dataclass(frozen=True)
class Request:
    """One line of the input."""

    index: int
    record: dict[str, Any]
    prompts: tuple[list[int], ...]
    error: str | None = None


class Reader:
    """Requests of a JSONL file; a line that cannot be used becomes a request with an error."""

    def __init__(self, path: Path, task: str, tokenizer: Path, longest: int, vocabulary: int):
        """Nothing is read yet.

        Args:
            path: of the JSONL file.
            task: `embed` or `score`.
            tokenizer: the checkpoint's `tokenizer.json`, for requests with text.
            longest: tokens of a prompt at most.
            vocabulary: token ids are below it.
        """
        self.path, self.longest, self.vocabulary = path, longest, vocabulary
        self._tokenizer_path, self._tokenizer = tokenizer, None
        self._suffixes = ("",) if task == "embed" else ("_1", "_2")

    def batches(self, size: int) -> Iterator[list[Request]]:
        """Lines by `size`; blank lines are no requests, but count."""
        batch: list[Request] = []
        with self.path.open(encoding="utf-8") as lines:
            for i, line in enumerate(lines):
                if i and i % size == 0:
                    yield batch
                    batch = []
                if line.strip():
                    batch.append(self._request(i, line))
        yield batch

    def _request(self, index: int, line: str) -> Request:
        record: Any = {}
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                record, found = {}, record
                raise ValueError(f"a JSON object is required, found {type(found).__name__}")
            return Request(index, record, tuple(self._prompt(record, s) for s in self._suffixes))
        except UsageError:
            raise
        except ValueError as e:
            return Request(index, record, (), str(e))

    def _prompt(self, record: dict[str, Any], suffix: str) -> list[int]:
        tokens, text = record.get(f"tokens{suffix}"), record.get(f"text{suffix}")
        if (tokens is None) == (text is None):
            raise ValueError(
                f"either 'tokens{suffix}' or 'text{suffix}' is required, found {', '.join(record) or 'none'}"
            )
        if tokens is None:
            if not isinstance(text, str):
                raise ValueError(f"'text{suffix}' must be a string, found {type(text).__name__}")
            tokens = self._encode(text)
        if not isinstance(tokens, list) or not all(type(t) is int for t in tokens) or not tokens:
            raise ValueError(f"'tokens{suffix}' must be a list of at least one token id")
        if len(tokens) > self.longest:
            raise ValueError(f"'tokens{suffix}' must have at most {self.longest} tokens, found {len(tokens)}")
        if not all(0 <= t < self.vocabulary for t in tokens):
            bad = next(t for t in tokens if not 0 <= t < self.vocabulary)
            raise ValueError(f"'tokens{suffix}' must be ids from 0 to {self.vocabulary - 1}, found {bad}")
        return tokens

    def _encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            try:
                import tokenizers
            except ImportError as e:
                raise UsageError("requests with text need the tokenizers package: pip install tokenizers") from e
            if not self._tokenizer_path.is_file():
                raise UsageError(f"{self._tokenizer_path}: requests with text need the checkpoint's tokenizer.json")
            self._tokenizer = tokenizers.Tokenizer.from_file(str(self._tokenizer_path))
        return self._tokenizer.encode(text).ids


class Writer:
    """Results as JSON lines that survive a kill: whole batches reach the disk, a torn last line is taken back.

    `index` in each result is the line of the input. Beside the file stands `<output>.options.json` with what the
    results depend on, so that a run cannot continue another one's file.
    """

    def __init__(self, path: Path, origin: dict[str, Any], overwrite: bool):
        """Open the file for appending.

        Raises:
            UsageError: the file holds results of other options or another input, or a line that is no result.
        """
        self.path, self.done = path, set[int]()
        self.failed = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        options = path.with_name(path.name + ".options.json")
        if path.exists() and not overwrite:
            self._check(options, origin)
            self._recover()
        else:
            path.write_bytes(b"")
            options.write_text(json.dumps(origin, indent=1) + "\n", encoding="utf-8")
        self._file = path.open("ab")

    def write(self, results: Sequence[dict[str, Any]]) -> None:
        """Append results whose index is not there yet."""
        new = [r for r in results if r["index"] not in self.done]
        self._file.write(b"".join(json.dumps(r, allow_nan=False).encode() + b"\n" for r in new))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done |= {r["index"] for r in new}
        self.failed += sum("error" in r for r in new)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _check(self, options: Path, origin: dict[str, Any]) -> None:
        if not options.exists():
            raise UsageError(f"{self.path} exists and is no output of this script; name another or pass --overwrite")
        before = json.loads(options.read_text("utf-8"))
        differ = [f"{k} {before.get(k)!r}, now {v!r}" for k, v in origin.items() if before.get(k) != v]
        if differ:
            raise UsageError(f"{self.path} was begun with {'; '.join(differ)}; name another or pass --overwrite")

    def _recover(self) -> None:
        good = 0
        with self.path.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):  # torn by a kill
                    break
                try:
                    result = json.loads(line)
                    index = result["index"]
                except (ValueError, KeyError, TypeError) as e:
                    raise UsageError(
                        f"{self.path}: byte {good}: a result is required, found {line[:40]!r}; pass --overwrite"
                    ) from e
                self.failed += "error" in result
                self.done.add(index)
                good += len(line)
        os.truncate(self.path, good)


def origin(engine: EngineOptions, script: ScriptOptions) -> dict[str, Any]:
    """What the results depend on."""
    digest = hashlib.sha256()
    with script.input.open("rb") as f:
        while part := f.read(1 << 20):
            digest.update(part)
    values: dict[str, Any] = {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(engine).items()}
    values["model"] = str(engine.model.resolve())
    return values | {k: getattr(script, k) for k in ("task", "pooling", "normalize")} | {"input": digest.hexdigest()}
