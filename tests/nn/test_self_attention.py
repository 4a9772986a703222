"""Self-attention without a cache: its projections, positions and sequences around one call of the op."""

import contextlib
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxattn import attention
from jaxattn.nn import Attention
from pallas_kernels import _mosaic
from parity import tolerances

M, H, K, D, DV = 24, 4, 2, 16, 8
START = (0, 5, 5, 12)
OPTIONS = {
    "plain": {},
    "biases-sinks-window": {"use_bias": True, "sinks": True, "window": 3},
    "full-values-softcap": {"value_dim": DV, "causal": False, "softcap": 2.0, "scale": 0.3},
}
options = pytest.mark.parametrize("name", OPTIONS)


def build(seed=0, dtype="float32", **more) -> Attention:
    """A layer whose biases and sinks are not zero."""
    layer = Attention(M, H, K, D, dtype=dtype, precision="highest", rngs=nnx.Rngs(seed), **more)
    rng = np.random.default_rng(seed)
    for linear in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj):
        if linear.bias is not None:
            linear.bias[...] = jnp.asarray(rng.standard_normal(linear.bias.shape), dtype)
    if layer.sinks is not None:
        layer.sinks[...] = jnp.asarray(rng.standard_normal(H), jnp.float32)
    return layer


def tokens(rng, *shape, dtype="float32"):
    return jnp.asarray(rng.standard_normal((*shape, M)), dtype)


def close(a, b):
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerances.SAME_SUMS * np.abs(b).max())


def turn(x, positions):
    """A rotation of the first two numbers of each head."""
    angle = positions.astype(x.dtype)[:, None]
    a, b = x[..., 0], x[..., 1]
    first, second = a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)
    return jnp.concatenate([first[..., None], second[..., None], x[..., 2:]], -1)


def by_hand(layer, x, *, causal=True, window=None, softcap=None, scale=None, **_):
    """One sequence in numpy, float64."""
    kernels = {
        n: np.asarray(getattr(layer, n).kernel[...], np.float64) for n in ("q_proj", "k_proj", "v_proj", "o_proj")
    }
    biases = {n: getattr(layer, n).bias for n in kernels}
    biases = {n: 0.0 if b is None else np.asarray(b[...], np.float64) for n, b in biases.items()}
    q, k, v = (x @ kernels[n] + biases[n] for n in ("q_proj", "k_proj", "v_proj"))
    q, k, v = q.reshape(-1, H, D), k.reshape(-1, K, D), v.reshape(len(x), K, -1)
    rows, out = np.arange(len(x)), []
    visible = np.ones((len(x), len(x)), bool)
    visible &= rows[None] <= rows[:, None] if causal else True
    visible &= rows[:, None] - rows[None] < window if window else True
    for h in range(H):
        s = q[:, h] @ k[:, h // (H // K)].T * (D**-0.5 if scale is None else scale)
        s = softcap * np.tanh(s / softcap) if softcap else s
        e = np.exp(s) * visible
        sink = 0.0 if layer.sinks is None else np.exp(np.float64(layer.sinks[h]))
        out.append(e @ v[:, h // (H // K)] / (e.sum(1, keepdims=True) + sink))
    return np.stack(out, 1).reshape(len(x), -1) @ kernels["o_proj"] + biases["o_proj"]


# ---------------------------------------------------------------- numbers
@options
def test_it_is_what_the_formula_says(name, rng):
    layer, x = build(**OPTIONS[name]), tokens(rng, 2, 7)
    got = nnx.jit(Attention.__call__)(layer, x)
    for row, sequence in zip(got, np.asarray(x, np.float64), strict=True):
        close(row, by_hand(layer, sequence, **OPTIONS[name]))


@options
def test_packed_sequences_do_not_see_each_other(name, rng):
    """One of them is empty."""
    layer, x = build(**OPTIONS[name]), tokens(rng, START[-1])
    got = layer(x, jnp.asarray(START, jnp.int32))
    for a, b in itertools.pairwise(START):
        if a < b:
            close(got[a:b], by_hand(layer, np.asarray(x[a:b], np.float64), **OPTIONS[name]))


def test_padding_gives_the_output_bias(rng):
    layer, x = build(use_bias=True, sinks=True), tokens(rng, 9).at[6:].set(jnp.nan)
    got = np.asarray(layer(x, jnp.asarray([0, 4, 6], jnp.int32)))
    np.testing.assert_array_equal(got[6:], np.broadcast_to(np.asarray(layer.o_proj.bias[...]), (3, M)))
    assert np.isfinite(got).all()


def test_positions_start_with_each_sequence(rng):
    """Packed, or as a batch, the same rotation of the same tokens; and a rotation that matters."""
    layer, x = build(rotary=turn), tokens(rng, 2, 6)
    packed = layer(x.reshape(12, M), jnp.asarray([0, 6, 12], jnp.int32))
    close(packed.reshape(2, 6, M), layer(x))
    plain = np.asarray(build()(x))
    assert np.abs(packed.reshape(2, 6, M) - plain).max() > tolerances.SAME_COMPUTATION * np.abs(plain).max()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_interpreted_kernel(dtype, rng):
    """Heads of 64, the least that it takes: within the roundings of two 16-bit layers of the reference."""
    more = {"sinks": True, "window": 9, "dtype": dtype, "rngs": nnx.Rngs(1)}
    layer = Attention(M, 2, 1, 64, implementation="mosaic", **more)
    x, start = tokens(rng, 20, dtype=dtype), jnp.asarray([0, 13, 20], jnp.int32)
    with _mosaic.interpret() if _mosaic.why_not_here() else contextlib.nullcontext():
        got = np.asarray(layer(x, start), np.float64)
    layer.implementation = "reference"
    want = np.asarray(layer(x, start), np.float64)
    unit = float(jnp.finfo(dtype).eps) * np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerances.SAME_NARROW_LAYER * unit)


def test_gradient_of_every_parameter(rng):
    layer, x = build(use_bias=True, sinks=True, window=3), tokens(rng, 7)
    start = jnp.asarray([0, 7], jnp.int32)
    state = nnx.grad(lambda layer: (layer(x, start) * jnp.arange(M)).sum())(layer)
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
    assert len(leaves) == 9
    for name, leaf in leaves.items():
        assert np.isfinite(leaf).all(), name
        # a key's bias moves all scores of a row by one number, which only a sink notices
        assert np.abs(leaf).max() > 0, name


def test_the_op_gets_the_layer_s_options(rng, monkeypatch):
    seen = {}

    def spy(*arrays, **given):
        seen.update(given)
        return attention(*arrays, **given)

    monkeypatch.setattr("jaxattn.nn.self_attention.attention", spy)
    layer = build(scale=0.2, softcap=3.0, window=4, causal=False, sinks=True, implementation="reference")
    layer(tokens(rng, 1, 5))
    assert {k: v for k, v in seen.items() if k != "sinks"} == {
        "scale": 0.2,
        "softcap": 3.0,
        "window": 4,
        "causal": False,
        "implementation": "reference",
    }
    np.testing.assert_array_equal(seen["sinks"], layer.sinks[...])


# ---------------------------------------------------------------- errors
def test_messages(rng):
    wrong = [
        (lambda: build(window=0), ValueError, "Attention: window must be at least 1, got 0"),
        (lambda: build(softcap=0), ValueError, "Attention: softcap must be positive and finite or None, got 0"),
        (
            lambda: Attention(M, 3, 2, D, rngs=nnx.Rngs(0)),
            ValueError,
            "Attention: heads must be a multiple of kv_heads, got heads=3 and kv_heads=2",
        ),
        (
            lambda: build()(tokens(rng, 4)),
            ValueError,
            f"Attention: x must be a batch [B T M] with M={M}, got shape (4, {M})",
        ),
        (
            lambda: build()(tokens(rng, 1, 4), jnp.asarray([0, 4])),
            ValueError,
            f"Attention: x must be packed tokens [N M] with M={M}, got shape (1, 4, {M})",
        ),
        (
            lambda: build()(tokens(rng, 1, 4, dtype="bfloat16")),
            TypeError,
            "Attention: x must have dtype float32, got bfloat16; cast it to the layer's dtype",
        ),
        (
            lambda: build(rotary=lambda x, positions: x[..., :2])(tokens(rng, 1, 4)),
            ValueError,
            f"Attention: rotary must keep the shape and dtype of q, float32[4, {H}, {D}], got float32[4, {H}, 2]",
        ),
    ]
    for call, error, message in wrong:
        with pytest.raises(error, match=f"^{re.escape(message)}$"):
            call()
