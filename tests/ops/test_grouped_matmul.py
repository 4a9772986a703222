"""What products of rows in groups promise: each group its weight, wherever groups begin and end."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import grouped_matmul, permute, scaled_matmul
from jaxattn.ops.grouped_matmul import CODES, MECHANISM, make_inputs
from pallas_kernels import _mosaic, _row_tiles
from pallas_kernels import grouped_matmul as mosaic
from pallas_kernels.grouped_matmul import Config

E4M3 = CODES[0]
SIZES = (1, 0, 131, 14, 71)
"""Groups of no, one and several tiles, which end at rows of every kind."""


def whole(rng, args):
    """Small whole numbers and powers of two, whose sums are exact in any order; NaN stays."""
    args = dict(args)
    for name in ("a", "b", "a_scale", "b_scale"):
        if name in args:
            x = np.asarray(args[name], np.float32)
            scale = name.endswith("scale")
            drawn = np.exp2(rng.integers(-2, 3, x.shape)) if scale else rng.integers(-4, 5, x.shape)
            args[name] = jnp.asarray(np.where(np.isnan(x), np.nan, drawn), args[name].dtype)
    return args


def here():
    """Where kernels run: on this GPU, else interpreted."""
    return _mosaic.interpret() if _mosaic.why_not_here() else contextlib.nullcontext()


# ---------------------------------------------------------------- the reference
@pytest.mark.parametrize("dtype", [E4M3, "bfloat16", "float32"])
def test_each_group_has_its_weight(dtype, rng):
    args = whole(rng, make_inputs(rng, (3, 0, 5, 1), 200, 130, dtype=dtype, rest=2, out_dtype="float32"))
    a, b = (np.asarray(args[n]).astype(np.float64) for n in ("a", "b"))
    if dtype == E4M3:
        a = a * np.repeat(np.asarray(args["a_scale"], np.float64), 128, 1)[:, :200]
        b = b * np.repeat(np.repeat(np.asarray(args["b_scale"], np.float64), 128, 1)[:, :130], 128, 2)[:, :, :200]
    wanted = np.zeros((11, 130))
    for row, group in enumerate([0, 0, 0, 2, 2, 2, 2, 2, 3]):
        wanted[row] = b[group] @ a[row]
    np.testing.assert_array_equal(grouped_matmul(**args), wanted)


def test_one_group_is_a_product_of_codes(rng):
    args = make_inputs(rng, (9,), 256, 64)
    wanted = scaled_matmul(args["a"], args["b"][0], args["a_scale"], args["b_scale"][0], block=128)
    np.testing.assert_array_equal(grouped_matmul(**args), wanted)


def test_it_takes_what_permute_gives(rng):
    x = jnp.asarray(rng.integers(-4, 5, (6, 64)), jnp.float32)
    ids = jnp.asarray(rng.integers(-1, 4, (6, 2)), jnp.int32)
    w = jnp.asarray(rng.integers(-4, 5, (4, 24, 64)), jnp.float32)
    rows, offsets, positions = permute(x, ids, num_experts=4)
    y = np.asarray(grouped_matmul(rows, w, offsets, out_dtype="float32"))
    for token, slot in np.ndindex(6, 2):
        if ids[token, slot] >= 0:
            np.testing.assert_array_equal(y[positions[token, slot]], w[ids[token, slot]] @ x[token])


def test_new_sizes_compile_nothing(rng):
    args = make_inputs(rng, (3, 4), 64, 24, dtype="bfloat16")
    traced = []

    @jax.jit
    def multiply(offsets):
        traced.append(offsets)
        return grouped_matmul(**args | {"offsets": offsets})

    for offsets in ([0, 3, 7], [0, 7, 7], [0, 0, 2]):
        assert np.all(np.any(multiply(jnp.asarray(offsets, jnp.int32)), 1) == (np.arange(7) < offsets[-1]))
    assert len(traced) == 1


@pytest.mark.parametrize("case", [c for c in MECHANISM.cases if "smoke" in c.tags], ids=lambda c: c.name)
def test_a_few_rows_are_those_of_all(case, rng):
    """What benchmarks compare."""
    args = MECHANISM.prepare(**case.make(rng))
    assert MECHANISM.probe is not None
    fewer, rows = MECHANISM.probe(rng, **args)
    same, wanted = (np.asarray(MECHANISM.reference(**x)).astype(np.float32) for x in (fewer, args))
    bound = float(jnp.finfo(args["out_dtype"]).eps) * np.abs(wanted).max()
    assert (np.abs(same - wanted[rows]) <= bound).all()


def test_cost_counts_what_groups_have():
    args = make_inputs(np.random.default_rng(0), (3, 0, 4), 256, 128, rest=5)
    flops, moved = MECHANISM.cost(**MECHANISM.prepare(**args))
    assert (flops, moved) == (2 * 7 * 256 * 128, 7 * 256 + 2 * 128 * 256 + 12 * 128 * 2)


# ---------------------------------------------------------------- the kernel
@pytest.mark.parametrize("rows", [8, 64, 256])
@pytest.mark.parametrize("rest", [0, 5])
def test_tiles_cover_each_row_once(rows, rest, rng):
    for E in (1, 5, 40):
        sizes = rng.integers(0, 200, E) * (rng.random(E) < 0.7)
        N = int(sizes.sum()) + rest
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        found = {name: np.asarray(x) for name, x in _row_tiles.tables(jnp.asarray(offsets), N, rows).items()}
        count, end = found["count"]
        assert count <= len(found["first"]) == _row_tiles.most(N, E, rows)
        assert end == N - rest
        groups = np.full(N, -1)
        for first, weight, last in list(zip(found["first"], found["weight"], found["end"], strict=True))[:count]:
            mine = slice(first, min(first + rows, last))
            assert first < last
            assert (groups[mine] == -1).all()
            groups[mine] = weight
        np.testing.assert_array_equal(groups, np.concatenate([np.repeat(np.arange(E), sizes), np.full(rest, -1)]))


CONFIGS = {
    "split": Config(rows=64, features=32, stages=3),
    "split-narrow": Config(rows=64, features=16, stages=2),
    "split-wide": Config(rows=64, features=128, stages=2),
    "rows-128": Config(rows=128, features=64, stages=3, width=1),
    "rows-256-cluster": Config(rows=256, features=64, stages=2, cluster=2),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, E4M3) for name in CONFIGS] + [(name, "bfloat16") for name in ("split", "rows-256-cluster")],
)
def test_every_way_to_tile_multiplies_whole_numbers_exactly(name, dtype, rng):
    config = CONFIGS[name]
    features = 8 + config.features if config.cluster == 1 else 2 * config.features
    args = whole(rng, make_inputs(rng, SIZES, 272, features, dtype=dtype, rest=3))
    with here():
        got = grouped_matmul(**args, implementation="mosaic", config=config)
    np.testing.assert_array_equal(got, grouped_matmul(**args, implementation="reference"))


@pytest.mark.parametrize(
    ("dtype", "N", "E", "expected"),
    [
        (E4M3, 32768, 8, Config(rows=256, stages=4, cluster=2, width=16)),
        (E4M3, 8192, 32, Config(rows=256, stages=4, cluster=2, width=16)),
        ("bfloat16", 32768, 8, Config(rows=256, stages=4, cluster=2)),
        (E4M3, 24576, 256, Config(rows=128, stages=6, cluster=2)),
        (E4M3, 256, 32, Config(rows=64, features=128, stages=3)),
        ("bfloat16", 256, 32, Config(rows=64, features=64, stages=6)),
        (E4M3, 1024, 32, Config(rows=64, features=64, stages=6)),
        (E4M3, 8, 1, Config(rows=64, features=32, stages=8)),
    ],
)
def test_default_tiles_follow_the_size_of_groups(dtype, N, E, expected):
    shapes = {"a": ((N, 4096), dtype), "b": ((E, 4096, 4096), dtype), "offsets": ((E + 1,), "int32")}
    if dtype == E4M3:
        shapes |= {"a_scale": ((N, 32), "float32"), "b_scale": ((E, 32, 32), "float32")}
    prepared = MECHANISM.prepare(**{n: jax.ShapeDtypeStruct(s, jnp.dtype(d)) for n, (s, d) in shapes.items()})
    assert mosaic.default_config(**prepared) == expected
    assert expected in list(mosaic.configs(**prepared))


@pytest.mark.parametrize(
    ("sizes", "shape", "options", "message"),
    [
        ((3, 4), (64, 24), {"dtype": "float32"}, "a must be bfloat16, float16, float8_e4m3fn or float8_e5m2"),
        ((3, 4), (64, 24), {"out_dtype": "float32"}, "results must be bfloat16 or float16, got float32"),
        ((3, 4), (72, 24), {}, "must be multiples of 16 bytes, got 72 of float8_e4m3fn"),
        ((3, 4), (68, 24), {"dtype": "bfloat16"}, "must be multiples of 16 bytes, got 68 of bfloat16"),
        ((3, 4), (64, 20), {}, "the output features must be a multiple of 8, got 20"),
        ((0, 0), (64, 24), {}, "needs rows, inputs, groups and output features, got 0, 64, 2 and 24"),
    ],
)
def test_what_the_kernel_refuses(sizes, shape, options, message, rng):
    with pytest.raises(AssertionError, match=re.escape(message)):
        assert not mosaic.why_not(**MECHANISM.prepare(**make_inputs(rng, sizes, *shape, **options)))


def test_configurations_that_do_not_fit(rng):
    args = MECHANISM.prepare(**make_inputs(rng, (3, 4), 128, 72))
    with pytest.raises(
        ValueError, match=r"^grouped_matmul: cluster=2 needs output features in multiples of 128, got 72$"
    ):
        mosaic.grouped_matmul(config=Config(features=64, cluster=2), **args)


# ---------------------------------------------------------------- wrong calls
ROWS, SCALE = jnp.ones((4, 256), E4M3), jnp.ones((4, 2))
WRONG = {
    "inputs": ({"b": jnp.ones((2, 8, 128), E4M3)}, ValueError, "b must be [E F M] with M=256 (from a)"),
    "offsets": ({"offsets": jnp.zeros(2, jnp.int32)}, ValueError, "offsets must be [E+1] with E=2 (from b)"),
    "integers": ({"offsets": jnp.zeros(3)}, TypeError, "offsets must have dtype int32, got float32"),
    "kind": (
        {"b": jnp.ones((2, 8, 256))},
        TypeError,
        "b must have dtype float8_e4m3fn or float8_e5m2, got float32; a and b need one kind; cast one of them",
    ),
    "no-scales": (
        {"a_scale": None, "b_scale": None},
        ValueError,
        "codes of float8 need a_scale and b_scale, other numbers have none, got float8_e4m3fn with no scales",
    ),
    "one-scale": ({"b_scale": None}, ValueError, "other numbers have none, got float8_e4m3fn with a_scale"),
    "scales-of-floats": (
        {"a": jnp.ones((4, 256)), "b": jnp.ones((2, 8, 256))},
        ValueError,
        "other numbers have none, got float32 with a_scale and b_scale",
    ),
    "scale": (
        {"a_scale": jnp.ones((4, 1))},
        ValueError,
        "a_scale must be (4, 2), one per block of 128, got shape (4, 1)",
    ),
    "out": ({"out_dtype": "int8"}, ValueError, "out_dtype must be one of bfloat16, float16, float32, got 'int8'"),
}


@pytest.mark.parametrize(("changes", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_calls(changes, error, message):
    args = {"a": ROWS, "b": jnp.ones((2, 8, 256), E4M3), "offsets": jnp.asarray([0, 1, 4], jnp.int32)}
    args |= {"a_scale": SCALE, "b_scale": jnp.ones((2, 1, 2))}
    with pytest.raises(error, match=f"^grouped_matmul: .*{re.escape(message)}"):
        grouped_matmul(**args | changes)
