"""Round trips, layouts and hand-written numbers of the formats; adversarial inputs of their quantizers."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxattn.quant import _inputs, awq, fp8, gptq, hadamard, int8, integers, marlin, mx, nf4, nvfp4, weights, wna16
from jaxattn.quant import primitives as p


def same_bits(a, b):
    a, b = (np.atleast_1d(np.asarray(x)) for x in (a, b))
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


FP8 = {
    "tensor": {"granularity": "tensor"},
    "static": {"granularity": "tensor", "scale": 0.0123},
    "token": {},
    "bound": {"upper_bound": 10.0},
    "channel": {"granularity": "channel"},
    "cuda": {"granularity": "group"},
    "cuda-ue8m0": {"granularity": "group", "ue8m0": True},
    "triton": {"granularity": "group", "rule": "triton"},
    "triton-ue8m0": {"granularity": "group", "rule": "triton", "ue8m0": True},
    "deep-gemm": {"granularity": "group", "rule": "deep_gemm", "ue8m0": True},
    "block": {"granularity": "block"},
    "e5m2": {"dtype": "float8_e5m2"},
}
SATURATING = ("static", "bound")
finite_extremes = np.array([0, -0.0, 1e-45, -1e-38, 2.0**-126, 3.4e38, -3.4e38, 448, 1], np.float32)


@pytest.mark.parametrize("options", FP8.values(), ids=FP8)
@pytest.mark.parametrize("row", ["zeros", "minus-zeros", "tiny", "mixed", "huge"])
def test_finite_numbers_never_become_nan(options, row):
    rows = {
        "zeros": np.zeros(256),
        "minus-zeros": np.full(256, -0.0),
        "tiny": np.resize([1e-40, -1e-38, 0], 256),
        "mixed": np.resize(finite_extremes, 256),
        "huge": np.resize([3.4e38, -3.4e38, 0], 256),
    }
    x = jnp.asarray(np.tile(rows[row].astype(np.float32), (3, 1)))
    q, s = jax.jit(lambda x: fp8.quantize(x, **options))(x)
    assert np.isfinite(np.asarray(q).astype(np.float32)).all()
    assert np.isfinite(np.asarray(s)).all()
    zero = np.asarray(x) == 0
    assert (np.asarray(q).astype(np.float32)[zero] == 0).all()


@pytest.mark.parametrize("options", FP8.values(), ids=FP8)
def test_nan_stays_in_its_place(options, rng):
    x = rng.standard_normal((4, 256)).astype(np.float32)
    dirty = x.copy()
    dirty[1, 3] = np.nan
    x[1, 3] = 0
    (q, s), (dirty_q, dirty_s) = (fp8.quantize(jnp.asarray(v), **options) for v in (x, dirty))
    same_bits(s, dirty_s)
    codes, dirty_codes = (np.array(v).view(np.uint8) for v in (q, dirty_q))
    assert dirty_codes[1, 3] == 0x7F
    dirty_codes[1, 3] = codes[1, 3]
    same_bits(codes, dirty_codes)


@pytest.mark.parametrize("name", sorted(set(FP8) - set(SATURATING)))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_fp8_round_trip_is_within_half_a_step(name, dtype, rng):
    options = dict(FP8[name])
    x = _inputs.adversarial(rng, 12, 256, dtype)
    q, s = fp8.quantize(x, **options)
    form = {"granularity": options.get("granularity", "token")}
    back = np.asarray(fp8.dequantize(q, s, **form)).astype(np.float64)
    step = np.broadcast_to(np.asarray(fp8.expand(s, x.shape, **form)), x.shape).astype(np.float64)
    exact = np.asarray(x).astype(np.float64)
    mantissa, smallest = (4, 2.0**-9) if options.get("dtype") is None else (3, 2.0**-16)
    # half a step of the code's binade, and the roundings of quotient and product
    allowed = np.maximum(np.abs(exact) * 2.0**-mantissa, step * smallest / 2) * (1 + 2.0**-20)
    assert (np.abs(back - exact) <= allowed).all()


def test_bc35_zero_groups_have_the_floor_of_their_path():
    x = jnp.zeros((1, 128))
    scale = {rule: fp8.quantize(x, "group", rule=rule, ue8m0=True)[1].item() for rule in fp8.RULES}
    assert {rule: np.log2(s) for rule, s in scale.items()} == {"cuda": -33, "triton": -42, "deep_gemm": -22}


def test_bc35_contiguity_does_not_matter(rng):
    x = rng.standard_normal((128, 128)).astype(np.float32)
    for a, b in zip(fp8.quantize(jnp.asarray(x), "group"), fp8.quantize(jnp.asarray(x.T).T, "group"), strict=True):
        same_bits(a, b)


def test_bc39_a_scale_is_rounded_up_so_that_the_largest_number_survives():
    x = jnp.zeros((1, 128)).at[0, 5].set(600.0)
    q, s = fp8.quantize(x, "group", ue8m0=True)
    assert s.item() == 2
    assert float(fp8.dequantize(q, s, "group")[0, 5]) == 576


def test_cuda_and_triton_groups_have_different_scales(rng):
    x = jnp.asarray(rng.standard_normal((64, 128)), jnp.float32)
    assert (fp8.quantize(x, "group")[1] != fp8.quantize(x, "group", rule="triton")[1]).any()


@pytest.mark.parametrize("shape", [(1, 3), (5, 4), (128, 56)])
def test_packed_exponents(shape, rng):
    scale = jnp.asarray(np.exp2(rng.integers(-40, 40, shape)), jnp.float32)
    packed = fp8.pack(scale)
    assert packed.shape == (-(-shape[1] // 4), -(-shape[0] // 4) * 4)
    same_bits(fp8.unpack(packed, *shape), scale)
    word = np.asarray(packed)[0, 0].astype(np.uint32)
    assert word & 255 == int(np.log2(float(scale[0, 0]))) + 127


WRONG_FP8 = {
    "rows": ({"granularity": "row"}, "granularity must be one of tensor, token, channel, group, block, got 'row'"),
    "rule": ({"rule": "numpy"}, "rule must be one of cuda, triton, deep_gemm, got 'numpy'"),
    "scale": (
        {"scale": 1.0},
        "a static scale belongs to granularity 'tensor', got 'token'; leave one of them out",
    ),
    "bound": (
        {"granularity": "group", "upper_bound": 1.0},
        "upper_bound belongs to granularity 'token' or 'channel', got 'group'",
    ),
    "ue8m0": ({"ue8m0": True}, "UE8M0 scales belong to granularity 'group' or 'block', got 'token'"),
    "group": ({"granularity": "group", "group": 0}, "group must be at least 1, got 0"),
}


@pytest.mark.parametrize(("options", "message"), WRONG_FP8.values(), ids=WRONG_FP8)
def test_fp8_options_that_do_not_belong_together(options, message):
    with pytest.raises(ValueError) as raised:
        fp8.quantize(jnp.ones((2, 128)), **options)
    assert str(raised.value) == message


def test_fp8_blocks_need_a_matrix():
    with pytest.raises(ValueError, match="granularity 'block' needs a matrix"):
        fp8.quantize(jnp.ones((2, 2, 128)), "block")


# ---------------------------------------------------------------- INT8
def test_int8_constant_rows_come_back():
    x = jnp.tile(jnp.array([[0.0], [-0.0], [1e-7], [5.0], [-3e4]]), (1, 64))
    q, s, azp = int8.quantize(x, symmetric=False)
    assert (np.asarray(q) == 0).all()
    assert s[:, 0].tolist() == [1, 1, np.float32(1e-7), 5, 3e4]
    assert azp[:, 0].tolist() == [0, 0, -1, -1, 1]
    np.testing.assert_array_equal(int8.dequantize(q, s, azp), x)


@pytest.mark.parametrize("options", [{}, {"rule": "triton"}, {"granularity": "channel"}, {"granularity": "block"}])
def test_int8_rows_of_zeros(options):
    q, s, azp = int8.quantize(jnp.zeros((2, 128)), **options)
    assert (np.asarray(q) == 0).all() and azp is None
    assert np.isfinite(np.asarray(s)).all()


def test_int8_roundings_differ_on_ties():
    """amax 127: the scale is 1."""
    x = jnp.array([[127, 0.5, 1.5, 2.5, -0.5, -2.5, 3.9]])
    assert int8.quantize(x)[0].tolist() == [[127, 0, 2, 2, 0, -2, 4]]
    assert int8.quantize(x, rule="triton")[0].tolist() == [[127, 1, 2, 3, -1, -3, 4]]
    assert int8.quantize(x, "group", rule="triton", group=7)[0].tolist() == [[127, 0, 1, 2, 0, -2, 3]]


def test_int8_asymmetric_does_not_force_zero_into_the_range():
    x = jnp.asarray(np.linspace(100, 101, 256, dtype=np.float32)[None])
    q, s, azp = int8.quantize(x, symmetric=False)
    assert (int(q.min()), int(q.max())) == (-128, 127)
    assert int(azp[0, 0]) < -20_000
    assert float(jnp.abs(int8.dequantize(q, s, azp) - x).max()) <= float(s[0, 0])


@pytest.mark.parametrize("value", [1e30, 3e38])
def test_int8_far_zero_points_do_not_wrap(value):
    x = jnp.array([[value, value * (1 + 2.0**-23)]], jnp.float32)
    q, s, azp = int8.quantize(x, symmetric=False)
    assert int(q[0, 0]) <= int(q[0, 1])
    assert np.isfinite(float(s[0, 0])) and abs(int(azp[0, 0])) <= 2**30


@pytest.mark.parametrize("width", [1, 32, 1024, 2600])
def test_int8_products_are_exact(width, rng):
    """Also where all products are largest, and more of them than a float32 adds up exactly."""
    a, b = (rng.integers(-128, 128, (n, width)).astype(np.int8) for n in (5, 24))
    a[0] = b[0] = -128
    a[1] = 127
    np.testing.assert_array_equal(int8.product(jnp.asarray(a), jnp.asarray(b)), a.astype(np.int64) @ b.T.astype(int))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_experts_int8_rounds_in_the_dtype_of_the_weight(dtype, rng):
    w = (rng.standard_normal((3, 16, 128)) * 0.05).astype(dtype)
    w[0, 0], w[1, 2, :3] = 0, (-0.0, 1, -1)
    q, s = jax.jit(int8.experts_int8)(jnp.asarray(w))
    exact = w.astype(np.float32)
    scale = (np.abs(exact).max(-1, keepdims=True) / np.float32(127)).astype(dtype).astype(np.float32)
    quotient = np.divide(exact, scale, out=np.zeros_like(exact), where=scale > 0).astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(s, scale)
    np.testing.assert_array_equal(q, np.clip(np.rint(quotient), -127, 127))
    assert (np.asarray(q) != int8.quantize(jnp.asarray(w), "channel")[0]).any() == (dtype != "float32")


def test_int8_nan_is_zero_and_stays_in_its_place():
    x = jnp.array([[1.0, jnp.nan, -2.0]])
    assert int8.quantize(x)[0].tolist() == [[64, 0, -127]]


WRONG_INT8 = {
    "tensor": (
        {"granularity": "tensor"},
        "int8 codes with one scale for the tensor need a static one, and only those, got granularity='tensor' without "
        "scale",
    ),
    "azp": ({"azp": 3}, "a static azp belongs to a static scale; leave it out or give both"),
    "asymmetric": (
        {"granularity": "channel", "symmetric": False},
        "symmetric=False belongs to granularity 'token', got 'channel'; give azp instead",
    ),
    "triton": (
        {"granularity": "channel", "rule": "triton"},
        "rule 'triton' belongs to symmetric tokens and groups, got granularity='channel', symmetric=True",
    ),
}


@pytest.mark.parametrize(("options", "message"), WRONG_INT8.values(), ids=WRONG_INT8)
def test_int8_options_that_do_not_belong_together(options, message):
    with pytest.raises(ValueError) as raised:
        int8.quantize(jnp.ones((2, 128)), **options)
    assert str(raised.value) == message


# ---------------------------------------------------------------- MX and NVFP4
@pytest.mark.parametrize("k", range(-20, 21, 5))
def test_mx_at_exact_powers_of_two(k):
    """amax of 6 * 2^k fills the MXFP4 grid, one of 448 * 2^k that of no MXFP8 block: floor leaves codes below 2."""
    block = jnp.zeros((1, 32)).at[0, 3].set(6 * 2.0**k)
    q, s = mx.quantize(block)
    assert (int(s[0, 0]) - 127, float(p.from_e2m1(mx.unpack(q))[0, 3])) == (k, 6)
    above = block * np.float32(1 + 2.0**-23)
    assert int(mx.quantize(above)[1][0, 0]) - 127 == k + 1
    q, s = mx.quantize(jnp.zeros((1, 32)).at[0, 3].set(448 * 2.0**k), "mxfp8")
    assert (int(s[0, 0]) - 127, float(q[0, 3])) == (k + 8, 1.75)


def test_the_ocp_rule_may_saturate_and_the_ceiling_does_not():
    x = jnp.zeros((1, 32)).at[0, 0].set(7.5)
    back = {rule: float(mx.dequantize(*mx.quantize(x, rule=rule))[0, 0]) for rule in ("ceil", "floor")}
    assert back == {"ceil": 8.0, "floor": 6.0}


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4"])
def test_mx_zero_blocks_have_byte_one(format):
    q, s = mx.quantize(jnp.asarray([[0.0, -0.0] * 16]), format)
    assert s.tolist() == [[1]]
    back = np.asarray(mx.dequantize(q, s))
    assert (back == 0).all() and np.signbit(back).tolist() == [[False, True] * 16]


def test_mxfp8_denormals_keep_their_value():
    x = np.zeros((1, 32), ml_dtypes.bfloat16)
    x[0, :3] = np.array([1, 0x40, 0x8040], np.uint16).view(ml_dtypes.bfloat16)  # 2^-133, 2^-127, -2^-127
    q, s = jax.jit(lambda x: mx.quantize(x, "mxfp8"))(x)
    assert s.tolist() == [[1]]
    assert np.asarray(q)[0, :3].astype(np.float32).tolist() == [2.0**-7, 0.5, -0.5]


@pytest.mark.parametrize("rule", ["ceil", "floor"])
def test_mxfp4_requantizes_its_own_numbers_exactly(rule, rng):
    x = mx.dequantize(*mx.quantize(_inputs.adversarial(rng, 12, 128, "float32"), rule=rule))
    same_bits(mx.dequantize(*mx.quantize(x, rule=rule)), x)


def test_nvfp4_loses_less_than_mxfp4(rng):
    x = jnp.asarray(rng.standard_normal((64, 512)), jnp.float32)
    q, s, g = nvfp4.quantize(x)
    backs = {"nvfp4": nvfp4.dequantize(q, s, p.inverse(g)), "mxfp4": mx.dequantize(*mx.quantize(x))}
    error = {name: float(jnp.abs(back - x).mean()) for name, back in backs.items()}
    assert error["nvfp4"] < error["mxfp4"]


@pytest.mark.parametrize("values", [[0.0], [-0.0], [1e-40], [3e38, -3e38], [2.0**-126, 1e30]], ids=str)
def test_nvfp4_of_extremes_is_finite(values):
    x = jnp.asarray(np.resize(values, (2, 64)).astype(np.float32))
    q, s, g = jax.jit(nvfp4.quantize)(x)
    assert np.isfinite(np.asarray(s).astype(np.float32)).all() and np.isfinite(float(g))
    assert np.isfinite(np.asarray(nvfp4.dequantize(q, s, p.inverse(g)))).all()
    assert (np.signbit(np.asarray(p.from_e2m1(nvfp4.unpack(q)))) == np.signbit(np.asarray(x))).all(), "-0 is kept"


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (130, 9)])
def test_the_swizzle_is_a_permutation_with_padding(shape):
    block = jnp.arange(1, 1 + np.prod(shape), dtype=jnp.float32).reshape(shape)
    swizzled = np.asarray(nvfp4.swizzle(block))
    assert swizzled.shape == (-(-shape[0] // 128) * 128, -(-shape[1] // 4) * 4)
    assert sorted(swizzled[swizzled != 0].tolist()) == np.asarray(block).ravel().tolist()
    same_bits(nvfp4.unswizzle(jnp.asarray(swizzled), *shape), block)


def test_the_swizzle_by_hand():
    """Scales of rows 0, 32, 64 and 96 lie beside each other, four columns each."""
    block = jnp.arange(128 * 4).reshape(128, 4)
    first = np.asarray(nvfp4.swizzle(block)).ravel()[:16]
    assert first.tolist() == [4 * r + c for r in (0, 32, 64, 96) for c in range(4)]


# ---------------------------------------------------------------- rotation
@pytest.mark.parametrize("group", [1, 2, 32, 128])
def test_the_rotation_is_its_own_inverse_and_keeps_lengths(group, rng):
    x = rng.integers(-8, 8, (5, 128)).astype(np.float32)
    y = np.asarray(hadamard.rotate(jnp.asarray(x), group)).astype(np.float64)
    np.testing.assert_array_equal(np.rint(np.asarray(hadamard.rotate(jnp.asarray(y, jnp.float32), group))), x)
    np.testing.assert_array_equal(np.rint(np.square(y).sum(1)), np.square(x).sum(1))


def test_the_rotation_by_hand():
    assert hadamard.rotate(jnp.array([[1.0, 2, 3, 4]])).tolist() == [[5, -1, -2, 0]]


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_rotated_formats_rotate_and_quantize(format, rng):
    x = jnp.asarray(rng.standard_normal((16, 128)), jnp.float32)
    quantizer = mx.quantize if format == "mxfp4" else nvfp4.quantize
    codes = hadamard.quantize(x, format)
    for a, b in zip(codes, quantizer(hadamard.rotate(x, 32)), strict=True):
        same_bits(a, b)
    back = np.asarray(hadamard.dequantize(*codes)).astype(np.float64)
    lost = np.linalg.norm(back - x) / np.linalg.norm(x)
    assert 2.0**-5 < lost < 2.0**-2, "the error of a 4-bit format, no more and no less"


@pytest.mark.parametrize(
    ("group", "message"), [(3, "needs a power of two, got a group of 3"), (64, "got groups of 64 and 96 numbers")]
)
def test_rotations_that_do_not_exist(group, message):
    with pytest.raises(ValueError, match=message):
        hadamard.rotate(jnp.ones((2, 96)), group)


# ---------------------------------------------------------------- integers and their layouts
def test_bc_awq_order_by_hand():
    packed = np.asarray(awq.pack(jnp.arange(8, dtype=jnp.uint8)[None])).view(np.uint32)
    assert f"{packed[0, 0]:08x}" == "75316420"


def test_gptq_by_hand():
    q = jnp.arange(8, dtype=jnp.uint8)[:, None]
    qweight, _ = gptq.pack(jnp.tile(q, (1, 8)), jnp.full((1, 8), 8), 4)
    assert f"{np.asarray(qweight).view(np.uint32)[0, 0]:08x}" == "76543210"
    stored = jnp.asarray(np.array([[0xF8765432]], np.uint32).view(np.int32))
    assert gptq.unpack(qweight, stored, 4, version=1)[1].tolist() == [[3, 4, 5, 6, 7, 8, 9, 16]]
    assert gptq.unpack(qweight, stored, 4, version=2)[1].tolist() == [[2, 3, 4, 5, 6, 7, 8, 15]]


def test_gptq_of_3_and_2_bits_by_hand():
    """Code 10 has two bits in the first word and one in the second, code 21 one and two; 2-bit codes never straddle."""
    q = np.zeros((32, 32), np.uint8)
    q[10, 0] = q[21, 1] = 7
    q[[0, 9, 11, 31], 2] = 1, 2, 3, 4
    words, _ = gptq.pack(jnp.asarray(q), jnp.full((1, 32), 4), 3)
    found = np.asarray(words).view(np.uint32)
    assert found.shape == (3, 32)
    assert found[:, 0].tolist() == [0b11 << 30, 1, 0]
    assert found[:, 1].tolist() == [0, 1 << 31, 0b11]
    assert found[:, 2].tolist() == [1 | 2 << 27, 3 << 1, 4 << 29]
    words, _ = gptq.pack(jnp.asarray(q[:16] & 3), jnp.full((1, 32), 2), 2)
    assert np.asarray(words).view(np.uint32)[0, [0, 2]].tolist() == [3 << 20, 1 | 2 << 18 | 3 << 22]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
def test_gptq_packs_and_unpacks(bits, version, rng):
    q = rng.integers(0, 2**bits, (64, 32), dtype=np.uint8)
    zero = rng.integers(0, 2**bits, (2, 32)) + (version == 1)
    found_q, found_zero = gptq.unpack(
        *gptq.pack(jnp.asarray(q), jnp.asarray(zero), bits, version=version), bits, version=version
    )
    np.testing.assert_array_equal(found_q, q)
    np.testing.assert_array_equal(found_zero, zero)


def test_gptq_versions():
    with pytest.raises(ValueError, match="version 1 cannot store a zero point of 0; use version=2"):
        gptq.quantize(jnp.ones((128, 8)), symmetric=False)
    with pytest.raises(ValueError, match="the version of a GPTQ checkpoint must be 1 or 2, got 3"):
        gptq.unpack(jnp.zeros((1, 8), jnp.int32), jnp.zeros((1, 1), jnp.int32), 4, version=3)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(16, 64), (128, 192)])
def test_marlin_is_a_permutation(bits, shape, rng):
    q = rng.integers(0, 2**bits, shape, dtype=np.uint8)
    packed = marlin.pack(jnp.asarray(q), bits)
    assert packed.shape == (shape[0] // 16, shape[1] * bits // 2)
    np.testing.assert_array_equal(marlin.unpack(packed, bits), q)
    assert (
        np.bincount(np.asarray(p.unpack_words(packed, bits)).ravel(), minlength=256).tolist()
        == np.bincount(q.ravel(), minlength=256).tolist()
    )


@pytest.mark.parametrize("grouped", [True, False])
def test_marlin_scales_are_permuted_and_back(grouped):
    scales = jnp.arange(128.0).reshape(1, 128)
    permuted = marlin.permute_scales(scales, grouped=grouped)
    assert permuted[0, :8].tolist() == ([0, 8, 16, 24, 32, 40, 48, 56] if grouped else [0, 1, 8, 9, 16, 17, 24, 25])
    same_bits(marlin.unpermute_scales(permuted, grouped=grouped), scales)
    assert marlin.shuffle_fp4_scales(scales)[0, :4].tolist() == [0, 2, 1, 3]


def test_marlin_refuses_other_sizes():
    with pytest.raises(ValueError, match="multiples of 16 input and 64 output features, got 16 and 32"):
        marlin.pack(jnp.zeros((16, 32), jnp.uint8))
    with pytest.raises(ValueError, match="Marlin packs codes of 4 or 8 bits, got 3"):
        marlin.pack(jnp.zeros((16, 64), jnp.uint8), 3)


def test_every_e4m3_scale_survives_s0e5m3():
    scales = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    same_bits(marlin.from_s0e5m3(marlin.to_s0e5m3(jnp.asarray(scales))), scales)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_wna16_holds_the_same_weight(bits, symmetric, rng):
    w = jnp.asarray(rng.standard_normal((16, 64)), jnp.float32)
    packed, scales, zeros = wna16.quantize(w, bits, 32, symmetric=symmetric)
    q, scale, zero = integers.quantize(w.T, bits, 32, symmetric=symmetric)
    same_bits(wna16.dequantize(packed, scales, zeros, bits=bits), integers.dequantize(q, scale, zero).T)
    assert packed.shape == (16, 64 * bits // 8)
    if bits == 4:
        assert int(packed[0, 0]) & 15 == int(q[0, 0]) and int(packed[0, 0]) >> 4 == int(q[1, 0])


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_integer_weights_come_back_within_a_step(bits, symmetric, dtype, rng):
    w = jnp.asarray(rng.standard_normal((64, 16)), dtype).at[:32, 0].set(0).at[:, 1].set(0.5).at[3, 2].set(100)
    q, scale, zero = jax.jit(lambda w: integers.quantize(w, bits, 32, symmetric=symmetric))(w)
    back = np.asarray(integers.dequantize(q, scale, zero)).astype(np.float64)
    step = np.repeat(np.asarray(scale).astype(np.float64), 32, 0)
    assert (np.asarray(q) < 2**bits).all() and np.isfinite(back).all()
    rounding = 2.0 ** (2 - {"float16": 11, "bfloat16": 8, "float32": 24}[dtype])
    exact = np.asarray(w).astype(np.float64)
    if symmetric or (exact.min() < 0 < exact.max()):
        # one-sided groups lie outside an asymmetric range, which starts at zero point 0
        inside = np.ones_like(exact, bool) if symmetric else np.arange(16)[None] != 1
        assert (np.abs(back - exact) <= step * (0.5 + 2**bits * rounding))[np.broadcast_to(inside, exact.shape)].all()


# ---------------------------------------------------------------- NF4 and FP4
@pytest.mark.parametrize("format", ["nf4", "fp4"])
def test_codebooks_are_fixed_points(format):
    book = nf4.codebook(format)
    w = jnp.asarray(np.resize(book, 64))
    q, absmax = nf4.quantize(w, format)
    assert absmax.tolist() == [1]
    np.testing.assert_array_equal(nf4.dequantize(q, absmax, (64,), format), w)


def test_nf4_by_hand():
    """1, 0, -1, 0.5, ...: codes 15, 7, 0, 13; the first of a pair lies in the high bits."""
    w = jnp.zeros(64).at[:4].set(jnp.array([2.0, 0, -2, 1.0]))
    q, absmax = nf4.quantize(w)
    assert absmax.tolist() == [2]
    assert q[:3].tolist() == [0xF7, 0x0C, 0x77]


@pytest.mark.parametrize("format", ["nf4", "fp4"])
def test_nf4_blocks_of_zeros(format):
    q, absmax = nf4.quantize(jnp.zeros((2, 64)), format)
    assert absmax.tolist() == [0, 0]
    assert (np.asarray(nf4.dequantize(q, absmax, (2, 64), format)) == 0).all()


@pytest.mark.parametrize("format", ["nf4", "fp4"])
def test_every_number_goes_to_the_nearest_code(format, rng):
    w = rng.uniform(-1, 1, 64 * 64).astype(np.float32)
    w[::64] = 1
    q, absmax = nf4.quantize(jnp.asarray(w), format)
    back = np.asarray(nf4.dequantize(q, absmax, w.shape, format))
    book = nf4.codebook(format)
    best = np.abs(w[:, None] - book).min(1)
    np.testing.assert_array_equal(np.abs(back - w), best)


def test_the_dynamic_codebook():
    book = nf4.dynamic_codebook()
    assert (book.size, book[-1], (book == 0).sum()) == (256, 1, 1)
    assert (np.diff(book) > 0).all()
    assert (-book[book < 0][::-1]).tolist() == book[book > 0][:-1].tolist()


def test_doubly_quantized_absmax(rng):
    absmax = jnp.asarray(rng.uniform(0.5, 1.5, 300), jnp.float32)
    nested = nf4.quantize_absmax(absmax)
    assert nested.codes.shape == (300,) and nested.absmax.shape == (2,)
    back = np.asarray(nf4.dequantize_absmax(nested))
    gap = np.diff(nf4.dynamic_codebook()).max() / 2 * float(nested.absmax.max())
    assert np.abs(back - np.asarray(absmax)).max() <= gap * (1 + 2.0**-20)
    q, top = nf4.quantize(jnp.asarray(rng.standard_normal((64, 64)), jnp.float32))
    w = nf4.dequantize(q, nf4.quantize_absmax(top), (64, 64))
    np.testing.assert_array_equal(np.sign(w), np.sign(nf4.dequantize(q, top, (64, 64))))


def test_nf4_needs_whole_blocks():
    with pytest.raises(ValueError, match="the weight must fill whole blocks of 64 numbers, got 96"):
        nf4.quantize(jnp.ones(96))
    with pytest.raises(ValueError, match="format must be nf4 or fp4, got 'nf3'"):
        nf4.codebook("nf3")


def test_the_table_of_formats_is_complete():
    assert len(set(weights.FORMATS)) == len(weights.FORMATS) == 12
    assert set(weights.INTEGERS) <= set(weights.FORMATS) and set(weights.WIDTHS) <= set(weights.INTEGERS)
