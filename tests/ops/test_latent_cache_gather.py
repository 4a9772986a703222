"""What reading a latent cache promises: the last rows, exact numbers, zeros behind them."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import latent_cache_gather, latent_cache_write
from jaxattn.ops.latent_cache_gather import MECHANISM


def test_numbers_that_fit_come_back_exactly(rng):
    """Multiples of 1/8 up to 15/8 are e4m3 numbers of any block whose largest is below 448 and not tiny."""
    x = jnp.asarray(rng.integers(-15, 16, (3, 512)) / 8, jnp.bfloat16)
    cache = latent_cache_write(
        x[:, :448], x[:, 448:], jnp.zeros((2, 37440), jnp.uint8), jnp.array([64, 65, 66]), format="v4", page=64
    )
    back = latent_cache_gather(cache, jnp.array([[1]]), jnp.array([3]), jnp.array([2]), rows=4, page=64)
    np.testing.assert_array_equal(back[0, :2], x[1:])
    np.testing.assert_array_equal(back[0, 2:], jnp.zeros((2, 512)))


@pytest.mark.parametrize("case", MECHANISM.cases, ids=lambda c: c.name)
def test_nothing_else_is_read(case, rng):
    assert np.isfinite(np.asarray(latent_cache_gather(**case.make(rng)), np.float32)).all()


WRONG = {
    "rows": ({"rows": 0}, "rows must be at least 1, got 0"),
    "format": ({"format": "fp8"}, "format must be one of plain, fp8_ds_mla, v4, got 'fp8'"),
    "ds-mla": (
        {"format": "fp8_ds_mla", "page": None, "cache": jnp.zeros((2, 4, 600), jnp.uint8)},
        "a row of format fp8_ds_mla has 656 bytes, got a cache [2, 4, 600]",
    ),
    "bytes": ({"page": 128}, "a page of 128 v4 rows needs at least 74752 bytes, got a cache of pages of 37440"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_wrong_calls(changes, message):
    args = {"cache": jnp.zeros((2, 37440), jnp.uint8), "page_table": jnp.array([[0]]), "lengths": jnp.array([3])}
    with pytest.raises(ValueError, match=f"^latent_cache_gather: {re.escape(message)}$"):
        latent_cache_gather(**args | {"rows": 3, "page": 64} | changes)
