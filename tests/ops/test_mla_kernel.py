"""What the kernel of latent attention promises: how keys are shared out, and which results may not depend on it."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import mla
from jaxattn.ops._mla_bench import make_inputs as make_bench
from jaxattn.ops._mla_bench import probe
from jaxattn.ops._mla_cases import make_inputs
from jaxattn.ops.mla import MECHANISM
from pallas_kernels import _mosaic
from pallas_kernels import mla as mosaic
from pallas_kernels.mla import _scan
from parity import cases, execution, triangle

WAYS = {"whole": mosaic.Config(), "split": mosaic.Config(split_pages=2), "shared": mosaic.Config(num_shares=3)}
ORDERS = {"turns": mosaic.Config(num_shares=3, turns=True)}


def run(args, config):
    """Outputs as numpy arrays; on the GPU if there is one, else interpreted."""
    with _mosaic.interpret() if _mosaic.why_not_here() else contextlib.nullcontext():
        out = jax.block_until_ready(mla(**args, implementation="mosaic", config=config))
    return jax.tree.map(np.asarray, out)


def inputs(rng, queries, lengths, H=32, **options):
    """Narrow rows, so that interpreting is quick; every part of the kernel is there."""
    return make_inputs(rng, queries, lengths, H, D=192, value_dim=128, page=32, return_lse=True, **options)


def same_bits(xs, ys):
    for x, y in zip(xs, ys, strict=True):
        np.testing.assert_array_equal(np.ascontiguousarray(x).view(np.uint8), np.ascontiguousarray(y).view(np.uint8))


@pytest.mark.parametrize("config", (WAYS | ORDERS).values(), ids=WAYS | ORDERS)
def test_every_way_to_share_out_the_work_is_right(config, rng):
    """Three tokens of a request in two tiles, one cut by the causal mask; a token that sees nothing; padding."""
    args = inputs(rng, (1, 3, 2), (150, 66, 1), padding=1)
    check(args, run(args, config))


def check(args, outputs):
    """Outputs o and lse against the reference, by the record's rules."""
    got = dict(zip(("o", "lse"), outputs, strict=True))
    truth, same = (execution.reference(MECHANISM, args, wide=wide) for wide in (True, False))
    for name, x in got.items():
        sides = {"reference": same[name], "kernel": x}
        spec = cases.find(MECHANISM.name).outputs[name]
        verdict = triangle.edge(spec, "reference_vs_kernel", truth[name], sides, details=False)
        assert verdict.passed, f"{name}: {verdict.reason}"


@pytest.mark.parametrize(("format", "ahead"), [("fp8", 2), ("fp8_ds_mla", 6)])
def test_when_codes_are_fetched_changes_no_bit(format, ahead, rng):
    sizes = {"D": 576, "value_dim": 512} if format == "fp8_ds_mla" else {"D": 192, "value_dim": 128}
    args = make_inputs(rng, (1,), (200,), 16, page=64, format=format, return_lse=True, **sizes)
    ways = mosaic.Config(num_shares=1), mosaic.Config(num_shares=1, ahead=ahead, prefetch=True)
    same_bits(*(run(args, way) for way in ways))


def test_a_share_begins_where_the_search_says(rng, monkeypatch):
    """Requests without tokens or keys in between, more than a warp has lanes; compiled, both ways to search."""
    queries, lengths = ([n if i % 4 == 0 else 0 for i in range(34)] for n in (1, 70))
    queries[4], lengths[8], lengths[9], queries[33], lengths[33] = 3, 0, 90, 1, 129
    args = inputs(rng, queries, lengths, H=16, padding=1)
    found = run(args, WAYS["shared"])
    check(args, found)
    if not _mosaic.why_not_here():
        monkeypatch.setattr(_scan, "MOST", 0)
        jax.clear_caches()
        same_bits(found, run(args, WAYS["shared"]))
        jax.clear_caches()


@pytest.mark.optimized
def test_a_split_token_has_the_same_bits_in_every_batch(rng):
    """The last of two speculated tokens: alone, and in a tile with the other one, behind another request.

    XLA adds up the log-sum-exp of both calls, on a CPU with few passes not alike.
    """
    args = inputs(rng, (1, 2), (20, 100))
    one = args | {
        "q": args["q"][2:],
        "page_table": args["page_table"][1:],
        "lengths": args["lengths"][1:],
        "query_start": jnp.arange(2),
    }
    config = WAYS["split"]
    same_bits([x[0] for x in run(one, config)], [x[2] for x in run(args, config)])


def test_tiles_of_equal_length_stay_whole_in_shares(rng):
    args = inputs(rng, (1, 1), (70, 100))
    same_bits(run(args, mosaic.Config(num_shares=2)), run(args, WAYS["whole"]))


def test_a_pair_has_the_bits_of_two_thread_blocks(rng):
    args = inputs(rng, (1,), (100,), H=128)
    same_bits(*(run(args, mosaic.Config(pair=pair, turns=True, split_pages=2)) for pair in (True, False)))


def test_a_probe_of_a_benchmark_is_a_part_of_it(rng):
    args = MECHANISM.prepare(**make_bench(rng, 3, 70, 2, queries=2, ragged=True))
    some, rows = probe(rng, **args)
    whole, part = (np.asarray(mla(**a, implementation="reference"), np.float32) for a in (args, some))
    assert len(rows) > 1 and np.abs(whole[rows] - part).max() <= 2.0**-8 * np.abs(whole).max()


def test_default_configurations_follow_from_shapes():
    def default(B, S, H):
        shapes = {
            "q": jax.ShapeDtypeStruct((B, H, 576), jnp.bfloat16),
            "cache": jax.ShapeDtypeStruct((64, 64, 576), jnp.bfloat16),
            "page_table": jax.ShapeDtypeStruct((B, S // 64), jnp.int32),
            "lengths": jax.ShapeDtypeStruct((B,), jnp.int32),
            "query_start": jax.ShapeDtypeStruct((B + 1,), jnp.int32),
        }
        return mosaic.default_config(**MECHANISM.prepare(**shapes, scale=0.1))

    assert default(4, 512, 128) == mosaic.Config()
    pairs = _mosaic.num_sms() // 2
    assert default(64, 8192, 128) == mosaic.Config(pair=True, turns=True, num_shares=pairs)
    assert default(64, 8192, 16) == mosaic.Config(num_shares=_mosaic.num_sms())
    assert default(1, 2048, 16).num_shares == 2 * 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split_pages": 0}, "split_pages must be at least 1 or None, got 0"),
        (
            {"split_pages": 4, "num_shares": 3},
            "split_pages and num_shares exclude each other, got split_pages=4 and num_shares=3; leave one out",
        ),
    ],
)
def test_configurations_that_are_never_legal(options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        mosaic.Config(**options)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (mosaic.Config(split_pages=1), "a split must be a multiple of 64 keys, got split_pages=1 of 32"),
        (mosaic.Config(pair=True), "pair=True needs heads in multiples of 128, got 32"),
        (mosaic.Config(ahead=3), "ahead must be 1 to 2, got 3"),
    ],
    ids=["split", "pair", "ahead"],
)
def test_configurations_that_do_not_fit(interpret, config, message, rng):
    with pytest.raises(ValueError, match=f"^mla: {re.escape(message)}"):  # jax may add a line
        mla(**inputs(rng, (1,), (40,)), implementation="mosaic", config=config)


def test_codes_take_no_turns(interpret, rng):
    message = "mla: turns=True needs a plain cache, whose places are filled anew in parts, got format fp8"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        mla(**inputs(rng, (1,), (40,), format="fp8"), implementation="mosaic", config=mosaic.Config(turns=True))


REFUSED = {
    "dtype": ({"dtype": "float32"}, "q must be bfloat16 or float16, got float32"),
    "row": ({"D": 96, "value_dim": 64}, "a row must be a multiple of 64 numbers, at most 576, got D=96"),
    "value": ({"value_dim": 64}, "value_dim must be a multiple of 128, at most 512, got 64"),
    "page": ({"page": 8}, "the page size must be 16, 32, 64, 128 or 256, got 8"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_what_the_kernel_refuses(changes, message, rng):
    args = make_inputs(rng, (1,), (40,), 16, **{"D": 192, "value_dim": 128} | changes)
    assert mosaic.why_not(**MECHANISM.prepare(**args)) == message


def test_packed_rows_of_other_numbers_are_refused():
    shapes = dict(MECHANISM.support)["float16, H 128, page 64, fp8_ds_mla"]
    reason = mosaic.why_not(**MECHANISM.prepare(**shapes))
    assert reason == "q must be bfloat16, as rotated keys of format fp8_ds_mla are, got float16"
