"""What V4's quantized output promises: rotation undone, floors, groups."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import inv_rope_fp8_quant, rope, rope_table

TABLE = rope_table(64, 200)


def test_bc29_the_position_is_gone(rng):
    """A value rotated at p and attended from p alone leaves the same codes for every p, but for rounding at borders."""
    v = jnp.asarray(rng.standard_normal((1, 2, 512)), jnp.float32)
    outs = []
    for position in (0, 1, 77, 199):
        where = jnp.array([position])
        outs.append(inv_rope_fp8_quant(rope(v, where, TABLE), where, TABLE, groups=1))
    for q, scale in outs[1:]:
        np.testing.assert_array_equal(scale, outs[0][1])
        assert (np.asarray(q) != np.asarray(outs[0][0])).sum() <= 5
    other, _ = inv_rope_fp8_quant(rope(v, jnp.array([77]), TABLE), jnp.array([150]), TABLE, groups=1)
    assert (np.asarray(other) != np.asarray(outs[0][0])).sum() > 50


def test_bc35_blocks_of_zeros_have_the_floor_of_activations():
    q, scale = inv_rope_fp8_quant(jnp.zeros((1, 2, 128)), jnp.array([5]), TABLE, groups=2)
    assert (np.asarray(scale) == 2.0**-42).all()
    assert (np.asarray(q, np.float32) == 0).all()


def test_groups_are_neighbouring_heads(rng):
    o = jnp.asarray(rng.standard_normal((2, 6, 128)), jnp.bfloat16)
    where = jnp.array([3, 4])
    whole, _ = inv_rope_fp8_quant(o, where, TABLE, groups=1)
    parts, scale = inv_rope_fp8_quant(o, where, TABLE, groups=3)
    np.testing.assert_array_equal(whole.reshape(2, 3, 256), parts)
    assert scale.shape == (2, 3, 2)


WRONG = {
    "groups": ({"groups": 4}, "H must be a multiple of groups=4 and D of 128, got H=6 and D=128"),
    "dim": ({"o": jnp.ones((2, 6, 96))}, "H must be a multiple of groups=2 and D of 128, got H=6 and D=96"),
    "none": ({"groups": 0}, "groups must be at least 1, got 0"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_wrong_calls(changes, message):
    args = {"o": jnp.ones((2, 6, 128)), "positions": jnp.arange(2), "cos_sin": TABLE, "groups": 2}
    with pytest.raises(ValueError, match=f"^inv_rope_fp8_quant: {re.escape(message)}$"):
        inv_rope_fp8_quant(**args | changes)
