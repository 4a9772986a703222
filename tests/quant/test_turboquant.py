"""TurboQuant's format: solver, packing, rotation, sizes, errors that shrink with bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.quant import turboquant

presets = pytest.mark.parametrize("preset", turboquant.PRESETS)
EPS = float(jnp.finfo(jnp.float32).eps)


# ---------------------------------------------------------------- levels
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize(
    ("bits", "half"),
    [
        (3, [0.244984, 0.755646, 1.343180, 2.150350]),
        (4, [0.128428, 0.388138, 0.656880, 0.942448, 1.256258, 1.617882, 2.068447, 2.730922]),
    ],
)
def test_levels_are_vllms(D, bits, half):
    levels = turboquant.centroids(D, bits)
    assert levels.dtype == np.float32 and levels.shape == (2**bits,)
    np.testing.assert_array_equal(levels, -levels[::-1])
    digit = 1e-6  # the table has six digits
    np.testing.assert_allclose(levels[2 ** (bits - 1) :] * D**0.5, half, rtol=0, atol=digit)


def test_levels_lie_near_the_converged_solution_but_not_on_it():
    """Lloyd-Max levels of N(0, 1) with 8 levels, Max (1960), table I."""
    known = np.array([0.2451, 0.7560, 1.344, 2.152])
    off = np.abs(turboquant.centroids(128, 3)[4:] * 128**0.5 - known)
    most = 2e-3
    assert (off < most).all() and off[3] > most / 4


def test_midpoints_are_averages():
    levels = turboquant.centroids(128, 4).astype(np.float64)
    np.testing.assert_array_equal(turboquant.midpoints(128, 4), ((levels[1:] + levels[:-1]) / 2).astype(np.float32))


@pytest.mark.parametrize(("bits", "expected"), [(3, 0.0345), (4, 0.0095)])
def test_bc45_mean_squared_error_of_normal_numbers(bits, expected, rng):
    D = 128
    x = rng.standard_normal((500, D)).astype(np.float32)
    codes, norm = turboquant.key_codes(jnp.asarray(x), bits)
    y = turboquant.centroids(D, bits)[np.asarray(codes)] * np.asarray(norm)[:, None]
    error = np.mean((np.asarray(turboquant.rotate(jnp.asarray(y))) - x) ** 2)
    tenth = 0.1  # of the asymptotic value: samples and D are finite
    assert abs(error / expected - 1) < tenth


# ---------------------------------------------------------------- packing
def test_3_bit_codes_by_hand():
    codes = jnp.array([[1, 2, 3, 4, 5, 6, 7, 0]])
    word = sum(int(c) << 3 * i for i, c in enumerate(codes[0]))
    assert turboquant.pack(codes, 3)[0].tolist() == [word & 255, word >> 8 & 255, word >> 16]


def test_4_bit_codes_by_hand():
    assert turboquant.pack(jnp.array([[1, 2, 15, 0]]), 4)[0].tolist() == [0x21, 0x0F]


@pytest.mark.parametrize("bits", [3, 4])
def test_all_codes_in_all_places_survive_packing(bits):
    codes = jnp.stack([jnp.roll(jnp.arange(16) % 2**bits, i) for i in range(16)])
    np.testing.assert_array_equal(turboquant.unpack(turboquant.pack(codes, bits), bits), codes)


@pytest.mark.parametrize(
    ("preset", "D", "size"),
    [("k8v4", 128, 196), ("4bit_nc", 128, 134), ("k3v4_nc", 128, 118), ("3bit_nc", 128, 102), ("4bit_nc", 64, 70)],
)
def test_slots_have_vllms_size(preset, D, size):
    assert turboquant.PRESETS[preset].slot_bytes(D) == size
    assert turboquant.quantize(jnp.ones((2, D)), jnp.ones((2, D)), preset).shape == (2, size)


# ---------------------------------------------------------------- keys and values
def test_rotation_is_its_own_inverse_and_keeps_lengths(rng):
    x = jnp.asarray(rng.standard_normal((20, 256)), jnp.float32)
    y = turboquant.rotate(x)
    bound = 16 * EPS  # eight additions a number, twice
    np.testing.assert_allclose(turboquant.rotate(y), x, rtol=0, atol=bound * float(jnp.abs(x).max()))
    np.testing.assert_allclose(jnp.linalg.norm(y, axis=1), jnp.linalg.norm(x, axis=1), rtol=bound, atol=0)


def test_a_number_on_a_midpoint_moves_up():
    """k = e1 has y = (1, ..., 1) / sqrt(D); scaled rows put y on the middle level's border, 0."""
    codes, norm = turboquant.key_codes(jnp.zeros((1, 64), jnp.float32), 4)
    assert (codes == 8).all() and (norm == 0).all()


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("preset", ["4bit_nc", "k3v4_nc", "3bit_nc"])
def test_bc45_the_relative_error_does_not_depend_on_the_norm(preset, scale):
    D = 128
    key = np.zeros((1, D), np.float32)
    key[0, 0] = scale
    got = [
        np.asarray(turboquant.dequantize(turboquant.quantize(jnp.asarray(k), jnp.asarray(k), preset), D, preset)[0])
        for k in (key, key / scale)
    ]
    half = 2.0**-10  # the norm is float16, subnormal for the smallest
    np.testing.assert_allclose(got[0] / scale, got[1], rtol=0, atol=half)


@presets
def test_bc45_zeros_come_back_as_zeros(preset):
    zeros = jnp.zeros((2, 64), jnp.bfloat16)
    for x in turboquant.dequantize(turboquant.quantize(zeros, zeros, preset), 64, preset):
        assert not np.asarray(x).any()


def test_constant_values_come_back(rng):
    value = jnp.full((1, 64), 1.5, jnp.bfloat16)
    back = turboquant.dequantize(turboquant.quantize(value, value, "4bit_nc"), 64, "4bit_nc")[1]
    assert (np.asarray(back) == 1.5).all()


def test_value_codes_by_hand():
    """Step 1 from 0 to 15: halves move up."""
    value = jnp.array([[0, 15, 0.5, 1.49, 7.5, 14.4, 14.5, 3]], jnp.float32)
    codes, scale, low = turboquant.value_codes(value, 4)
    assert (scale[0], low[0]) == (1, 0)
    assert codes[0].tolist() == [0, 15, 1, 1, 8, 14, 15, 3]


def test_a_query_may_be_rotated_instead_of_the_key(rng):
    D = 128
    q, k = (jnp.asarray(rng.standard_normal((30, D)), jnp.float32) for _ in range(2))
    slots = turboquant.quantize(k, k, "4bit_nc")
    rotated = (turboquant.rotate(q) * turboquant.read_key(slots, D, "4bit_nc")).sum(1)
    plain = (q * turboquant.dequantize(slots, D, "4bit_nc")[0]).sum(1)
    bound = 64 * EPS * float(jnp.abs(q).max() * jnp.abs(k).max() * D)
    np.testing.assert_allclose(rotated, plain, rtol=0, atol=bound)


def test_errors_shrink_with_bits_and_norm_correction_keeps_the_length(rng):
    D = 128
    x = jnp.asarray(rng.standard_normal((200, D)), jnp.float32)
    errors = {}
    for preset in turboquant.PRESETS:
        key, value = turboquant.dequantize(turboquant.quantize(x, x, preset), D, preset)
        errors[preset] = [float(jnp.linalg.norm(y - x) / jnp.linalg.norm(x)) for y in (key, value)]
        if turboquant.PRESETS[preset].norm_correction:
            rounding = 2.0**-10  # of the norm to float16
            np.testing.assert_allclose(jnp.linalg.norm(key, axis=1), jnp.linalg.norm(x, axis=1), rtol=rounding, atol=0)
    assert errors["k8v4"][0] < errors["4bit_nc"][0] < errors["3bit_nc"][0]
    assert errors["k8v4"][1] == errors["4bit_nc"][1] < errors["3bit_nc"][1]


def test_numbers_that_are_not_finite_are_read_as_such():
    value = jnp.ones((3, 64)).at[0, 5].set(jnp.nan).at[1, 5].set(jnp.inf)
    key, back = turboquant.dequantize(turboquant.quantize(value, value, "4bit_nc"), 64, "4bit_nc")
    for x in (key, back):
        assert not np.isfinite(np.asarray(x[:2])).any() and np.isfinite(np.asarray(x[2])).all()


def test_jit_gives_the_same_bytes(rng):
    x = jnp.asarray(rng.standard_normal((50, 64)), jnp.bfloat16)
    for preset in turboquant.PRESETS:
        eager = turboquant.quantize(x, x, preset)
        np.testing.assert_array_equal(jax.jit(turboquant.quantize, static_argnums=2)(x, x, preset), eager)


# ---------------------------------------------------------------- layers, messages
@pytest.mark.parametrize(
    ("layers", "options", "plain"),
    [
        (32, {}, (0, 1, 30, 31)),
        (3, {}, (0, 2)),
        (1, {}, ()),
        (6, {"edge": 1}, (0, 5)),
        (32, {"hybrid": True}, ()),
        (4, {"edge": 9}, (0, 1, 2, 3)),
    ],
)
def test_boundary_layers(layers, options, plain):
    assert turboquant.boundary_layers(layers, **options) == plain


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: turboquant.find("5bit", 128), "preset must be one of k8v4, 4bit_nc, k3v4_nc, 3bit_nc, got '5bit'"),
        (
            lambda: turboquant.find("k8v4", 96),
            "TurboQuant rotates heads and packs eight codes: D must be a power of two >= 8, got 96",
        ),
        (
            lambda: turboquant.dequantize(jnp.zeros((1, 60), jnp.uint8), 64, "4bit_nc"),
            "slots of 4bit_nc with D=64 have 70 bytes, got 60",
        ),
    ],
)
def test_messages(call, message):
    with pytest.raises(ValueError) as raised:
        call()
    assert str(raised.value) == message
