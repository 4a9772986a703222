"""What V4's fused step promises: it is its parts, padding is zero, a skipped token still has its q."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import latent_cache_write, qnorm_rope_kv_insert, rope, rope_table
from jaxattn.ops.qnorm_rope_kv_insert import make_inputs
from pallas_kernels import _mosaic
from pallas_kernels.qnorm_rope_kv_insert import Config

TABLE = rope_table(64, 16)


def test_it_is_its_parts(rng):
    args = make_inputs(rng, 5, 3, skipped=0.0, dtype="float32")
    q, cache = qnorm_rope_kv_insert(**args)
    where, table = args["positions"], args["cos_sin"]
    turned = rope(args["kv"][:, None], where, table)[:, 0]
    written = latent_cache_write(
        turned[:, :448], turned[:, 448:], args["cache"], args["slots"], format="v4", page=args["page"]
    )
    np.testing.assert_array_equal(cache, written)
    x = np.asarray(args["q"], np.float64)
    normed = jnp.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6), jnp.float32)
    expected = np.asarray(rope(normed, where, table), np.float64)
    assert np.abs(np.asarray(q) - expected).max() <= 64 * np.finfo(np.float32).eps


def test_padding_heads_are_zero_and_a_token_without_a_slot_has_a_q(rng):
    args = make_inputs(rng, 4, 3, page=2, pages=4)
    args["kv"] = jnp.nan_to_num(args["kv"])
    some, _ = qnorm_rope_kv_insert(**args | {"heads": 8})
    none, cache = qnorm_rope_kv_insert(**args | {"slots": jnp.full(4, -1)})
    assert (np.asarray(some[:, 3:], np.float32) == 0).all()
    np.testing.assert_array_equal(some[:, :3], none)
    np.testing.assert_array_equal(cache, args["cache"])


def test_bc21_the_rotated_bytes_are_those_of_rope(rng):
    args = make_inputs(rng, 5, 1, page=2, pages=4, skipped=0.0)
    _, cache = qnorm_rope_kv_insert(**args)
    turned = rope(args["kv"][:, None], args["positions"], args["cos_sin"])[:, 0, 448:]
    for token, slot in enumerate(args["slots"].tolist()):
        row = np.asarray(cache)[slot // 2, slot % 2 * 576 + 448 : slot % 2 * 576 + 576]
        np.testing.assert_array_equal(row, np.asarray(turned[token]).view(np.uint8))


WRONG = {
    "heads": ({"heads": 1}, "heads must be at least H=2, got 1"),
    "page": ({"page": None}, "page belongs to format v4, and only there, got format v4 and page none"),
    "format": ({"format": "fp8"}, "format must be one of plain, v4, got 'fp8'"),
    "dims": (
        {"q": jnp.ones((3, 2, 256)), "kv": jnp.ones((3, 256))},
        "format v4 stores D, Dr = 512, 64, got 256, 64",
    ),
    "bytes": ({"cache": jnp.zeros((1, 99), jnp.uint8)}, "a page of 2 v4 rows needs at least 1168 bytes"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_wrong_calls(changes, message):
    args = {"q": jnp.ones((3, 2, 512)), "kv": jnp.ones((3, 512)), "positions": jnp.arange(3), "cos_sin": TABLE}
    args |= {"cache": jnp.zeros((2, 1728), jnp.uint8), "slots": jnp.arange(3), "page": 2}
    with pytest.raises(ValueError, match=f"^qnorm_rope_kv_insert: {re.escape(message)}"):
        qnorm_rope_kv_insert(**args | changes)


@pytest.mark.parametrize("config", [None, Config(rows=16, tokens=2, packed=True), Config(rows=16, tokens=4)])
def test_the_kernel_at_the_edges(config, rng):
    """Positions and slots outside, padded heads, and no other byte of the cache."""
    args = make_inputs(rng, 5, 3, page=2, pages=4, heads=16, skipped=0.0)
    args["positions"] = jnp.array([-3, 10**6, 2**31 - 1, 0, 0], jnp.int32)
    args["slots"] = jnp.array([7, 8, -(2**31), 2**31 - 1, 5], jnp.int32)
    args["cos_sin"] = jnp.nan_to_num(args["cos_sin"]).at[1:-1].set(jnp.nan)
    q, cache = qnorm_rope_kv_insert(**args)
    with _mosaic.interpret():
        ours, written = qnorm_rope_kv_insert(**args, implementation="mosaic", config=config)
    np.testing.assert_array_equal(written, cache)
    assert (np.asarray(ours[:, 3:], np.float32) == 0).all()
    a, b = (np.asarray(x, np.float64) for x in (q, ours))
    assert (np.abs(a - b) <= 2.0**-8 * np.abs(a)).all()  # one unit of bfloat16
    assert 100 * (a != b).sum() < a.size


def test_wrong_configurations(rng):
    with pytest.raises(ValueError, match=r"^rows must be 8, 16 or 32, got 7$"):
        Config(rows=7)
    with pytest.raises(ValueError, match=r"^tokens must be 1, 2, 4 or 8, got 3$"):
        Config(rows=8, tokens=3)
    args = make_inputs(rng, 2, 8, page=2)
    with _mosaic.interpret(), pytest.raises(ValueError, match=r"rows=8 is not legal for 8 heads of bfloat16"):
        qnorm_rope_kv_insert(**args, implementation="mosaic", config=Config(rows=8))
    args = make_inputs(rng, 2, 16, page=2, dtype="float32")
    with _mosaic.interpret(), pytest.raises(ValueError, match=r"packed=True is for types of 16 bits, got float32\b"):
        qnorm_rope_kv_insert(**args, implementation="mosaic", config=Config(rows=16, packed=True))
