"""What the indexer promises: the formula by hand, ties, ranges, paged keys."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import _latent_cache, indexer, indexer_keys
from jaxattn.ops._indexer_cases import make_inputs, make_paged_inputs
from jaxattn.ops.indexer import FORMATS, MECHANISM
from pallas_kernels import _mosaic, _mxfp4_scores
from pallas_kernels import indexer as mosaic
from parity import tolerances
from parity.twins import indexer as twin


def test_by_hand():
    """Two heads: relu drops the negative score, weights may be negative."""
    q = jnp.array([[[1.0, 0.0], [0.0, 1.0]]])
    k = jnp.array([[2.0, 3.0], [-5.0, 4.0], [1.0, -1.0]])
    best, logits = indexer(
        q,
        jnp.array([[1.0, -2.0]]),
        k,
        jnp.array([1.0, 2.0, 4.0]),
        jnp.array([0]),
        jnp.array([3]),
        topk=4,
        return_logits=True,
    )
    np.testing.assert_array_equal(logits, [[2 - 6, (0 - 8) * 2, 1 * 4]])
    assert best.tolist() == [[2, 0, 1, -1]]


def test_of_equal_scores_the_lower_index_comes_first():
    q, k = jnp.ones((1, 1, 8)), jnp.ones((8, 8))
    args = (q, jnp.ones((1, 1)), k, jnp.ones(8), jnp.array([0]), jnp.array([8]))
    assert indexer(*args, topk=3).tolist() == [[0, 1, 2]]
    zeros = (q, jnp.array([[-1.0]]), 0 * k, jnp.ones(8), jnp.array([0]), jnp.array([8]))  # all are -0
    assert indexer(*zeros, topk=3).tolist() == [[0, 1, 2]]


def test_against_a_sort(rng):
    args = make_inputs(rng, 12, 4, 50, D=32, whole=True, topk=9)
    best, logits = indexer(**args, return_logits=True)
    for n in range(12):
        a, b = int(args["starts"][n]), min(int(args["ends"][n]), 50)
        order = sorted(range(a, b), key=lambda e, n=n: (-float(logits[n, e]), e))[:9]
        assert best[n].tolist() == [e - a for e in order] + [-1] * (9 - len(order))
        outside = [e for e in range(50) if not a <= e < b]
        assert (np.asarray(logits)[n, outside] == -np.inf).all()


@pytest.mark.parametrize("format", FORMATS)
def test_paged_keys_score_like_dense_ones(format, rng):
    x = jnp.asarray(rng.standard_normal((6, 128)), jnp.float32)
    page, table, slots = 2, jnp.array([[4, 0, 2]]), jnp.array([8, 9, 0, 1, 4, 5])
    if format == "plain":
        values = np.asarray(x)
        cache = jnp.full((10, 128), jnp.nan).at[slots].set(x).reshape(5, page, 128)
    else:
        rows, scales = _latent_cache.encode_indexer(x, format)
        cache = jnp.full((5, _latent_cache.PAGED[format].least(page)), 0xFF, jnp.uint8)
        cache = _latent_cache.insert(cache, rows, scales, slots, format, page)
        values, scale = _latent_cache.decode_indexer(rows, scales)
        values = values * jnp.repeat(scale, 32, -1) if format == "indexer_mxfp4" else values
    keys, key_scales = indexer_keys(cache, table, format=format, page=page)
    assert keys.shape == (1, 6, 128)
    np.testing.assert_array_equal(keys[0].astype(jnp.float32), values)
    args: dict[str, Any] = {"q": jnp.asarray(rng.standard_normal((1, 4, 128)), jnp.float32).astype(keys.dtype)}
    args |= {"weights": jnp.ones((1, 4)), "starts": jnp.array([0]), "ends": jnp.array([5])}
    args |= {"topk": 6, "return_logits": True}
    best, logits = indexer(**args, k=keys[0], k_scale=key_scales[0])
    paged: dict[str, Any] = {"page_table": table, "requests": jnp.array([0]), "page": page, "format": format}
    in_pages, same = indexer(**args, k=cache, k_scale=None, **paged)
    np.testing.assert_array_equal(in_pages, best)
    scores = np.maximum(np.asarray(args["q"], np.float64)[0] @ np.asarray(values, np.float64).T, 0).sum(0)
    exact = (scores * np.asarray(key_scales, np.float64)[0])[:5]
    for one in (logits, same):
        assert np.abs(np.asarray(one)[0, :5] - exact).max() <= 64 * np.finfo(np.float32).eps * np.abs(exact).max()


def test_a_nan_comes_last():
    k = jnp.array([[7.0], [np.nan], [1.0], [2.0]])
    args = jnp.ones((1, 1, 1)), jnp.ones((1, 1)), k, jnp.ones(4), jnp.array([1]), jnp.array([4])
    assert indexer(*args, topk=2).tolist() == [[2, 1]]
    assert indexer(*args, topk=4).tolist() == [[2, 1, 0, -1]]


def test_rising_order_is_the_same_set(rng):
    args = make_inputs(rng, 9, 4, 50, D=8, whole=True, topk=12)
    best, rising = (np.asarray(indexer(**args, order=order)) for order in ("best", "rising"))
    last = np.iinfo(np.int32).max
    best = np.sort(np.where(best < 0, last, best), 1)
    np.testing.assert_array_equal(np.where(rising < 0, last, rising), best)
    assert (np.diff(best, axis=1) > 0)[best[:, 1:] < last].all()


def test_only_logits(rng):
    args = make_inputs(rng, 3, 4, 20, D=8, topk=5)
    _, logits = indexer(**args, return_logits=True)
    np.testing.assert_array_equal(indexer(**args | {"topk": None}, return_logits=True), logits)
    with pytest.raises(ValueError, match=r"^indexer: nothing is asked for: give topk, or return_logits=True$"):
        indexer(**args | {"topk": None})


@pytest.mark.parametrize(
    ("H", "config"),
    [
        (64, mosaic.Config(stages=2)),
        (64, mosaic.Config(consumers=2, stages=3)),
        (16, mosaic.Config(consumers=2, stages=2)),
    ],
    ids=str,
)
def test_every_block_takes_many_tiles_and_few_slots(H, config, rng, monkeypatch):
    monkeypatch.setattr(_mosaic, "num_sms", lambda: 2)
    args = make_inputs(rng, 11 if H == 64 else 19, H, 330, whole=True, topk=None, return_logits=True)
    with _mosaic.interpret():
        got = indexer(**args, implementation="mosaic", config=config)
    np.testing.assert_array_equal(got, indexer(**args, implementation="reference"))


@pytest.mark.parametrize(
    "config",
    [mosaic.Config(stages=2, chunk=4), mosaic.Config(consumers=2, stages=4, chunk=8)],
    ids=str,
)
def test_paged_tiles_are_chunks_of_a_request(config, rng, monkeypatch):
    monkeypatch.setattr(_mosaic, "num_sms", lambda: 2)
    args = make_paged_inputs(rng, (300, 70, 129), 32, whole=True, topk=20, return_logits=True)
    with _mosaic.interpret():
        got = indexer(**args, implementation="mosaic", config=config)
    for ours, reference in zip(got, indexer(**args, implementation="reference"), strict=True):
        np.testing.assert_array_equal(ours, reference)


def test_paged_is_dense_request_by_request(rng):
    args = make_paged_inputs(rng, (9, 5), 4, page=2, topk=4, return_logits=True)
    keys, scales = indexer_keys(args["k"], args["page_table"], page=2)
    got = indexer(**args)
    for n, b in enumerate(args["requests"].tolist()):
        dense = {name: args[name][n : n + 1] for name in ("q", "weights", "starts", "ends")}
        want = indexer(**dense, k=keys[b], k_scale=scales[b], topk=4, return_logits=True)
        np.testing.assert_array_equal(got[0][n], want[0][0])
        some = np.isfinite(want[1][0])
        np.testing.assert_array_equal(some, np.isfinite(got[1][n]))
        off = np.abs(np.asarray(got[1][n])[some] - np.asarray(want[1][0])[some])
        assert off.max() <= 16 * np.finfo(np.float32).eps * np.abs(np.asarray(want[1][0])[some]).max()


def test_tensor_cores_stay_within_the_rule(rng):
    args = make_inputs(rng, 16, 64, 96, topk=1, causal=True, return_logits=True)
    host = {
        k: np.asarray(v).astype(np.float32 if k in "qk" else v.dtype) for k, v in args.items() if hasattr(v, "shape")
    }
    host |= {"topk": 1, "return_logits": True}
    truth = twin.run(host, True)["logits"]
    some = np.isfinite(truth)
    off = (twin.run(host, False, twin.Switches(tensor_core=True))["logits"][some] - truth[some]).astype(np.float64)
    unit = 2.0**-23 * np.abs(truth[some]).max()
    rms, largest = (check.floor_factor * unit for check in tolerances.CONTRACT_FP8_SUMS.checks)
    assert rms / 64 < np.sqrt(np.mean(off**2)) < rms
    assert largest / 64 < np.abs(off).max() < largest


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"consumers": 4}, "consumers must be 2 or 3, got 4"),
        ({"chunk": 0}, "chunk must be at least 1, got 0"),
        ({"stages": 1}, "stages must lie between 2 and 8, got 1"),
    ],
)
def test_wrong_configs(options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        mosaic.Config(**options)


def test_a_config_that_does_not_fit():
    args = MECHANISM.prepare(**MECHANISM.support[0][1])
    message = "indexer: consumers=3, stages=8 needs 238592 bytes of shared memory, more than 232448; use fewer"
    with pytest.raises(ValueError, match=f"^{message}$"):
        MECHANISM.kernels["mosaic"].run(config=mosaic.Config(stages=8), **args)


def test_configs_hold_the_default():
    for _, shapes in MECHANISM.support:
        args = MECHANISM.prepare(**shapes)
        assert mosaic.default_config(**args) in list(mosaic.configs(**args))


REFUSED = {
    "dtype": ({"dtype": "bfloat16"}, "q and k must be float8_e4m3fn or uint8 (MXFP4), got bfloat16"),
    "width": ({"D": 64}, "keys must be 128 wide, got D=64"),
    "heads": ({"H": 8}, "the heads must be 16, 32, 64 or 128, got H=8"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_what_the_kernel_refuses(changes, message, rng):
    args = make_inputs(rng, 2, changes.pop("H", 64), 8, topk=2, **changes)
    with (
        _mosaic.interpret(),
        pytest.raises(
            NotImplementedError, match=f"implementation='mosaic' cannot run this call: {re.escape(message)}$"
        ),
    ):
        indexer(**args, implementation="mosaic")


WRONG = {
    "topk": ({"topk": 0}, "topk must be at least 1, got 0"),
    "k": ({"k": jnp.ones((4, 7))}, "k must be [S D] with D=8 (from q), got shape (4, 7)"),
    "scale": ({"k_scale": jnp.ones(5)}, "k_scale must be [S] with S=4 (from k), got shape (5,)"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_wrong_calls(changes, message):
    args = {"q": jnp.ones((2, 3, 8)), "weights": jnp.ones((2, 3)), "k": jnp.ones((4, 8)), "k_scale": jnp.ones(4)}
    args |= {"starts": jnp.zeros(2, jnp.int32), "ends": jnp.full(2, 4, jnp.int32), "topk": 2}
    with pytest.raises(ValueError, match=f"^indexer: {re.escape(message)}$"):
        indexer(**args | changes)
    with pytest.raises(TypeError, match="indexer: k must have dtype float32, got bfloat16; q and k need one dtype"):
        indexer(**args | {"k": jnp.ones((4, 8), jnp.bfloat16)})


PAGED_WRONG = {
    "alone": ({"requests": None}, "page_table, requests and page belong together; give all or none"),
    "scale": ({"k_scale": jnp.ones(4)}, "k_scale belongs to keys outside of pages, and a paged cache holds its own"),
    "pages": ({"k": jnp.zeros((2, 100), jnp.uint8)}, "a page of 2 indexer_fp8 rows needs at least 264 bytes"),
    "width": (
        {"q": jnp.ones((3, 4, 64)), "weights": jnp.ones((3, 4))},
        "a paged cache holds keys of 128 numbers, got D=64 from q",
    ),
    "plain": (
        {"k": jnp.zeros((2, 3, 128), jnp.float8_e4m3fn), "format": "plain"},
        "page must be that of the plain cache, 3, got 2",
    ),
    "none": ({"k": jnp.zeros((0, 384), jnp.uint8)}, "needs at least one page and one request, got P=0 and B=2"),
}


@pytest.mark.parametrize(("changes", "message"), PAGED_WRONG.values(), ids=PAGED_WRONG)
def test_wrong_paged_calls(changes, message, rng):
    args = make_paged_inputs(rng, (3, 5), 4, page=2, topk=2)
    with pytest.raises(ValueError, match=f"^indexer: {re.escape(message)}"):
        indexer(**args | changes)


PAGED_REFUSED = {
    "page": ({"page": 32}, "pages must hold 64 entries, got 32"),
    "bytes": ({"k": jnp.zeros((2, 8500), jnp.uint8)}, "pages must be multiples of 128 bytes, got 8500"),
    "table": ({"page_table": jnp.zeros((2, 0), jnp.int32)}, "needs at least one page per request, got a page table"),
}


@pytest.mark.parametrize(("changes", "message"), PAGED_REFUSED.values(), ids=PAGED_REFUSED)
def test_what_the_kernel_refuses_of_pages(changes, message, rng):
    args = MECHANISM.prepare(**make_paged_inputs(rng, (3, 5), 64, topk=2) | changes)
    assert str(mosaic.why_not(**args)).startswith(message)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            {"format": "indexer_mxfp4"},
            "q must be MXFP4 codes (uint8) as a cache of format indexer_mxfp4 is, got float8_e4m3fn",
        ),
        (
            {"format": "plain", "k": (9, 64, 128)},
            "a paged cache must be of format indexer_fp8 or indexer_mxfp4, got plain",
        ),
        ({"topk": 5000, "page_table": (2, 9000)}, "topk must be at most 4096 of more than 524288 entries, got 5000"),
    ],
    ids=("format", "plain", "topk"),
)
def test_what_a_kernel_of_both_refuses(shapes, message):
    args = dict(MECHANISM.support)["float8_e4m3fn, paged, top 512"] | shapes
    if "page_table" in shapes:
        args["page_table"] = jax.ShapeDtypeStruct(shapes["page_table"], jnp.int32)
    if "k" in shapes:
        args["k"] = jax.ShapeDtypeStruct(shapes["k"], args["q"].dtype)
    assert MECHANISM.kernels["mosaic"].why_not(**MECHANISM.prepare(**args)) == message


MXFP4_WRONG = {
    "alone": ({"q_scale": None}, "q_scale belongs to MXFP4 codes, q in uint8; give both or none"),
    "floats": (
        {"q": jnp.ones((3, 16, 128)), "weights": jnp.ones((3, 16))},
        "q_scale belongs to MXFP4 codes, q in uint8; give both or none",
    ),
    "scales": (
        {"q_scale": jnp.zeros((3, 16, 2), jnp.uint8)},
        "MXFP4 has 16 bytes of codes for every scale, got 64 bytes and 2 scales of a head in q and q_scale",
    ),
    "cache": ({"format": "indexer_fp8"}, "MXFP4 queries need a cache of format indexer_mxfp4, got indexer_fp8"),
    "width": (
        {"q": jnp.zeros((3, 16, 32), jnp.uint8), "q_scale": jnp.zeros((3, 16, 2), jnp.uint8)},
        "a paged cache holds keys of 128 numbers, got D=64 from q",
    ),
}


@pytest.mark.parametrize(("changes", "message"), MXFP4_WRONG.values(), ids=MXFP4_WRONG)
def test_wrong_mxfp4_calls(changes, message, rng):
    args = make_paged_inputs(rng, (3, 5), 16, page=4, topk=2, format="indexer_mxfp4")
    with pytest.raises(ValueError, match=f"^indexer: {re.escape(message)}$"):
        indexer(**args | changes)
    with pytest.raises(TypeError, match=r"^indexer: q_scale must have dtype uint8, got float32$"):
        indexer(**args | {"q_scale": args["q_scale"].astype(jnp.float32)})


def test_mxfp4_by_hand():
    """Two groups under scales of their own; the even number of a byte lies in its low four bits."""
    pack = lambda *x: jnp.asarray(x, jnp.uint8)  # noqa: E731
    q, q_scale = pack(0x42, *[0] * 15, 0x09, *[0] * 15), pack(127, 129)  # 1, 2 | 4 * -0.5
    k = jnp.stack([pack(0x17, *[0] * 15, 0x06, *[0] * 15), pack(0xF0, *[0] * 31)])  # 6, .5 | 4 and 0, -6
    k_scale = jnp.stack([pack(126, 124), pack(130, 127)])
    args = (q[None, None], jnp.array([[3.0]]), k, k_scale, jnp.array([0]), jnp.array([2]))
    best, logits = indexer(*args, topk=2, q_scale=q_scale[None, None], return_logits=True)
    np.testing.assert_array_equal(logits, [[3 * (3 + 2 * 0.25 - 2 * 4 * 0.125), 0]])
    assert best.tolist() == [[0, 1]]


def test_mxfp4_codes_become_exact_numbers():
    """Every code, under scales up to the ends of float32's normal numbers, in the kernel's order."""
    codes = np.arange(256, dtype=np.uint8).reshape(4, 64)
    scales = np.array([[4, 2, 127, 252], [255, 64, 190, 252], [3, 100, 126, 128], [129, 200, 2, 251]], np.uint8)
    values = np.asarray(twin.mxfp4(codes, scales), np.float64)
    np.testing.assert_array_equal(_mxfp4_scores.numbers(jnp.asarray(codes), jnp.asarray(scales)), values)
    q = np.asarray(_mxfp4_scores.queries(jnp.asarray(codes), jnp.asarray(scales)), np.float64)
    for c, j, i, e in np.ndindex(4, 4, 4, 2):
        half, at = divmod(8 * (4 * j + i) + 2 * c + e, 64)
        np.testing.assert_array_equal(q[half, :, at], values[:, 32 * c + 8 * j + i + 4 * e])


@pytest.mark.parametrize("paged", [False, True])
def test_a_nan_scale_of_mxfp4_stays_nan(paged, rng):
    """Groups of such keys hold NaN, visible or not."""
    if paged:
        args = make_paged_inputs(rng, (70, 3), 16, whole=True, format="indexer_mxfp4", topk=6, return_logits=True)
        first = int(args["page_table"][0, 0])
        args["k"] = args["k"].at[first, 64 * 64 + 4 * 5 + 2].set(255)
        rows = args["requests"] == 0
    else:
        args = make_inputs(rng, 3, 16, 70, dtype="mxfp4", causal=True, whole=True, topk=6, return_logits=True)
        args["k_scale"] = args["k_scale"].at[5, 2].set(255)
        rows = args["ends"] > 5
    with _mosaic.interpret():
        best, logits = indexer(**args, implementation="mosaic", config=mosaic.Config(consumers=2, stages=2))
    want, same = indexer(**args, implementation="reference")
    np.testing.assert_array_equal(best, want)
    np.testing.assert_array_equal(logits, same)
    assert (np.isnan(np.asarray(logits)[:, 5]) == np.asarray(rows)).all()
    assert not (np.asarray(best) == 5).any()


def test_wrong_formats():
    message = "format must be indexer_fp8, indexer_mxfp4 or plain, got 'v4'"
    args: dict[str, Any] = MECHANISM.support[0][1]
    with pytest.raises(ValueError, match=f"^indexer: {message}$"):
        indexer(**args, format="v4")
    with pytest.raises(ValueError, match=r"^indexer: order must be best or rising, got 'falling'$"):
        indexer(**args | {"order": "falling"})
    with pytest.raises(ValueError, match=f"^indexer_keys: {message}$"):
        indexer_keys(jnp.zeros((1, 99), jnp.uint8), jnp.zeros((1, 1), jnp.int32), format="v4", page=2)
