"""What products of codes promise: where scales multiply, exact integers, the precision that was asked for."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import quantize_fp8, scaled_matmul
from jaxattn.ops.scaled_matmul import make_inputs

E4M3 = "float8_e4m3fn"


def test_int8_is_exact(rng):
    args = make_inputs(rng, 33, 256, 128, codes="int8", azp=True)
    a, b = (np.asarray(args[n]).astype(np.int64) for n in ("a", "b"))
    acc = ((a - np.asarray(args["azp"])) @ b.T).astype(np.float32)
    wanted = (acc * np.asarray(args["b_scale"])) * np.asarray(args["a_scale"])
    np.testing.assert_array_equal(jax.jit(lambda a: scaled_matmul(**a))(args), wanted.astype(jnp.bfloat16))


def test_int8_sums_do_not_wrap_at_full_range():
    a, b = jnp.full((1, 4096), -128, jnp.int8), jnp.full((1, 4096), -128, jnp.int8)
    one = jnp.ones(())
    assert scaled_matmul(a, b, one, one, out_dtype="float32").tolist() == [[4096 * 128 * 128]]
    azp = jnp.full((1,), 127, jnp.int32)
    assert scaled_matmul(a, b, one, one, azp=azp, out_dtype="float32").tolist() == [[4096 * 255 * 128]]


@pytest.mark.parametrize("scales", ["tensor", "token", "block"])
def test_whole_numbers_and_power_of_two_scales_are_exact(scales, rng):
    args = make_inputs(rng, 7, 256, 130, scales=scales, out_dtype="float32")
    for name in ("a", "b"):
        args[name] = jnp.asarray(rng.integers(-8, 9, args[name].shape), E4M3)
    for name in ("a_scale", "b_scale"):
        args[name] = jnp.asarray(np.exp2(rng.integers(-2, 3, args[name].shape)), jnp.float32)
    a, b, sa, sb = (np.asarray(args[n]).astype(np.float64) for n in ("a", "b", "a_scale", "b_scale"))
    if scales == "block":
        sa, sb = np.repeat(sa, 128, 1), np.repeat(np.repeat(sb, 128, 0)[:130], 128, 1)
        wanted = (a * sa) @ (b * sb).T
    else:
        wanted = (a * sa.reshape(-1, 1)) @ (b * sb.reshape(-1, 1)).T
    np.testing.assert_array_equal(scaled_matmul(**args), wanted.astype(np.float32))


def test_quantize_multiply_is_near_the_product(rng):
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((16, 256), (64, 256)))
    (a, sa), (b, sb) = quantize_fp8(x), quantize_fp8(w, granularity="channel")
    wanted = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    lost = np.linalg.norm(np.asarray(scaled_matmul(a, b, sa, sb, out_dtype="float32")) - wanted)
    assert lost < 2.0**-4 * np.linalg.norm(wanted)


def test_bc59_float32_is_float32():
    """2^-12 would vanish in TF32."""
    a = jnp.zeros((1, 128)).at[0, :2].set(jnp.array([1.0, 2.0**-6])).astype(E4M3)
    b = jnp.zeros((1, 128)).at[0, :2].set(jnp.array([1.0, 2.0**-6])).astype(E4M3)
    assert scaled_matmul(a, b, jnp.ones(()), jnp.ones(()), out_dtype="float32").item() == 1 + 2.0**-12


def test_empty_sides():
    one = jnp.ones(())
    a, none = jnp.ones((3, 128), E4M3), jnp.zeros((0, 128), E4M3)
    assert scaled_matmul(none, a, one, one).shape == (0, 3)
    assert scaled_matmul(a, none, one, one).shape == (3, 0)


CODES = jnp.ones((2, 256), E4M3)
WRONG = {
    "K": ({"b": jnp.ones((3, 128), E4M3)}, ValueError, "b must be [F M] with M=256 (from a), got shape (3, 128)"),
    "kind": (
        {"b": jnp.ones((2, 256), jnp.int8)},
        TypeError,
        "b must have dtype float8_e4m3fn or float8_e5m2, got int8; quantize both to the same kind",
    ),
    "floats": (
        {"a": jnp.ones((2, 256))},
        TypeError,
        "a must have dtype float8_e4m3fn or float8_e5m2 or int8 or float64, got float32; quantize it first",
    ),
    "scale": (
        {"a_scale": jnp.ones(3)},
        ValueError,
        "a_scale must be one number or a vector of 2, got shape (3,)",
    ),
    "number": ({"a_scale": 1.0}, TypeError, "a_scale must be an array, got float"),
    "block": (
        {"block": 128, "a_scale": jnp.ones((2, 2))},
        ValueError,
        "with block=128 b_scale must be (1, 2), got shape ()",
    ),
    "azp": (
        {"azp": jnp.zeros(2, jnp.int32)},
        ValueError,
        "azp belongs to int8 codes without block, got float8_e4m3fn and block=None; leave it out",
    ),
    "out": ({"out_dtype": "int8"}, ValueError, "out_dtype must be one of bfloat16, float16, float32, got 'int8'"),
}


@pytest.mark.parametrize(("changes", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_calls(changes, error, message):
    args = {"a": CODES, "b": CODES, "a_scale": jnp.ones(()), "b_scale": jnp.ones(())} | changes
    with pytest.raises(error, match=f"^scaled_matmul: {re.escape(message)}$"):
        scaled_matmul(**args)
