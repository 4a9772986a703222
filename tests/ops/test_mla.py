"""What latent attention promises: absorption, paging, chunks and merges, edges."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import merge_states, mla, softmax_scale
from jaxattn.ops._mla_cases import make_inputs

R, DR, NOPE, DV = 32, 8, 16, 24


def test_absorbed_is_expanded(rng):
    """forward_mqa == forward_mha: q W_UK over latents, then W_UV, is attention with expanded keys and values."""
    H, S, T = 3, 20, 4
    with jax.enable_x64(True):
        latent, key = (jnp.asarray(rng.standard_normal((S, n))) for n in (R, DR))
        q_nope, q_rope = (jnp.asarray(rng.standard_normal((T, H, n))) for n in (NOPE, DR))
        w_uk, w_uv = (jnp.asarray(rng.standard_normal((R, H, n))) for n in (NOPE, DV))
        scale = softmax_scale(NOPE + DR)
        q = jnp.concatenate([jnp.einsum("thn,rhn->thr", q_nope, w_uk), q_rope], -1)
        cache = jnp.concatenate([latent, key], -1).reshape(5, 4, R + DR)
        table, start = jnp.arange(5, dtype=jnp.int32)[None], jnp.array([0, T], jnp.int32)
        length = jnp.full(1, S, jnp.int32)
        o = mla(q, cache, table, length, start, scale=scale, value_dim=R, implementation="reference")
        absorbed = jnp.einsum("thr,rhv->thv", o, w_uv)
        k = jnp.concatenate([jnp.einsum("sr,rhn->shn", latent, w_uk), jnp.broadcast_to(key[:, None], (S, H, DR))], -1)
        v = jnp.einsum("sr,rhv->shv", latent, w_uv)
        s = jnp.einsum("thd,shd->hts", jnp.concatenate([q_nope, q_rope], -1), k) * scale
        s = jnp.where(jnp.arange(S) <= (S - T + jnp.arange(T))[:, None], s, -jnp.inf)
        expanded = jnp.einsum("hts,shv->thv", jax.nn.softmax(s, -1), v)
        assert np.abs(absorbed - expanded).max() <= 1e4 * np.finfo(np.float64).eps * np.abs(expanded).max()


def test_page_size_and_order_change_no_bit(rng):
    x = jnp.asarray(rng.standard_normal((64, 96)), jnp.float32)
    q = jnp.asarray(rng.standard_normal((2, 4, 96)), jnp.float32)
    outs = []
    for page in (1, 16, 64):
        order = rng.permutation(64 // page)
        cache = jnp.zeros((64 // page, page, 96)).at[order].set(x.reshape(-1, page, 96))
        table, length = jnp.asarray(order.astype(np.int32))[None], jnp.array([50])
        outs.append(mla(q, cache, table, length, jnp.array([0, 2]), scale=0.1, value_dim=64, return_lse=True))
    for o, lse in outs[1:]:
        np.testing.assert_array_equal(o, outs[0][0])
        np.testing.assert_array_equal(lse, outs[0][1])


@pytest.mark.parametrize("chunk", [8, 24])
def test_context_in_chunks_merges_to_the_whole(chunk, rng):
    with jax.enable_x64(True):
        x, q = jnp.asarray(rng.standard_normal((48, 1, 96))), jnp.asarray(rng.standard_normal((3, 4, 96)))
        start = jnp.array([0, 3], jnp.int32)

        def part(first, last, causal):
            table, length = jnp.arange(first, last, dtype=jnp.int32)[None], jnp.array([last - first], jnp.int32)
            return mla(q, x, table, length, start, scale=0.1, value_dim=64, causal=causal, return_lse=True)

        whole = part(0, 48, True)
        o, lse = part(45, 48, True)
        for first in range(0, 45, chunk):
            o, lse = merge_states(o, lse, *part(first, min(first + chunk, 45), False))
        for a, b in ((o, whole[0]), (lse, whole[1])):
            assert np.abs(a - b).max() <= 1e4 * np.finfo(np.float64).eps


def test_one_row_is_its_value(rng):
    args = make_inputs(rng, (1,), (1,), 4, D=96, value_dim=64, page=16, return_lse=True)
    o, _ = mla(**args)
    row = args["cache"][args["page_table"][0, 0], 0, :64]
    np.testing.assert_array_equal(o[0], jnp.broadcast_to(row, (4, 64)))


WRONG = {
    "scale": ({"scale": None}, "scale is that of the expanded heads and must be given; see softmax_scale"),
    "value": ({"value_dim": 97}, "value_dim must be at most D=96, got 97"),
    "cache-scale": ({"cache_scale": 0.5}, "cache_scale belongs to format fp8, got format plain; leave it out"),
    "format": ({"format": "v4"}, "format must be one of plain, fp8, fp8_ds_mla, got 'v4'"),
    "row": ({"cache": jnp.ones((3, 4, 95))}, "cache must be [P page D] with D=96 (from q), got shape (3, 4, 95)"),
    "pool": ({"cache": jnp.ones((0, 4, 96))}, "the cache needs at least one page of one row, got shape (0, 4, 96)"),
    "ds-mla": (
        {"cache": jnp.ones((3, 4, 656), jnp.uint8), "format": "fp8_ds_mla"},
        "format fp8_ds_mla has rows of 656 bytes for D=576, got 656 and D=96",
    ),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_wrong_calls(changes, message):
    args = {"q": jnp.ones((2, 3, 96)), "cache": jnp.ones((3, 4, 96)), "page_table": jnp.array([[0, 1]])}
    args |= {"lengths": jnp.array([5]), "query_start": jnp.array([0, 2]), "scale": 0.1, "value_dim": 64}
    with pytest.raises(ValueError, match=f"^mla: {re.escape(message)}$"):
        mla(**args | changes)


def test_checked_mode():
    args = {"q": jnp.ones((2, 3, 96)), "cache": jnp.ones((3, 4, 96)), "page_table": jnp.array([[0, 3]])}
    args |= {"lengths": jnp.array([5]), "query_start": jnp.array([0, 2]), "scale": 0.1, "value_dim": 64}
    with pytest.raises(ValueError, match=re.escape("page_table[0, 1] must be a page of the pool, 0 to 2, got 3")):
        mla(**args, checked=True)
