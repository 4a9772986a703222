"""What the compressor promises: streaming is one shot, windows by hand, masks, formats."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import compressor, rope_table
from jaxattn.ops._compressor_cases import make_inputs
from pallas_kernels import _mosaic

D, DR = 32, 16


class Request:
    """One request whose tokens are fed in chunks; entries are slots in order, in a plain float32 cache."""

    def __init__(self, tokens, ratio, overlap, rng, pages=None):
        W = D * (2 if overlap else 1)
        self.kv, self.score = (jnp.asarray(rng.standard_normal((tokens, W)), jnp.float32) for _ in range(2))
        self.ape = jnp.asarray(rng.standard_normal((ratio, W)), jnp.float32)
        self.weight = jnp.asarray(rng.standard_normal(D), jnp.float32)
        self.table, self.ratio, self.tokens = rope_table(DR, max(tokens, 1)), ratio, tokens
        spage = 4 if ratio < 8 else 8
        SP = -(-tokens // spage)
        self.state = jnp.full((SP, spage, 2 * W), jnp.nan)
        self.pages = jnp.asarray(rng.permutation(SP).astype(np.int32) if pages is None else pages)[None]
        self.cache = jnp.full((tokens // ratio + 1, 1, D), -7.0)

    def run(self, chunk):
        cache, state = self.cache, self.state
        for start in range(0, self.tokens, chunk):
            at = jnp.arange(start, min(start + chunk, self.tokens), dtype=jnp.int32)
            # padded to one shape: padding must do nothing
            pad = chunk - len(at)
            where = jnp.pad(at, (0, pad), constant_values=-1)
            rows = [jnp.pad(x[at], ((0, pad), (0, 0)), constant_values=np.nan) for x in (self.kv, self.score)]
            cache, state = compressor(
                *rows,
                self.ape,
                self.weight,
                where,
                jnp.zeros_like(where),
                self.table,
                state,
                self.pages,
                cache,
                where // self.ratio,
                format="plain",
            )
        return np.asarray(cache)[:, 0], np.asarray(state)

    def dense(self):
        """Entries by the formula, in float64."""
        kv, score, ape = (np.asarray(x, np.float64) for x in (self.kv, self.score, self.ape))
        out = []
        for e in range(self.tokens // self.ratio):
            last = (e + 1) * self.ratio - 1
            rows = []
            for q in range(last - kv.shape[1] // D * self.ratio + 1, last + 1):
                half = 0 if kv.shape[1] == D or q <= last - self.ratio else 1
                columns = slice(half * D, (half + 1) * D)
                if q >= 0:
                    rows.append((kv[q, columns], score[q, columns] + ape[q % self.ratio, columns]))
            v, s = (np.stack(x) for x in zip(*rows, strict=True))
            w = np.exp(s - s.max(0))
            c = (w / w.sum(0) * v).sum(0)
            n = c / np.sqrt((c**2).mean() + 1e-6) * np.asarray(self.weight, np.float64)
            cos, sin = np.split(np.asarray(self.table, np.float64)[e * self.ratio], 2)
            a, b = n[-DR::2].copy(), n[-DR + 1 :: 2].copy()
            n[-DR::2], n[-DR + 1 :: 2] = a * cos - b * sin, b * cos + a * sin
            out.append(n)
        return np.stack(out) if out else np.zeros((0, D))


@pytest.mark.parametrize(
    ("ratio", "overlap", "tokens"),
    [
        *((4, True, n) for n in (1, 3, 4, 5, 8, 9)),
        (128, False, 127),
        (128, False, 128),
        (128, False, 257),
        (4, False, 9),
    ],
)
def test_bc27_token_by_token_is_chunks_is_one_shot(ratio, overlap, tokens, rng):
    request = Request(tokens, ratio, overlap, rng)
    truth = request.dense()
    chunks = (tokens, 3) if ratio == 128 else (tokens, 3, 1)
    caches, states = zip(*(request.run(chunk) for chunk in chunks), strict=True)
    for cache, state in zip(caches, states, strict=True):
        np.testing.assert_array_equal(cache, caches[0])
        np.testing.assert_array_equal(state, states[0])
    n = len(truth)
    assert (caches[0][n:] == -7).all(), "an entry without a whole window"
    bound = 64 * np.finfo(np.float32).eps * (1 + np.abs(truth).max(initial=0))
    assert np.abs(caches[0][:n] - truth).max(initial=0) <= bound


def test_pages_may_lie_in_any_order(rng):
    request = Request(12, 4, True, rng, pages=np.arange(3, dtype=np.int32))
    a, _ = request.run(5)
    request.pages = jnp.array([[2, 0, 1]])
    b, _ = request.run(5)
    np.testing.assert_array_equal(a, b)


def test_one_token_by_hand():
    """Ratio 1 without overlap: the entry is the normed token."""
    kv = jnp.array([[3.0, 4.0, 0.0, 0.0]])
    args = {"ape": jnp.zeros((1, 4)), "weight": jnp.ones(4), "cos_sin": jnp.array([[1.0, 0.0]])}
    cache, state = compressor(
        kv=kv,
        score=kv,
        positions=jnp.array([0]),
        request=jnp.array([0]),
        state=jnp.zeros((1, 1, 8)),
        state_table=jnp.array([[0]]),
        cache=jnp.zeros((1, 1, 4)),
        cache_slots=jnp.array([0]),
        format="plain",
        **args,
    )
    np.testing.assert_array_equal(state[0, 0], [3, 4, 0, 0, 3, 4, 0, 0])
    assert np.abs(np.asarray(cache)[0, 0] - np.array([1.2, 1.6, 0, 0])).max() <= 8 * np.finfo(np.float32).eps


@pytest.mark.parametrize("format", ["v4", "indexer_fp8", "indexer_mxfp4"])
def test_compiled_is_eager_to_the_bit(format, rng):
    args = make_inputs(rng, (9, 1), (9, 8), D=512 if format == "v4" else 128, format=format)
    arrays = {k: v for k, v in args.items() if k not in ("format", "page")}
    options = {k: args[k] for k in ("format", "page")}
    eager = compressor(**args)
    compiled = jax.jit(lambda a: compressor(**a, **options))(arrays)
    for a, b in zip(eager, compiled, strict=True):
        np.testing.assert_array_equal(a, b)


WRONG = {
    "format": ({"format": "fp8"}, "format must be one of plain, v4, indexer_fp8, indexer_mxfp4, got 'fp8'"),
    "page": ({"page": None}, "page belongs to packed formats, and only there, got format v4 and page none"),
    "state": ({"state": jnp.zeros((2, 4, 5))}, "with D=512 from weight; got W=1024, state [2, 4, 5], ape [4, 1024]"),
    "dims": ({"format": "indexer_fp8"}, "format indexer_fp8 stores D, Dr = 128, 64, got 512, 64"),
    "bytes": ({"cache": jnp.zeros((2, 99), jnp.uint8)}, "needs at least 37376 bytes, got a cache of pages of 99"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_wrong_calls(changes, message, rng):
    args = make_inputs(rng, (4,), (4,)) | changes
    with pytest.raises(ValueError, match=rf"^compressor: .*{re.escape(message)}$"):
        compressor(**args)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("format", ["v4", "indexer_fp8"])
def test_the_kernel_finds_angles_itself(format, dtype, rng):
    """Also at positions and slots outside, and in tables of other types."""
    args = make_inputs(rng, (9, 1), (9, 8), D=512 if format == "v4" else 128, format=format)
    args["cos_sin"] = args["cos_sin"][:5].astype(dtype)
    with _mosaic.interpret():
        found = compressor(**args, implementation="mosaic")
    for a, b in zip(found, compressor(**args), strict=True):
        np.testing.assert_array_equal(a, b)
