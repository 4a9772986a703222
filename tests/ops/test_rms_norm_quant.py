"""What RMSNorm with quantized results promises: the roundings of each mode, and the residual's."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import quantize_fp8, rms_norm_quant
from jaxattn.ops.rms_norm_quant import MECHANISM, make_inputs
from pallas_kernels import _mosaic
from pallas_kernels.rms_norm_quant import Config

BF16 = jnp.bfloat16


def twice(x):
    return np.asarray(x).astype(BF16).astype(np.float32)


def norm(z, w, once):
    """float32 in numpy; the mean in float64."""
    r = (1 / np.sqrt(np.square(z.astype(np.float64)).mean(1, keepdims=True) + 1e-6)).astype(np.float32)
    y = z * r
    return twice((y if once else twice(y)) * w)


@pytest.mark.parametrize("mode", ["none", "static", "token", "group"])
@pytest.mark.parametrize("residual", [False, True])
def test_each_mode_rounds_where_vllm_does(mode, residual, rng):
    args = make_inputs(rng, 5, 256, residual=residual)
    x, w = (np.asarray(args[n]).astype(np.float32) for n in ("x", "weight"))
    once = mode in ("none", "static")
    total = x + np.asarray(args["residual"]).astype(np.float32) if residual else x
    y = norm(twice(total) if residual and once else total, w, once)
    options = {"scale": 0.03} if mode == "static" else {}
    out = jax.jit(lambda a: rms_norm_quant(**a, mode=mode, **options))(args)
    out = out if isinstance(out, tuple) else (out,)
    if mode == "none":
        wanted = (y.astype(BF16),)
    elif mode == "static":
        wanted = (quantize_fp8(jnp.asarray(y), granularity="tensor", scale=0.03)[0],)
    elif mode == "token":
        wanted = quantize_fp8(jnp.asarray(y))
    else:
        q, s = quantize_fp8(jnp.asarray(y).reshape(-1, 128))
        wanted = q.reshape(5, 256), s.reshape(5, 2)
    wanted = (*wanted, total.astype(BF16)) if residual else wanted
    for a, b in zip(out, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(a).astype(np.float32), np.asarray(b).astype(np.float32))


def test_the_two_roundings_differ(rng):
    args = make_inputs(rng, 5, 256)
    x, w = (np.asarray(args[n]).astype(np.float32) for n in ("x", "weight"))
    assert (norm(x, w, True) != norm(x, w, False)).sum() > 50


def test_a_row_of_zeros_has_the_smallest_scale(rng):
    q, scale = rms_norm_quant(jnp.zeros((2, 128), BF16), jnp.ones(128, BF16), mode="token")
    assert (np.asarray(q).astype(np.float32) == 0).all()
    assert scale.tolist() == [[np.float32(1 / 512) / np.float32(448)]] * 2


@pytest.mark.parametrize("case", [c for c in MECHANISM.cases if "smoke" in c.tags], ids=lambda c: c.name)
def test_compiled_is_eager_to_the_bit(case, rng):
    args = case.make(rng)
    arrays = {n: v for n, v in args.items() if hasattr(v, "shape")}
    static = {n: v for n, v in args.items() if n not in arrays}
    eager, compiled = rms_norm_quant(**args), jax.jit(lambda a: rms_norm_quant(**a, **static))(arrays)
    for a, b in zip(jax.tree.leaves(eager), jax.tree.leaves(compiled), strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


WRONG = {
    "mode": ({"mode": "row"}, ValueError, "mode must be one of none, static, token, group, got 'row'"),
    "no-scale": (
        {"mode": "static"},
        ValueError,
        "a scale belongs to mode 'static', and only there, got mode 'static' without scale",
    ),
    "scale": (
        {"scale": 1.0},
        ValueError,
        "a scale belongs to mode 'static', and only there, got mode 'none' with scale",
    ),
    "bound": ({"upper_bound": 1.0}, ValueError, "upper_bound belongs to mode 'token', got mode 'none'; leave it out"),
    "weight": (
        {"weight": jnp.ones(8, BF16)},
        TypeError,
        "weight must have dtype float32, got bfloat16; cast one of them",
    ),
    "eps": ({"eps": 0.0}, ValueError, "eps must be positive and finite or None, got 0.0"),
}


@pytest.mark.parametrize(("changes", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_calls(changes, error, message):
    args = {"x": jnp.ones((2, 8)), "weight": jnp.ones(8)} | changes
    with pytest.raises(error, match=f"^rms_norm_quant: {re.escape(message)}$"):
        rms_norm_quant(**args)


@pytest.mark.parametrize("mode", ["token", "static", "none", "group"])
@pytest.mark.parametrize("residual", [False, True])
def test_rows_of_the_kernel_come_in_any_way(mode, residual, rng):
    """Three rows of several pieces, one or two a warpgroup: the same to the bit."""
    scale = {"scale": np.float32(0.03)} if mode == "static" else {}
    args = make_inputs(rng, 3, 1280, mode=mode, residual=residual, **scale)
    with _mosaic.interpret():
        configs = Config(rows=1), Config(rows=2)
        found = [jax.tree.leaves(rms_norm_quant(**args, implementation="mosaic", config=c)) for c in configs]
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
