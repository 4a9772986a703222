"""Float32 means float32: no product of 32-bit numbers is left to a backend's default, which is TF32 on a GPU."""

import ast
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from jaxattn import _checks, rope_table
from jaxattn._mechanism import REFERENCE
from jaxattn.models import DeepseekV4Config, DeepseekV4ForCausalLM
from jaxattn.models.auto import MODELS
from jaxattn.nn import (
    Attention,
    LatentCache,
    MLAttention,
    PagedBatch,
    QuantizedLinear,
)
from jaxattn.nn.linear import make_linear, project
from jaxattn.registry import MECHANISMS
from parity.models import tiny_deepseek_v4

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "parity" / "data" / "models"
TINY = ("deepseek_v3", "deepseek_v3_fp8", "deepseek_v2", "deepseek_v2_lite", "gpt_oss")
PRODUCTS = {
    "conv",
    "conv_general_dilated",
    "dot",
    "dot_general",
    "einsum",
    "inner",
    "matmul",
    "ragged_dot",
    "tensordot",
}
"""Functions of `jax.numpy` and `jax.lax` with a `precision`."""
LAYERS = ("nnx.Linear", "nnx.LinearGeneral", "nnx.Einsum")
EXACT = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
INSIDE = ("pallas_call", "core_map")
"""Primitives whose bodies are kernels: their products name instructions, not precisions."""


def rounded(fn, *args):
    """Products of `fn` that a backend may round the factors of: `dot_general(float32, float32)` and so on."""
    return [
        f"{eqn.primitive.name}({', '.join(x.aval.dtype.name for x in eqn.invars)}) precision={eqn.params['precision']}"
        for eqn in equations(jax.make_jaxpr(fn)(*args).jaxpr)
        if "precision" in eqn.params
        and any(x.aval.dtype in (jnp.float32, jnp.float64) for x in eqn.invars)
        and eqn.params["precision"] != EXACT
    ]


def equations(jaxpr):
    """All equations, also of loops, branches and functions within; not those of kernels."""
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive.name not in INSIDE:
            for inner in jax.tree.leaves(list(eqn.params.values())):
                inner = getattr(inner, "jaxpr", inner)
                yield from equations(inner) if hasattr(inner, "eqns") else ()


def test_what_is_rounded_is_found():
    x = jnp.ones((4, 4))

    def looped(x):
        return lax.fori_loop(0, 3, lambda _, y: jnp.dot(y, x), x)

    assert rounded(jax.jit(looped), x) == ["dot_general(float32, float32) precision=None"]
    assert len(rounded(lambda x: jnp.dot(x, x, precision="high"), x)) == 1
    assert rounded(lambda x: jnp.dot(x, x, precision="highest"), x) == []
    assert rounded(lambda x: jnp.dot(x, x), x.astype(jnp.bfloat16)) == []


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda m: m.name)
def test_references(mechanism):
    traced = 0
    for case in mechanism.cases:
        if "smoke" not in case.tags:
            continue
        args = case.make(np.random.default_rng(0)) if case.shapes is None else case.shapes()
        arrays = {name: x for name, x in args.items() if _checks.is_array(x)}
        static = {name: x for name, x in args.items() if name not in arrays}

        def op(arrays, static=static):
            return mechanism.op(**arrays, **static, implementation=REFERENCE)

        assert rounded(op, arrays) == [], case.name
        traced += 1
    assert traced


def step(make, *, exact=False, predict=False):
    """Products of a model's step of six tokens that are rounded."""

    def abstract():
        model = make()
        return model.dequantized() if exact else model

    definition, state = nnx.split(nnx.eval_shape(abstract))

    def run(state, tokens):
        model = nnx.merge(definition, state)
        cache, tables = model.make_cache(1, 8)
        batch = model.make_batch(tables, jnp.array([6], jnp.int32), jnp.array([0, 6], jnp.int32), tokens=6)
        if predict:
            return model.predict(0, tokens, model.streams(tokens, cache, batch), cache, batch)
        return model(tokens, cache, batch)

    return rounded(run, state, jnp.zeros(6, jnp.int32))


@pytest.mark.parametrize("name", TINY)
def test_models(name):
    stored = json.loads((DATA / name / "config.json").read_text())
    kind = MODELS[stored["model_type"]]
    assert step(lambda: kind(kind.Config.from_hf(stored), dtype="float32", rngs=nnx.Rngs(0))) == []


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "quantized"])
@pytest.mark.parametrize("predict", [True, False], ids=["predict", "step"])
def test_deepseek_v4(exact, predict):
    stored = tiny_deepseek_v4.CONFIG | tiny_deepseek_v4.QUANTIZED
    config = DeepseekV4Config.from_hf(stored, max_positions=256, chunk=64)

    def make():
        return DeepseekV4ForCausalLM(config, dtype="float32", rngs=nnx.Rngs(0))

    assert step(make, exact=exact, predict=predict) == []


@pytest.mark.parametrize("expand", [False, True])
def test_latent_attention(expand):
    sizes = {"q_rank": 16, "kv_rank": 16, "nope_dim": 8, "value_dim": 8}
    layer = MLAttention(32, 2, table=rope_table(8, 16), scale=0.2, **sizes, dtype="float32", rngs=nnx.Rngs(0))
    start, table = jnp.array([0, 5], jnp.int32), jnp.array([[0, 1]], jnp.int32)
    batch = PagedBatch.from_lengths(table, start[1:], start, tokens=5, page=8)

    def run(x):
        cache = LatentCache(2, 8, dtype="float32", kv_rank=16, rope_dim=8)
        return layer(x, cache, batch, expand=expand)

    assert rounded(run, jnp.zeros((5, 32))) == []


def test_attention_of_whole_sequences():
    layer = Attention(16, 2, 1, 8, dtype="float32", rngs=nnx.Rngs(0))
    assert rounded(layer, jnp.zeros((1, 5, 16))) == []


def test_quantized_layers():
    linear = make_linear(128, 128, dtype="float32", rngs=nnx.Rngs(0))
    for format in ("fp8_block", "int8"):
        layer = QuantizedLinear.from_linear(linear, format=format)
        assert rounded(layer, jnp.zeros((3, 128))) == []


def test_a_setting_of_jax_is_kept():
    """TF32 for those who ask for it: modules take the setting, references do not."""
    linear = make_linear(8, 8, dtype="float32", rngs=nnx.Rngs(0))
    x = jnp.zeros((3, 8))
    with jax.default_matmul_precision("tensorfloat32"):
        found = rounded(lambda x: project(linear, x), x)
        assert found == ["dot_general(float32, float32) precision=(Precision.HIGH, Precision.HIGH)"]
        (mtp,) = (m for m in MECHANISMS if m.name == "mtp")
        args = mtp.cases[0].make(np.random.default_rng(0))
        assert rounded(lambda: mtp.op(**args, implementation=REFERENCE)) == []
    given = make_linear(8, 8, dtype="float32", precision="default", rngs=nnx.Rngs(0))
    assert len(rounded(lambda x: project(given, x), x)) == 1


def unnamed(source):
    """Lines of products that name no precision, which tracing a few paths might not reach."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            yield node.lineno
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in PRODUCTS:
            module, keywords = ast.unparse(node.func.value), {k.arg: ast.unparse(k.value) for k in node.keywords}
            integers = keywords.get("preferred_element_type") == "jnp.int32"
            if module in ("jnp", "lax", "jax.lax", "jax.numpy") and "precision" not in keywords and not integers:
                yield node.lineno
        layer = isinstance(node, ast.Call) and ast.unparse(node.func) in LAYERS
        if layer and "dot_general" not in {k.arg for k in node.keywords}:
            yield node.lineno


def test_products_name_their_precision():
    assert list(unnamed("a @ b\njnp.dot(a, b)\nnnx.Linear(3, 4, rngs=rngs)\njnp.dot(a, b, precision=p)")) == [1, 2, 3]
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for folder in ("jaxattn", "pallas_kernels")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.name != "capture.py"  # numpy only
        for line in unnamed(path.read_text("utf-8"))
    ]
    assert found == []
