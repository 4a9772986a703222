"""What rotary embedding promises beyond the contract: known angles, inverses, YaRN's numbers, public bugs."""

import math
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxattn import _rope, rope, rope_table
from pallas_kernels import _mosaic
from pallas_kernels.rope import Config


def test_a_quarter_turn_by_hand():
    table = jnp.array([[0.0, 1.0, 1.0, 0.0]])  # cos 0, cos pi/2, sin pi/2 ...: pair 0 turns by 90 degrees, pair 1 not
    x = jnp.arange(1.0, 7.0).reshape(1, 1, 6)
    np.testing.assert_array_equal(rope(x, jnp.array([0]), table)[0, 0], [1, 2, -4, 3, 5, 6])
    np.testing.assert_array_equal(rope(x, jnp.array([0]), table, first=True)[0, 0], [-2, 1, 3, 4, 5, 6])
    np.testing.assert_array_equal(rope(x, jnp.array([0]), table, interleaved=False)[0, 0], [1, 2, -5, 4, 3, 6])
    np.testing.assert_array_equal(rope(x, jnp.array([0]), table, inverse=True)[0, 0], [1, 2, 4, -3, 5, 6])


@pytest.mark.parametrize("interleaved", [True, False])
def test_the_inverse_undoes_it(interleaved, rng):
    with jax.enable_x64(True):
        inverse = jnp.asarray(_rope.frequencies(64, 10000.0, dtype=np.float64))
        table = _rope.table(inverse, jnp.arange(5000))
        x, where = jnp.asarray(rng.standard_normal((4, 2, 128))), jnp.array([0, 1, 127, 4999])
        back = rope(rope(x, where, table, interleaved=interleaved), where, table, interleaved=interleaved, inverse=True)
        assert np.abs(back - x).max() < 64 * np.finfo(np.float64).eps
        norms = [np.linalg.norm(y, axis=-1) for y in (x, rope(x, where, table, interleaved=interleaved))]
        assert np.abs(norms[0] - norms[1]).max() < 1024 * np.finfo(np.float64).eps


def test_neox_is_interleaved_with_the_pairs_moved(rng):
    x, where, table = (
        jnp.asarray(rng.standard_normal((3, 2, 64)), jnp.float32),
        jnp.array([0, 5, 99]),
        rope_table(64, 100),
    )
    halves = jnp.concatenate([x[..., ::2], x[..., 1::2]], -1)
    a, b = rope(x, where, table), rope(halves, where, table, interleaved=False)
    np.testing.assert_array_equal(jnp.concatenate([a[..., ::2], a[..., 1::2]], -1), b)


def test_scores_depend_on_distance_only(rng):
    with jax.enable_x64(True):
        table = _rope.table(jnp.asarray(_rope.frequencies(64, 10000.0, dtype=np.float64)), jnp.arange(300))
        q, k = (jnp.asarray(rng.standard_normal((1, 1, 64))) for _ in range(2))
        scores = [
            jnp.sum(rope(q, jnp.array([p + 7]), table) * rope(k, jnp.array([p]), table)) for p in (0, 1, 100, 290)
        ]
        assert np.ptp(scores) < 1e4 * np.finfo(np.float64).eps


@pytest.mark.parametrize(
    ("base", "original", "expected"),
    [(160000.0, 65536, (15, 25)), (10000.0, 65536, (20, 33)), (10000.0, 4096, (10, 23))],
)
def test_the_ramp_of_yarn(base, original, expected):
    assert _rope.yarn_range(64, base, original) == expected


def test_the_ramp_of_gpt_oss_begins_between_pairs():
    def pair(turns):
        return 64 * np.log(4096 / (turns * 2 * np.pi)) / (2 * np.log(150000.0))

    assert _rope.yarn_range(64, 150000.0, 4096, truncate=False) == (pair(32), pair(1))
    assert _rope.yarn_range(64, 150000.0, 4096) == (np.floor(pair(32)), np.ceil(pair(1)))
    low, high = pair(32), pair(1)
    keep = 1 - np.clip((np.arange(32) - low) / (high - low), 0, 1)
    plain = 150000.0 ** -(np.arange(32) / 32)
    found = _rope.frequencies(64, 150000.0, factor=32.0, original=4096, truncate=False, dtype=np.float64)
    assert np.abs(found / (plain / 32 * (1 - keep) + plain * keep) - 1).max() <= 64 * np.finfo(np.float64).eps


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
    plain, stretched = (_rope.frequencies(64, 160000.0, factor=f, original=65536) for f in (1.0, 16.0))
    np.testing.assert_array_equal(stretched[:16], plain[:16])
    assert np.abs(stretched[25:] * 16 / plain[25:] - 1).max() < 4 * np.finfo(np.float32).eps
    assert (np.diff(stretched) < 0).all()


@pytest.mark.parametrize("position", [0, 1, 127, 4095, 65535, 131071, 1048575])
def test_angles_are_as_good_as_float32_allows(position):
    """Half an ulp of the frequency and half of the product: relative 2^-23 of an angle of up to `position`."""
    inverse = _rope.frequencies(64, 160000.0, factor=16.0, original=65536)
    exact = position * _rope.frequencies(64, 160000.0, factor=16.0, original=65536, dtype=np.float64)
    table = np.asarray(_rope.table(jnp.asarray(inverse), jnp.array([position])), np.float64)[0]
    bound = 4 * np.finfo(np.float32).eps * (1 + exact)
    assert (np.abs(table - np.concatenate([np.cos(exact), np.sin(exact)])) <= np.tile(bound, 2)).all()


def test_bc31_frequencies_in_bfloat16_would_be_wrong():
    exact = np.cos(4095 * _rope.frequencies(64, 10000.0, dtype=np.float64))
    ours = np.asarray(rope_table(64, 4096))[4095, :32]
    coarse = np.cos(4095 * _rope.frequencies(64, 10000.0).astype(ml_dtypes.bfloat16).astype(np.float64))
    hundredth = 1 / 100
    assert (np.abs(coarse - exact) > hundredth).sum() == 17
    assert (np.abs(ours - exact) > hundredth).sum() == 0
    assert int(jnp.bfloat16(15962)) == 15936  # positions must not be 16-bit either


def test_bc33_v4_has_magnitude_one():
    table = rope_table(64, 8, base=160000.0, factor=16.0, original=65536)
    np.testing.assert_array_equal(table[0], [1.0] * 32 + [0.0] * 32)
    plain = rope_table(64, 1, factor=16.0, original=65536, mscale=1.0, mscale_all_dim=None)
    assert float(plain[0, 0]) == np.float32(0.1 * math.log(16) + 1)


def test_positions_outside_the_table_take_its_nearest_row(rng):
    x, table = jnp.asarray(rng.standard_normal((4, 1, 64)), jnp.float32), rope_table(64, 10)
    a = rope(x, jnp.array([-5, 10, 2**31 - 1, 9]), table)
    np.testing.assert_array_equal(a, rope(x, jnp.array([0, 9, 9, 9]), table))


WRONG = {
    "odd": ({"cos_sin": jnp.ones((4, 7))}, "an even Dr of at most D=64, got 4 rows of 7"),
    "wide": ({"cos_sin": jnp.ones((4, 66))}, "an even Dr of at most D=64, got 4 rows of 66"),
    "empty": ({"cos_sin": jnp.ones((0, 64))}, "an even Dr of at most D=64, got 0 rows of 64"),
    "checked": (
        {"checked": True, "positions": jnp.array([0, 4])},
        "positions[1] must be a row of the table, 0 to 3, got 4",
    ),
    "tokens": ({"positions": jnp.arange(3)}, "positions must be [N] with N=2 (from x), got shape (3,)"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_wrong_calls(changes, message):
    args = {"x": jnp.ones((2, 3, 64)), "positions": jnp.arange(2), "cos_sin": jnp.ones((4, 64))} | changes
    with pytest.raises(ValueError, match=rf"^rope: .*{re.escape(message)}$"):
        rope(**args)


def test_wrong_tables():
    with pytest.raises(ValueError, match="rope_table: rotary_dim must be even, got 7"):
        rope_table(7, 4)
    with pytest.raises(
        ValueError, match=r"rope_table: a factor of 16.0 stretches the original context; give original="
    ):
        rope_table(64, 4, factor=16.0)
    with pytest.raises(ValueError, match="rope: checked=True reads the positions and needs a concrete array"):
        jax.jit(lambda p: rope(jnp.ones((2, 1, 64)), p, jnp.ones((4, 64)), checked=True))(jnp.arange(2))


@pytest.mark.parametrize("options", [{}, {"interleaved": False}, {"first": True, "inverse": True}], ids=str)
def test_the_kernel_turns_tiles_of_a_token_as_it_turns_rows(options, rng):
    """Sixteen heads lie in one tile, of one head each row has its own angles; halves are two lanes or more apart."""
    x, where = jnp.asarray(rng.standard_normal((2, 16, 96)), jnp.float32), jnp.array([3, -7])
    table = rope_table(64, 9)
    rows = x.reshape(32, 1, 96), jnp.repeat(where, 16), table
    with _mosaic.interpret():
        by_token = rope(x, where, table, **options, implementation="mosaic")
        by_row = rope(*rows, **options, implementation="mosaic")
    np.testing.assert_array_equal(by_token, by_row.reshape(x.shape))
    np.testing.assert_array_equal(by_token, rope(x, where, table, **options))


def test_wrong_configurations():
    with pytest.raises(ValueError, match=r"^rows=0 must be at least 1$"):
        Config(rows=0)
    args = jnp.ones((2, 16, 64)), jnp.arange(2), rope_table(64, 9)
    with (
        _mosaic.interpret(),
        pytest.raises(ValueError, match=r"^rope: rows=3 must be a multiple of 8, the smallest tile"),
    ):
        rope(*args, implementation="mosaic", config=Config(rows=3))
