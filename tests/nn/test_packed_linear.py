"""Weights in the kernel's own layout: packed once, the same numbers as the checkpoint's tensors."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxattn.nn import QuantizedLinear, pack_module, quantize_module
from jaxattn.nn._linear_formats import FORMATS
from jaxattn.quant import calibrate, gptq, tiles

M, F = 256, 128
WEIGHT_ONLY = [name for name, format in FORMATS.items() if format.packs is not None]
CROSSED = 2.0**-8
"""Share of numbers that scales 2^-17 off (`jaxattn.quant.tiles`) move across a border of bfloat16, up or down; borders
lie 2^-8 of a number apart."""


@pytest.fixture
def linear():
    made = nnx.Linear(M, F, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    made.bias[...] = jnp.arange(F, dtype=jnp.bfloat16) / 64
    return made


@pytest.mark.parametrize("format", WEIGHT_ONLY)
def test_packing_keeps_the_numbers(format, linear):
    layer = QuantizedLinear.from_linear(linear, format=format)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, M)), jnp.bfloat16)
    matrix, y = layer.matrix("float32"), layer(x)
    layer.pack_tiles()
    packed = next(iter(layer.tensors))
    assert getattr(layer, packed).shape[0] == F // 64 and getattr(layer, packed).dtype == jnp.int32
    same = np.asarray(layer.matrix("float32") == matrix)
    assert same.all() if format not in ("nf4", "fp4") else same.mean() > 1 - CROSSED
    if same.all():
        np.testing.assert_array_equal(nnx.jit(lambda layer, x: layer(x))(layer, x), y)
    stored = layer._arrays()
    layer.pack_tiles()  # a second time changes nothing
    for name, array in stored.items():
        if array is not None:
            np.testing.assert_array_equal(getattr(layer, name)[...], array)


def test_the_kernel_loads_packed_layers_as_they_are(linear, interpret, monkeypatch):
    layer = QuantizedLinear.from_linear(linear, format="awq", implementation="mosaic")
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, M)), jnp.bfloat16)
    y = layer(x)  # packs on the way
    layer.pack_tiles()
    monkeypatch.delattr(tiles, "pack")
    np.testing.assert_array_equal(layer(x), y)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_act_order_and_narrow_codes_are_packed_and_loaded_again(bits):
    rng = np.random.default_rng(bits)
    w, x = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((M, F), (64, M)))
    found = calibrate.gptq(w, calibrate.hessian(x), bits=bits, group=64, act_order=True)
    qweight, qzeros = gptq.pack(found.q, found.zero, bits)
    tensors = {"qweight": qweight, "qzeros": qzeros, "scales": found.scale, "g_idx": found.g_idx}
    layer = QuantizedLinear(M, F, format="gptq", bits=bits, group=64)
    layer.load(tensors)
    matrix = layer.matrix()
    np.testing.assert_array_equal(matrix, found.dequantize())
    layer.pack_tiles()
    assert layer.tile_bits == 4 and layer.options.bits == bits
    np.testing.assert_array_equal(layer.matrix(), matrix)
    layer.load(tensors)
    assert layer.tile_bits is None
    np.testing.assert_array_equal(layer.qweight[...], qweight)


def test_a_model_is_packed_where_it_can_be():
    class Block(nnx.Module):
        def __init__(self):
            self.up, self.down, self.head = (
                nnx.Linear(*sizes, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)) for sizes in ((M, F), (F, M), (M, 40))
            )

    model = Block()
    quantize_module(model, {"up": "mxfp4", "down": "fp8_block", "head": "awq"})
    packed = pack_module(model)
    refused = "QuantizedLinear: tiles.pack: the output features must be a multiple of 64, got 40; pad the weight"
    assert packed == {"head": refused, "up": None}
    assert (model.up.tile_bits, model.head.tile_bits) == (4, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"format": "fp8_channel"},
            "QuantizedLinear: format 'fp8_channel' quantizes activations; its kernels load a checkpoint's tensors as "
            "they are, so leave them",
        ),
        (
            {"format": "mxfp4", "dtype": jnp.float32},
            "QuantizedLinear: tiles.pack: x must be bfloat16 or float16, got float32",
        ),
    ],
)
def test_what_has_no_tiles(options, message, linear):
    with pytest.raises(ValueError, match=re.escape(message)):
        QuantizedLinear.from_linear(linear, **options).pack_tiles()
