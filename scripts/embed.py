"""Embeddings and similarity scores of prompts in a JSONL file, by a model of `jaxattn.models`.

python scripts/embed.py --model CHECKPOINT --input requests.jsonl --output vectors.jsonl [--task score]

A request is {"tokens": [1, 2, 3]} or {"text": "..."}; for scores {"tokens_1": ..., "tokens_2": ...}. A result has
the request's line as `index`, its `id` if it has one, and `embedding` or `score`, or `error`. A run that was stopped
goes on where it was. Exit code: 0 all lines done, 1 some have an error, 2 the options or files cannot be used.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: E402

from scripts import _embed  # noqa: E402
from scripts._embed import EngineOptions, Reader, Request, ScriptOptions, UsageError, Writer  # noqa: E402

LONGEST = 4096


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    os.environ.setdefault("NPROC", "16")  # XLA's threads: interpreted warpgroups wait for each other
    errors = Console(stderr=True)
    try:
        engine, script = _embed.parse(argv, __doc__ or "")
        failed, done = run(engine, script, errors)
    except (UsageError, OSError) as e:
        errors.print(f"embed: {e}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    print(f"{script.output}: {done} lines" + (f", {failed} with an error" if failed else ""))
    return 1 if failed else 0


def run(engine: EngineOptions, script: ScriptOptions, console: Console) -> tuple[int, int]:
    """Embed what is not in the output yet; returns how many results are errors, and how many there are.

    Raises:
        UsageError: the model, input or output cannot be used.
    """
    if not script.input.is_file():
        raise UsageError(f"--input must name a JSONL file, found none at {script.input}")
    writer = Writer(script.output, _embed.origin(engine, script), script.overwrite)
    try:
        with script.input.open("rb") as lines:
            total = sum(bool(line.strip()) for line in lines)
        if len(writer.done) < total:
            embedder = _load(engine, script)
            tokenizer = engine.model / "tokenizer.json"
            reader = Reader(
                script.input, script.task, tokenizer, embedder.capacity, embedder.model.config.vocab_size
            )  # fmt: skip
            columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[speed]}"))
            with Progress(*columns, console=console, transient=True) as bar:
                task = bar.add_task("", total=total, completed=len(writer.done), speed="")
                tokens = 0
                for batch in reader.batches(engine.max_num_seqs):
                    if all(r.index in writer.done for r in batch):
                        continue
                    writer.write(_results(embedder, batch, script))
                    tokens += sum(len(p) for r in batch for p in r.prompts)
                    elapsed = bar.tasks[0].elapsed or 1.0
                    bar.update(task, completed=len(writer.done), speed=f"{tokens / elapsed:,.0f} tokens/s")
    finally:
        writer.close()
    return writer.failed, len(writer.done)


def _load(engine: EngineOptions, script: ScriptOptions) -> Any:
    from jaxattn.models import CheckpointError, load_model
    from jaxattn.models.pooling import Embedder

    try:
        model = load_model(
            engine.model, dtype=None if engine.dtype == "auto" else engine.dtype, progress=sys.stderr.isatty()
        )
        capacity = engine.max_model_len or min(model.config.max_positions, LONGEST)
        # a batch of scores has two prompts a line
        requests = engine.max_num_seqs * (2 if script.task == "score" else 1)
        return Embedder(model, requests, capacity, pooling=script.pooling, chunk=engine.max_num_batched_tokens)
    except (CheckpointError, ValueError) as e:
        raise UsageError(str(e)) from e


def _results(embedder: Any, batch: Sequence[Request], script: ScriptOptions) -> list[dict[str, Any]]:
    """A result for each request; those with an error do not reach the model."""
    prompts = [p for r in batch for p in r.prompts]
    vectors = iter(embedder(prompts, normalize=script.normalize or script.task == "score") if prompts else ())
    out = []
    for request in batch:
        result: dict[str, Any] = {"index": request.index}
        result |= {"id": request.record["id"]} if "id" in request.record else {}
        own = [next(vectors) for _ in request.prompts]
        if request.error is not None:
            result["error"] = request.error
        elif script.task == "score":
            result["score"] = float(own[0] @ own[1])
        else:
            result |= {"tokens": len(request.prompts[0]), "embedding": own[0].tolist()}
        out.append(result)
    return out


if __name__ == "__main__":
    raise SystemExit(main())
