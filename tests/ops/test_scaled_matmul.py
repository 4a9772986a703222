"""What products of codes promise: where scales multiply, exact integers, the precision that was asked for."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import quantize_fp8, scaled_matmul
from jaxattn.ops.scaled_matmul import MECHANISM, make_inputs
from pallas_kernels import _aot, _mosaic
from pallas_kernels.scaled_matmul import Config, configs, default_config

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


CONFIGS = {
    "split": Config(rows=64, features=32, stages=3),
    "split-wide": Config(rows=64, features=64, stages=2),
    "split-few": Config(rows=64, features=64, stages=2),
    "split-resident": Config(rows=64, features=32, stages=2, resident=True),
    "rows-128": Config(rows=128, features=64, stages=3, width=1),
    "rows-128-cluster": Config(rows=128, features=64, stages=2, cluster=2),
    "rows-256": Config(rows=256, features=64, stages=3),
}


def shape(name):
    """Ragged rows and inputs; 10 or 9 blocks of inputs, so that rings turn over and steps are left over."""
    return {"split-few": 21, "split-resident": 61}.get(name, 133), 1168, 128


@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if not config.resident])
def test_every_way_to_tile_gives_exact_int8_sums(name, rng):
    args = make_inputs(rng, *shape(name), codes="int8", azp=True, out_dtype="float32")
    with _mosaic.interpret():
        got = scaled_matmul(**args, implementation="mosaic", config=CONFIGS[name])
    np.testing.assert_array_equal(got, scaled_matmul(**args, implementation="reference"))


@pytest.mark.parametrize(
    ("name", "scales"),
    [
        (name, scales)
        for name, config in CONFIGS.items()
        for scales in ("token", "block")
        if scales == "block" or not (config.resident or config.rows == 256)
    ],
)
def test_every_way_to_tile_multiplies_whole_numbers_exactly(name, scales, rng):
    args = make_inputs(rng, *shape(name), scales=scales)
    for operand in ("a", "b"):
        args[operand] = jnp.asarray(rng.integers(-4, 5, args[operand].shape), E4M3)
    for scale in ("a_scale", "b_scale"):
        args[scale] = jnp.asarray(np.exp2(rng.integers(-2, 3, args[scale].shape)), jnp.float32)
    with _mosaic.interpret():
        got = scaled_matmul(**args, implementation="mosaic", config=CONFIGS[name])
    np.testing.assert_array_equal(got, scaled_matmul(**args, implementation="reference"))


def test_rows_beyond_the_end_are_neither_read_nor_written(rng):
    """A row of NaN and a row of infinities in the codes' tile spoil no other row."""
    args = make_inputs(rng, 5, 256, 64)
    clean = scaled_matmul(**args, implementation="reference")
    args["a"] = args["a"].at[3].set(jnp.nan)
    with _mosaic.interpret():
        got = scaled_matmul(**args, implementation="mosaic")
    kept = np.array([0, 1, 2, 4])
    np.testing.assert_array_equal(np.asarray(got)[kept], np.asarray(clean)[kept])
    assert np.isnan(np.asarray(got)[3].astype(np.float32)).all()


@pytest.mark.parametrize(
    ("N", "F", "scales", "codes", "expected"),
    [
        (16, 4096, "block", E4M3, Config(rows=64, features=32, stages=8)),
        (64, 4096, "block", E4M3, Config(rows=64, features=32, stages=8, resident=True)),
        (64, 4096, "token", E4M3, Config(rows=64, features=32, stages=8)),
        (64, 8192, "block", E4M3, Config(rows=64, features=64, stages=6)),  # no memory left for scales
        (1, 18432, "token", E4M3, Config(rows=64, features=64, stages=6)),
        (128, 4096, "block", E4M3, Config(rows=64, features=64, stages=6)),
        (1, 36864, "block", E4M3, Config(rows=64, features=64, stages=6)),
        (128, 36864, "block", E4M3, Config(rows=128, features=128, stages=6, cluster=2)),
        (4096, 4096, "block", E4M3, Config(rows=256, features=128, stages=4, cluster=2)),
        (1024, 4096, "block", E4M3, Config(rows=128, features=128, stages=6, cluster=2)),
        (4096, 4096, "token", "int8", Config(rows=256, features=128, stages=4)),
    ],
)
def test_default_tiles_fill_the_card(N, F, scales, codes, expected):
    blocks = {"token": ((N,), (F,)), "block": ((N, 56), (F // 128, 56))}[scales]
    shapes = {"a": ((N, 7168), codes), "b": ((F, 7168), codes)}
    shapes |= {"a_scale": (blocks[0], "float32"), "b_scale": (blocks[1], "float32")}
    args = {name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for name, (shape, dtype) in shapes.items()}
    prepared = MECHANISM.prepare(**args, block=128 if scales == "block" else None)
    assert default_config(**prepared) == expected
    assert expected in list(configs(**prepared))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 96}, "rows must be 64, 128 or 256, got 96"),
        ({"features": 8}, "features must be 16, 32, 64 or 128, got 8"),
        ({"cluster": 4}, "cluster must be 1 or 2, got 4"),
        ({"stages": 1}, "stages must lie between 2 and 16, got 1"),
        ({"width": 0}, "width must be at least 1, got 0"),
        ({"resident": True}, "resident needs rows=64, got rows=128"),
        ({"rows": 64, "cluster": 2}, "rows=64 needs cluster=1, got cluster=2"),
    ],
)
def test_wrong_configurations(options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Config(**options)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config(rows=256), "rows=256 leaves no registers for float32 sums beside products of several steps; use 128"),
        (Config(cluster=2), "cluster=2 needs output features in multiples of 256, got 128"),
        (
            Config(rows=64, resident=True),
            "resident needs block scales of up to 64 rows and 32768 inputs, got 5 and 256",
        ),
        (
            Config(rows=128, features=128, stages=8),
            "rows=128, features=128, stages=8 needs 279552 bytes of shared memory, more than 232448; "
            "use smaller values",
        ),
    ],
)
def test_configurations_that_do_not_fit(config, message, rng):
    args = make_inputs(rng, 5, 256, 128)
    with _mosaic.interpret(), pytest.raises(ValueError, match=f"^scaled_matmul: {re.escape(message)}(\n|$)"):
        scaled_matmul(**args, implementation="mosaic", config=config)


@pytest.mark.aot
@pytest.mark.skipif(_mosaic.find_ptxas() is None, reason="lacks ptxas")
def test_odd_rows_compile_where_thread_blocks_share_them():
    shapes = {
        "a": ((67, 256), E4M3),
        "b": ((18432, 256), E4M3),
        "a_scale": ((67,), "float32"),
        "b_scale": ((), "float32"),
    }
    args = {name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for name, (shape, dtype) in shapes.items()}
    assert default_config(**MECHANISM.prepare(**args)).cluster == 2
    _aot.compile_h200(lambda args: scaled_matmul(**args, implementation="mosaic"), args)


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
