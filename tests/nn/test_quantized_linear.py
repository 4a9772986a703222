"""QuantizedLinear and quantize_module: checkpoints' tensors in, the op's numbers out, and what is refused."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxattn import quantize_fp8, quantize_int8, rope_table, scaled_matmul, weight_only_matmul
from jaxattn.nn import (
    Attention,
    CascadeAttention,
    LatentCache,
    MLAttention,
    PagedAttention,
    PagedBatch,
    PagedKVCache,
    QuantizedLinear,
    QuantizedParam,
    SharedPrefixes,
    quantize_module,
)
from jaxattn.nn._linear_formats import FORMATS
from jaxattn.quant import awq, fp8, gptq, int8, nvfp4, weights

M, F = 256, 128
STEPS = {"fp8": 2**-4, "int8": 1 / 127, "mxfp8": 2**-4}
"""Largest step of a code, relative to the number (fp8) or to the largest one; four-bit formats: a third."""


@pytest.fixture
def weight():
    return jnp.asarray(np.random.default_rng(0).standard_normal((F, M)) * 0.05, jnp.bfloat16)


@pytest.fixture
def x():
    return jnp.asarray(np.random.default_rng(1).standard_normal((3, 5, M)), jnp.bfloat16)


def linear(weight, bias=True):
    layer = nnx.Linear(weight.shape[1], weight.shape[0], use_bias=bias, param_dtype=weight.dtype, rngs=nnx.Rngs(0))
    layer.kernel[...] = weight.T
    if bias:
        layer.bias[...] = jnp.arange(weight.shape[0], dtype=weight.dtype) / 64
    return layer


def bits(x):
    return np.asarray(x).view(np.uint8)


def same(a, b):
    assert a.shape == b.shape and a.dtype == b.dtype
    np.testing.assert_array_equal(bits(a), bits(b))


# ---------------------------------------------------------------- checkpoints as they are
def test_fp8_block_checkpoint(weight, x):
    q, s = fp8.quantize(weight, "block")
    layer = QuantizedLinear(M, F, format="fp8_block")
    layer.load({"a.weight": q, "a.weight_scale_inv": s, "b.weight": 0}, prefix="a.")
    same(layer.weight[...], q)
    codes, scale = quantize_fp8(x.reshape(-1, M), granularity="group")
    same(layer(x), scaled_matmul(codes, q, scale, s, block=128).reshape(3, 5, F))


def test_fp8_checkpoint_with_a_static_scale(weight, x):
    q, s = fp8.quantize(weight, "tensor")
    layer = QuantizedLinear(M, F, format="fp8")
    layer.load({"weight": q, "weight_scale": s.reshape(1), "input_scale": jnp.float32([0.02])})
    codes, scale = quantize_fp8(x.reshape(-1, M), granularity="tensor", scale=0.02)
    same(layer(x), scaled_matmul(codes, q, scale, s).reshape(3, 5, F))


@pytest.mark.parametrize("static", [False, True])
def test_int8_checkpoint_with_zero_points(static, weight, x):
    q, s, _ = int8.quantize(weight, "channel")
    layer = QuantizedLinear(M, F, format="int8_azp")
    more = {"input_scale": jnp.float32(0.03), "input_zero_point": jnp.int8([5])} if static else {}
    layer.load({"weight": q, "weight_scale": s[:, 0]} | more)
    same(layer.weight_sums[...], q.astype(jnp.int32).sum(1))
    how = {"granularity": "tensor", "scale": 0.03, "azp": 5} if static else {"symmetric": False}
    codes, scale, azp = quantize_int8(x.reshape(-1, M), **how)
    same(layer(x), scaled_matmul(codes, q, scale, s, azp=azp).reshape(3, 5, F))


def test_gptq_checkpoint_in_float16_and_its_order(weight, x):
    qweight, qzeros, scales, g_idx = gptq.quantize(weight.T.astype(jnp.float16), 4, 64)
    layer = QuantizedLinear(M, F, format="gptq", group=64)
    layer.load({"qweight": qweight, "qzeros": qzeros, "scales": scales, "g_idx": g_idx})
    assert layer.g_idx is None, "consecutive groups need no index"
    expected = weight_only_matmul(x.reshape(-1, M), qweight, scales.astype(jnp.bfloat16), zeros=qzeros, format="gptq")
    same(layer(x), expected.reshape(3, 5, F))
    order = jnp.asarray(np.random.default_rng(0).permutation(M) // 64, jnp.int32)
    layer.load({"qweight": qweight, "qzeros": qzeros, "scales": scales, "g_idx": order})
    same(layer.g_idx[...], order)
    assert not (layer(x) == expected.reshape(3, 5, F)).all()


def test_awq_checkpoint(weight, x):
    qweight, qzeros, scales = awq.quantize(weight.T, 128)
    layer = QuantizedLinear(M, F, format="awq")
    layer.load({"qweight": qweight, "qzeros": qzeros, "scales": scales})
    expected = weight_only_matmul(x.reshape(-1, M), qweight, scales, zeros=qzeros, format="awq")
    same(layer(x), expected.reshape(3, 5, F))


def test_nvfp4_checkpoints_of_both_tools(weight, x):
    q, s, g = nvfp4.quantize(weight)
    one, other = (QuantizedLinear(M, F, format="nvfp4") for _ in range(2))
    one.load({"weight": q, "weight_scale": s, "weight_scale_2": 1 / g})
    other.load({"weight_packed": q, "weight_scale": s, "weight_global_scale": g.reshape(1)})
    expected = weight_only_matmul(x.reshape(-1, M), q, s, global_scale=one.weight_scale_2[...], format="nvfp4")
    same(one(x), expected.reshape(3, 5, F))
    same(other(x), one(x))


def test_bitsandbytes_weights_come_as_a_column(weight, x):
    layer = QuantizedLinear.from_linear(linear(weight, False), format="nf4")
    column = QuantizedLinear(M, F, format="nf4")
    column.load({"weight": layer.weight[...][:, None], "weight.absmax": layer.absmax[...]})
    same(column(x), layer(x))


# ---------------------------------------------------------------- conversion
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_near_the_linear_layer(format, weight, x):
    layer = QuantizedLinear.from_linear(linear(weight), format=format)
    y = nnx.jit(lambda layer, x: layer(x))(layer, x)
    exact = x.astype(jnp.float32) @ weight.T.astype(jnp.float32) + jnp.arange(F) / 64
    assert y.shape == (3, 5, F) and y.dtype == jnp.bfloat16
    # errors of codes are spread evenly over a step at most and average out over M products
    step = next((s for name, s in STEPS.items() if format.startswith(name)), 1 / 3)
    norm = (
        jnp.linalg.norm(x.astype(jnp.float32), axis=-1).max()
        * jnp.linalg.norm(weight.astype(jnp.float32), axis=1).max()
    )
    top = jnp.abs(exact).max() * 2**-8
    assert float(jnp.abs(y.astype(jnp.float32) - exact).max()) <= float(step * norm + top)
    assert not (y == 0).all()


@pytest.mark.parametrize("format", [f for f in FORMATS if f in weights.FORMATS])
def test_weight_only_formats_store_what_their_quantizer_makes(format, weight):
    layer = QuantizedLinear.from_linear(linear(weight), format=format)
    assert all(getattr(layer, n) is None or isinstance(getattr(layer, n), QuantizedParam) for n in layer.tensors)
    assert {n for n, t in layer.tensors.items() if t.required} <= {
        n for n in layer.tensors if getattr(layer, n) is not None
    }


@pytest.mark.parametrize("format", FORMATS)
def test_the_matrix_is_what_the_layer_multiplies_with(format, weight):
    """The identity gives it back, but where activations are rounded to 8 bits."""
    layer = QuantizedLinear.from_linear(linear(weight, bias=False), format=format)
    if format not in ("int8", "int8_azp", "fp8", "fp8_tensor", "fp8_channel", "fp8_block"):
        np.testing.assert_array_equal(layer(jnp.eye(M, dtype=jnp.bfloat16)), layer.matrix())
    assert layer.matrix("float32").shape == (M, F) and layer.matrix("float32").dtype == jnp.float32
    error = float(jnp.linalg.norm((layer.matrix() - weight.T).astype(jnp.float32)))
    assert error < STEPS.get(format.partition("_")[0], 1 / 3) * float(jnp.linalg.norm(weight.astype(jnp.float32)))


def test_optimizers_see_the_bias_only(weight, x):
    layer = QuantizedLinear.from_linear(linear(weight), format="awq")
    assert {path for path, _ in nnx.to_flat_state(nnx.state(layer, nnx.Param))} == {("bias",)}


def test_no_rows_and_one_vector(weight):
    layer = QuantizedLinear.from_linear(linear(weight), format="int8")
    assert layer(jnp.zeros((0, M), jnp.bfloat16)).shape == (0, F)
    assert layer(jnp.zeros(M, jnp.bfloat16)).shape == (F,)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(M, 2 * M, rngs=rngs)
        self.down = nnx.Linear(2 * M, M, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.silu(self.up(x)))


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(M, 30, rngs=rngs)
        self.tied = self.layers[0].up

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_a_model_is_converted_by_path():
    model = Model()
    rules = {"head": None, "layers.1.down": {"format": "awq", "group": 64}, "layers.*": "fp8_channel"}
    formats = quantize_module(model, rules)
    assert formats == {
        "layers.0.down": "fp8_channel",
        "layers.0.up": "fp8_channel",
        "layers.1.down": "awq",
        "layers.1.up": "fp8_channel",
    }
    assert model.layers[1].down.options.group == 64 and isinstance(model.head, nnx.Linear)
    assert model.tied is model.layers[0].up and isinstance(model.tied, QuantizedLinear)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, M)), jnp.float32)
    y, exact = nnx.jit(lambda m, x: m(x))(model, x), Model()(x)
    assert float(jnp.linalg.norm(y - exact)) < STEPS["fp8"] * 2 * float(jnp.linalg.norm(exact))


def attend(layer, x):
    """Two requests' tokens through an attention layer of its own kind."""
    if isinstance(layer, Attention):
        return layer(x[None])[0]
    pages, lengths, start = jnp.array([[1], [0]]), jnp.array([5, 4]), jnp.array([0, 5, 9])
    batch = PagedBatch.from_lengths(pages, lengths, start, tokens=9, page=16)
    if isinstance(layer, MLAttention):
        return layer(x, LatentCache(num_pages=2, page=16, kv_rank=64, rope_dim=16), batch)
    cache = PagedKVCache(num_pages=2, page=16, kv_heads=2, head_dim=64)
    if isinstance(layer, CascadeAttention):
        return layer(x, cache, batch, SharedPrefixes(jnp.array([[0, 2]]), jnp.array([[0]])))
    return layer(x, cache, batch)


@pytest.mark.parametrize("format", ["fp8_channel", "mxfp4"])
@pytest.mark.parametrize("kind", [PagedAttention, Attention, CascadeAttention, MLAttention])
def test_attention_layers_are_converted_whole(kind, format, x):
    sizes = {"heads": 4, "implementation": "reference", "rngs": nnx.Rngs(0)}
    if kind is MLAttention:
        table = rope_table(16, 16)
        sizes |= {"table": table, "scale": 0.1, "q_rank": 64, "kv_rank": 64, "nope_dim": 32, "value_dim": 32}
    else:
        sizes |= {"kv_heads": 2, "head_dim": 64, "use_bias": True}
    layer, tokens = kind(M, **sizes), x.reshape(-1, M)[:9]
    exact = attend(layer, tokens)
    assert set(quantize_module(layer, {"*": format}).values()) == {format}
    assert not [m for _, m in nnx.iter_modules(layer) if isinstance(m, nnx.Linear)]
    y = attend(layer, tokens)
    assert y.shape == exact.shape and y.dtype == exact.dtype
    lost = float(jnp.linalg.norm((y - exact).astype(jnp.float32)) / jnp.linalg.norm(exact.astype(jnp.float32)))
    assert 0 < lost < 2 * STEPS.get(format.partition("_")[0], 1 / 3)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            {"layers.*": "fp8", "blocks.*": "fp8"},
            "quantize_module: the rule 'blocks.*' matches no linear layer; there are head, layers.0.down, layers.0.up, "
            "layers.1.down, layers.1.up",
        ),
        (
            {"head": "awq"},
            "quantize_module: head: QuantizedLinear: out_features of format 'awq' must be a multiple of 8, got 30",
        ),
        (
            {"*.up": {"format": "gptq", "group": 96}},
            "quantize_module: layers.0.up: QuantizedLinear: in_features of format 'gptq' must be a multiple of 96 "
            "(group=96), got 256",
        ),
        ({"head": {"bits": 4}}, "quantize_module: the rule 'head' must name a format, got bits"),
        ({"head": "fp9"}, "quantize_module: head: QuantizedLinear: format must be one of fp8, fp8_tensor"),
    ],
)
def test_rules_that_cannot_be_followed_change_nothing(rules, message):
    model = Model()
    with pytest.raises(ValueError, match=re.escape(message)):
        quantize_module(model, rules)
    assert not any(isinstance(module, QuantizedLinear) for _, module in nnx.iter_modules(model))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("model", "quantize_module: model must be a nnx.Module, got str"),
        (
            nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
            "quantize_module: model is itself a linear layer; use QuantizedLinear.from_linear",
        ),
    ],
    ids=["str", "linear"],
)
def test_only_modules_with_linear_layers_are_converted(model, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        quantize_module(model, {"*": "fp8"})


# ---------------------------------------------------------------- messages
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"format": "int9"}, ValueError, "got 'int9' (did you mean 'int8'?)"),
        (
            {"format": "gptq", "bits": 5},
            ValueError,
            "QuantizedLinear: bits of gptq must be 2 or 3 or 4 or 8, got 5",
        ),
        (
            {"format": "marlin", "in_features": 256, "out_features": 72},
            ValueError,
            "QuantizedLinear: out_features of format 'marlin' must be a multiple of 64, got 72",
        ),
        (
            {"format": "mxfp4", "in_features": 40},
            ValueError,
            "QuantizedLinear: in_features of format 'mxfp4' must be a multiple of 32, got 40",
        ),
        (
            {"format": "gptq", "in_features": 36, "group": 12},
            ValueError,
            "QuantizedLinear: in_features of format 'gptq' must fill words of 32 bits, got 36",
        ),
        ({"format": "fp8", "in_features": 0}, ValueError, "QuantizedLinear: in_features must be at least 1, got 0"),
        (
            {"format": "fp8", "dtype": jnp.int8},
            TypeError,
            "QuantizedLinear: dtype must have dtype bfloat16 or float16 or float32, got int8",
        ),
    ],
)
def test_layers_that_cannot_be(options, error, message):
    sizes = {"in_features": M, "out_features": F} | options
    with pytest.raises(error, match=re.escape(message)):
        QuantizedLinear(sizes.pop("in_features"), sizes.pop("out_features"), **sizes)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"weight": None},
            KeyError,
            "QuantizedLinear: format 'fp8_channel' needs weight, weight_scale, input_scale_ub, but weight of prefix "
            "'' is missing; there are weight_scale",
        ),
        (
            {"bias": jnp.zeros(F)},
            KeyError,
            "QuantizedLinear: format 'fp8_channel' takes weight, weight_scale, input_scale_ub, got bias as well; make "
            "the layer with use_bias=True",
        ),
        ({"zeros": jnp.zeros(F)}, KeyError, "takes weight, weight_scale, input_scale_ub, got zeros as well"),
        (
            {"weight": jnp.zeros((M, F), jnp.float8_e4m3fn)},
            ValueError,
            "QuantizedLinear: weight of format 'fp8_channel' must have shape (128, 256), got (256, 128)",
        ),
        (
            {"weight": jnp.zeros((F, M), jnp.int8)},
            TypeError,
            "QuantizedLinear: weight of format 'fp8_channel' must have dtype float8_e4m3fn, got int8",
        ),
        (
            {"weight_scale": 1.0},
            TypeError,
            "QuantizedLinear: weight_scale of format 'fp8_channel' must be an array, got float",
        ),
    ],
)
def test_checkpoints_that_do_not_fit(change, error, message):
    layer = QuantizedLinear(M, F, format="fp8_channel")
    tensors = {"weight": jnp.zeros((F, M), jnp.float8_e4m3fn), "weight_scale": jnp.ones((F, 1))} | change
    with pytest.raises(error, match=re.escape(message)):
        layer.load({name: x for name, x in tensors.items() if x is not None})


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            jnp.zeros((2, 8), jnp.bfloat16),
            ValueError,
            "QuantizedLinear: x must have 256 numbers along its last axis, got shape (2, 8)",
        ),
        (
            jnp.zeros((2, M), jnp.float32),
            TypeError,
            "QuantizedLinear: x must have dtype bfloat16, got float32; cast it to the layer's dtype",
        ),
        (3.0, ValueError, "QuantizedLinear: x must have 256 numbers along its last axis, got float"),
    ],
)
def test_inputs_that_do_not_fit(given, error, message):
    with pytest.raises(error, match=re.escape(message)):
        QuantizedLinear(M, F, format="fp8")(given)


def test_a_weight_that_is_not_finite_is_refused(weight):
    message = "QuantizedLinear: the kernel holds NaN or infinite numbers, which no code stands for"
    with pytest.raises(ValueError, match=re.escape(message)):
        QuantizedLinear.from_linear(linear(weight.at[3, 4].set(jnp.inf)), format="fp8")


def test_a_named_implementation_is_handed_on(weight, x):
    layer = QuantizedLinear.from_linear(linear(weight), format="fp8", implementation="nothing")
    with pytest.raises(ValueError, match=re.escape("quantize_fp8: implementation must be None or one of reference")):
        layer(x)
