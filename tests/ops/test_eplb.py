import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import choose_replica, eplb, expert_load
from jaxattn.ops.eplb import make_inputs, rank_load, replicas
from parity.twins import eplb as twin
from scripts import eplb_balance


def test_by_hand():
    load = jnp.asarray([[90.0, 132.0, 40.0, 61.0, 104.0, 165.0, 39.0, 4.0, 73.0, 56.0, 183.0, 86.0]])
    placed = eplb(load, num_replicas=16, num_groups=4, num_nodes=2, num_ranks=8)
    # the example of https://github.com/deepseek-ai/eplb, first layer
    assert placed.tolist() == [[5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1]]


@pytest.mark.parametrize("skew", [0.1, 1.0, 4.0])
@pytest.mark.parametrize(
    ("E", "P", "ranks", "groups", "nodes"),
    [(64, 80, 16, 8, 4), (256, 288, 32, 8, 4), (8, 32, 4, 1, 1), (60, 64, 8, 5, 2)],
)
def test_the_policy_on_random_and_skewed_loads(E, P, ranks, groups, nodes, skew, rng):
    args = make_inputs(rng, 2, E, P, ranks, skew=skew, num_groups=groups, num_nodes=nodes)
    placed = np.asarray(eplb(**args))
    load = np.asarray(args["load"])
    expected = twin.run(args | {"load": load}, False)["physical_to_logical"]
    np.testing.assert_array_equal(load[np.arange(2)[:, None], placed], load[np.arange(2)[:, None], expected])
    for row in placed:
        assert set(row.tolist()) == set(range(E))
    plain = rank_load(load, np.tile(np.concatenate([np.arange(E), np.zeros(P - E, int)]), (2, 1)), ranks)
    assert (rank_load(load, placed, ranks).max(-1) <= plain.max(-1)).all()


@pytest.mark.parametrize(
    "load", [np.zeros(16), np.ones(16), np.eye(16)[3], 2.0 ** np.arange(16), np.repeat([5.0, 1.0], 8)]
)
def test_adversarial_loads(load):
    args = {"num_replicas": 24, "num_ranks": 4, "num_groups": 4, "num_nodes": 2}
    placed = eplb(jnp.asarray(load[None], jnp.float32), **args)
    expected = twin.run(args | {"load": np.float32(load[None])}, False)["physical_to_logical"]
    np.testing.assert_array_equal(placed, expected)


def test_it_runs_under_jit(rng):
    args = make_inputs(rng, 2, 16, 24, 4, previous=True)
    arrays = {name: args.pop(name) for name in ("load", "previous")}
    np.testing.assert_array_equal(jax.jit(lambda a: eplb(**a, **args))(arrays), eplb(**arrays, **args))


def test_experts_that_stay_keep_their_slots(rng):
    args = make_inputs(rng, 2, 32, 40, 8)
    placed = np.asarray(eplb(**args))
    shuffled = rng.permuted(placed.reshape(2, 8, 5), axis=-1).reshape(2, 40)
    np.testing.assert_array_equal(eplb(**args, previous=jnp.asarray(shuffled)), shuffled)


def test_statistics_skip_padding_and_masked_pairs():
    ids = jnp.asarray([[0, 2], [2, -1], [2, 1]], jnp.int32)
    assert expert_load(ids, 4).tolist() == [1, 1, 3, 0]
    assert expert_load(ids, 4, tokens=2).tolist() == [1, 0, 2, 0]
    assert expert_load(ids[:0], 2).tolist() == [0, 0]


def test_tokens_are_spread_over_replicas_by_a_hash():
    placed = jnp.asarray([[0, 1, 0, 0]], jnp.int32)
    slots, counts = replicas(placed, 2)
    assert slots.tolist() == [[[0, 2, 3], [1, -1, -1]]]
    assert counts.tolist() == [[3, 1]]
    ids = jnp.asarray([[0, 1]] * 4 + [[-1, 7]], jnp.int32)
    chosen = choose_replica(ids, slots[0], counts[0])
    assert chosen[:4, 1].tolist() == [1] * 4
    expected = [[0, 2, 3][(t * 2654435769 % 2**32) % 3] for t in range(4)]
    assert chosen[:4, 0].tolist() == expected
    assert chosen[4].tolist() == [-1, -1]


def test_logical_load_is_counted_per_physical_expert(rng):
    args = make_inputs(rng, 1, 8, 12, 4)
    slots, counts = replicas(eplb(**args), 8)
    ids = jnp.asarray(rng.integers(0, 8, (100, 2)), jnp.int32)
    physical = choose_replica(ids, slots[0], counts[0])
    placed = np.asarray(eplb(**args))[0]
    np.testing.assert_array_equal(placed[np.asarray(physical)], ids)
    assert int(expert_load(physical, 12).sum()) == 200


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"num_replicas": 6},
            ValueError,
            "num_replicas must be at least the number of experts, got num_replicas=6 and E=8",
        ),
        ({"num_replicas": 9}, ValueError, "num_replicas=9 must be a multiple of num_ranks=2"),
        ({"num_groups": 3, "num_nodes": 1}, ValueError, "the number of experts E=8 must be a multiple of num_groups=3"),
        ({"num_groups": 4, "num_nodes": 4}, ValueError, "num_ranks=2 must be a multiple of num_nodes=4"),
        ({"load": jnp.full((1, 8), -1.0)}, ValueError, "loads must be finite and not negative, got -1.0 to -1.0"),
        ({"load": jnp.full((1, 8), jnp.nan)}, ValueError, "loads must be finite and not negative, got nan to nan"),
        ({"load": jnp.zeros((1, 8), jnp.int32)}, TypeError, "load must have dtype float32 or float64, got int32"),
        ({"previous": jnp.zeros((1, 4), jnp.int32)}, ValueError, "previous must have num_replicas=10 columns, got 4"),
    ],
)
def test_messages(changes, error, message):
    with pytest.raises(error, match=message):
        eplb(**({"load": jnp.ones((1, 8)), "num_replicas": 10, "num_ranks": 2} | changes))


def test_the_script_shows_the_balance_before_and_after(tmp_path, capsys):
    loads = tmp_path / "loads.txt"
    loads.write_text("1 1 1 1 1 1 1 9\n4 3 2 1 4 3 2 1\n")
    svg = tmp_path / "balance.svg"
    sizes = ["--replicas", "12", "--ranks", "4", "--groups", "1", "--nodes", "1"]
    assert eplb_balance.main(["--loads", str(loads), *sizes, "--svg", str(svg)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [["0", "0.400", "0.870"], ["1", "0.714", "1.000"]]
    assert svg.read_text().count("<rect") == 8
    for wrong, message in (
        (["--ranks", "7"], "num_replicas=12 must be a multiple of num_ranks=7"),
        (["--ranks", "6", "--svg", str(svg)], "--svg shows ranks of equally many experts, got 8 experts and 6 ranks"),
    ):
        with pytest.raises(SystemExit):
            eplb_balance.main(["--loads", str(loads), *sizes, *wrong])
        assert message in capsys.readouterr().err
