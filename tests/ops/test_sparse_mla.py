"""What sparse attention promises: dense equality, sinks, invalid and repeated entries, two caches."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import mla, sparse_mla, window_slots
from jaxattn.ops._sparse_mla_cases import make_inputs
from jaxattn.ops.latent_cache_gather import at_slots
from jaxattn.ops.sparse_mla import MECHANISM
from pallas_kernels import _mosaic
from pallas_kernels import sparse_mla as mosaic
from parity import cases, execution, triangle

EPS = np.finfo(np.float32).eps


def rows(rng, S=40, D=64, H=4, N=3):
    return (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((N, H, D), (S, D)))


def test_over_all_rows_it_is_dense(rng):
    q, kv = rows(rng)
    everything = jnp.broadcast_to(jnp.arange(40, dtype=jnp.int32), (3, 40))
    o, lse, top = sparse_mla(q, kv, everything, return_lse=True, value_dim=48)
    table = jnp.arange(40, dtype=jnp.int32)[None]
    dense = mla(
        q,
        kv[:, None],
        table,
        jnp.array([40]),
        jnp.array([0, 3]),
        scale=64**-0.5,
        value_dim=48,
        causal=False,
        return_lse=True,
    )
    assert np.abs(o - dense[0]).max() <= 16 * EPS
    assert np.abs(lse - dense[1]).max() <= 16 * EPS * np.abs(lse).max()
    scores = np.einsum("nhd,sd->nhs", np.asarray(q, np.float64), np.asarray(kv, np.float64)) / 8
    assert np.abs(top - scores.max(-1)).max() <= 16 * EPS * np.abs(scores).max()


def test_window_lists_are_a_band_mask(rng):
    q, kv = rows(rng, N=40)
    slots, counts = window_slots(
        jnp.arange(40, dtype=jnp.int32)[None], jnp.zeros(40, jnp.int32), jnp.arange(40), window=7, page=1
    )
    o = np.asarray(sparse_mla(q, kv, slots, counts=counts, value_dim=64), np.float64)
    qn, kn = np.asarray(q, np.float64), np.asarray(kv, np.float64)
    for p in range(40):
        keys = kn[max(p - 6, 0) : p + 1]
        s = qn[p] @ keys.T / 8
        w = np.exp(s - s.max(1, keepdims=True))
        assert np.abs(o[p] - w / w.sum(1, keepdims=True) @ keys).max() <= 32 * EPS


def test_a_sink_is_a_sigmoid(rng):
    q, kv = rows(rng)
    sinks = jnp.array([-jnp.inf, 0.0, 2.0, jnp.inf])
    lists = jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32), (3, 9))
    plain, lse, _ = sparse_mla(q, kv, lists, return_lse=True)
    sunk, same, _ = sparse_mla(q, kv, lists, sinks=sinks, return_lse=True)
    np.testing.assert_array_equal(lse, same)
    weight = 1 / (1 + np.exp(np.asarray(sinks, np.float64) - np.asarray(lse, np.float64)))
    assert np.abs(sunk - np.asarray(plain) * weight[..., None]).max() <= 16 * EPS
    np.testing.assert_array_equal(sunk[:, 0], plain[:, 0])
    assert (np.asarray(sunk[:, 3]) == 0).all()


def test_bc11_and_bc25_invalid_entries(rng):
    q, kv = rows(rng, N=4)
    n = 40
    lists = np.array(
        [
            [5, -1, n, -(2**31), 2**31 - 1, 114514],  # one valid
            [-1] * 6,
            [3, 3, 7, 3, -1, 3],  # 3 counts four times
            [1, 2, 3, 4, 5, 6],  # length 0
        ],
        np.int32,
    )
    counts = jnp.array([6, 6, 6, 0])
    o, lse, top = sparse_mla(q, kv, jnp.asarray(lists), counts=counts, sinks=jnp.full(4, 0.3), return_lse=True)
    for empty in (1, 3):
        assert (np.asarray(o[empty]) == 0).all()
        assert (np.asarray(lse[empty]) == -np.inf).all() and (np.asarray(top[empty]) == -np.inf).all()
    plain = sparse_mla(q[:1], kv, jnp.asarray(lists[:1]))
    np.testing.assert_array_equal(plain[0], jnp.broadcast_to(kv[5], (4, 64)))
    s = np.asarray(q, np.float64)[2] @ np.asarray(kv, np.float64)[[3, 7]].T / 8
    assert np.abs(lse[2] - np.log(4 * np.exp(s[:, 0]) + np.exp(s[:, 1]))).max() <= 32 * EPS


def test_two_caches_are_one_list(rng):
    q, kv = rows(rng)
    a, b = jnp.array([[1, 2, -1]] * 3), jnp.array([[0, 5, 19, 4]] * 3)
    joint = sparse_mla(q, kv, jnp.concatenate([a, jnp.where(b >= 0, b + 20, -1)], 1), return_lse=True)
    split = sparse_mla(q, kv[:20], a, extra_cache=kv[20:], extra_indices=b, return_lse=True)
    for x, y in zip(joint, split, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("format", ["v4", "fp8_ds_mla"])
def test_packed_rows_are_their_dequantized_numbers(format, rng):
    D = 512 if format == "v4" else 576
    args = make_inputs(rng, 2, 4, D, 128, 16, format=format, lengths=False)
    dense = at_slots(args["cache"], jnp.arange(128), format=format, page=64).astype(jnp.bfloat16)
    dense = jnp.where(jnp.isnan(dense), 0, dense)
    plain = sparse_mla(args["q"], dense, args["indices"])
    np.testing.assert_array_equal(sparse_mla(**args), plain)


WRONG = {
    "format": ({"format": "fp8"}, "format must be one of plain, fp8_ds_mla, v4, got 'fp8'"),
    "extra": ({"extra_indices": jnp.zeros((2, 3), jnp.int32)}, "extra_cache and extra_indices belong together"),
    "page": ({"page": 64}, "page belongs to format v4, and only there, got format plain and page 64"),
    "value": ({"value_dim": 65}, "value_dim must be at most D=64, got 65"),
    "v4": (
        {"format": "v4", "page": 64, "cache": jnp.zeros((1, 37440), jnp.uint8)},
        "format v4 holds rows of 512 numbers, got D=64 from q",
    ),
    "empty": ({"cache": jnp.ones((0, 64))}, "cache must hold at least one row, got none"),
    "sinks": ({"sinks": jnp.ones(2)}, "sinks must be [H] with H=3 (from q), got shape (2,)"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_wrong_calls(changes, message):
    args = {"q": jnp.ones((2, 3, 64)), "cache": jnp.ones((5, 64)), "indices": jnp.zeros((2, 4), jnp.int32)}
    with pytest.raises(ValueError, match=f"^sparse_mla: {re.escape(message)}"):
        sparse_mla(**args | changes)


@pytest.mark.parametrize("case", [c for c in MECHANISM.cases if "smoke" in c.tags], ids=lambda c: c.name)
def test_shapes_of_cases_are_theirs(case, rng):
    assert case.shapes is not None
    made, said = case.make(rng), case.shapes()
    assert {k: getattr(v, "shape", v) for k, v in made.items()} == {k: getattr(v, "shape", v) for k, v in said.items()}
    assert all(v.dtype == said[k].dtype for k, v in made.items() if hasattr(v, "dtype"))


# ---------------------------------------------------------------- kernel
WAYS = {
    "two lists": (mosaic.Config(), {"N": 4, "H": 64, "width": 130, "more": (50, 70)}),
    "small blocks, splits": (mosaic.Config(block_kv=32, stages=3, splits=2), {"N": 3, "H": 128, "width": 130}),
}


@pytest.mark.parametrize("way", WAYS)
def test_thread_blocks_take_many_tiles(way, rng, monkeypatch):
    """Two thread blocks for all; one list is empty."""
    monkeypatch.setattr(_mosaic, "num_sms", lambda: 2)
    config, sizes = WAYS[way]
    N, H, width = (sizes.pop(name) for name in ("N", "H", "width"))
    args = make_inputs(rng, N, H, 192, 100, width, value_dim=128, sinks="mixed", return_lse=True, **sizes)
    with _mosaic.interpret():
        got = dict(
            zip(("o", "lse", "max_logits"), sparse_mla(**args, implementation="mosaic", config=config), strict=True)
        )
    truth, same = (execution.reference(MECHANISM, args, wide=wide) for wide in (True, False))
    for name, spec in cases.find("sparse_mla").outputs.items():
        sides = {"reference": same[name], "kernel": np.asarray(got[name])}
        verdict = triangle.edge(spec, "reference_vs_kernel", truth[name], sides, details=False)
        assert verdict.passed, f"{name}: {verdict.reason}"


SHAPES = dict(MECHANISM.support)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_kv": 48}, "block_kv must be 32 or 64, got 48"),
        ({"stages": 1}, "stages must lie between 2 and 8, got 1"),
        ({"splits": 17}, "splits must lie between 1 and 16, got 17"),
    ],
)
def test_a_config_that_is_always_wrong(options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        mosaic.Config(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"splits": 11}, "splits=11 is more than the 10 blocks of the lists; use fewer"),
        (
            {"stages": 3},
            "block_kv=64, stages=3 needs 281600 bytes of shared memory, more than 232448; use smaller values",
        ),
    ],
)
def test_a_config_that_does_not_fit_the_shapes(options, message):
    args = MECHANISM.prepare(**SHAPES["bfloat16, H 64, D 512, plain rows"])
    with pytest.raises(ValueError, match=f"^sparse_mla: {re.escape(message)}$"):
        mosaic.sparse_mla(config=mosaic.Config(**options), **args)


def test_configs_are_legal_and_hold_the_default():
    for _, shapes in MECHANISM.support:
        prepared = MECHANISM.prepare(**shapes)
        if mosaic.why_not(**prepared) is None:
            assert mosaic.default_config(**prepared) in list(mosaic.configs(**prepared))


def test_small_batches_are_split():
    def splits(N, width):
        q, cache = jnp.zeros((N, 128, 512), jnp.bfloat16), jnp.zeros((64, 512), jnp.bfloat16)
        args = MECHANISM.prepare(q=q, cache=cache, indices=jnp.zeros((N, width), jnp.int32))
        return mosaic.default_config(**args).splits

    assert splits(32, 1152) == 2
    assert splits(1, 2048) == 8
    assert splits(128, 2048) == splits(1, 256) == 1


REFUSED = {
    "format": (SHAPES["bfloat16, H 128, fp8_ds_mla cache"], "format must be plain or v4, got fp8_ds_mla"),
    "dtype": (SHAPES["float32, H 64, D 512, plain rows"], "q must be bfloat16 or float16, got float32"),
    "heads": (SHAPES["bfloat16, H 16, D 576, plain rows"], "the query heads must be a multiple of 64, got H=16"),
    "width": ({"D": 96}, "rows must be multiples of 64 up to 576 wide, got D=96"),
    "values": ({"value_dim": 64}, "value_dim must be 128, 256 or 512, got 64"),
    "pages": ({"bytes": 2345}, "pages must be multiples of 16 bytes, got 2345"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_what_the_kernel_refuses(changes, message):
    if "q" not in changes:
        D, dtype = changes.get("D", 512), jnp.bfloat16
        given = {"q": jnp.zeros((1, 64, D), dtype), "indices": jnp.zeros((1, 4), jnp.int32)}
        if "bytes" in changes:
            given |= {"cache": jnp.zeros((2, changes["bytes"]), jnp.uint8), "format": "v4", "page": 4}
        else:
            given |= {"cache": jnp.zeros((4, D), dtype)}
        changes = given | {k: v for k, v in changes.items() if k == "value_dim"}
    assert mosaic.why_not(**MECHANISM.prepare(**changes)) == message
