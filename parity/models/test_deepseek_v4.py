"""DeepSeek-V4 against transformers: every module and the logits; prefill, decode, ragged batches and drafts agree."""

import contextlib
import dataclasses
import itertools
import json
import subprocess
import sys
from importlib import metadata
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from packaging.version import Version

from jaxattn.models import (
    CheckpointError,
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    generate,
    generate_with_drafts,
    generation,
    speculative,
)
from jaxattn.models.sampling import Sampling
from jaxattn.nn import HyperConnections
from parity import captures, judge, tolerances
from parity.models import running
from parity.models import tiny_deepseek_v4 as tiny

CASES = {c.case: c for c in captures.read(running.DATA / "torch-deepseek_v4.safetensors")}
RUNS = captures.runs(CASES.values())
TOKENS = CASES["float32.root"].inputs["input_ids"][0]
KEPT = CASES["float32.root"].params["rows"]["out.logits"]
"""Tokens of which the captures hold what modules return."""
ROWS, REQUESTS = 64, 3
HYPER = {"x": "y_2", "post": "y_0", "comb": "y_1"}
"""What hyper-connections return, and its names in the captures."""
OURS = {"model.": "", "self_attn": "attn", "mlp": "ffn"}
"""What the checkpoint, and this package, call modules of transformers."""
GATE_BIAS = {n.split(".")[1]: x for n, _, x in tiny.tensors() if n.startswith("layers.") and n.endswith(".gate.bias")}
LAYERS_OF_SUMS = 64
"""Of sixteen float64 roundings each, that a run of the model adds one after the other: sixteen a layer."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The checkpoint that was captured."""
    path = tmp_path_factory.mktemp("tiny")
    digest = tiny.write(path, quantized=False)
    assert digest == CASES["float32.root"].params["checkpoint"], "the checkpoint changed; capture it again"
    return path


def load(folder, dtype, **changes):
    changes = {"exact": True, "max_positions": 512, "chunk": ROWS} | changes
    return DeepseekV4ForCausalLM.from_pretrained(folder, dtype=dtype, progress=False, **changes)


@pytest.fixture(scope="module")
def model(folder):
    return load(folder, "float32")


@pytest.fixture(scope="module")
def stepper(model):
    return Stepper(model)


@pytest.fixture(scope="module")
def alone(stepper):
    """Everything of one request, 64 tokens at a time."""
    stepper.reset()
    return joined([stepper(TOKENS[i : i + ROWS])[0] for i in range(0, len(TOKENS), ROWS)])


@contextlib.contextmanager
def recording(model):
    """`running.recording`, and what the hyper-connections give."""
    paths = {id(m): ".".join(map(str, path)) for path, m in nnx.iter_modules(model)}
    original = HyperConnections.pre

    def pre(self, streams, **update):
        result = original(self, streams, **update)
        found.update({f"{paths[id(self)]}.{name}": x for name, x in zip(HYPER, result, strict=False)})
        return result

    with running.recording(model) as found, mock.patch.object(HyperConnections, "pre", pre):
        yield found


def ours(path):
    """A module's path in our model."""
    for theirs, name in OURS.items():
        path = path.replace(theirs, name)
    return path


WANTED = {ours(path) for path in RUNS["float32.truth"]}


def named(found):
    """What was recorded, by path."""
    return {name.rpartition(":")[2]: x for name, x in found.items()}


def wanted(name):
    """True for what is compared with the captures."""
    return name in WANTED or name.endswith((*(f"_hc.{x}" for x in HYPER), ".indexer", ".route.1"))


class Stepper:
    """One compiled step of 64 rows for three requests, everything recorded."""

    def __init__(self, model):
        self.model, self.traced = model, 0
        self.reset()

        @nnx.jit
        def step(model, cache, tokens, lengths, start):
            self.traced += 1
            with recording(model) as found:
                logits = model(tokens, cache, model.make_batch(self.tables, lengths, start, tokens=ROWS))
            return {name: x for name, x in named(found).items() if wanted(name)} | {"logits": logits}

        self.compiled = step

    def reset(self):
        cache, self.tables = self.model.make_cache(REQUESTS, 320)
        self.cache = running.poisoned(cache)
        self.lengths = np.zeros(REQUESTS, np.int32)

    def __call__(self, *new):
        """Take up to 64 tokens of the requests together; returns every request's own rows of everything."""
        new = [np.asarray(x, np.int32) for x in (*new, *[[]] * (REQUESTS - len(new)))]
        start = np.cumsum([0, *map(len, new)]).astype(np.int32)
        tokens = np.zeros(ROWS, np.int32)
        tokens[: start[-1]] = np.concatenate(new)
        self.lengths = self.lengths + np.diff(start)
        found = self.compiled(self.model, self.cache, *map(jnp.asarray, (tokens, self.lengths, start)))
        host = {name: np.asarray(x) for name, x in found.items()}
        return [{name: x[a:b] for name, x in host.items()} for a, b in itertools.pairwise(start)]


def joined(parts):
    """Rows of several steps behind each other."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def first(call):
    """The name of what a module returns first."""
    return next(name for name in ("y", "y_0", "logits") if name in call.outputs)


def passes(run, path, name, mine, keep=slice(None)):
    """Judge rows against the capture's through its truth.

    A row is a slice of its own where it has enough numbers for a mean; a token's few gates move together.
    """
    truth, peer = (running.packed(RUNS[r][path].outputs[name]) for r in (f"{run}.truth", run))
    judged(f"{run} {path} {name}", truth, peer, mine, keep)


def judged(what, truth, peer, mine, keep=slice(None)):
    """Judge rows by the rule of their dtype."""
    verdict = judge.judge(
        tolerances.PROPAGATED if what.startswith("float32") else tolerances.OWN_TRUTH,
        truth=truth[keep].astype(np.float64),
        subject=mine.astype(peer.dtype)[keep],
        peer=peer[keep],
        names=("ours", "transformers"),
        slice_rank=int(mine[0].size >= 32),
        details=False,
    )
    assert verdict.passed, f"{what}: {verdict.reason}"


def choice(run, path):
    """What a gate or an indexer chose, and the scores that it chose by, float64."""
    calls = RUNS[run]
    if path.endswith("indexer"):
        return calls[path].outputs["y"][0], calls[f"{path}.scorer"].outputs["y"][0].astype(np.float64)
    logits = calls[path].outputs["y_0"].astype(np.float64)
    return calls[path].outputs["y_2"], np.sqrt(np.logaddexp(0, logits)) + GATE_BIAS.get(path.split(".")[2], 0)


def same_choices(run, path, mine):
    """Rows in which both sides choose what the truth does; all in float32, but for near ties in bfloat16.

    Scores of both sides may be off by twice the largest error of transformers' (the default rule), so that two entries
    may change places if their true scores differ by less than twice that.
    """
    (true, scores), (theirs, rounded) = choice(f"{run}.truth", path), choice(run, path)
    error, true = np.abs(rounded - scores).max(), np.sort(true, -1)
    agree = np.ones(len(true), bool)
    for one in (np.sort(mine, -1), np.sort(theirs, -1)):
        for row in np.flatnonzero((one != true).any(-1)):
            swapped = [scores[row][sorted(set(a) - set(b))] for a, b in ((true[row], one[row]), (one[row], true[row]))]
            assert swapped[0].size == swapped[1].size
            assert np.abs(np.sort(swapped[0]) - np.sort(swapped[1])).max() <= 4 * error, (
                f"{run} {path}: row {row} is no near tie"
            )
            agree[row] = False
    assert agree.all() or run == "bfloat16"
    assert 2 * agree.sum() > agree.size
    return agree


INNER = ("compressor", "scorer", "indexer", "gate")
FREE = [path for path in RUNS["float32.truth"] if not path.endswith(INNER)]


@pytest.mark.parametrize("path", FREE, ids=lambda path: path or "root")
def test_float32_agrees_with_transformers(path, alone):
    """Every module of one run, inputs and all: the error of float32 stays that of transformers'."""
    mine = ours(path) or "logits"
    if path.endswith("_hc"):
        for name, theirs in HYPER.items():
            passes("float32", path, theirs, alone[f"{mine}.{name}"][KEPT])
        return
    passes("float32", path, first(RUNS["float32"][path]), alone[mine][KEPT])
    if (indexer := f"{path}.compressor.indexer") in RUNS["float32"]:
        same_choices("float32", indexer, alone[f"{mine}.indexer"][KEPT])
    if f"{path}.gate" in RUNS["float32"]:
        same_choices("float32", f"{path}.gate", alone[f"{mine}.route.1"][KEPT])


def test_decode_and_ragged_batches_agree_with_transformers(stepper, alone):
    """Three requests in one batch, each a prefix of the same text: in chunks then token by token, in odd pieces, and
    token by token from the start. All logits are as far from the truth as those of transformers' one pass."""
    stepper.reset()
    rng, lengths = np.random.default_rng(0), (len(TOKENS), 200, 24)  # the last beyond the window of 16
    parts, done = [[] for _ in lengths], [0, 0, 0]
    while done != list(lengths):
        step = (31 if done[0] < 247 else 1, int(rng.integers(0, 30)), 1)
        new = [TOKENS[d : min(d + n, top)] for d, n, top in zip(done, step, lengths, strict=True)]
        for part, found in zip(parts, stepper(*new), strict=True):
            part.append(found)
        done = [d + len(x) for d, x in zip(done, new, strict=True)]
    assert stepper.traced == 1, "other lengths must not compile anew"
    for part, top in zip(parts, lengths, strict=True):
        mine = joined(part)["logits"]
        assert len(mine) == top
        inside = [i for i, row in enumerate(KEPT) if row < top]
        passes("float32", "", "logits", spread(mine, inside), inside)
    truth, peer = (CASES[f"float32.{name}cached"].outputs["logits"] for name in ("truth.", ""))
    judged("float32 cached", truth, peer, joined(parts[0])["logits"][CASES["float32.cached"].params["tokens"]])


def spread(mine, inside):
    """Rows of the capture, those that this request has."""
    out = np.zeros((len(KEPT), mine.shape[1]), mine.dtype)
    out[inside] = mine[[KEPT[i] for i in inside]]
    return out


def test_greedy_tokens_are_those_of_transformers(stepper):
    capture = CASES["float32.generate"]
    stepper.reset()
    found = [stepper(capture.inputs["tokens"])[0]["logits"][-1].argmax()]
    while len(found) < len(capture.outputs["tokens"]):
        found.append(stepper([found[-1]])[0]["logits"][-1].argmax())
    np.testing.assert_array_equal(found, capture.outputs["tokens"])


@pytest.fixture(scope="module")
def model16(folder):
    return load(folder, "bfloat16", chunk=512)


@pytest.mark.parametrize("layer", range(4))
def test_bfloat16_attention(model16, layer):
    """Modules on transformers' inputs: in bfloat16, a whole run would compare which experts near ties chose."""
    path = f"model.layers.{layer}.self_attn"
    x = RUNS["bfloat16"][path].inputs["hidden_states"][0]
    found = attention(model16.layers[layer].attn, model16, jnp.asarray(x), layer)
    keep, indexer = slice(None), f"{path}.compressor.indexer"
    if indexer in RUNS["bfloat16"]:
        keep = same_choices("bfloat16", indexer, np.asarray(found[1])[KEPT])
    passes("bfloat16", path, "y_0", np.asarray(found[0])[KEPT], keep)


@pytest.mark.parametrize("layer", range(4))
def test_bfloat16_experts(model16, layer):
    path = f"model.layers.{layer}.mlp"
    x, ffn = jnp.asarray(RUNS["bfloat16"][path].inputs["hidden_states"][0]), model16.layers[layer].ffn
    y, ids = mixed(ffn, x, None if ffn.table is None else jnp.asarray(TOKENS[KEPT]))
    passes("bfloat16", path, "y", np.asarray(y), same_choices("bfloat16", f"{path}.gate", np.asarray(ids)))


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("part", ["attn_hc", "ffn_hc"])
def test_bfloat16_hyper_connections(model16, layer, part):
    path = f"model.layers.{layer}.{part}"
    x = RUNS["bfloat16"][path].inputs["hidden_streams"][0]
    found = hyper(getattr(model16.layers[layer], part), jnp.asarray(x))
    for name, mine in zip(HYPER.values(), found, strict=True):
        passes("bfloat16", path, name, np.asarray(mine))


def test_bfloat16_head(model16):
    x = RUNS["bfloat16"]["model.hc_head"].inputs["x"][0]
    found = nnx.jit(lambda head, x: head(x))(model16.hc_head, jnp.asarray(x))
    passes("bfloat16", "model.hc_head", "y", np.asarray(found))


@nnx.jit
def mixed(ffn, x, tokens):
    return ffn(x, tokens), ffn.route(x, tokens)[1]


@nnx.jit
def hyper(module, x):
    return module.pre(x)


@nnx.jit
def attend(module, cache, batch, x):
    """Outputs of an attention layer, and the indexer's choice if it has one."""
    with running.recording(module) as found:
        y = module(x, cache, batch)
    return y, named(found).get("indexer")


def attention(module, model, x, layer):
    n = len(x)
    cache, tables = model.make_cache(1, n)
    batch = model.make_batch(tables, jnp.array([n], jnp.int32), jnp.array([0, n], jnp.int32), tokens=n)
    return attend(module, running.poisoned(cache.layers[layer]), batch[module.ratio], x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mtp_agrees_with_transformers_pieces(folder, dtype):
    peer, truth = (CASES[f"{dtype}.{name}mtp.0"].outputs for name in ("", "truth."))
    x = CASES[f"{dtype}.mtp.0"].inputs
    n = len(x["tokens"])
    own = load(folder, dtype)
    cache, tables = own.make_cache(1, n)
    running.poisoned(cache)

    @nnx.jit
    def predict(model, cache, tokens, hidden):
        batch = model.make_batch(tables, jnp.array([n], jnp.int32), jnp.array([0, n], jnp.int32), tokens=n)
        return model.predict(0, tokens, hidden, cache, batch)

    streams, logits = predict(own, cache, *(jnp.asarray(x[name]) for name in ("tokens", "hidden")))
    judged(f"{dtype} mtp streams", truth["streams"], peer["streams"], np.asarray(streams))
    judged(f"{dtype} mtp logits", truth["logits"], peer["logits"], np.asarray(logits))


@pytest.fixture(scope="module")
def short(folder):
    """A hash-routed C4A layer and the MTP block."""
    whole = load(folder, "float32")
    whole.layers = nnx.List([whole.layers[1]])
    whole.config = dataclasses.replace(whole.config, ratios=(4,), stops=())
    return whole


PROMPTS = [TOKENS[:9].tolist(), TOKENS[20:41].tolist(), TOKENS[50:53].tolist()]


def test_drafts_change_no_token(short):
    """The third guess of a step is mostly wrong here, the first sometimes right: caches survive both."""
    plain = generate(short, PROMPTS, max_new_tokens=24, chunk=32, capacity=64)
    drafted = generate_with_drafts(short, PROMPTS, max_new_tokens=24, drafts=2, chunk=32, capacity=64)
    assert drafted.tokens == plain
    assert 0 <= drafted.kept < drafted.guessed


@contextlib.contextmanager
def no_waiting(x):
    """No transfer either way; reads of arrays are caught as well where they need none, on the CPU."""

    def refuse(*_, **__):
        raise AssertionError("the host waits for the device")

    kind = type(x)
    reads = mock.patch.object(kind, "_value", property(refuse)), mock.patch.object(kind, "__array__", refuse)
    with jax.transfer_guard("disallow"), reads[0], reads[1]:
        with pytest.raises(AssertionError, match="waits"):
            int(x.sum())
        yield


def test_decode_waits_for_nothing_and_compiles_once(short):
    """Steps of another batch of prompts run without a transfer and without a compilation."""
    stops = jnp.zeros(0, jnp.int32)
    plain = generation.Runner(short, 3, 64, how=Sampling(), stops=stops)
    drafts = speculative.DraftRunner(short, 3, 64, drafts=2, stops=stops)
    for runner, compiled in ((plain, generation._decode), (drafts, speculative._step)):
        jax.block_until_ready(runner.step(runner.prefill(PROMPTS, 12, 32)))
        before, state = compiled._cache_size(), runner.prefill([p[::-1][:7] for p in PROMPTS], 12, 32)
        with no_waiting(stops):
            for _ in range(4):
                state = runner.step(state)
        assert compiled._cache_size() == before
        jax.block_until_ready(state)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """The checkpoint in FP8 and MXFP4."""
    path = tmp_path_factory.mktemp("quantized")
    tiny.write(path, quantized=True)
    return path


def test_a_quantized_checkpoint_holds_the_same_numbers(quantized, model):
    """FP8 linears dequantize to the bfloat16 checkpoint's numbers; MXFP4 experts stay as stored."""
    stored = load(quantized, "float32", exact=False)
    assert type(stored.layers[0].attn.wq_a).__name__ == "QuantizedLinear"
    assert stored.layers[0].ffn.w13.dtype == "uint8" and stored.config.cache_format == "v4"
    exact = stored.dequantized()
    ours, theirs = (dict(nnx.to_flat_state(nnx.state(m, nnx.Param))) for m in (exact, model))
    experts = {path for path in theirs if path[-1] in ("w13", "w2")}
    assert set(theirs) - set(ours) == experts
    for path in set(theirs) - experts:
        np.testing.assert_array_equal(ours[path][...], theirs[path][...], err_msg=str(path))
    for layer in range(4):
        for name in ("w13", "w2"):
            parts = (getattr(exact.layers[layer].ffn, n)[...] for n in (name, f"{name}_scale"))
            np.testing.assert_array_equal(decoded(*parts), getattr(model.layers[layer].ffn, name)[...])


def test_fp8_and_mxfp4_add_their_noise_and_no_more(quantized, folder):
    """Logits of the first layer alone, stored against exact.

    Rounded on the way: inputs of wq_a and wkv, wq_b, wo_a, wo_b, w13, w2 and both shared projections, and the rows of
    the cache: nine roundings to e4m3 in series at most.
    """
    found = []
    for path, exact in ((quantized, False), (folder, True)):
        m = load(path, "float32", exact=exact, mtp=False)
        m.layers, m.config = nnx.List([m.layers[0]]), dataclasses.replace(m.config, ratios=(1,))
        found.append(np.asarray(whole(m, *m.make_cache(1, 24), jnp.asarray(TOKENS[:24])), np.float64))
    error = np.sqrt(((found[0] - found[1]) ** 2).mean() / (found[1] ** 2).mean())
    assert 0 < error <= np.sqrt(9) * tolerances.E4M3_NOISE


@nnx.jit
def whole(model, cache, tables, tokens):
    n = tokens.shape[0]
    return model(tokens, cache, model.make_batch(tables, jnp.array([n]), jnp.array([0, n]), tokens=n))


def decoded(codes, scale):
    """Numbers of MXFP4 codes, with numpy."""
    codes = np.stack([codes & 15, np.asarray(codes) >> 4], -1).reshape(*codes.shape[:-1], -1)
    values = np.where(codes & 8, -1, 1) * tiny._E2M1[codes & 7]
    return (values * np.repeat(np.exp2(np.asarray(scale, np.float32) - 127), tiny.GROUP, -1)).astype(np.float32)


def test_broken_checkpoints_are_named(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    for change, message in (
        ({"model_type": "deepseek_v3"}, "'model_type' must be 'deepseek_v4', got 'deepseek_v3'"),
        ({"head_dim": 128}, "'head_dim' must be 512, got 128"),
        ({"compress_ratios": [0, 4, 16, 4]}, r"a ratio of 0, 1, 4 or 128, got \[0, 4, 16, 4\]"),
        ({"n_routed_experts": 9}, r"layers.0.ffn.experts.8.w1.weight: missing; must have shape \[128, 128\]"),
        ({"num_nextn_predict_layers": 0}, None),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        if message is None:
            assert len(load(tmp_path, "float32").mtp) == 0
            continue
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path, "float32")


def test_messages(short):
    with pytest.raises(ValueError, match="a step may have at most chunk=64 rows, got 65; make the model with a larger"):
        short.make_batch(short.make_cache(1, 8)[1], jnp.array([65]), jnp.array([0, 65]), tokens=65)
    with pytest.raises(ValueError, match=r"the drafts, 13 in all, got 12"):
        generate_with_drafts(short, [[2, 3]], max_new_tokens=10, capacity=12)


def test_configurations():
    """DeepSeek's fields and those that transformers writes mean the same; vLLM's rotation of windows on request."""
    ours = DeepseekV4Config.from_hf(tiny.CONFIG)
    kept = {k: v for k, v in tiny.CONFIG.items() if k not in ("compress_ratios", "rope_scaling", "num_hash_layers")}
    kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    yarn = {k: v for k, v in tiny.CONFIG["rope_scaling"].items() if k != "type"}
    written = kept | {
        "layer_types": [kinds[0], kinds[1], kinds[2], kinds[1]],
        "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
        "compress_rates": {kinds[1]: 4, kinds[2]: 128},
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.125},
            "compress": yarn | {"rope_type": "yarn", "rope_theta": 160000.0, "attention_factor": 1.0},
        },
    }
    assert DeepseekV4Config.from_hf(written) == ours
    assert [moe.vocab is not None for moe in ours.moe] == [True, True, False, False, False]
    assert (ours.window_rope.factor, ours.rope.factor, ours.rope.theta) == (1.0, 16.0, 160000.0)
    assert DeepseekV4Config.from_hf(tiny.CONFIG, yarn_on_window=True).window_rope.factor == 16.0
    assert {moe.format for moe in DeepseekV4Config.from_hf(tiny.CONFIG | tiny.QUANTIZED).moe} == {"mxfp4"}
    for change, message in (
        (
            {"mlp_layer_types": ["moe", "hash_moe", "moe", "moe"]},
            "'mlp_layer_types' must be 'hash_moe' first, then 'moe'",
        ),
        (
            {"rope_parameters": {"compress": {"rope_type": "linear"}}},
            "the type must be 'default' or 'yarn', got 'linear'",
        ),
        ({"layer_types": ["full_attention"] * 4}, "'layer_types' must be of sliding_attention, .* got full_attention"),
    ):
        with pytest.raises(ValueError, match=message):
            DeepseekV4Config.from_hf(written | change)
    with pytest.raises(ValueError, match="max_positions must be 1 to 4096, got 5000"):
        DeepseekV4Config.from_hf(written, max_positions=5000)


@pytest.mark.skipif(not running.LIVE, reason="needs torch and transformers in this Python")
@pytest.mark.skipif(
    running.LIVE and Version(metadata.version("transformers")) < Version("5.24"),
    reason="needs transformers 5.24: 5.17's DeepSeek-V4 does not run in bfloat16, and names caches otherwise",
)
def test_transformers_of_today_gives_the_captured_truths(tmp_path):
    script = captures.SHIPPED.parents[1] / "scripts" / "capture_deepseek_v4.py"
    command = [sys.executable, str(script), str(tmp_path), "--commit", "live"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made = {c.case: c for c in captures.read(tmp_path / "torch-deepseek_v4.safetensors")}
    assert set(made) == set(CASES)
    for case, stored in CASES.items():
        assert made[case].params == stored.params
        for name, x in stored.outputs.items():
            if x.dtype == np.float64 and case.startswith("float32.truth"):
                error = np.abs(made[case].outputs[name] - x).max() / np.abs(x).max()
                assert error <= LAYERS_OF_SUMS * tolerances.FLOAT64, (case, name)
    np.testing.assert_array_equal(
        made["float32.generate"].outputs["tokens"], CASES["float32.generate"].outputs["tokens"]
    )
