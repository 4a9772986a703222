"""Numeric primitives, bit by bit, eager and compiled."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxattn.quant import primitives as p

HUGE, SMALL = 3.0e38, 1e-38
EDGES = np.array(
    [0, -0.0, 1e-45, -1e-40, SMALL, 2.0**-126, 2.0**-10, 2.0**-9, 0.1, 448, 464, 465, 57344, 61440, 61441, HUGE],
    np.float32,
)


def same_bits(a, b):
    a, b = (np.atleast_1d(np.asarray(x)) for x in (a, b))
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


def around(x):
    """The numbers, their neighbours on both sides, and all of that negated."""
    x = np.asarray(x, np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))])
    return np.concatenate([x, -x])


def borders(dtype):
    """Numbers half way between two neighbouring codes."""
    codes = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    codes = np.sort(codes[np.isfinite(codes)])
    return ((codes[1:] + codes[:-1]) / 2).astype(np.float32)


# ---------------------------------------------------------------- division and powers of two
@pytest.mark.parametrize("y", [448.0, 127.0, 6.0, 0.0123])
def test_division_by_a_constant_is_division(y, rng):
    x = rng.standard_normal(1 << 14).astype(np.float32)
    same_bits(jax.jit(lambda x: p.divide(x, y))(x), x / np.float32(y))
    assert (x * (np.float32(1) / np.float32(y)) != x / np.float32(y)).any(), "the reciprocal would differ"


def test_division_by_rows_is_division(rng):
    x = rng.standard_normal((64, 256)).astype(np.float32)
    s = np.abs(rng.standard_normal((64, 1))).astype(np.float32)
    same_bits(jax.jit(p.divide)(x, s), x / s)


def test_the_inverse_of_nothing_is_nothing():
    s = np.array([0, 1e-40, 2.0**-126, 2, np.inf, np.nan, -0.0], np.float32)
    found = np.asarray(jax.jit(p.inverse)(s))
    np.testing.assert_array_equal(found, np.array([0, 0, 2.0**126, 0.5, 0, np.nan, 0], np.float32))


def test_powers_of_two_are_exact():
    e = np.arange(-126, 128)
    same_bits(jax.jit(p.power_of_two)(e), np.ldexp(np.float32(1), e))


def test_ue8m0_of_powers_of_two_and_their_neighbours():
    x = np.ldexp(np.float32(1), np.arange(-125, 127)).astype(np.float32)
    up, down = (np.nextafter(x, np.float32(v)) for v in (np.inf, 0))
    code = np.arange(2, 254)
    for values, ceil, floor in ((x, code, code), (up, code + 1, code), (down, code, code - 1)):
        np.testing.assert_array_equal(jax.jit(p.ue8m0_ceil)(values), ceil)
        np.testing.assert_array_equal(jax.jit(p.ue8m0_floor)(values), floor)


def test_ue8m0_codes_stay_finite():
    x = np.array([1e-40, SMALL, HUGE, np.inf], np.float32)
    assert p.ue8m0_ceil(x).tolist() == [1, 1, 254, 254]
    assert p.ue8m0_floor(x).tolist() == [1, 1, 254, 254]


def test_the_logarithm_agrees_but_for_neighbours_of_powers_of_two(rng):
    x = np.exp2(rng.uniform(-60, 60, 1 << 14)).astype(np.float32)
    same_bits(p.ue8m0_ceil_log2(x), p.ue8m0_ceil(x))
    exact = np.ldexp(np.float32(1), np.arange(-60, 60)).astype(np.float32)
    near = np.concatenate([np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(0))])
    difference = p.ue8m0_ceil_log2(near).astype(jnp.int32) - p.ue8m0_ceil(near)
    assert int(jnp.abs(difference).max()) <= 1


def test_ue8m0_values():
    found = np.asarray(p.ue8m0_value(np.arange(256, dtype=np.uint8)))
    np.testing.assert_array_equal(found[1:255], np.ldexp(np.float32(1), np.arange(-126, 128)))
    assert np.isnan(found[255])


@pytest.mark.parametrize("code", [1, 2, 104, 127, 254])
def test_division_by_a_power_of_two_keeps_denormals(code):
    x = around([2.0**-149, 2.0**-133, 2.0**-127, 2.0**-126, 1.5, 1e30])
    exact = x.astype(np.float64) * 2.0 ** (127 - code)
    wanted = np.where(np.abs(exact) < 2.0**-126, np.copysign(0, exact), exact)
    with np.errstate(over="ignore"):
        same_bits(jax.jit(p.divide_by_ue8m0)(x, np.full(x.shape, code, np.uint8)), wanted.astype(np.float32))


# ---------------------------------------------------------------- float8
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_codes_round_to_nearest_even_and_saturate(name, rng):
    dtype = getattr(ml_dtypes, name)
    normal = rng.standard_normal(1 << 14) * np.exp2(rng.integers(-20, 20, 1 << 14))
    x = np.concatenate([around(borders(dtype)), around(EDGES), normal.astype(np.float32)])
    limit = p.float8_max(name)
    same_bits(jax.jit(lambda x: p.to_float8(x, name))(x), np.clip(x, -limit, limit).astype(dtype))
    assert np.isfinite(np.asarray(p.to_float8(x, name)).astype(np.float32)).all()


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_nan_has_one_code_and_infinity_saturates(name):
    x = np.array([np.nan, -np.nan, np.inf, -np.inf], np.float32)
    codes = np.asarray(p.to_float8(x, name))
    assert codes[:2].view(np.uint8).tolist() == [0x7F, 0x7F]
    assert codes[2:].astype(np.float32).tolist() == [p.float8_max(name), -p.float8_max(name)]


@pytest.mark.parametrize(("x", "code"), [(400.199585, 416), (272.156555, 288), (136.002075, 144)])
def test_bc37_numbers_are_rounded_once(x, code):
    assert float(jax.jit(p.to_float8)(np.float32(x))) == code
    assert float(np.float32(x).astype(ml_dtypes.bfloat16).astype(ml_dtypes.float8_e4m3fn)) != code


def test_bc37_as_many_are_rounded_down_as_up(rng):
    n = 1 << 14
    x = rng.uniform(-448, 448, n).astype(np.float32)
    down = (np.asarray(p.to_float8(x)).astype(np.float32) < x).mean()
    assert abs(down - 0.5) < 10 / n**0.5


def test_an_unknown_type_of_codes():
    with pytest.raises(ValueError, match="the dtype of the codes must be float8_e4m3fn or float8_e5m2, got 'int8'"):
        p.to_float8(jnp.ones(2), "int8")


# ---------------------------------------------------------------- E2M1
def test_bc41_ties_of_e2m1():
    x = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    for rule, wanted in (("even", [0, 1, 1, 2, 2, 4, 4]), ("zero", [0, 0.5, 1, 1.5, 2, 3, 4])):
        assert p.from_e2m1(p.to_e2m1(x, rule)).tolist() == wanted
        assert p.from_e2m1(p.to_e2m1(-x, rule)).tolist() == [-v for v in wanted]
    assert p.to_e2m1(np.float32([-0.2, -0.0]), "even").tolist() == [8, 8]
    assert p.to_e2m1(np.float32([-0.2, -0.0]), "zero").tolist() == [0, 0]


def test_e2m1_is_that_of_ml_dtypes(rng):
    x = around(np.concatenate([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], rng.uniform(0, 8, 1000)]))
    wanted = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    same_bits(jax.jit(p.to_e2m1)(x), wanted.view(np.uint8) & 15)


def test_e2m1_round_trip_and_edges():
    codes = np.arange(16, dtype=np.uint8)
    same_bits(p.to_e2m1(p.from_e2m1(codes)), codes)
    x = np.array([np.nan, -np.nan, np.inf, -np.inf, HUGE, 1e-45, -1e-45], np.float32)
    assert p.to_e2m1(x).tolist() == [7, 7, 7, 15, 7, 0, 8]
    with pytest.raises(ValueError, match="ties must be 'even' or 'zero', got 'up'"):
        p.to_e2m1(x, "up")


# ---------------------------------------------------------------- integers and packing
@pytest.mark.parametrize(
    ("rounding", "wanted"),
    [
        ("even", [0, 2, 2, -0.0, -2, 1, 0]),
        ("away", [1, 2, 3, -1, -2, 1, 0]),
        ("zero", [0, 1, 2, -0.0, -1, 0, 0]),
    ],
)
def test_three_roundings(rounding, wanted):
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 0.75, np.nextafter(np.float32(0.5), np.float32(0))], np.float32)
    np.testing.assert_array_equal(jax.jit(lambda x: p.round_integer(x, rounding))(x), np.array(wanted, np.float32))


def test_int8_saturates_and_nan_is_zero():
    x = np.array([127.4, 127.5, 1e9, np.inf, -128.5, -1e9, -np.inf, np.nan], np.float32)
    assert p.to_int8(x).tolist() == [127, 127, 127, 127, -128, -128, -128, 0]
    with pytest.raises(ValueError, match="rounding must be 'even', 'away' or 'zero', got 'up'"):
        p.to_int8(x, "up")


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_words_hold_a_little_endian_stream(bits, rng):
    codes = rng.integers(0, 2**bits, (3, 64), dtype=np.uint8)
    packed = np.asarray(jax.jit(lambda c: p.pack_words(c, bits))(codes))
    stream = [(int(c) >> b) & 1 for c in codes[1] for b in range(bits)]
    words = [sum(bit << i for i, bit in enumerate(stream[k : k + 32])) for k in range(0, len(stream), 32)]
    assert packed[1].view(np.uint32).tolist() == words
    same_bits(p.unpack_words(packed, bits), codes)


def test_words_that_do_not_come_out():
    with pytest.raises(ValueError, match="codes must have 2, 3, 4 or 8 bits, got 5"):
        p.pack_words(np.zeros(32, np.uint8), 5)
    with pytest.raises(ValueError, match="3-bit codes are packed 32 at a time, got 16 along the last axis"):
        p.pack_words(np.zeros(16, np.uint8), 3)
    with pytest.raises(ValueError, match="3-bit codes come in 3 words at a time, got 4 along the last axis"):
        p.unpack_words(np.zeros(4, np.int32), 3)


def test_nibbles():
    assert p.pack_nibbles(np.array([1, 2, 15, 0], np.uint8)).tolist() == [0x21, 0x0F]
    assert p.unpack_nibbles(np.array([0x21, 0x0F], np.uint8)).tolist() == [1, 2, 15, 0]


def test_groups_are_filled_up_with_zeros():
    x = jnp.arange(1, 6)
    assert p.grouped(x, 4).tolist() == [[1, 2, 3, 4], [5, 0, 0, 0]]
    assert p.ungrouped(p.grouped(x, 4), 5).tolist() == x.tolist()


def test_amax_ignores_nan_and_takes_nothing_for_zero():
    assert p.amax(jnp.array([1.0, -3.0, jnp.nan]), -1).tolist() == [3]
    assert p.amax(jnp.zeros((0, 4)), None) == 0
