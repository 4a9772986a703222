"""Layers filled with other tools' tensors, under their names: bitsandbytes, compressed-tensors, FBGEMM."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import quantize_fp8, scaled_matmul
from jaxattn.nn import QuantizedLinear
from jaxattn.quant import fp8, integers, nf4, wna16
from jaxattn.quant import primitives as p

M, F, GROUP = 128, 160, 32


@pytest.fixture
def weight():
    return jnp.asarray(np.random.default_rng(0).standard_normal((F, M)) * 0.05, jnp.bfloat16)


# ---------------------------------------------------------------- bitsandbytes
def saved(weight, format="nf4", **facts):
    """What bitsandbytes saves for a weight with double quantization, whose inner codebook is its own."""
    codes, absmax = nf4.quantize(weight, format)
    nested = nf4.quantize_absmax(absmax)
    facts = {"quant_type": format, "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)} | facts
    facts |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(nested.offset)}
    return {
        "weight": codes[:, None],
        "weight.absmax": nested.codes,
        "weight.quant_map": jnp.asarray(nf4.codebook(format)),
        "weight.nested_absmax": nested.absmax,
        "weight.nested_quant_map": jnp.asarray(np.nextafter(nf4.dynamic_codebook(), np.float32(2))),
        f"weight.quant_state.bitsandbytes__{format}": np.frombuffer(json.dumps(facts).encode(), np.uint8),
    }


@pytest.mark.parametrize("format", ["nf4", "fp4"])
def test_double_quantization_is_undone_with_the_checkpoints_own_codebook(format, weight):
    tensors = saved(weight, format)
    layer = QuantizedLinear(M, F, format=format)
    layer.load({f"a.{name}": x for name, x in tensors.items()}, prefix="a.")
    codes, top, book = (
        np.asarray(tensors[f"weight.{name}"]) for name in ("absmax", "nested_absmax", "nested_quant_map")
    )
    assert top.size == 2, "a short block is among them"
    offset = np.float32(json.loads(bytes(tensors[f"weight.quant_state.bitsandbytes__{format}"]))["nested_offset"])
    absmax = book[codes] * np.repeat(top, 256)[: codes.size] + offset  # float32, each step rounded
    np.testing.assert_array_equal(layer.absmax[...], absmax)
    nibbles = np.stack([np.asarray(tensors["weight"])[:, 0] >> 4, np.asarray(tensors["weight"])[:, 0] & 15], 1)
    wanted = (nf4.codebook(format)[nibbles].reshape(-1, 64) * absmax[:, None]).reshape(F, M)
    np.testing.assert_array_equal(layer.matrix("float32").T, jnp.asarray(wanted).astype("bfloat16").astype("float32"))
    x = jnp.eye(M, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(layer(x), layer.matrix())


def test_absmax_is_the_same_inside_one_program(weight):
    nested = nf4.quantize_absmax(nf4.quantize(weight)[1])
    np.testing.assert_array_equal(jax.jit(nf4.dequantize_absmax)(nested), nf4.dequantize_absmax(nested))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"weight.nested_absmax": None},
            KeyError,
            "QuantizedLinear: weight.absmax of format 'nf4' holds codes, which need weight.nested_absmax, "
            "weight.nested_quant_map and weight.quant_state.bitsandbytes__nf4",
        ),
        (
            {"weight.quant_state.bitsandbytes__nf4": None},
            KeyError,
            "QuantizedLinear: weight.absmax of format 'nf4' holds codes, which need",
        ),
        (
            {"weight.quant_map": jnp.asarray(nf4.codebook("fp4"))},
            ValueError,
            "QuantizedLinear: weight.quant_map is not the codebook of format 'nf4'",
        ),
        (
            {"weight.quant_state.bitsandbytes__nf4": np.frombuffer(b'{"blocksize": 128}', np.uint8)},
            ValueError,
            "QuantizedLinear: blocksize of format 'nf4' must be 64, got 128",
        ),
        ({"weight.absmax": None}, KeyError, "format 'nf4' needs weight, absmax, but absmax of prefix '' is missing"),
    ],
)
def test_bitsandbytes_checkpoints_that_do_not_fit(change, error, message, weight):
    tensors = {name: x for name, x in (saved(weight) | change).items() if x is not None}
    with pytest.raises(error, match=re.escape(message)):
        QuantizedLinear(M, F, format="nf4").load(tensors)


# ---------------------------------------------------------------- compressed-tensors
def words_of(codes, bits):
    """Codes [A, B] in words along the second axis, low bits first, by arithmetic."""
    per = 32 // bits
    shifted = codes.astype(np.uint64).reshape(codes.shape[0], -1, per) << (np.arange(per, dtype=np.uint64) * bits)
    return shifted.sum(-1).astype(np.uint32).view(np.int32)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_integers_of_compressed_tensors(bits, symmetric, weight):
    q, scale, zero = (np.asarray(x) for x in integers.quantize(weight.T, bits, GROUP, symmetric=symmetric))
    tensors = {
        "weight_packed": words_of(q.T, bits),
        "weight_scale": scale.T,
        "weight_shape": np.array([F, M], np.int64),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words_of(zero, bits).T
    layer = QuantizedLinear(M, F, format="wna16", bits=bits, group=GROUP)
    layer.load({name: jnp.asarray(x) if x.dtype != np.int64 else x for name, x in tensors.items()})
    packed, _, zeros = wna16.quantize(weight, bits, GROUP, symmetric=symmetric)
    np.testing.assert_array_equal(layer.weight[...], packed)
    if symmetric:
        assert layer.weight_zero_point is None
    else:
        np.testing.assert_array_equal(layer.weight_zero_point[...], zeros)
    np.testing.assert_array_equal(layer.matrix(), integers.dequantize(*map(jnp.asarray, (q, scale, zero))))
    np.testing.assert_array_equal(layer(jnp.eye(M, dtype=jnp.bfloat16)), layer.matrix())


# ---------------------------------------------------------------- FBGEMM
def test_fbgemm_bounds_the_scale_of_activations(weight):
    q, s = fp8.quantize(weight, "channel")
    x = jnp.asarray(np.random.default_rng(1).standard_normal((5, M)) * 100, jnp.bfloat16)
    layer = QuantizedLinear(M, F, format="fp8_channel")
    layer.load({"weight": q, "weight_scale": s, "input_scale_ub": jnp.array([120.0])})
    codes, scale = quantize_fp8(x, upper_bound=120.0)
    assert (np.asarray(scale) == np.float32(120) / np.float32(448)).any(), "the bound is what decides"
    np.testing.assert_array_equal(layer(x), scaled_matmul(codes, q, scale, s))
    layer.load({"weight": q, "weight_scale": s})
    np.testing.assert_array_equal(layer(x), scaled_matmul(*(r := quantize_fp8(x))[:1], q, r[1], s))


def test_the_words_of_the_tests_are_the_stream_that_gptq_packs():
    codes = np.random.default_rng(2).integers(0, 16, (3, 16), dtype=np.uint8)
    np.testing.assert_array_equal(words_of(codes, 4), p.pack_words(jnp.asarray(codes), 4))
