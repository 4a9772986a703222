"""Tiles of prefill attention: short windows in one pass, blocks of other sizes, ways of the output.

Interpreted where there is no GPU, as tests/ops/test_attention.py.
"""

import contextlib
import dataclasses
import re
from typing import Any

import jax
import numpy as np
import pytest

from jaxattn import attention, paged_attention
from jaxattn.ops import _paged_attention_cases as paged_cases
from jaxattn.ops._attention_cases import make_inputs
from jaxattn.ops.attention import MECHANISM
from jaxattn.ops.paged_attention import MECHANISM as PAGED
from pallas_kernels import _mosaic
from pallas_kernels import attention as mosaic
from pallas_kernels.paged_attention import prefill
from parity import cases, execution, triangle


def run(args, config):
    """Outputs as numpy arrays."""
    op = paged_attention if "k_pages" in args else attention
    with _mosaic.interpret() if _mosaic.why_not_here() else contextlib.nullcontext():
        out = jax.block_until_ready(op(**args, implementation="mosaic", config=config))
    return jax.tree.map(np.asarray, out)


def check(args, config):
    """The contract of o and lse."""
    mechanism = PAGED if "k_pages" in args else MECHANISM
    got = dict(zip(("o", "lse"), run(args, config), strict=True))
    truth, same = (execution.reference(mechanism, args, wide=wide) for wide in (True, False))
    for name, x in got.items():
        spec = cases.find(mechanism.name).outputs[name]
        sides = {"reference": same[name], "kernel": x}
        verdict = triangle.edge(spec, "reference_vs_kernel", truth[name], sides, details=False)
        assert verdict.passed, f"{name}: {verdict.reason}"


@pytest.fixture(autouse=True)
def few_sms(monkeypatch):
    """Two thread blocks, so that each takes several tiles."""
    monkeypatch.setattr(_mosaic, "num_sms", lambda: 2)


ONE_PASS: dict[str, dict[str, Any]] = {
    "four-heads": {"block_g": 4, "num_stages": 1},
    "eight-heads-two-q": {"block_g": 8, "q_stages": 2},
    "three-consumers": {"consumers": 3, "block_g": 4, "q_stages": 2, "num_stages": 3},
}


@pytest.mark.parametrize("way", ONE_PASS)
def test_one_pass_over_a_window(way, rng):
    """Sequences with a beginning, shorter than a tile, without queries, and with queries before all keys."""
    config = mosaic.Config(one_pass=True, **ONE_PASS[way])
    shape = {"H": config.block_g, "K": 1, "window": 27, "sinks": True, "return_lse": True}
    check(make_inputs(rng, (50, 5, 0, 20), (50, 40, 3, 12), **shape), config)


@pytest.mark.parametrize("page", [16, 64])
def test_one_pass_over_pages(page, rng):
    """By default; windows begin anywhere in a page, NaN where no query of a request sees."""
    shape = {"H": 4, "K": 1, "window": 40, "sinks": True, "return_lse": True, "page": page}
    args = paged_cases.make_inputs(rng, (50, 33), (77, 33), **shape)
    config = prefill.default_config(**PAGED.prepare(**args))
    assert config.one_pass
    check(args, config)


@pytest.mark.parametrize(
    ("D", "G", "window", "page", "want"),
    [
        (64, 8, 128, None, {"consumers": 3, "block_g": 8, "num_stages": 3, "q_stages": 2}),
        (64, 8, 128, 16, {"consumers": 3, "block_g": 8, "num_stages": 3, "q_stages": 2}),
        (64, 4, 128, 16, {"consumers": 3, "block_g": 4, "num_stages": 3, "q_stages": 1}),
        (64, 3, 160, None, None),
        (64, 3, 128, None, {"consumers": 2, "block_g": 1, "num_stages": 3, "q_stages": 1}),
        (128, 8, 128, None, {"consumers": 2, "block_g": 8, "num_stages": 2, "q_stages": 1}),
        (128, 8, 128, 16, {"consumers": 2, "block_g": 8, "num_stages": 1, "q_stages": 2}),
        (128, 8, 200, None, None),
        (256, 8, 128, None, None),
    ],
)
def test_the_default_for_a_window_follows_from_shapes(D, G, window, page, want):
    """As much as fits; None where no tile holds all keys."""

    def array(*shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, dtype)

    args: dict[str, Any] = {"q": array(4096, 8 * G, D), "query_start": array(2, dtype="int32"), "window": window}
    if page is None:
        config = mosaic.default_config(**MECHANISM.prepare(k=array(4096, 8, D), v=array(4096, 8, D), **args))
    else:
        pages = array(4096 // page, page, 8, D)
        table = {"page_table": array(1, 4096 // page, dtype="int32"), "lengths": array(1, dtype="int32")}
        config = prefill.default_config(**PAGED.prepare(k_pages=pages, v_pages=pages, **table, **args))
    assert config.one_pass == (want is not None)
    assert (want or {}).items() <= dataclasses.asdict(config).items()


def test_one_pass_over_wide_values_of_two_groups(rng):
    args = make_inputs(rng, (40,), (60,), H=4, K=2, D=128, dtype="float16", window=17, return_lse=True)
    check(args, mosaic.Config(one_pass=True, consumers=1, block_g=2))


@pytest.mark.parametrize(
    ("block_kv", "options"),
    [(80, {"window": 60}), (64, {"window": 40, "causal": False}), (144, {"softcap": 9.0, "causal": False})],
)
def test_blocks_of_any_size_are_masked_at_both_ends(block_kv, options, rng):
    args = make_inputs(rng, (40, 5), (100, 70), H=2, K=1, sinks=True, return_lse=True, **options)
    check(args, mosaic.Config(consumers=1, block_g=2, block_kv=block_kv))


def test_the_output_may_leave_through_memory_of_q(rng):
    """Which changes no bit."""
    args = make_inputs(rng, (130, 5), (150, 30), H=2, K=1, sinks=True, return_lse=True)
    config = mosaic.Config(block_kv=64)
    for a, b in zip(run(args, config), run(args, dataclasses.replace(config, share_o=True)), strict=True):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_g": 16, "one_pass": True}, "block_g must be 1, 2, 4 or 8 with one_pass, got 16"),
        ({"share_o": True, "one_pass": True}, "share_o=True is not for one_pass; use share_o=False"),
        ({"share_o": True, "q_stages": 2}, "share_o=True leaves room for one q; use q_stages=1"),
    ],
)
def test_a_config_that_is_always_wrong(options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        mosaic.Config(**options)


@pytest.mark.parametrize(
    ("options", "window", "message"),
    [
        ({"one_pass": True}, None, "one_pass needs a causal window and no soft cap"),
        (
            {"one_pass": True, "block_g": 4},
            200,
            "one_pass takes 192 keys of a warpgroup, 256 of a tile and values of 128 with 2 consumers, got 224, 240 "
            "and 64; use a larger block_g",
        ),
    ],
)
def test_a_config_that_does_not_fit_the_shapes(options, window, message):
    shapes = dict(MECHANISM.support)["bfloat16, D 64, window 128"] | {"window": window}
    with pytest.raises(ValueError, match=f"^attention: {re.escape(message)}$"):
        mosaic.attention(config=mosaic.Config(**options), **MECHANISM.prepare(**shapes))


def test_pages_of_one_pass_are_brought_by_warps(rng):
    args = PAGED.prepare(**paged_cases.make_inputs(rng, (40,), (40,), window=20))
    with pytest.raises(ValueError, match=r"^paged_attention: one_pass over pages needs by_warps=True$"):
        prefill.paged_attention(**args, config=prefill.Config(one_pass=True))


def test_one_pass_of_deep_keys_takes_two_consumers():
    shapes = dict(MECHANISM.support)["bfloat16, D 256"] | {"window": 60}
    message = r"^attention: one_pass with 3 consumers fits the registers for keys of at most 128, got 256$"
    with pytest.raises(ValueError, match=message):
        config = mosaic.Config(one_pass=True, consumers=3, block_g=4)
        mosaic.attention(config=config, **MECHANISM.prepare(**shapes))


def test_a_block_holds_whole_pages(rng):
    args = PAGED.prepare(**paged_cases.make_inputs(rng, (40,), (40,), page=64))
    message = r"^paged_attention: block_kv must divide the page or be a multiple of it, got 80 and 64$"
    with pytest.raises(ValueError, match=message):
        prefill.paged_attention(**args, config=prefill.Config(block_kv=80))
