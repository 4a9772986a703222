"""Tiles of prefill attention that take a short window in one pass, blocks of other sizes, masks by edges: all are right.

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
from jaxattn.ops.paged_attention import MECHANISM as PAGED
from jaxattn.ops._attention_cases import make_inputs
from jaxattn.ops.attention import MECHANISM
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
    "one-consumer": {"consumers": 1, "block_g": 2},
    "three-consumers": {"consumers": 3, "block_g": 4, "q_stages": 2, "num_stages": 3},
}


@pytest.mark.parametrize("way", ONE_PASS)
def test_one_pass_over_a_window(way, rng):
    """Sequences with a beginning, with keys before the first query, shorter than a tile, and without queries."""
    config = mosaic.Config(one_pass=True, **ONE_PASS[way])
    shape = {"H": 2 * config.block_g, "K": 2, "window": 40, "sinks": True, "return_lse": True}
    check(make_inputs(rng, (70, 5, 0, 33), (70, 60, 3, 20), **shape), config)


@pytest.mark.parametrize("page", [16, 64])
def test_one_pass_over_pages(page, rng):
    """Whose rows the windows begin anywhere in; NaN where no query of a request sees."""
    shape = {"H": 4, "K": 1, "window": 40, "sinks": True, "return_lse": True, "page": page}
    args = paged_cases.make_inputs(rng, (50, 33), (77, 33), **shape)
    check(args, prefill.Config(one_pass=True, block_g=4))


def test_one_pass_over_wide_values(rng):
    args = make_inputs(rng, (70,), (90,), H=2, K=1, D=128, dtype="float16", window=17, return_lse=True)
    check(args, mosaic.Config(one_pass=True, block_g=2))
