"""DeepSeek-V3.2's attention: multi-head latent attention over the tokens that a lightning indexer chooses."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jaxattn import _checks, _latent_cache
from jaxattn.nn.cache import KVPages, PagedBatch
from jaxattn.nn.latent import LatentCache, MLAttention
from jaxattn.nn.linear import make_linear, project
from jaxattn.nn.norm import LayerNorm
from jaxattn.ops.indexer import indexer
from jaxattn.ops.indexer_q import indexer_q
from jaxattn.ops.latent_cache_write import latent_cache_write
from jaxattn.ops.rope import rope
from jaxattn.ops.sparse_indices import entry_slots, places
from jaxattn.ops.sparse_mla import sparse_mla

_OP = "DeepseekV32Attention"
QUERY_FLOOR = 1e-10
"""Smallest amax of the indexer's queries; that of its keys is V4's, 1e-4."""


class V32Cache(nnx.Module):
    """The caches of one DeepSeek-V3.2 layer: pages of latents, and the indexer's keys in pages of the same numbers.

    Under `nnx.jit` they are updated in place if the cache is donated, copied if not.
    """

    def __init__(
        self,
        num_pages: int,
        page: int = 64,
        *,
        format: str = "fp8_ds_mla",
        index_format: str | None = None,
        dtype: DTypeLike = jnp.bfloat16,
        kv_rank: int = 512,
        rope_dim: int = 64,
        index_dim: int = 128,
    ):
        """Allocate the pages, zero at first.

        Args:
            num_pages: P.
            page: tokens of a page; the kernels of `jaxattn.indexer` want 64.
            format: of latents, "fp8_ds_mla", 656 bytes each, or "plain", numbers of `dtype` that no cache rounds.
            index_format: of keys, "indexer_fp8", 128 codes and a float32 scale, or "plain"; None = FP8, plain beside
                plain latents.
            dtype: of a plain cache, that of the layer.
            kv_rank: R; 512 in packed rows.
            rope_dim: Dr; 64 in packed rows.
            index_dim: width of a key; 128 in packed pages.

        Raises:
            TypeError, ValueError: sizes or format.
        """
        op = "V32Cache"
        _checks.check_count(op, num_pages=num_pages, page=page, index_dim=index_dim)
        if format not in ("fp8_ds_mla", "plain"):
            raise ValueError(f"{op}: format must be fp8_ds_mla or plain, got {format!r}")
        if format == "fp8_ds_mla" and (kv_rank, rope_dim) != (512, 64):
            raise ValueError(f"{op}: format fp8_ds_mla needs kv_rank, rope_dim = 512, 64, got {kv_rank}, {rope_dim}")
        if index_format is None:
            index_format = "plain" if format == "plain" else "indexer_fp8"
        if index_format not in ("indexer_fp8", "plain"):
            raise ValueError(f"{op}: index_format must be indexer_fp8 or plain, got {index_format!r}")
        packed = index_format != "plain"
        if packed and index_dim != 128:
            raise ValueError(f"{op}: index_format indexer_fp8 needs index_dim = 128, got {index_dim}")
        sizes: dict[str, Any] = {"kv_rank": kv_rank, "rope_dim": rope_dim}
        self.latent = LatentCache(num_pages, page, format=format, dtype=dtype, **sizes)
        self.index_format = index_format
        size = _latent_cache.PAGED["indexer_fp8"].least(page)
        shape = (num_pages, page, index_dim)
        self.keys = KVPages(jnp.zeros((num_pages, size), jnp.uint8) if packed else jnp.zeros(shape, dtype))
        self.page, self.index_dim = page, index_dim

    def update_keys(self, keys: Float[Array, "N D"], slots: Int32[Array, " N"]) -> None:
        """Write this step's indexer keys; rows with a slot outside the cache are skipped."""
        page = None if self.index_format == "plain" else self.page
        half = self.index_dim // 2
        self.keys[...] = latent_cache_write(
            keys[:, :half], keys[:, half:], self.keys[...], slots, format=self.index_format, page=page
        )


class Indexer(nnx.Module):
    """V3.2's lightning indexer: `wq_b` (Rq to H * D), `wk` (M to D), `k_norm` (LayerNorm), `weights_proj` (M to H).

    The first Dr numbers of queries and keys are rotated, in halves unless `interleaved`.
    """

    def __init__(
        self,
        features: int,
        q_rank: int,
        *,
        heads: int,
        dim: int,
        topk: int,
        interleaved: bool = False,
        format: str | None = None,
        ue8m0: bool = False,
        dtype: DTypeLike,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        """Draw the parameters; `format` and `ue8m0` are those of `wq_b` and `wk`."""
        how: dict[str, Any] = {"format": format, "ue8m0": ue8m0, "dtype": dtype, "rngs": rngs}
        self.wq_b, self.wk = make_linear(q_rank, heads * dim, **how), make_linear(features, dim, **how)
        self.k_norm = LayerNorm(dim)
        self.weights_proj = make_linear(features, heads, dtype=dtype, rngs=rngs)
        self.heads, self.dim, self.topk = heads, dim, topk
        self.interleaved, self.implementation = interleaved, implementation

    def __call__(
        self,
        x: Float[Array, "N M"],
        q: Float[Array, "N Rq"],
        table: Float[Array, "P Dr"],
        cache: V32Cache,
        batch: PagedBatch,
    ) -> tuple[Int32[Array, "N topk"], Int32[Array, " N"]]:
        """Slots of the chosen tokens, rising by position, -1 behind the last, and their counts; writes keys first.

        Args:
            x: packed tokens.
            q: normed latent of the queries.
            table: of the rotation.
            cache: keys of the layer.
            batch: where the tokens belong.
        """
        N = x.shape[0]
        turn: dict[str, Any] = {"first": True, "interleaved": self.interleaved}
        keys = rope(self.k_norm(project(self.wk, x))[:, None], batch.positions, table, **turn)[:, 0]
        cache.update_keys(keys, batch.slots)
        heads = project(self.wq_b, q).reshape(N, self.heads, self.dim)
        weights = project(self.weights_proj, x)
        if cache.index_format == "plain":
            heads = rope(heads, batch.positions, table, **turn)
            weights = weights.astype(jnp.promote_types(x.dtype, jnp.float32)) * self.dim**-0.5 * self.heads**-0.5
        else:
            heads, weights = indexer_q(heads, weights, batch.positions, table, **turn, floor=QUERY_FLOOR)
        request, position, live = places(batch.query_start, batch.lengths, N)
        visible = jnp.where(live, position + 1, 0)
        chosen = indexer(
            heads,
            weights,
            cache.keys[...],
            None,
            jnp.zeros_like(visible),
            visible,
            topk=self.topk,
            page_table=batch.page_table,
            requests=request,
            page=cache.page,
            format=cache.index_format,
            order="rising",
            implementation=self.implementation,
        )
        slots, _ = entry_slots(batch.page_table, request, chosen, page=cache.page)
        return slots, jnp.sum(chosen >= 0, -1, dtype=jnp.int32)


class DeepseekV32Attention(MLAttention):
    """`MLAttention` over the `index_topk` earlier tokens that `indexer` chooses for each token, itself included.

    Children are named as in Hugging Face checkpoints: those of `MLAttention` with a rank of queries, and `indexer` with
    `wq_b`, `wk`, `k_norm` and `weights_proj`. Where a token sees no more than `index_topk` others, the result is that
    of `MLAttention`, but for the order of sums.
    """

    def __init__(
        self,
        features: int,
        heads: int,
        *,
        table: Float[Array, "P Dr"] | nnx.Variable,
        scale: float,
        q_rank: int = 1536,
        index_heads: int = 64,
        index_dim: int = 128,
        index_topk: int = 2048,
        index_interleaved: bool = False,
        index_implementation: str | None = None,
        format: str | None = None,
        ue8m0: bool = False,
        dtype: DTypeLike = jnp.bfloat16,
        implementation: str | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        """Draw the parameters.

        Args:
            features: M.
            heads: H.
            table: of `rope_table`, for the indexer, too.
            scale: of the softmax.
            q_rank: Rq.
            index_heads: heads of the indexer.
            index_dim: width of its heads.
            index_topk: tokens that it chooses.
            index_interleaved: its rotated pairs are neighbours, else halves, whatever the attention's are.
            index_implementation: handed to `jaxattn.indexer`.
            format: of the projections' weights, None or "fp8_block"; `indexer.weights_proj` has none.
            ue8m0: of format "fp8_block".
            dtype: of parameters, inputs and outputs.
            implementation: handed to `jaxattn.sparse_mla`.
            rngs: source of the parameters.
            **options: `kv_rank`, `nope_dim`, `value_dim`, `interleaved`, `use_bias` and `eps` of `MLAttention`.

        Raises:
            TypeError: dtype; ValueError: sizes or format.
        """
        sizes = {"q_rank": q_rank, "index_heads": index_heads, "index_dim": index_dim, "index_topk": index_topk}
        _checks.check_count(_OP, **sizes)
        if table.shape[1] > index_dim:
            raise ValueError(f"{_OP}: index_dim must be at least that of the table, {table.shape[1]}, got {index_dim}")
        how: dict[str, Any] = {"format": format, "ue8m0": ue8m0, "dtype": dtype, "rngs": rngs}
        super().__init__(
            features, heads, table=table, scale=scale, q_rank=q_rank, implementation=implementation, **how, **options
        )
        self.indexer = Indexer(
            features,
            q_rank,
            heads=index_heads,
            dim=index_dim,
            topk=index_topk,
            interleaved=index_interleaved,
            implementation=index_implementation,
            **how,
        )

    def __call__(self, x: Float[Array, "N M"], cache: V32Cache, batch: PagedBatch) -> Float[Array, "N M"]:  # type: ignore[override]
        """Attention output of every packed token; `cache` is updated with their latents and keys first.

        Raises:
            TypeError: x is not in the parameters' dtype; ValueError: x, cache and batch disagree in a size.
        """
        self._check(_OP, x, batch)
        if cache.index_dim != self.indexer.dim:
            raise ValueError(
                f"{_OP}: this layer takes a cache of index_dim={self.indexer.dim}, got one of {cache.index_dim}"
            )
        nope, rotated, latent, key, low = self._project(x, batch)
        cache.latent.update(latent, key, batch.slots)
        assert low is not None
        slots, counts = self.indexer(x, low, self.table[...], cache, batch)
        rows = cache.latent.rows[...]
        o = sparse_mla(
            self._into_latent(nope, rotated),
            rows if cache.latent.format == "fp8_ds_mla" else rows.reshape(-1, rows.shape[2]),
            slots,
            counts=counts,
            scale=self.scale,
            value_dim=self.kv_rank,
            format=cache.latent.format,
            implementation=self.implementation,
        )
        return project(self.o_proj, self._out_of_latent(o).reshape(x.shape[0], self.heads * self.value_dim))
