"""What combining ranks promises beyond the contract: limits, algebra, hand-written numbers."""

import contextlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import combine_partials, merge_states
from jaxattn.ops.combine_partials import make_inputs
from pallas_kernels import _mosaic
from pallas_kernels import combine_partials as mosaic

implementations = pytest.mark.parametrize("implementation", ["reference", "mosaic"])
WIDTH = 64


def run(implementation, *args, **options):
    """Outputs as numpy arrays; kernels run on the GPU if there is one, else interpreted."""
    interpreted = implementation == "mosaic" and _mosaic.why_not_here()
    with _mosaic.interpret() if interpreted else contextlib.nullcontext():
        out = jax.block_until_ready(combine_partials(*args, implementation=implementation, **options))
    return jax.tree.map(np.asarray, out)


def bits(x):
    return np.asarray(x).view(np.uint8)


def ranks(values, lses, dtype="float32"):
    """One (sequence, head) with a constant row per rank."""
    o = jnp.broadcast_to(jnp.asarray(values, dtype)[:, None, None, None], (len(values), 1, 1, WIDTH))
    return o, jnp.asarray(lses, jnp.float32)[:, None, None]


@implementations
@pytest.mark.parametrize(("base", "log"), [("e", math.log), ("2", math.log2)])
def test_three_ranks_by_hand(implementation, base, log):
    o, lse, corrected = run(
        implementation, *ranks([0.0, 1.0, 2.0], [log(1), log(2), log(5)]), base=base, return_corrected=True
    )
    np.testing.assert_array_max_ulp(o, np.full_like(o, 1.5), 4)
    np.testing.assert_array_max_ulp(lse, np.full_like(lse, log(8)), 4)
    np.testing.assert_array_max_ulp(corrected[:, 0, 0, 0], np.array([0, 0.25, 1.25], np.float32), 4)


@implementations
@pytest.mark.parametrize("marker", [-math.inf, math.inf, math.nan])
def test_an_empty_rank_is_not_read_and_gives_plus_zero(implementation, marker, rng):
    v = jnp.asarray(rng.standard_normal(WIDTH), jnp.bfloat16)
    o, lse = ranks([math.nan, 0.0], [marker, 0.7], "bfloat16")
    o = o.at[1].set(v)
    got, total, corrected = run(implementation, o, lse, return_corrected=True)
    np.testing.assert_array_equal(bits(got[0, 0]), bits(v))
    np.testing.assert_array_equal(bits(corrected[1, 0, 0]), bits(v))
    assert not bits(corrected[0]).any()
    assert total[0, 0] == np.float32(0.7)


@implementations
def test_a_factor_that_underflows_gives_plus_zero(implementation):
    _, _, corrected = run(implementation, *ranks([-1.0, 1.0], [-200.0, 0.0]), return_corrected=True)
    assert not bits(corrected[0]).any()


@implementations
def test_all_ranks_empty_gives_zero_and_minus_infinity(implementation):
    o, lse, corrected = run(
        implementation, *ranks([math.nan] * 3, [math.nan, math.inf, -math.inf]), return_corrected=True
    )
    assert not bits(o).any() and not bits(corrected).any()
    assert lse[0, 0] == -math.inf


@implementations
def test_one_rank_is_copied(implementation, rng):
    args = make_inputs(rng, 1, 3, 8, WIDTH, empty=False)
    o, lse = run(implementation, args["o"], args["lse"])
    np.testing.assert_array_equal(bits(o), bits(args["o"][0]))
    np.testing.assert_array_equal(bits(lse), bits(args["lse"][0]))


@implementations
def test_two_ranks_merge_as_two_states_do(implementation, rng):
    args = make_inputs(rng, 2, 3, 8, WIDTH, dtype="float32")
    args["lse"] = jnp.where(jnp.isnan(args["lse"]), -jnp.inf, args["lse"])
    o, lse = run(implementation, args["o"], args["lse"])
    expected, expected_lse = merge_states(
        args["o"][0], args["lse"][0], args["o"][1], args["lse"][1], implementation="reference"
    )
    scale = np.abs(np.asarray(expected)).max()
    assert np.abs(o - np.asarray(expected)).max() <= 4 * np.finfo(np.float32).eps * scale
    assert (np.isneginf(lse) == np.isneginf(expected_lse)).all()


@implementations
def test_bc23_ranks_with_their_own_positions_combine_to_one(implementation, rng):
    """Ranks hold the tokens t with t % 4 == r; top-k {0, 3, 7, 9}: rank 2 has no hit."""
    tokens, top, N = 10, [0, 3, 7, 9], 4
    scores, v = rng.standard_normal((8, tokens)), rng.standard_normal((tokens, WIDTH))

    def attend(chosen):
        if not chosen:
            return np.full((8, WIDTH), np.nan), np.full(8, -np.inf)
        p = np.exp(scores[:, chosen])
        return p @ v[chosen] / p.sum(-1, keepdims=True), np.log(p.sum(-1))

    local = [[t // N for t in top if t % N == r] for r in range(N)]
    assert local == [[0], [2], [], [0, 1]]
    parts = [attend([t * N + r for t in local[r]]) for r in range(N)]
    o = jnp.asarray(np.stack([p[0] for p in parts])[:, None], jnp.float32)
    lse = jnp.asarray(np.stack([p[1] for p in parts])[:, None], jnp.float32)
    got, total, corrected = run(implementation, o, lse, return_corrected=True)
    whole, whole_lse = attend(top)
    assert np.abs(got[0] - whole).max() <= 8 * np.finfo(np.float32).eps * np.abs(whole).max()
    np.testing.assert_array_max_ulp(total[0], whole_lse.astype(np.float32), 8)
    assert not bits(corrected[2]).any()


@implementations
def test_the_sum_is_rounded_once(implementation):
    """Two halves of 1 + 2^-9 each, in bfloat16: corrected results round to 0.5 twice, their exact sum to 1 + 2^-8."""
    v = 1 + 2**-7
    o, _, corrected = run(implementation, *ranks([v, v], [0.0, 0.0], "bfloat16"), return_corrected=True)
    assert o[0, 0, 0].astype(np.float32) == v
    assert corrected[:, 0, 0, 0].astype(np.float32).tolist() == [v / 2, v / 2]
    parts = [1.0, 2**-8, 2**-8]
    o, _ = run(implementation, *ranks([3 * x for x in parts], [0.0] * 3, "bfloat16"))
    assert o[0, 0, 0].astype(np.float32) == 1 + 2**-7


@pytest.mark.parametrize(("B", "rows"), [(1, 16), (11, 16), (23, 32)])
def test_every_remainder_of_rows_is_written(B, rows, rng):
    """Tiles, a last shorter one, and a sliver by TMA; a fused multiply and add may move one rounding by one step."""
    args = make_inputs(rng, 3, B, 3, WIDTH)
    expected = run("reference", args["o"], args["lse"])[0]
    got = run("mosaic", args["o"], args["lse"], config=mosaic.Config(rows=rows))[0]
    steps = np.abs(got.view(np.int16).astype(int) - expected.view(np.int16).astype(int))
    assert steps.max() <= 1
    assert (steps > 0).mean() < 1 / 1000


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"lse": jnp.zeros((2, 1, 4))},
            ValueError,
            r"lse must be \[N B H\] with H=3 \(from o\), got shape \(2, 1, 4\)",
        ),
        ({"lse": jnp.zeros((2, 1, 3), jnp.float16)}, TypeError, "lse must have dtype float32, got float16"),
        (
            {"o": jnp.zeros((0, 1, 3, WIDTH)), "lse": jnp.zeros((0, 1, 3))},
            ValueError,
            r"needs the result of at least one rank, got o of shape \(0, 1, 3, 64\)",
        ),
        ({"base": 2}, ValueError, r"base must be one of e, 2 \(strings\), got 2"),
        ({"o": jnp.zeros((2, 1, 3, WIDTH), jnp.int32)}, TypeError, "o must have dtype .* got int32"),
    ],
)
def test_messages(changes, error, message):
    with pytest.raises(error, match=message):
        combine_partials(**({"o": jnp.zeros((2, 1, 3, WIDTH)), "lse": jnp.zeros((2, 1, 3))} | changes))


def test_more_ranks_than_the_kernel_unrolls_are_refused():
    o, lse = jnp.zeros((17, 1, 8, WIDTH)), jnp.zeros((17, 1, 8))
    with _mosaic.interpret(), pytest.raises(NotImplementedError, match="at most 16 ranks, got N=17; combine groups"):
        combine_partials(o, lse, implementation="mosaic")
