"""Running a model on tokens with every module's output recorded, to be held against a capture."""

import contextlib
import functools
import hashlib
import importlib.util
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxattn.models import load_model
from jaxattn.nn import FusedMoE
from jaxattn.ops.router import gate_logits
from parity import captures, judge, tolerances
from parity.captures import Capture
from parity.tolerances import Rule

DATA = captures.SHIPPED / "models"
"""Tiny checkpoints, and the captures of them."""
LIVE = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
"""The models that the captures come from can run here."""

_jit = functools.partial(jax.jit, static_argnums=0)

type Arrays = dict[str, np.ndarray]


type Calls = Mapping[str, Capture]
"""Calls of a run by path."""


@functools.cache
def cases(family: str, directory: Path = DATA) -> Calls:
    """All cases of a checkpoint's capture.

    Raises:
        CaptureError: the file is broken, or captured another checkpoint than the one that is there.
    """
    path = directory / f"torch-{family}.safetensors"
    found = {c.case: c for c in captures.read(path)}
    files = sorted(p for p in (DATA / family).iterdir() if p.suffix in (".json", ".safetensors"))
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in files)).hexdigest()
    for case in found.values():
        if case.params["checkpoint"] != digest:
            raise captures.CaptureError(f"{path}: captured another checkpoint than {DATA / family}; capture it anew")
    return found


def run(family: str, name: str, directory: Path = DATA) -> Calls:
    """The calls of one run of a checkpoint's capture: "f32", "bf16", "f32.prompt1" and so on."""
    return captures.runs(cases(family, directory).values())[name]


def given(call: Capture) -> np.ndarray:
    """What a module works on."""
    return packed(
        next(call.inputs[name] for name in ("hidden_states", "x", "input", "input_ids") if name in call.inputs)
    )


def returned(call: Capture) -> np.ndarray:
    """What a module returns first."""
    return packed(
        next(call.outputs[name] for name in ("y", "y_0", "logits", "last_hidden_state") if name in call.outputs)
    )


def packed(x: np.ndarray) -> np.ndarray:
    """A tensor without its batch dimensions of 1."""
    while x.ndim > 2 and x.shape[0] == 1:
        x = x[0]
    return x


def capture_now(family: str, directory: Path) -> None:
    """Run transformers' model and write its capture."""
    script = captures.SHIPPED.parents[1] / "scripts" / "capture_model.py"
    command = [sys.executable, str(script), str(directory), "--family", family, "--commit", "live"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def prompts(family: str) -> list[list[int]]:
    """The prompts that the captures ran."""
    return json.loads((DATA / family / "prompts.json").read_text())


@functools.cache
def model(family: str, dtype: str) -> Any:
    """The model of a tiny checkpoint, in bfloat16, float32 or float64."""
    with jax.enable_x64(dtype == "float64"):
        return load_model(DATA / family, dtype=dtype, progress=False)


@contextlib.contextmanager
def recording(model: nnx.Module) -> Iterator[dict[str, jax.Array]]:
    """While it lasts, outputs of all modules of `model` by path; `.route` has a mixture's weights, `.route.1` the ids.

    A number and a colon before the path keep the order of the run, which jax.jit would lose. Types are patched, so that
    modules may be called by each other and under a trace. Linear layers are recorded as their callers round them.
    """
    paths = {id(m): ".".join(map(str, path)) for path, m in nnx.iter_modules(model)}
    outputs: dict[str, jax.Array] = {}

    def patched(original, mark):
        @functools.wraps(original)
        def call(self, *args, **kwargs):
            result = original(self, *args, **kwargs)
            if name := paths.get(id(self)):
                parts = result if isinstance(result, tuple) else (result,)
                if isinstance(self, nnx.Linear):
                    parts = (result.astype(self.kernel.dtype),)
                for i, part in enumerate(parts):
                    outputs[f"{len(outputs):04}:{name}{mark}" + (f".{i}" if i else "")] = part
            return result

        return call

    kinds = {type(m) for _, m in nnx.iter_modules(model) if "__call__" in vars(type(m))}
    changed = [(kind, "__call__", "") for kind in kinds]
    changed += [(kind, "route", ".route") for kind in kinds if issubclass(kind, FusedMoE)]
    originals = [(kind, name, vars(kind)[name], mark) for kind, name, mark in changed]
    try:
        for kind, name, original, mark in originals:
            setattr(kind, name, patched(original, mark))
        yield outputs
    finally:
        for kind, name, original, _ in originals:
            setattr(kind, name, original)


def poisoned(caches: Any) -> Any:
    """Caches whose numbers are NaN: nothing may read them before it has written them."""
    pages = nnx.state(caches)
    nnx.update(caches, jax.tree.map(lambda x: jnp.full_like(x, jnp.nan) if _floating(x) else x, pages))
    return caches


def _floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


@_jit
def _whole(definition, state, tokens):
    model = nnx.merge(definition, state)
    n = tokens.shape[0]
    cache, tables = model.make_cache(1, n)
    batch = model.make_batch(tables, jnp.array([n], jnp.int32), jnp.array([0, n], jnp.int32), tokens=n)
    with recording(model) as outputs:
        logits = model(tokens, poisoned(cache), batch)
    return outputs | {"9999:logits": logits}


def whole(model: Any, tokens: Sequence[int]) -> Arrays:
    """Outputs of all modules of a model that sees all tokens at once, under their paths, and the `logits`."""
    wide = jax.tree.leaves(nnx.state(model))[0].dtype == jnp.float64
    with jax.enable_x64(wide):
        found = _whole(*nnx.split(model), jnp.asarray(tokens, jnp.int32))
    return {name.partition(":")[2]: np.asarray(found[name]) for name in sorted(found)}


@functools.cache
def outputs(family: str, dtype: str) -> Arrays:
    """`whole` of the first prompt."""
    return whole(model(family, dtype), prompts(family)[0])


@functools.cache
def both(family: str, dtype: str) -> tuple[Arrays, Arrays]:
    """`whole` of both prompts; the second runs with rows behind it that it cannot see."""
    first, second = prompts(family)
    n = len(second)
    padded = whole(model(family, dtype), second + [0] * (len(first) - n))
    return outputs(family, dtype), {name: x[:n] for name, x in padded.items()}


def logits(family: str, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Logits of both prompts."""
    first, second = both(family, dtype)
    return first["logits"], second["logits"]


@_jit
def _forced(definition, state, inputs):
    model, n = nnx.merge(definition, state), next(iter(inputs.values())).shape[0]
    modules = {".".join(map(str, path)): m for path, m in nnx.iter_modules(model)}
    batch = None
    found = {}
    for name, x in inputs.items():
        module = modules[name]
        if "cache" not in inspect.signature(type(module).__call__).parameters:
            found[name] = module(x).astype(x.dtype)
            continue
        cache, tables = model.make_cache(1, n)
        if batch is None:
            batch = model.make_batch(tables, jnp.array([n], jnp.int32), jnp.array([0, n], jnp.int32), tokens=n)
        found[name] = module(x, poisoned(cache[0]), batch)
    return found


def forced(model: Any, calls: Calls) -> Arrays:
    """Outputs of every module, given the input that the capture's module had; what has another name there is left out.

    Errors of one module do not reach the next, so each verdict is about one module.
    """
    dtype = jax.tree.leaves(nnx.state(model))[0].dtype
    modules = {".".join(map(str, path)): m for path, m in nnx.iter_modules(model) if callable(m)}
    own = {name for name, m in modules.items() if not hasattr(m, "self_attn")}  # a layer is the sum of its parts
    first = {path: given(calls[path]) for path in calls if path in own}
    with jax.enable_x64(dtype == jnp.float64):
        inputs = {n: jnp.asarray(x, dtype) for n, x in first.items() if _floating(x)}
        found = _forced(*nnx.split(model), inputs)
    return {name: np.asarray(x) for name, x in found.items()}


def compare(
    ours: np.ndarray,
    theirs: np.ndarray,
    truth: np.ndarray,
    rule: Rule = tolerances.PROPAGATED,
    yardstick: judge.Yardstick | None = None,
) -> judge.Verdict:
    """The verdict of a two-sided rule on tokens of a module; `yardstick` has their known roundings, None = ours."""
    return judge.judge(
        rule,
        truth=truth,
        subject=ours,
        peer=theirs,
        names=("ours", "theirs"),
        yardstick=yardstick,
        axes=("token", "feature"),
        slice_rank=1,
        details=False,
    )


def verdicts(
    ours: Arrays,
    calls: Calls,
    truth: Arrays,
    rule: Rule = tolerances.PROPAGATED,
    explained: Mapping[str, judge.Yardstick] | None = None,
) -> dict[str, judge.Verdict]:
    """Path -> verdict, for every module that was captured as well, in the order of the run.

    `explained` has the yardsticks of modules that round at other places there.
    """
    theirs, explained = {path: returned(call) for path, call in calls.items()}, explained or {}
    return {
        name: compare(ours[name], theirs[name], truth[name], rule, explained.get(name))
        for name in truth
        if name in theirs
    }


def near_ties(family: str, ours: Arrays, truth: Arrays, calls: Calls) -> tuple[np.ndarray, list[str]]:
    """Tokens that reach other experts than in the truth, or attend to such tokens, [N] bool; and a sentence for each.

    A router's logits may be off by twice the largest error of transformers' (the default rule, on the first prompt's
    run). Where they are not farther off and the truth's router, given them, chooses the same experts, the choice is
    what rounding makes of a near tie, and what follows from it is no error of a product or a sum.

    Args:
        family: checkpoint.
        ours: outputs of all modules (`whole`) in a narrow dtype.
        truth: the same in float64.
        calls: transformers' run of the first prompt in the narrow dtype.

    Raises:
        AssertionError: other experts without a near tie.
    """
    wide, bound = model(family, "float64"), outputs(family, "float64")
    n = len(truth["logits"])
    differ, sentences = np.zeros(n, bool), []
    for i, layer in enumerate(wide.model.layers):
        name = f"model.layers.{i}.mlp"
        differ |= np.cumsum(differ) > 0  # this layer's attention handed on what the last one's experts changed
        if f"{name}.route.1" not in truth:
            continue

        def logits(found, layer=layer, i=i):
            mlp, x = layer.mlp, found[f"model.layers.{i}.post_attention_layernorm"]
            with jax.enable_x64(True):
                args = (None if w is None else w[...] for w in (mlp.gate, mlp.gate_bias))
                return np.asarray(gate_logits(jnp.asarray(x, jnp.float64), *args))

        router = calls[f"{name}.{'router' if family == 'gpt_oss' else 'gate'}"].outputs["y_0"].astype(np.float64)
        most = 2 * np.abs(router - logits(bound)).max()
        with jax.enable_x64(True):
            x = jnp.asarray(ours[f"model.layers.{i}.post_attention_layernorm"], jnp.float64)
            again = np.sort(np.asarray(layer.mlp.route(x)[1]), -1)
        mine, true = (np.sort(found[f"{name}.route.1"], -1) for found in (ours, truth))
        moved = np.abs(logits(ours) - logits(truth)).max(-1)
        for row in np.flatnonzero((mine != true).any(-1) & ~differ):
            what = f"{name}: token {row} reaches experts {mine[row].tolist()} instead of {true[row].tolist()}"
            assert moved[row] <= most, f"{what}, its logits are off by {moved[row]:.3g}, {most:.3g} is allowed"
            assert (again[row] == mine[row]).all(), f"{what}, which its own logits do not say"
            sentences.append(f"{what}: a near tie, its logits are off by {moved[row]:.3g} of {most:.3g}")
            differ[row] = True
    return differ, sentences


def steps(family: str, dtype: str, plan: Sequence[Sequence[int]], rows: int) -> list[np.ndarray]:
    """Logits of both prompts, run through caches step by step.

    Args:
        family: checkpoint.
        dtype: of the model.
        plan: how many tokens of each prompt every step takes.
        rows: packed rows of a step, padding included.
    """
    tokens = prompts(family)
    runner = model(family, dtype)
    cache, tables = runner.make_cache(len(tokens), max(map(len, tokens)))
    cache_def, pages = nnx.split(poisoned(cache))
    definition, state = nnx.split(runner)
    done, found = [0] * len(tokens), [[] for _ in tokens]
    for takes in plan:
        packed = [t for prompt, n, take in zip(tokens, done, takes, strict=True) for t in prompt[n : n + take]]
        done = [n + take for n, take in zip(done, takes, strict=True)]
        start = np.cumsum([0, *takes]).astype(np.int32)
        padded = np.array(packed + [0] * (rows - len(packed)), np.int32)
        out, pages = _step((definition, cache_def), state, pages, tables, padded, np.array(done, np.int32), start)
        for b in range(len(tokens)):
            found[b].append(np.asarray(out[start[b] : start[b + 1]]))
    assert done == [len(prompt) for prompt in tokens], "the plan must take all tokens"
    return [np.concatenate(parts) for parts in found]


@_jit
def _step(definitions, state, pages, tables, tokens, lengths, start):
    model, caches = nnx.merge(definitions[0], state), nnx.merge(definitions[1], pages)
    out = model(tokens, caches, model.make_batch(tables, lengths, start, tokens=tokens.shape[0]))
    return out, nnx.state(caches)
