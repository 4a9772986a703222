"""What quantization to block formats promises as an op; formats and edges are tested in tests/quant."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import quantize_mx
from jaxattn.ops.quantize_mx import MECHANISM
from jaxattn.quant import hadamard, mx, nvfp4


@pytest.mark.parametrize("case", [c for c in MECHANISM.cases if "smoke" in c.tags], ids=lambda c: c.name)
def test_compiled_is_eager_to_the_bit(case, rng):
    args = case.make(rng)
    x = args.pop("x")
    for a, b in zip(quantize_mx(x, **args), jax.jit(lambda x: quantize_mx(x, **args))(x), strict=True):
        np.testing.assert_array_equal(np.atleast_1d(a).view(np.uint8), np.atleast_1d(b).view(np.uint8))


def test_options_reach_the_format(rng):
    x = jnp.asarray(rng.standard_normal((3, 64)), jnp.float32)
    rotated = hadamard.rotate(x, 32)
    pairs = (
        (quantize_mx(x), mx.quantize(x)),
        (quantize_mx(x, rule="floor", ties="zero"), mx.quantize(x, rule="floor", ties="zero")),
        (quantize_mx(x, format="mxfp8"), mx.quantize(x, "mxfp8")),
        (quantize_mx(x, rotation=32), mx.quantize(rotated)),
        (quantize_mx(x, format="nvfp4", global_scale=7.0), nvfp4.quantize(x, jnp.float32(7))),
        (quantize_mx(x, format="nvfp4", rotation=32), nvfp4.quantize(rotated)),
    )
    for found, wanted in pairs:
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(a, b)
    swizzled = quantize_mx(x, format="nvfp4", swizzled=True)[1]
    np.testing.assert_array_equal(nvfp4.unswizzle(swizzled, 3, 4), nvfp4.quantize(x)[1])


WRONG = {
    "size": ({"x": jnp.ones((2, 48))}, "the last dimension must be a multiple of 32, got 48"),
    "size-16": ({"x": jnp.ones((2, 24)), "format": "nvfp4"}, "the last dimension must be a multiple of 16, got 24"),
    "format": ({"format": "mxfp6"}, "format must be one of mxfp8, mxfp4, nvfp4, got 'mxfp6'"),
    "rule": ({"format": "mxfp8", "rule": "ceil"}, "rule of mxfp8 must be floor, got 'ceil'"),
    "ties": ({"ties": "up"}, "ties must be 'even' or 'zero', got 'up'"),
    "nvfp4-rule": (
        {"format": "nvfp4", "rule": "floor"},
        "NVFP4 has no rule and even ties, got rule='floor', ties='even'; leave them out",
    ),
    "global": (
        {"global_scale": 1.0},
        "global_scale and swizzled belong to nvfp4, got format 'mxfp4'; leave them out",
    ),
    "rotation": ({"rotation": 48}, "a Hadamard rotation needs a power of two, got a group of 48"),
    "rotation-8": (
        {"format": "mxfp8", "rotation": 32},
        "a rotation belongs to the 4-bit formats, got format 'mxfp8'; leave it out",
    ),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_wrong_calls(changes, message):
    args = {"x": jnp.ones((2, 64))} | changes
    with pytest.raises(ValueError, match=f"^quantize_mx: {re.escape(message)}$"):
        quantize_mx(**args)
