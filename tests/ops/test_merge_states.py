"""What merging partial results promises beyond the contract: limits, algebra, hand-written numbers."""

import contextlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import merge_states
from jaxattn.ops.merge_states import make_inputs
from pallas_kernels import _mosaic, _rows
from pallas_kernels import merge_states as mosaic

IMPLEMENTATIONS = ("reference", "mosaic")
implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
WIDTH = 64


def run(implementation, *args, **options):
    """Outputs as numpy arrays; kernels run on the GPU if there is one, else interpreted."""
    interpreted = implementation == "mosaic" and _mosaic.why_not_here()
    with _mosaic.interpret() if interpreted else contextlib.nullcontext():
        out = jax.block_until_ready(merge_states(*args, implementation=implementation, **options))
    return jax.tree.map(np.asarray, out)


def bits(x):
    return np.asarray(x).view(np.uint8)


def row(value, dtype="float32"):
    return jnp.full((1, 1, WIDTH), value, dtype)


def lse(value):
    return jnp.full((1, 1), value, jnp.float32)


@implementations
def test_a_merge_by_hand(implementation):
    o, out_lse = run(implementation, row(0.0), lse(0.0), row(1.0), lse(math.log(3)))
    np.testing.assert_array_max_ulp(o, np.full_like(o, 0.75), 2)
    np.testing.assert_array_max_ulp(out_lse, np.full_like(out_lse, math.log(4)), 2)


@implementations
def test_bc05_a_base_2_log_sum_exp_gives_another_answer(implementation):
    o, _ = run(implementation, row(0.0), lse(0.0), row(1.0), lse(math.log2(3)))
    assert round(float(o[0, 0, 0]), 4) == 0.8299
    o, _ = run(implementation, row(0.0), lse(0.0), row(1.0), lse(math.log2(3)) * jnp.float32(math.log(2)))
    assert round(float(o[0, 0, 0]), 6) == 0.75


@implementations
@pytest.mark.parametrize("infinity", [math.inf, -math.inf])
@pytest.mark.parametrize("empty", ["prefix", "suffix"])
def test_bc03_an_empty_side_of_either_sign_is_not_read(implementation, infinity, empty, rng):
    v = jnp.asarray(rng.standard_normal((1, 1, WIDTH)), jnp.bfloat16).at[0, 0, 0].set(-0.0)
    full, none = (v, lse(0.7)), (row(math.nan, "bfloat16"), lse(infinity))
    o, out_lse = run(implementation, *(none + full if empty == "prefix" else full + none))
    np.testing.assert_array_equal(bits(o), bits(v))
    assert out_lse[0, 0] == np.float32(0.7)


@implementations
@pytest.mark.parametrize("infinities", [(math.inf, math.inf), (-math.inf, math.inf), (-math.inf, -math.inf)])
def test_both_sides_empty_gives_zero_and_minus_infinity(implementation, infinities):
    a, b = infinities
    o, out_lse = run(implementation, row(math.nan), lse(a), row(math.nan), lse(b))
    assert not bits(o).any()
    assert out_lse[0, 0] == -math.inf


@implementations
def test_the_order_of_the_sides_does_not_matter(implementation, rng):
    args = make_inputs(rng, 5, 8, WIDTH, dtype="float32")
    names = ("prefix_o", "prefix_lse", "suffix_o", "suffix_lse")
    a = run(implementation, *(args[n] for n in names))
    b = run(implementation, *(args[n] for n in (*names[2:], *names[:2])))
    largest = max(np.nanmax(np.abs(args[n])) for n in ("prefix_o", "suffix_o"))
    assert np.abs(a[0] - b[0]).max() <= 2 * np.finfo(np.float32).eps * largest
    np.testing.assert_array_equal(bits(a[1]), bits(b[1]))


@implementations
def test_merging_splits_of_a_softmax_restores_it(implementation, rng):
    scores, v = rng.standard_normal((1, 8, 30)), rng.standard_normal((30, WIDTH))

    def attend(part):
        p = np.exp(scores[..., part])
        return jnp.asarray(p @ v[part] / p.sum(-1, keepdims=True), jnp.float32), jnp.asarray(
            np.log(p.sum(-1)), jnp.float32
        )

    whole, whole_lse = attend(slice(None))
    o, out_lse = attend(slice(0, 3))
    for part in (slice(3, 17), slice(17, 30)):
        o, out_lse = run(implementation, o, out_lse, *attend(part))
    same, _ = merge_states(*attend(slice(0, 17)), *attend(slice(17, 30)), implementation="reference")
    error = np.abs(o - whole).max()
    assert error <= 4 * max(np.abs(np.asarray(same) - whole).max(), np.finfo(np.float32).eps)
    np.testing.assert_array_max_ulp(out_lse, np.asarray(whole_lse), 8)


@implementations
def test_float8_output_saturates_and_keeps_nan(implementation):
    o = row(1.0).at[0, 0, :4].set(jnp.array([1000.0, -1000.0, math.nan, 464.0]))
    codes, _ = run(implementation, o, lse(0.0), o, lse(0.0), out_scale=1.0)
    assert codes.dtype == jnp.float8_e4m3fn
    assert codes[0, 0, :2].astype(np.float32).tolist() == [448, -448]
    assert np.isnan(codes[0, 0, 2].astype(np.float32))
    assert codes[0, 0, 3:5].astype(np.float32).tolist() == [448, 1]


@implementations
def test_bc37_float8_output_is_rounded_once(implementation):
    o = row(1.0).at[0, 0, :3].set(jnp.array([400.199585, 272.156555, 136.002075]))
    codes, _ = run(implementation, o, lse(0.0), row(0.0), lse(-math.inf), out_scale=1.0)
    assert codes[0, 0, :3].astype(np.float32).tolist() == [416, 288, 144]


@pytest.mark.parametrize(
    ("T", "D", "rows"),
    [(1, 128, 8), (7, 128, 64), (16, 128, 16), (33, 128, 64), (3, 8, 128), (3, 40, 128), (5, 80, 64), (5, 256, 4)],
)
def test_every_remainder_of_rows_is_written(T, D, rows, rng):
    """Tiles, a last shorter one, and a sliver by TMA; a fused multiply and add may move one rounding by one step."""
    args = make_inputs(rng, T, 5, D)
    names = ("prefix_o", "prefix_lse", "suffix_o", "suffix_lse")
    expected = run("reference", *(args[n] for n in names))[0]
    got = run("mosaic", *(args[n] for n in names), config=mosaic.Config(rows=rows))[0]
    steps = np.abs(got.view(np.int16).astype(int) - expected.view(np.int16).astype(int))
    assert steps.max() <= 1
    assert (steps > 0).mean() < 1 / 1000


def test_the_default_tile_is_small():
    shapes = {(1, 1): 8, (8, 8): 8, (1024, 8): 8, (8192, 32): 8}
    for (T, H), rows in shapes.items():
        assert mosaic.default_config(prefix_o=jax.ShapeDtypeStruct((T, H, 128), jnp.bfloat16)).rows == rows
    assert _rows.choices(512, 8) == (4, 8, 16)


def call(**changes):
    o, lse = jnp.zeros((2, 3, WIDTH)), jnp.zeros((2, 3))
    return {"prefix_o": o, "prefix_lse": lse, "suffix_o": o, "suffix_lse": lse} | changes


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"prefix_lse": jnp.zeros((3, 2))},
            ValueError,
            r"prefix_lse must be \[T H\] with T=2 \(from prefix_o\), got shape \(3, 2\)",
        ),
        (
            {"suffix_o": jnp.zeros((2, 3, 32))},
            ValueError,
            r"suffix_o must be \[T H D\] with D=64 \(from prefix_o\), got shape \(2, 3, 32\)",
        ),
        (
            {"suffix_o": jnp.zeros((2, 3, WIDTH), jnp.bfloat16)},
            TypeError,
            "suffix_o must have dtype float32, got bfloat16; both sides need one dtype; cast one of them",
        ),
        (
            {"prefix_lse": jnp.zeros((2, 3), jnp.bfloat16)},
            TypeError,
            "prefix_lse must have dtype float32, got bfloat16",
        ),
        ({"out_scale": jnp.ones(3)}, ValueError, r"out_scale must be one number, got shape \(3,\)"),
        ({"implementation": "cuda"}, ValueError, "must be None or one of reference, mosaic, got 'cuda'"),
    ],
)
def test_messages(changes, error, message):
    with pytest.raises(error, match=message):
        merge_states(**call(**changes))


@pytest.mark.parametrize("rows", [0, -8, 6])
def test_an_illegal_tile_cannot_be_built(rows):
    with pytest.raises(ValueError, match=f"rows={rows} must be a positive multiple of 4, one row for each warp"):
        mosaic.Config(rows=rows)


def test_a_tile_that_does_not_fit_the_row_length_is_refused():
    with (
        _mosaic.interpret(),
        pytest.raises(ValueError, match="rows=4 must be a multiple of 8, the smallest tile for D=64"),
    ):
        merge_states(**call(), implementation="mosaic", config=mosaic.Config(rows=4))
