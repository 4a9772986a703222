"""What the Mosaic kernels of quantizers promise beyond the contract: special numbers, tails, recipes of public bugs."""

import math
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import hadamard_transform, quantize_fp8, quantize_int8, quantize_mx, rms_norm_quant, silu_mul_quant
from pallas_kernels import _mosaic, _plans
from pallas_kernels import quantize_fp8 as fp8_kernel
from pallas_kernels import rms_norm_quant as norm_kernel

OPS = {
    "fp8 token": quantize_fp8,
    "fp8 group": lambda x, **k: quantize_fp8(x, granularity="group", **k),
    "fp8 ue8m0": lambda x, **k: quantize_fp8(x, granularity="group", ue8m0=True, **k),
    "fp8 deep_gemm": lambda x, **k: quantize_fp8(x, granularity="group", rule="deep_gemm", **k),
    "fp8 static": lambda x, **k: quantize_fp8(x, granularity="tensor", scale=0.01, **k),
    "int8 token": quantize_int8,
    "int8 triton": lambda x, **k: quantize_int8(x, rule="triton", **k),
    "int8 azp": lambda x, **k: quantize_int8(x, symmetric=False, **k),
    "int8 static": lambda x, **k: quantize_int8(x, granularity="tensor", scale=0.01, **k),
    "int8 channel": lambda x, **k: quantize_int8(x, granularity="channel", **k),
    "mxfp8": lambda x, **k: quantize_mx(x, format="mxfp8", **k),
    "mxfp4": quantize_mx,
    "mxfp4 floor": lambda x, **k: quantize_mx(x, rule="floor", **k),
    "mxfp4 zero": lambda x, **k: quantize_mx(x, ties="zero", **k),
    "nvfp4": lambda x, **k: quantize_mx(x, format="nvfp4", global_scale=50.0, **k),
}


def mosaic(op, *args, **options):
    """The kernel's outputs, interpreted."""
    with _mosaic.interpret():
        out = op(*args, implementation="mosaic", **options)
    return out if isinstance(out, tuple) else (out,)


def reference(op, *args, **options):
    out = op(*args, implementation="reference", **options)
    return out if isinstance(out, tuple) else (out,)


def same_bits(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(np.atleast_1d(np.asarray(a)).view(np.uint8), np.atleast_1d(b).view(np.uint8))


# ---------------------------------------------------------------- the short division
def nearest(x: Fraction) -> Fraction:
    """Rounded to 24 bits, halves to even."""
    size = abs(x)
    exponent = math.floor(math.log2(size)) if size else 0
    unit = Fraction(2) ** (exponent - 23)
    return round(x / unit) * unit


def short_quotient(x: int, y: int) -> Fraction:
    """`Frame.quotient` of 16-bit numbers, in exact arithmetic with its roundings."""
    r = nearest(Fraction(1, y))
    q = nearest(x * r)
    return nearest(q - nearest(q * y - x) * r)


def near_borders(bits: int, odd: range, most: int = 64):
    """All x of `bits` bits and y of 24 whose quotient lies within about 2^-20 units of half a unit beside a border.

    Borders between codes are t * 2^k with t odd. c = 2t * 2^n +- 1 stands for half a unit beside one, and x / y is near
    it if y c = x 2^g + d with a small d; modulo 2^g that gives y.
    """
    for t in odd:
        places = [(t << (25 - t.bit_length())) + sign for sign in (1, -1)]
        places += [(t << (26 - t.bit_length())) - 1] if t == 1 else []  # units are finer below a power of two
        for c in places:
            for g in range(22 + c.bit_length() - bits, 26 + c.bit_length() - bits):
                inverse = pow(c, -1, 2**g)
                for d in range(-most, most + 1):
                    y = d * inverse % 2**g
                    x = (y * c - d) >> g
                    if 2**23 <= y < 2**24 and 0 < x < 2**bits:
                        yield x, y


@pytest.mark.parametrize("odd", [range(1, 32, 2), range(1, 256, 2)], ids=["float8", "int8"])
@pytest.mark.parametrize("bits", [8, 11], ids=["bfloat16", "float16"])
def test_quotients_of_16_bit_numbers_keep_away_from_borders(bits, odd):
    found = set(near_borders(bits, odd))
    assert found, "the search finds what is near"
    for x, y in found:
        assert short_quotient(x, y) == nearest(Fraction(x, y)), (x, y)


def test_the_short_quotient_of_random_numbers(rng):
    for x, y in zip(rng.integers(1, 256, 2000).tolist(), rng.integers(2**23, 2**24, 2000).tolist(), strict=True):
        exact = Fraction(x, y)
        # at most the neighbour, and that only where the quotient lies in the middle of two
        assert abs(short_quotient(x, y) - exact) <= abs(nearest(exact) - exact) * (1 + Fraction(1, 2**20))


# ---------------------------------------------------------------- special numbers
@pytest.mark.parametrize("name", OPS)
def test_special_numbers(name, rng):
    x = rng.standard_normal((8, 2048)).astype(np.float32)
    x[1, 3], x[2, 5] = np.nan, -np.nan
    x[3, 7], x[4, 9] = np.inf, -np.inf
    x[5] = -0.0
    x[6, ::2] = 3e38
    x[7] = 2.0**-120
    with np.errstate(all="ignore"):
        found, wanted = (run(OPS[name], jnp.asarray(x)) for run in (mosaic, reference))
    same_bits(found, wanted)


@pytest.mark.parametrize("N", [1, 3, 8, 9, 17])
def test_tails_of_tiles_and_lines(N, rng):
    x = jnp.asarray(rng.standard_normal((N, 128)), jnp.bfloat16)
    for name in ("fp8 group", "int8 token", "mxfp4", "nvfp4"):
        same_bits(mosaic(OPS[name], x), reference(OPS[name], x))
    long = jnp.asarray(rng.standard_normal((N, 2568)), jnp.bfloat16)
    same_bits(mosaic(quantize_fp8, long, config=fp8_kernel.Config(rows=2)), reference(quantize_fp8, long))


@pytest.mark.parametrize(("M", "options"), [(2880, {}), (512, {}), (256, {"granularity": "group"})])
def test_every_config_gives_the_same_bits(M, options, rng):
    x = jnp.asarray(rng.standard_normal((9, M)), jnp.bfloat16)
    wanted = reference(quantize_fp8, x, **options)
    args = quantize_fp8_arguments(x, **options)
    for config in fp8_kernel.configs(**args):
        same_bits(mosaic(quantize_fp8, x, config=config, **options), wanted)


def quantize_fp8_arguments(x, granularity="token", group=128):
    return {"x": x, "granularity": granularity, "group": group}


def test_wrong_heights():
    x = jnp.ones((16, 128), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"quantize_fp8: rows=12 must be a multiple of 8, the smallest tile for D=128"):
        mosaic(quantize_fp8, x, config=fp8_kernel.Config(rows=12))
    with pytest.raises(ValueError, match=r"quantize_fp8: rows=2 must be 1 for blocks"):
        mosaic(quantize_fp8, x, granularity="block", config=fp8_kernel.Config(rows=2))
    with pytest.raises(ValueError, match=r"rows=0 must be at least 1"):
        norm_kernel.Config(rows=0)


@pytest.mark.parametrize(
    ("shape", "group", "message"),
    [
        ((4, 100), None, "rows must hold at least 128 values, got 100"),
        ((4, 16385 * 8), None, "rows must hold at most 16384 values, got 131080"),
        ((4, 256), 128, "rows must hold at least 512 values in groups of 128, got 256"),
        (
            (4, 1000),
            128,
            "groups must be a power of two that divides the row length, got groups of 128 and rows of 1000",
        ),
    ],
)
def test_rows_that_no_warpgroup_holds(shape, group, message):
    assert _plans.whole_rows(*shape, "bfloat16", group) == message


# ---------------------------------------------------------------- public bugs
def test_bc35_zero_groups_have_the_floor_of_their_path():
    x = jnp.zeros((8, 128), jnp.bfloat16)
    for rule, exponent in (("cuda", -33), ("triton", -42), ("deep_gemm", -22)):
        _, scale = mosaic(quantize_fp8, x, granularity="group", rule=rule, ue8m0=True)
        assert (np.asarray(scale) == 2.0**exponent).all(), rule


@pytest.mark.parametrize("name", ["fp8 token", "fp8 group", "int8 azp", "mxfp4"])
def test_bc35_contiguity_does_not_matter(name, rng):
    x = jnp.asarray(rng.standard_normal((128, 256)), jnp.bfloat16)
    same_bits(mosaic(OPS[name], jnp.asarray(x.T).T), mosaic(OPS[name], x))


def test_bc37_numbers_are_rounded_once():
    x = jnp.tile(jnp.float32([400.199585, 272.156555, 136.002075, -400.199585]), (8, 32))
    (q, _) = mosaic(quantize_fp8, x, granularity="tensor", scale=1.0)
    assert q[0, :4].astype(jnp.float32).tolist() == [416, 288, 144, -416]


def test_bc39_a_scale_is_rounded_up_so_that_the_largest_number_survives():
    x = jnp.zeros((8, 128), jnp.bfloat16).at[:, 5].set(600)
    q, scale = mosaic(quantize_fp8, x, granularity="group", ue8m0=True)
    assert (np.asarray(scale) == 2).all() and float(q[0, 5]) * 2 == 576


def test_bc41_ties_of_e2m1():
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    x = jnp.tile(jnp.float32([*ties, *(-t for t in ties), -0.2, 0.2]), (32, 32))[:, :64]
    for how, codes in (("even", [0, 2, 2, 4, 4, 6, 6, 7]), ("zero", [0, 1, 2, 3, 4, 5, 6, 7])):
        q, scale = mosaic(quantize_mx, x, ties=how)
        assert (np.asarray(scale) == 127).all()
        packed = np.asarray(q[0])
        found = np.stack([packed & 15, packed >> 4], -1).reshape(-1)
        signed = [c | 8 if c or how == "even" else 0 for c in codes]
        assert found[:18].tolist() == [*codes, *signed, 8 if how == "even" else 0, 0], how


@pytest.mark.parametrize("mode", ["none", "static", "token", "group"])
def test_bc67_a_row_does_not_depend_on_its_neighbours(mode, rng):
    x, w = jnp.asarray(rng.standard_normal((9, 1536)), jnp.float32), jnp.ones(1536, jnp.float32)
    options = {"mode": mode} | ({"scale": 0.02} if mode == "static" else {})
    together = mosaic(rms_norm_quant, x, w, **options)
    same_bits(mosaic(rms_norm_quant, x[4:5], w, **options), [a[4:5] for a in together])
    together = mosaic(silu_mul_quant, jnp.tile(x, (1, 2)), **options)
    same_bits(mosaic(silu_mul_quant, jnp.tile(x[4:5], (1, 2)), **options), [a[4:5] for a in together])


def test_a_rotation_is_undone_by_itself(rng):
    x = jnp.asarray(rng.integers(-8, 9, (5, 1024)), jnp.float32)
    (y,) = mosaic(hadamard_transform, x)
    (back,) = mosaic(hadamard_transform, y)
    np.testing.assert_array_equal(np.round(np.asarray(back)), x)
