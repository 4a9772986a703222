"""What decoding promises beyond the contract: how work is shared out, and which results may not depend on it."""

import contextlib
import dataclasses
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import paged_attention
from jaxattn.ops._paged_attention_cache import make_inputs as coded
from jaxattn.ops._paged_attention_cases import FP8, make_inputs
from jaxattn.ops.paged_attention import MECHANISM
from pallas_kernels import _aot, _mosaic
from pallas_kernels import paged_attention as mosaic
from pallas_kernels.paged_attention import _per_head, decode, tiled
from parity import cases, execution, triangle

SPLIT = decode.Config(num_stages=2, split_pages=4)
SHARED = decode.Config(num_stages=2, num_shares=5)
WHOLE = decode.Config(num_stages=2)
ONCE = decode.Config(num_stages=1, swapped=True, at_once=True)
ways = pytest.mark.parametrize("config", [WHOLE, SPLIT, SHARED], ids=["whole", "split", "shared"])


def run(args, config, detect_races=True):
    """Outputs as numpy arrays; on the GPU if there is one, else interpreted."""
    with _mosaic.interpret(detect_races=detect_races) if _mosaic.why_not_here() else contextlib.nullcontext():
        out = jax.block_until_ready(paged_attention(**args, implementation="mosaic", config=config))
    return jax.tree.map(np.asarray, out)


def same_bits(xs, ys):
    for x, y in zip(xs, ys, strict=True):
        np.testing.assert_array_equal(np.ascontiguousarray(x).view(np.uint8), np.ascontiguousarray(y).view(np.uint8))


# ---------------------------------------------------------------- numbers
@ways
@pytest.mark.parametrize(
    "options",
    [
        {"query_lengths": (1, 1), "lengths": (200, 70), "sinks": True},
        {"query_lengths": (0, 1, 0, 3), "lengths": (0, 130, 5, 70), "padding": 3},
        {"query_lengths": (3, 1, 1), "lengths": (90, 66, 0), "H": 6, "K": 1, "cache_dtype": FP8, "D": 128},
    ],
    ids=["decode", "uneven", "fp8"],
)
def test_every_way_to_share_out_the_work_is_right(config, options, rng):
    """The last: five tokens of three requests, two of them more than a tile holds on average."""
    args = make_inputs(rng, return_lse=True, **options)
    judged(args, run(args, config))


def judged(args, outputs):
    """Against the float64 truth, as far off as the reference is."""
    got = dict(zip(("o", "lse"), outputs, strict=True))
    truth, same = (execution.reference(MECHANISM, args, wide=wide) for wide in (True, False))
    for name, x in got.items():
        spec = cases.find(MECHANISM.name).outputs[name]
        sides = {"reference": same[name], "kernel": x}
        verdict = triangle.edge(spec, "reference_vs_kernel", truth[name], sides, details=False)
        assert verdict.passed, f"{name}: {verdict.reason}"


@pytest.mark.parametrize(
    ("config", "make", "options"),
    [
        (SHARED, make_inputs, {"query_lengths": (0, 1, 0, 3), "lengths": (0, 70, 5, 70), "padding": 3, "sinks": True}),
        (SPLIT, make_inputs, {"query_lengths": (1, 1), "lengths": (90, 70), "cache_dtype": FP8, "D": 128}),
        (
            WHOLE,
            make_inputs,
            {"query_lengths": (2, 1), "lengths": (90, 66), "window": 31, "H": 6, "K": 1, "sinks": True},
        ),
        (SHARED, coded, {"stored": "uint8", "query_lengths": (1, 1), "lengths": (90, 30), "D": 128, "softcap": 3.0}),
        (WHOLE, coded, {"stored": "int8", "query_lengths": (3, 1), "lengths": (66, 90), "sinks": True, "page": 32}),
        (SPLIT, coded, {"stored": FP8, "query_lengths": (1, 1), "lengths": (150, 70), "window": 90, "K": 1}),
    ],
    ids=["uneven", "fp8", "window", "int4", "int8", "fp8-per-head"],
)
def test_keys_as_rows_of_wgmma(config, make, options, rng):
    args = make(rng, return_lse=True, **options)
    judged(args, run(args, dataclasses.replace(config, swapped=True)))


@pytest.mark.parametrize(
    ("stages", "options"),
    [
        (2, {"query_lengths": (1, 1), "lengths": (90, 33), "window": 31, "sinks": True}),
        (3, {"query_lengths": (0, 1, 2), "lengths": (0, 70, 9), "window": 70, "padding": 1, "H": 6, "K": 1, "D": 128}),
        (
            2,
            {"query_lengths": (1, 1), "lengths": (90, 128), "window": 33, "causal": False, "page": 128, "softcap": 3.0},
        ),
        (2, {"query_lengths": (1, 1), "lengths": (96, 40), "page": 32}),
    ],
    ids=["sinks", "uneven", "not-causal", "short-tables"],
)
def test_all_keys_at_once(stages, options, rng):
    args = make_inputs(rng, return_lse=True, **options)
    judged(args, run(args, dataclasses.replace(ONCE, num_stages=stages)))


@pytest.mark.parametrize("stored", ["int8", "uint8"])
def test_scales_per_head_in_shares(stored, rng):
    args = coded(rng, stored, (1, 2), (90, 40), H=6, K=3, sinks=True, return_lse=True)
    judged(args, run(args, SHARED))


@pytest.mark.parametrize("block_kv", [32, 64])
@pytest.mark.parametrize("page", mosaic.PAGES)
@pytest.mark.parametrize("K", [1, 2, 3, 8])
def test_scales_per_head_arrive_where_tma_may_write(K, page, block_kv):
    """At multiples of 128 bytes; the interpreter takes any. The scales of two tokens do not overlap."""
    x = SimpleNamespace(K=K, page=page, block_kv=block_kv)
    for token in range(0, block_kv + 1, min(page, block_kv)):
        assert _per_head.place(x, token) % 128 == 0
    places = [_per_head.place(x, token) for token in range(block_kv + 1)]
    assert min(np.diff(places)) == 4 * K


def test_what_may_help_is_among_the_configurations():
    """For windows all keys at once, else shares of different sizes."""
    windows = list(decode.configs(**shapes(window=128)))
    assert {c.swapped for c in windows if c.block_kv == 64} == {False, True}
    assert len({c.num_shares for c in decode.configs(**shapes())}) == 5
    assert [c.num_stages for c in windows if c.at_once] == [3]
    assert not any(c.at_once for c in decode.configs(**shapes()))


@pytest.mark.parametrize(
    ("requests", "lengths", "whole"),
    [
        ((1, 1, 1), (640, 700, 690), True),
        ((1,) * 6, (650, 650, 640, 640, 650, 650), True),
        ((1, 2, 1), (640, 65, 0), False),
    ],
    ids=["one-each", "two-each", "ragged"],
)
def test_shares_snap_to_tiles_of_one_length(requests, lengths, whole, rng):
    """Bits of tiles that were not cut, where lengths are about the same; else those of equal shares."""
    args = make_inputs(rng, requests, lengths, H=2, K=1, sinks=True, return_lse=True, padding=0)
    snapped = run(args, dataclasses.replace(SHARED, num_shares=3, snap=True))
    same_bits(snapped, run(args, WHOLE if whole else dataclasses.replace(SHARED, num_shares=3)))


def test_more_shares_than_work(rng):
    args = make_inputs(rng, (1, 1), (3, 60), H=2, K=1, return_lse=True)
    many = run(args, dataclasses.replace(SHARED, num_shares=7))
    np.testing.assert_array_equal(many[0], run(args, WHOLE)[0])


# ---------------------------------------------------------------- batch invariance
@pytest.mark.parametrize(
    ("config", "window"), [(SPLIT, None), (dataclasses.replace(ONCE, num_stages=3), 70)], ids=["split", "at-once"]
)
def test_a_split_token_has_the_same_bits_in_every_batch(config, window, rng):
    """Alone, and in a batch with other neighbours, other pages, other places, requests without tokens, and padding."""
    batch = make_inputs(rng, (1, 1, 1), (200, 140, 64), H=2, K=1, sinks=True, window=window, return_lse=True)
    alone = batch | {name: batch[name][:1] for name in ("q", "page_table", "lengths")} | {"query_start": jnp.arange(2)}
    order = jnp.array([2, 1, 1, 0])
    other = batch | {
        "q": jnp.concatenate([batch["q"][jnp.array([2, 1, 0])], jnp.full((2, 2, 64), jnp.nan, jnp.bfloat16)]),
        "page_table": batch["page_table"][order],
        "lengths": batch["lengths"][order],
        "query_start": jnp.array([0, 1, 2, 2, 3]),
    }
    single = run(alone, config)
    for out, row in ((run(batch, config), 0), (run(other, config), 2)):
        same_bits([x[row] for x in out], [x[0] for x in single])


def test_a_split_token_has_the_same_bits_among_speculated_ones(rng):
    """The last of four tokens alone, and the first of four without those behind it: in a tile with others."""
    four = make_inputs(rng, (4,), (258,), H=2, K=1, return_lse=True)
    out = run(four, SPLIT)
    for row, length in ((3, 258), (0, 255)):
        one = four | {
            "q": four["q"][row : row + 1],
            "query_start": jnp.arange(2),
            "lengths": jnp.array([length]),
        }
        same_bits([x[row] for x in out], [x[0] for x in run(one, SPLIT)])


def test_a_tile_of_one_split_has_the_bits_of_a_whole_one(rng):
    args = make_inputs(rng, (1, 2), (64, 33), H=2, K=1, sinks=True, return_lse=True)
    same_bits(run(args, SPLIT), run(args, WHOLE))


@ways
def test_twice_is_once_to_the_bit(config, rng):
    args = make_inputs(rng, (1, 2), (150, 33), H=2, K=1, return_lse=True)
    same_bits(run(args, config), run(args, config))


@pytest.mark.aot
def test_a_loop_over_batches_keeps_the_rows_that_were_not_cut():
    """XLA would fuse a custom call with the update of a stacked output, and forget that the call writes in place."""
    args = {name: x for name, x in shapes(B=4, N=4).items() if name != "lengths" and hasattr(x, "shape")}
    many = jax.ShapeDtypeStruct((3, 4), jnp.int32)

    def loop(args, lengths):
        return jax.lax.map(lambda n: paged_attention(**args, lengths=n, implementation="mosaic"), lengths)

    text = _aot.compile_h200(loop, args, many).as_text()
    computations = re.split(r"\n(?=\S)", text)
    in_place = [c for c in computations if "output_to_operand_aliasing" in c and "mosaic_gpu" in c]
    assert in_place, "the kernel that combines partial sums is missing"
    assert not [c for c in in_place if "dynamic-update-slice" in c]


# ---------------------------------------------------------------- the choice of a kernel, from shapes alone
def shapes(N=32, B=32, S=8192, H=32, K=8, D=128, page=64, dtype="bfloat16", cache=None, **options):
    pool = jax.ShapeDtypeStruct((B * S // page, page, K, D), jnp.dtype(cache or dtype))
    return MECHANISM.prepare(
        q=jax.ShapeDtypeStruct((N, H, D), jnp.dtype(dtype)),
        k_pages=pool,
        v_pages=pool,
        page_table=jax.ShapeDtypeStruct((B, S // page), jnp.int32),
        lengths=jax.ShapeDtypeStruct((B,), jnp.int32),
        query_start=jax.ShapeDtypeStruct((B + 1,), jnp.int32),
        **options,
    )


@pytest.mark.parametrize(
    ("options", "kernel", "shared"),
    [
        ({}, decode, True),
        ({"N": 256}, decode, True),
        ({"S": 512}, decode, False),
        ({"window": 128}, decode, False),
        ({"cache": FP8}, decode, True),
        ({"N": 257}, tiled, None),
        ({"dtype": "float32"}, tiled, None),
        ({"cache": FP8, "D": 256}, tiled, None),
    ],
)
def test_the_default_follows_from_shapes(options, kernel, shared):
    args = shapes(**options)
    config = mosaic.default_config(**args)
    assert type(config) is kernel.Config
    assert config in list(mosaic.configs(**args))
    if shared is not None:
        assert config.split_pages is None
        assert (config.num_shares is not None) is shared


@pytest.mark.parametrize(
    ("options", "swapped", "at_once"),
    [
        ({}, True, False),
        ({"cache": FP8}, True, False),
        ({"D": 256}, False, False),
        ({"N": 256}, False, False),
        ({"H": 64, "K": 1}, False, False),
        ({"window": 128}, True, True),
        ({"window": 300}, True, False),
        ({"window": 128, "cache": FP8}, True, False),
        ({"window": 128, "D": 256}, False, False),
    ],
)
def test_tiles_of_few_rows_are_swapped_and_short_windows_fetched_at_once(options, swapped, at_once):
    config = decode.default_config(**shapes(**options))
    assert (config.swapped, config.at_once) == (swapped, at_once)


@pytest.mark.parametrize("stored", ["int8", FP8, "uint8"])
def test_tiles_of_few_rows_are_swapped_with_scales_per_head(stored):
    config = decode.default_config(**per_head(cache=stored))
    assert (config.swapped, config.num_stages, config.num_shares) == (True, 4, 33)


@pytest.mark.parametrize("D", [64, 128])
def test_shares_are_for_two_thread_blocks_a_multiprocessor(D):
    """More fit with heads of 64, and were slower."""
    assert decode.default_config(**shapes(D=D)).num_shares == 2 * 132 // 8


def test_tiles_hold_what_requests_have_on_average():
    """Tokens of a tile, for 64 rows of which a token takes a multiple of 8."""
    tokens = {N: decode._plan(WHOLE, **shapes(N=N)).block_q for N in (1, 32, 33, 96, 256)}
    assert tokens == {1: 1, 32: 1, 33: 2, 96: 4, 256: 8}
    slabs = {
        (H, K): decode._plan(WHOLE, **shapes(H=H, K=K)).slab for H, K in ((8, 2), (6, 1), (12, 2), (7, 1), (64, 1))
    }
    assert slabs == {(8, 2): 8, (6, 1): 8, (12, 2): 16, (7, 1): 8, (64, 1): 64}


# ---------------------------------------------------------------- configurations
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_kv": 16}, "block_kv must be 32, 64 or 128, got 16"),
        ({"num_stages": 9}, "num_stages must lie between 1 and 8, got 9"),
        ({"split_pages": 0}, "split_pages must be at least 1 or None, got 0"),
        ({"num_shares": -1}, "num_shares must be at least 1 or None, got -1"),
        (
            {"split_pages": 4, "num_shares": 8},
            "split_pages and num_shares exclude each other, got split_pages=4 and num_shares=8; leave one out",
        ),
    ],
)
def test_configurations_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        decode.Config(**options)


@pytest.mark.parametrize(
    ("options", "config", "message"),
    [
        ({"cache": FP8}, {"block_kv": 32}, f"block_kv must be at least 64 for {FP8} caches, got 32"),
        ({"D": 256}, {"block_kv": 128}, "block_kv must be at most 64 for head dim 256, got 128"),
        (
            {"D": 256},
            {"swapped": True},
            "swapped needs block_kv=64 and a head dim of at most 128, got block_kv=64 and head dim 256",
        ),
        (
            {"page": 16},
            {"split_pages": 6},
            "a split must be a multiple of block_kv=64 keys, got split_pages=6 of 16",
        ),
        (
            {"window": 9},
            {"num_shares": 4},
            "num_shares=4 is for calls without a window; leave it out or use split_pages",
        ),
        ({}, {"snap": True}, "snap is for shares; leave it out or use num_shares"),
        ({"window": 9}, {"at_once": True}, "at_once needs swapped=True"),
        (
            {"window": 300},
            {"at_once": True, "swapped": True},
            "at_once needs a stage for every 64 keys of a tile, 6 here, got 3",
        ),
        (
            {"window": 128},
            {"at_once": True, "swapped": True, "num_stages": 2},
            "at_once needs a stage for every 64 keys of a tile, 3 here, got 2",
        ),
        (
            {"window": 128, "N": 256},
            {"at_once": True, "swapped": True, "num_stages": 4},
            "at_once is for at most 128 rows of all stages, got 4 of 64; leave it out",
        ),
        (
            {"window": 9, "cache": FP8},
            {"at_once": True, "swapped": True},
            f"at_once is for caches in q's dtype, got {FP8}",
        ),
        (
            {"window": 9},
            {"at_once": True, "swapped": True, "split_pages": 4},
            "at_once is for tiles that are not split; leave split_pages and num_shares out",
        ),
        (
            {},
            {"num_stages": 7},
            "block_kv=64, num_stages=7 needs 246272 bytes of shared memory, more than 232448; use smaller values",
        ),
        (
            {"N": 300},
            {},
            "pallas_kernels.paged_attention.decode.Config cannot be used here: at most 8 query rows a request count as "
            "decoding, got N=300 and B=32",
        ),
        (
            {"dtype": "float32"},
            {},
            "pallas_kernels.paged_attention.decode.Config cannot be used here: q must be bfloat16 or float16 to "
            "decode, got float32",
        ),
    ],
)
def test_configurations_that_do_not_fit(options, config, message):
    with pytest.raises(ValueError, match=f"^paged_attention: {re.escape(message)}$"):
        mosaic.paged_attention(config=decode.Config(**config), **shapes(**options))


def per_head(dtype="bfloat16", cache="int8", D=128, K=8):
    """Prepared shapes of a call whose cache has scale pages."""
    args = {
        name: x for name, x in shapes(dtype=dtype, D=D).items() if name in ("q", "page_table", "lengths", "query_start")
    }
    pool = jax.ShapeDtypeStruct((64, 64, K, D // 2 if cache == "uint8" else D), jnp.dtype(cache))
    scales = jax.ShapeDtypeStruct(pool.shape[:3], jnp.float32)
    args["q"] = jax.ShapeDtypeStruct((len(args["q"].shape) + 1, max(32, K), D), args["q"].dtype)
    return MECHANISM.prepare(**args, k_pages=pool, v_pages=pool, k_scale_pages=scales, v_scale_pages=scales)


def test_what_the_kernels_cannot_read():
    assert decode.why_not(**per_head()) is None
    assert (
        decode.why_not(**per_head(dtype="float16"))
        == "q must be bfloat16 to decode a cache with scale pages, got float16"
    )
    assert decode.why_not(**per_head(D=256)) == "the head dim of int8 caches must be at most 128 to decode, got 256"
    assert tiled.why_not(**per_head(K=128)) == "with scale pages there may be 64 KV heads, got 128"
    message = "block_kv must be at most 64 for a cache with scale pages, got 128"
    with pytest.raises(ValueError, match=f"^paged_attention: {message}$"):
        decode.paged_attention(config=decode.Config(block_kv=128), **per_head())


def test_caches_with_scales_per_head_have_configurations_of_two_kernels():
    assert {type(c) for c in mosaic.configs(**per_head())} == {decode.Config, tiled.Config}


def test_a_configuration_of_no_kernel():
    message = (
        "paged_attention: config must be a pallas_kernels.paged_attention.decode.Config, "
        "pallas_kernels.paged_attention.tiled.Config or pallas_kernels.paged_attention.prefill.Config, "
        "got pallas_kernels.paged_attention._common.Config"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        mosaic.paged_attention(config=mosaic.Config(), **shapes())
