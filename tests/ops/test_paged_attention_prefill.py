"""Prefill over pages: every way to bring tiles gives the same, also where a thread block takes many of them."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import attention, paged_attention
from jaxattn.ops import _attention_cases as packed_cases
from jaxattn.ops._paged_attention_cases import make_inputs
from jaxattn.ops.paged_attention import MECHANISM
from pallas_kernels import _mosaic
from pallas_kernels import paged_attention as paged
from pallas_kernels.attention import packed
from pallas_kernels.paged_attention import prefill
from parity import cases, execution, triangle

WAYS = {
    "plain": {},
    "two-pages": {"pages_at_once": 2},
    "four-pages": {"pages_at_once": 4},
    "two-q": {"q_stages": 2},
    "exact": {"slack": 0},
    "both": {"q_stages": 2, "pages_at_once": 4, "num_stages": 3},
}


@pytest.fixture
def few_sms(monkeypatch):
    """Two thread blocks, so that each takes several tiles."""
    monkeypatch.setattr(_mosaic, "num_sms", lambda: 2)


def run(op, args, config):
    with _mosaic.interpret() if _mosaic.why_not_here() else contextlib.nullcontext():
        out = jax.block_until_ready(op(**args, implementation="mosaic", config=config))
    return jax.tree.map(np.asarray, out)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_bring_tiles_is_right(way, rng, few_sms):
    """Pages shuffled, of 16; NaN where no query of a request sees."""
    window = 40 if "q" in way else None
    shape = {"H": 4, "K": 2, "window": window, "sinks": True, "return_lse": True}
    args = make_inputs(rng, (50, 33), (70, 33), **shape)
    check(args, prefill.Config(**{"consumers": 1, "block_g": 2, "block_kv": 64} | WAYS[way]))


@pytest.mark.parametrize(
    "options", [{}, {"window": 40, "softcap": 20.0}, {"window": 40}], ids=["plain", "window-softcap", "window"]
)
def test_the_default_for_a_long_prompt_is_right(options, rng, few_sms):
    """257 rows behind three keys, pages of 16."""
    args = make_inputs(rng, (257,), (260,), H=2, K=2, sinks=True, return_lse=True, **options)
    config = paged.default_config(**MECHANISM.prepare(**args))
    assert isinstance(config, prefill.Config)
    check(args, config)


def check(args, config):
    """The contract of o and lse."""
    got = dict(zip(("o", "lse"), run(paged_attention, args, config), strict=True))
    truth, same = (execution.reference(MECHANISM, args, wide=wide) for wide in (True, False))
    for name, x in got.items():
        spec = cases.find(MECHANISM.name).outputs[name]
        sides = {"reference": same[name], "kernel": x}
        verdict = triangle.edge(spec, "reference_vs_kernel", truth[name], sides, details=False)
        assert verdict.passed, f"{name}: {verdict.reason}"


def test_a_second_q_changes_no_bit(rng, few_sms):
    """Packed keys, two consumers."""
    args = packed_cases.make_inputs(rng, (140,), H=4, K=2, window=30, return_lse=True)
    one, two = (run(attention, args, packed.Config(block_g=2, block_kv=64, q_stages=n)) for n in (1, 2))
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"q_stages": 3}, "q_stages must be 1 or 2, got 3"),
        ({"slack": 9}, "slack must lie between 0 and 8, got 9"),
        ({"pages_at_once": 3}, "pages_at_once must be 1, 2 or 4, got 3"),
    ],
)
def test_configurations_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        prefill.Config(**options)


def test_what_does_not_divide_a_block(rng):
    args = MECHANISM.prepare(**make_inputs(rng, (40,), (40,), page=64))
    with pytest.raises(ValueError, match=r"pages_at_once must divide the 1 pages of a block, got 2$"):
        prefill.paged_attention(**args, config=prefill.Config(block_kv=64, pages_at_once=2))
    with pytest.raises(ValueError, match=r"by_warps needs a multiple of 4 pages of a block, got 1$"):
        prefill.paged_attention(**args, config=prefill.Config(block_kv=64, by_warps=True))


def struct(page, window, rows=4096, D=64):
    pool = jax.ShapeDtypeStruct((256, page, 8, D), jnp.bfloat16)
    args = {"q": jax.ShapeDtypeStruct((rows, 64, D), jnp.bfloat16), "k_pages": pool, "v_pages": pool}
    args |= {"page_table": jax.ShapeDtypeStruct((1, 4096 // page), jnp.int32)}
    args |= {"lengths": jax.ShapeDtypeStruct((1,), jnp.int32), "query_start": jax.ShapeDtypeStruct((2,), jnp.int32)}
    return MECHANISM.prepare(**args, window=window)


@pytest.mark.parametrize("page", [16, 32, 64, 128])
@pytest.mark.parametrize("window", [None, 1024])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_the_default_for_long_prompts(page, window, D):
    """Any page and long window; warps share the copies of many pages, a second q is there if tiles are short."""
    args = struct(page, window, rows=256, D=D)
    config = paged.default_config(**args)
    assert isinstance(config, prefill.Config)
    assert config.by_warps == (config.block_kv >= 4 * page)
    assert config.pages_at_once == 1
    assert config.q_stages == (2 if page >= 64 and D < 256 else 1)
    assert config in list(prefill.configs(**args))
    assert not isinstance(paged.default_config(**struct(page, window, rows=255, D=D)), prefill.Config)


def test_the_variants_are_timed_where_they_may_help():
    found = {
        key: {(c.q_stages, c.pages_at_once, c.by_warps) for c in prefill.configs(**struct(*key)) if not c.one_pass}
        for key in ((64, None), (64, 128), (16, None), (16, 128))
    }
    assert found == {
        (64, None): {(1, 1, False), (2, 1, False)},
        (64, 128): {(1, 1, False), (2, 1, False)},
        (16, None): {(1, 1, False), (1, 2, False), (1, 1, True)},
        (16, 128): {(1, 1, False), (1, 2, False), (1, 1, True), (2, 1, False), (2, 1, True)},
    }
