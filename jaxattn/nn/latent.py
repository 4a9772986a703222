"""Multi-head latent attention of DeepSeek-V2 and V3 and its paged cache of latents."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxattn import _checks, _products
from jaxattn.nn.cache import KVPages, PagedBatch
from jaxattn.nn.linear import make_linear, matrix, project
from jaxattn.nn.norm import RMSNorm
from jaxattn.ops.attention import attention
from jaxattn.ops.latent_cache_gather import at_slots
from jaxattn.ops.latent_cache_write import latent_cache_write
from jaxattn.ops.merge_states import merge_states
from jaxattn.ops.mla import mla
from jaxattn.ops.q_kv_rms_norm import q_kv_rms_norm
from jaxattn.ops.rope import rope
from jaxattn.ops.window_cache import slot_mapping

_OP = "MLAttention"


class LatentCache(nnx.Module):
    """Pages of latents of one layer, zero at first: `[latent | rotated key]` rows in a format of `latent_cache_write`.

    Under `nnx.jit` the pages are updated in place if the cache is donated, copied if not.
    """

    def __init__(
        self,
        num_pages: int,
        page: int,
        *,
        format: str = "plain",
        dtype: DTypeLike = jnp.bfloat16,
        kv_rank: int = 512,
        rope_dim: int = 64,
        scale: float | None = None,
    ):
        """Allocate the pages.

        Args:
            num_pages: P.
            page: rows of a page.
            format: "plain", "fp8" or "fp8_ds_mla".
            dtype: of a plain cache, that of the layer.
            kv_rank: R.
            rope_dim: Dr.
            scale: of format "fp8", None = 1.

        Raises:
            ValueError: sizes or format.
        """
        op = "LatentCache"
        _checks.check_count(op, num_pages=num_pages, page=page, kv_rank=kv_rank, rope_dim=rope_dim)
        if format not in ("plain", "fp8", "fp8_ds_mla"):
            raise ValueError(f"{op}: format must be plain, fp8 or fp8_ds_mla, got {format!r}")
        stored = {"plain": dtype, "fp8": "float8_e4m3fn"}.get(format, "uint8")
        width = 656 if format == "fp8_ds_mla" else kv_rank + rope_dim
        self.rows = KVPages(jnp.zeros((num_pages, page, width), stored))
        self.scale = KVPages(jnp.float32(1 if scale is None else scale)) if format == "fp8" else nnx.data(None)
        self.format = format

    def update(self, latent: Float[Array, "N R"], rotary: Float[Array, "N Dr"], slots: Array) -> None:
        """Write this step's rows; rows with a slot outside the cache are skipped."""
        scale = None if self.scale is None else self.scale[...]
        self.rows[...] = latent_cache_write(latent, rotary, self.rows[...], slots, format=self.format, scale=scale)

    def read(self, slots: Array, dtype: DTypeLike) -> Float[Array, "N R+Dr"]:
        """Rows as numbers, as `jaxattn.mla` reads them; zeros for slots outside the cache."""
        packed = self.format == "fp8_ds_mla"
        rows = at_slots(self.rows[...], slots, format="fp8_ds_mla" if packed else "plain", page=None)
        if self.scale is not None:
            rows = rows.astype(jnp.float32) * self.scale[...]
        return jnp.where((slots >= 0)[:, None], rows, 0).astype(dtype)


class MLAttention(nnx.Module):
    """Causal latent attention of packed requests: project, write the cache, attend in latent space, project back.

    Children are named as in Hugging Face checkpoints: `q_a_proj` (M to Rq), `q_a_layernorm`, `q_b_proj` (Rq to
    H * (Dn + Dr): nope, then rope per head), or `q_proj` (M to H * (Dn + Dr)) without a rank of queries (V2-Lite);
    `kv_a_proj_with_mqa` (M to R + Dr), `kv_a_layernorm`, `kv_b_proj` (R to H * (Dn + Dv): key, then value per head),
    `o_proj` (H * Dv to M). Those of the other kind are None.

    By default keys and values are never expanded: `kv_b_proj` is absorbed into the queries and the outputs. With
    `expand` every head has its own, which takes fewer operations for long prompts. Both are the function of the paper's
    equations 37 to 47. A quantized `kv_b_proj` is dequantized for them.
    """

    def __init__(
        self,
        features: int,
        heads: int,
        *,
        table: Float[Array, "P Dr"] | nnx.Variable,
        scale: float,
        q_rank: int | None = 1536,
        kv_rank: int = 512,
        nope_dim: int = 128,
        value_dim: int = 128,
        interleaved: bool = True,
        use_bias: bool = False,
        eps: float = 1e-6,
        format: str | None = None,
        ue8m0: bool = False,
        dtype: DTypeLike = jnp.bfloat16,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        """Draw the parameters.

        Args:
            features: M.
            heads: H.
            table: of `rope_table`; its width is Dr. Layers that are given one variable share it.
            scale: of the softmax, `softmax_scale(nope_dim + Dr, ...)`.
            q_rank: Rq; None = queries are projected at once.
            kv_rank: R.
            nope_dim: Dn, width of a head's unrotated part.
            value_dim: Dv.
            interleaved: rotated pairs are neighbours, else halves.
            use_bias: `q_a_proj`, `kv_a_proj_with_mqa` and `o_proj` have biases.
            eps: of the norms.
            format: of the projections' weights, None or "fp8_block".
            ue8m0: of format "fp8_block".
            dtype: of parameters, inputs and outputs.
            implementation: handed to `jaxattn.mla` and `jaxattn.attention`.
            rngs: source of the parameters.

        Raises:
            TypeError: dtype; ValueError: sizes or format.
        """
        sizes = {"features": features, "heads": heads, "kv_rank": kv_rank, "nope_dim": nope_dim}
        sizes |= {} if q_rank is None else {"q_rank": q_rank}
        _checks.check_count(_OP, **sizes, value_dim=value_dim)
        _checks.check_positive(_OP, scale=scale, eps=eps)
        _checks.check_dtype(_OP, "dtype", jax.ShapeDtypeStruct((), dtype), _checks.FLOATS)
        if format not in (None, "fp8_block"):
            raise ValueError(f"{_OP}: format must be None or 'fp8_block', got {format!r}")
        rope_dim = table.shape[1]
        width = heads * (nope_dim + rope_dim)

        def linear(inputs, outputs, use_bias=False):
            how: dict[str, Any] = {"format": format, "ue8m0": ue8m0, "dtype": dtype, "rngs": rngs}
            return make_linear(inputs, outputs, use_bias=use_bias, **how)

        direct = q_rank is None
        self.q_proj = linear(features, width) if direct else nnx.data(None)
        self.q_a_proj = nnx.data(None) if direct else linear(features, q_rank, use_bias)
        self.q_a_layernorm = nnx.data(None) if direct else RMSNorm(q_rank, eps=eps, dtype=dtype)
        self.q_b_proj = nnx.data(None) if direct else linear(q_rank, width)
        self.kv_a_proj_with_mqa = linear(features, kv_rank + rope_dim, use_bias)
        self.kv_a_layernorm = RMSNorm(kv_rank, eps=eps, dtype=dtype)
        self.kv_b_proj = linear(kv_rank, heads * (nope_dim + value_dim))
        self.o_proj = linear(heads * value_dim, features, use_bias)
        self.table = table if isinstance(table, nnx.Variable) else nnx.Variable(table)
        self.features, self.heads, self.kv_rank, self.rope_dim = features, heads, kv_rank, rope_dim
        self.nope_dim, self.value_dim, self.scale, self.eps = nope_dim, value_dim, scale, eps
        self.interleaved, self.implementation = interleaved, implementation

    def __call__(
        self,
        x: Float[Array, "N M"],
        cache: LatentCache,
        batch: PagedBatch,
        *,
        expand: bool = False,
        chunk: int = 4096,
    ) -> Float[Array, "N M"]:
        """Attention output of every packed token; `cache` is updated with their latents first.

        Args:
            x: packed tokens.
            cache: of the layer.
            batch: where the tokens belong.
            expand: attend with the keys and values of every head, for prefill: fewer operations from about 170 query
                tokens of a request on. This step's tokens then attend to each other as they are, and to earlier ones
                as the cache holds them.
            chunk: earlier tokens of a request that are expanded at a time.

        Raises:
            TypeError: x is not in the parameters' dtype;
            ValueError: x, cache and batch disagree in a size, or `chunk` is below 1.
        """
        N = x.shape[0]
        self._check(_OP, x, batch)
        _checks.check_count(_OP, chunk=chunk)
        nope, rotated, latent, key, _ = self._project(x, batch)
        cache.update(latent, key, batch.slots)
        if expand:
            q = jnp.concatenate([nope, rotated], -1)
            o = self._expanded(q, jnp.concatenate([latent, key], -1), cache, batch, chunk)
        else:
            o = self._absorbed(nope, rotated, cache, batch)
        return project(self.o_proj, o.reshape(N, self.heads * self.value_dim))

    def _check(self, op: str, x: Array, batch: PagedBatch) -> None:
        """Raise unless tokens fit the layer and the batch."""
        dtype = self.kv_a_layernorm.weight.dtype
        _checks.check_shapes(op, x=(x, "N M"), slots=(batch.slots, "N"), positions=(batch.positions, "N"))
        _checks.check_dtype(op, "x", x, (jnp.dtype(dtype).name,), "cast it to the layer's dtype")
        if x.shape[1] != self.features:
            raise ValueError(f"{op}: x must be packed tokens [N M] with M={self.features}, got shape {tuple(x.shape)}")

    def _project(self, x: Array, batch: PagedBatch) -> tuple[Array, Array, Array, Array, Array | None]:
        """Queries [N, H, Dn] and, rotated, [N, H, Dr], the normed latent, the rotated key, the normed rank of q."""
        joined = project(self.kv_a_proj_with_mqa, x)
        q, latent, low = self._queries(x, joined[:, : self.kv_rank])
        q = q.reshape(x.shape[0], self.heads, self.nope_dim + self.rope_dim)
        turned = jnp.concatenate([q[..., self.nope_dim :], joined[:, None, self.kv_rank :]], 1)
        turned = rope(turned, batch.positions, self.table[...], interleaved=self.interleaved)
        return q[..., : self.nope_dim], turned[:, :-1], latent, turned[:, -1], low

    def _kv_b(self) -> Array:
        kv_b = matrix(self.kv_b_proj, self.kv_a_layernorm.weight.dtype)
        return kv_b.reshape(self.kv_rank, self.heads, self.nope_dim + self.value_dim)

    def _absorbed(self, nope, rotated, cache: LatentCache, batch: PagedBatch) -> Float[Array, "N H Dv"]:
        """Attention in latent space (`forward_mqa` of vLLM)."""
        o = mla(
            self._into_latent(nope, rotated),
            cache.rows[...],
            batch.page_table,
            batch.lengths,
            batch.query_start,
            scale=self.scale,
            value_dim=self.kv_rank,
            format=cache.format,
            cache_scale=None if cache.scale is None else cache.scale[...],
            implementation=self.implementation,
        )
        return self._out_of_latent(o)

    def _into_latent(self, nope, rotated) -> Float[Array, "N H R+Dr"]:
        """Queries with the keys' half of `kv_b_proj` in them."""
        return jnp.concatenate([_einsum("nhd,rhd->nhr", nope, self._kv_b()[..., : self.nope_dim]), rotated], -1)

    def _out_of_latent(self, o) -> Float[Array, "N H Dv"]:
        """Outputs with the values' half of it."""
        return _einsum("nhr,rhv->nhv", o, self._kv_b()[..., self.nope_dim :])

    def _expanded(self, q, rows, cache: LatentCache, batch: PagedBatch, chunk: int) -> Float[Array, "N H Dv"]:
        """Attention with keys and values of every head (`forward_mha`): new rows, then earlier ones in chunks."""
        start, queries = batch.query_start, jnp.diff(batch.query_start)
        before, B = batch.lengths - queries, queries.shape[0]

        def attend(rows, key_start, causal):
            k, v = self._heads(rows)
            options: dict[str, Any] = {"scale": self.scale, "causal": causal, "return_lse": True}
            return attention(q, k, v, start, key_start, **options, implementation=self.implementation)

        def more(n, state):
            counts = jnp.clip(before - n * chunk, 0, chunk)
            ends = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
            row = jnp.arange(B * chunk, dtype=jnp.int32)
            request = jnp.minimum(
                jnp.searchsorted(ends[1:], row, side="right", method="compare_all").astype(jnp.int32), B - 1
            )
            position = jnp.where(row < ends[-1], n * chunk + row - ends[request], -1)
            rows = cache.read(slot_mapping(batch.page_table, request, position, page=cache.rows.shape[1]), q.dtype)
            return tuple(merge_states(*state, *attend(rows, ends, False)))

        state = attend(rows, start, True)
        if not B:
            return state[0]
        return lax.fori_loop(0, (jnp.max(before) + (chunk - 1)) // chunk, more, state)[0]

    def _heads(self, rows: Float[Array, "S R+Dr"]) -> tuple[Float[Array, "S H D"], Float[Array, "S H Dv"]]:
        """Keys and values of every head from latents and rotated keys."""
        kv = _einsum("sr,rhd->shd", rows[:, : self.kv_rank], self._kv_b())
        shared = jnp.broadcast_to(rows[:, None, self.kv_rank :], (*kv.shape[:2], self.rope_dim))
        return jnp.concatenate([kv[..., : self.nope_dim], shared], -1), kv[..., self.nope_dim :]

    def _queries(self, x, latent):
        """Queries [N, H * (Dn + Dr)], the normed latent, and the normed [N, Rq] that queries come from, if any."""
        if self.q_proj is not None:
            return project(self.q_proj, x), self.kv_a_layernorm(latent), None
        assert self.q_a_layernorm is not None
        q, latent = q_kv_rms_norm(
            project(self.q_a_proj, x),
            latent,
            self.q_a_layernorm.weight[...],
            self.kv_a_layernorm.weight[...],
            eps=self.eps,
        )
        return project(self.q_b_proj, q), latent, q


def _einsum(form: str, x: Array, w: Array) -> Array:
    """Products accumulated in float32 (float64 for float64), rounded to the dtype of `x` once."""
    return _products.einsum(form, x, w).astype(x.dtype)
