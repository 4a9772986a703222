"""What the grouped projection promises: a block-diagonal product of dequantized matrices."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import _checks, grouped_projection
from jaxattn.ops.grouped_projection import MECHANISM, make_inputs
from pallas_kernels import _mosaic
from pallas_kernels import grouped_projection as mosaic


def test_it_is_a_block_diagonal_product(rng):
    args = make_inputs(rng, 3, 2, 256, 130)
    y = np.asarray(grouped_projection(**args, dtype="float32"), np.float64)
    x = np.asarray(args["x"], np.float64) * np.repeat(np.asarray(args["x_scale"], np.float64), 128, 2)
    s = np.repeat(np.repeat(np.asarray(args["weight_scale"], np.float64), 128, 1)[:, :130], 128, 2)
    w = np.asarray(args["weight"], np.float64) * s
    dense = np.zeros((2 * 256, 2 * 130))
    for g in range(2):
        dense[g * 256 : (g + 1) * 256, g * 130 : (g + 1) * 130] = w[g].T
    expected = (x.reshape(3, -1) @ dense).reshape(3, 2, 130)
    bound = 256 * np.finfo(np.float32).eps * np.abs(x.reshape(3, -1)) @ np.abs(dense)
    assert (np.abs(y - expected) <= bound.reshape(3, 2, 130)).all()


@pytest.mark.parametrize("case", [c for c in MECHANISM.cases if "smoke" in c.tags], ids=lambda c: c.name)
def test_one_rounding(case, rng):
    args = case.make(rng)
    y = np.asarray(grouped_projection(**args), np.float64)
    with jax.enable_x64(True):
        truth = np.asarray(grouped_projection(**_checks.upcast(args)))
    assert (np.abs(y - truth) <= float(jnp.finfo("bfloat16").eps) * np.abs(truth).max()).all()


WRONG = {
    "width": ({"x": jnp.ones((2, 1, 96)), "weight": jnp.ones((1, 8, 96))}, "got W=96, R=8, x_scale [2, 1, 1]"),
    "scale": (
        {"x_scale": jnp.ones((2, 1, 2)), "weight_scale": jnp.ones((1, 1, 2))},
        "got W=128, R=8, x_scale [2, 1, 2]",
    ),
    "groups": ({"weight": jnp.ones((2, 8, 128))}, "weight must be [groups R W] with groups=1 (from x)"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_wrong_calls(changes, message):
    args = {"x": jnp.ones((2, 1, 128)), "x_scale": jnp.ones((2, 1, 1)), "weight": jnp.ones((1, 8, 128))}
    args |= {"weight_scale": jnp.ones((1, 1, 1))}
    with pytest.raises(ValueError, match=rf"^grouped_projection: .*{re.escape(message)}"):
        grouped_projection(**args | changes)


# ---------------------------------------------------------------- the kernel
def kernel(args, **options):
    """The op by its kernel: on the GPU if there is one, else interpreted."""
    with _mosaic.interpret() if _mosaic.why_not_here() else contextlib.nullcontext():
        return np.float32(jax.jit(lambda: grouped_projection(**args, implementation="mosaic", **options))())


def test_groups_do_not_meet(rng):
    """An odd number of blocks of inputs, of which two are loaded at a time: the last one's neighbour is a stranger."""
    args = make_inputs(rng, 3, 2, 384, 16)
    clean, found = kernel(args), kernel(args | {"x": args["x"].at[:, 1].set(jnp.nan)})
    np.testing.assert_array_equal(found[:, 0], clean[:, 0])
    assert np.isnan(found[:, 1]).all()


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ((3, 2, 128, 24), {}, "each group must have a multiple of 16 outputs, got 24"),
        ((3, 2, 128, 32), {"dtype": "float32"}, "results must be bfloat16 or float16, got float32"),
        ((0, 2, 128, 32), {}, r"needs tokens, groups and inputs, got shape \(0, 2, 128\)"),
    ],
)
def test_what_the_kernel_refuses(sizes, options, message, rng):
    with pytest.raises(AssertionError, match=message):
        assert not mosaic.why_not(**MECHANISM.prepare(**make_inputs(rng, *sizes), **options))


def test_tiles_lie_in_one_group(rng):
    args = MECHANISM.prepare(**make_inputs(rng, 130, 3, 128, 96))
    assert {c.features * c.cluster for c in mosaic.configs(**args)} == {16, 32}
    with pytest.raises(ValueError, match="features=64 and cluster=1 needs output features in multiples of 64, got 96"):
        mosaic.grouped_projection(config=mosaic.Config(features=64), **args)
