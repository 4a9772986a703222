"""DeepSeek-V4's attention layer: low-rank projections, compressor, indexer, sparse attention, grouped output."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jaxattn import _checks, _latent_cache, _products
from jaxattn.nn.deepseek_v4_cache import TOKENS_PER_PAGE, WINDOW_PAGE, CompressorState, V4Batch, V4Cache
from jaxattn.nn.linear import make_linear, project
from jaxattn.nn.moe import Frozen
from jaxattn.ops.compressor import compressor
from jaxattn.ops.grouped_projection import grouped_projection
from jaxattn.ops.indexer import indexer
from jaxattn.ops.indexer_q import indexer_q
from jaxattn.ops.inv_rope_fp8_quant import inv_rope_fp8_quant
from jaxattn.ops.q_kv_rms_norm import q_kv_rms_norm
from jaxattn.ops.qnorm_rope_kv_insert import qnorm_rope_kv_insert
from jaxattn.ops.rope import rope
from jaxattn.ops.sparse_indices import all_entries, entry_slots, window_slots
from jaxattn.ops.sparse_mla import sparse_mla
from jaxattn.quant import fp8

_OP = "DeepseekV4Attention"
_MANY = 1024
"""Rows from which on copies of float32 products cost more than a launch for each product."""
type LinearFormat = Literal["none", "fp8_block"]
D, DR = _latent_cache.LATENT, _latent_cache.ROTARY


def _draw(rngs: nnx.Rngs, dtype: DTypeLike, *shape: int) -> Array:
    return (jax.random.normal(rngs.params(), shape, jnp.float32) * shape[0] ** -0.5).astype(dtype)


def _apart(x: Array, w: Array) -> tuple[Array, Array]:
    """Operands of a product: XLA joins those of the same x, and copies the results of many rows apart again."""
    return jax.lax.optimization_barrier((x, w)) if len(x) >= _MANY else (x, w)


def linear(inputs: int, outputs: int, *, format: str = "none", dtype: DTypeLike, rngs: nnx.Rngs) -> Any:
    """A linear layer in the model's dtype, or in DeepSeek-V4's FP8 with UE8M0 scales."""
    stored = None if format == "none" else format
    return make_linear(inputs, outputs, format=stored, ue8m0=stored is not None, dtype=dtype, rngs=rngs)


def check_format(op: str, **formats: str) -> None:
    """Raise `ValueError` for a format that V4's linear layers do not have."""
    for name, format in formats.items():
        if format not in ("none", "fp8_block"):
            raise ValueError(f"{op}: {name} must be none or fp8_block, got {format!r}")


class Compressor(nnx.Module):
    """Weights of one compressor: `wkv` and `wgate [M, W]` (products keep float32), `ape [ratio, W]`, `norm [dim]`."""

    def __init__(self, features: int, dim: int, ratio: int, *, eps: float, dtype: DTypeLike, rngs: nnx.Rngs):
        """Draw the parameters; W is `dim`, twice that for ratio 4."""
        width = dim * (2 if ratio == 4 else 1)
        self.wkv, self.wgate = (nnx.Param(_draw(rngs, dtype, features, width)) for _ in range(2))
        self.ape = nnx.Param(jnp.zeros((ratio, width), jnp.float32))
        self.norm = nnx.Param(jnp.ones(dim, dtype))
        self.ratio, self.eps = ratio, eps

    def __call__(self, x: Float[Array, "N M"], table: Float[Array, "P Dr"], cache: CompressorState, batch: V4Batch):
        """Update `cache` with the states of these tokens and the entries that they end."""
        kv, score = (_products.einsum("nm,mw->nw", *_apart(x, w[...])) for w in (self.wkv, self.wgate))
        cache.entries[...], cache.state[...] = compressor(
            kv,
            score,
            self.ape[...],
            self.norm[...],
            batch.positions,
            batch.request,
            table,
            cache.state[...],
            batch.state_table,
            cache.entries[...],
            batch.entry_slots_of_tokens(self.ratio),
            format=cache.format,
            page=None if cache.format == "plain" else cache.page,
            eps=self.eps,
        )


class Indexer(nnx.Module):
    """The lightning indexer: `wq_b` (Rq to H * 128), `weights_proj` (M to H) and a compressor of its own."""

    def __init__(
        self,
        features: int,
        q_rank: int,
        *,
        heads: int,
        dim: int,
        topk: int,
        eps: float,
        dtype: DTypeLike,
        linear_format: str = "none",
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        """Draw the parameters; `implementation` is handed to `jaxattn.indexer`."""
        self.wq_b = linear(q_rank, heads * dim, format=linear_format, dtype=dtype, rngs=rngs)
        self.weights_proj = linear(features, heads, dtype=dtype, rngs=rngs)
        self.compressor = Compressor(features, dim, 4, eps=eps, dtype=dtype, rngs=rngs)
        self.heads, self.dim, self.topk, self.implementation = heads, dim, topk, implementation

    def __call__(
        self,
        x: Float[Array, "N M"],
        q: Float[Array, "N Rq"],
        table: Float[Array, "P Dr"],
        cache: CompressorState,
        batch: V4Batch,
    ) -> Int32[Array, "N topk"]:
        """The best entries of each token, counted from its request's first; updates `cache` first.

        Keys stay where they are: `jaxattn.indexer` reads those of a token through its request's row of `entry_table`.
        """
        self.compressor(x, table, cache, batch)
        heads = project(self.wq_b, q).reshape(len(x), self.heads, self.dim)
        # XLA joins all products of x, and with so few columns among them it copies all weights in each step
        weights, q_scale = project(self.weights_proj, jax.lax.optimization_barrier(x)), None
        if cache.format == "plain":
            codes = rope(heads, batch.positions, table)
            weights = weights.astype(jnp.promote_types(x.dtype, jnp.float32)) * self.dim**-0.5 * self.heads**-0.5
        else:
            fp4 = cache.format == "indexer_mxfp4"
            codes, weights, *scale = indexer_q(heads, weights, batch.positions, table, format="mxfp4" if fp4 else "fp8")
            q_scale = scale[0] if fp4 else None
        visible = jnp.where(batch.positions >= 0, (batch.positions + 1) // self.compressor.ratio, 0)
        return indexer(
            codes,
            weights,
            cache.entries[...],
            None,
            jnp.zeros_like(visible),
            visible,
            topk=self.topk,
            q_scale=q_scale,
            page_table=batch.entry_table,
            requests=batch.request,
            page=cache.page,
            format=cache.format,
            implementation=self.implementation,
        )


class DeepseekV4Attention(nnx.Module):
    """Attention of one DeepSeek-V4 layer over a window and compressed entries of the past.

    Children and parameters are named as in DeepSeek's checkpoints: linear layers `wq_a` (M to Rq), `wq_b` (Rq to H *
    512), `wkv` (M to 512) and `wo_b` (G * Ro to M), `nnx.Linear` or `QuantizedLinear`; `q_norm [Rq]`, `kv_norm [512]`,
    `attn_sink [H]` (float32), `wo_a` float8_e4m3fn [G, Ro, H / G * 512] with `wo_a_scale` (blocks of 128 x 128); layers
    with a ratio have a `compressor`, ratio 4 an `indexer`.

    With both formats "none" and a plain `V4Cache`, nothing is rounded but to the layer's dtype: what implementations
    compute that keep no FP8 cache.
    """

    def __init__(
        self,
        features: int,
        heads: int,
        *,
        ratio: int,
        table: Float[Array, "P 64"] | nnx.Variable,
        q_rank: int = 1024,
        groups: int = 8,
        o_rank: int = 1024,
        window: int = 128,
        index_heads: int = 64,
        index_dim: int = 128,
        index_topk: int = 512,
        eps: float = 1e-6,
        dtype: DTypeLike = jnp.bfloat16,
        linear_format: LinearFormat = "none",
        output_format: LinearFormat = "fp8_block",
        implementation: str | None = None,
        index_implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        """Draw the parameters (sinks and positional scores start at zero).

        Args:
            features: M.
            heads: H, a multiple of `groups`.
            ratio: 1 (window only), 4 or 128.
            table: of `rope_table`, base 10000 on window-only layers, 160000 on others; a `nnx.Variable` can be shared.
            q_rank: Rq.
            groups: G, of heads in the output projection.
            o_rank: Ro, of each group.
            window: visible positions, the token itself included.
            index_heads: heads of the indexer.
            index_dim: width of its heads.
            index_topk: entries that it chooses.
            eps: of the norms.
            dtype: of parameters, inputs and outputs.
            linear_format: "none", or "fp8_block": E4M3 weights (zero until they are loaded) and activations with UE8M0
                scales.
            output_format: of `wo_a`: "fp8_block", its inputs too, or "none": [G, Ro, H / G * 512] in `dtype`.
            implementation: handed to `jaxattn.sparse_mla`.
            index_implementation: handed to `jaxattn.indexer`.
            rngs: source of the parameters.

        Raises:
            TypeError: dtype; ValueError: sizes that can never be right.
        """
        sizes = {"features": features, "heads": heads, "q_rank": q_rank, "groups": groups, "o_rank": o_rank}
        _checks.check_count(_OP, **sizes, window=window)
        _checks.check_dtype(_OP, "dtype", jax.ShapeDtypeStruct((), dtype), _checks.FLOATS)
        if ratio not in (1, 4, 128):
            raise ValueError(f"{_OP}: ratio must be 1, 4 or 128, got {ratio}")
        if heads % groups:
            raise ValueError(f"{_OP}: heads must be a multiple of groups, got heads={heads} and groups={groups}")
        if table.shape[1] != DR:
            raise ValueError(f"{_OP}: table must have rows of {DR} numbers, got {table.shape[1]}")
        check_format(_OP, linear_format=linear_format, output_format=output_format)
        how: dict[str, Any] = {"format": linear_format, "dtype": dtype, "rngs": rngs}
        self.wq_a, self.wq_b = linear(features, q_rank, **how), linear(q_rank, heads * D, **how)
        self.wkv, self.wo_b = linear(features, D, **how), linear(groups * o_rank, features, **how)
        self.q_norm, self.kv_norm = nnx.Param(jnp.ones(q_rank, dtype)), nnx.Param(jnp.ones(D, dtype))
        self.attn_sink = nnx.Param(jnp.zeros(heads, jnp.float32))
        kernels = [_draw(rngs, jnp.float32, heads // groups * D, o_rank).T for _ in range(groups)]
        self.wo_a: Any = nnx.Param(jnp.stack(kernels).astype(dtype))
        self.wo_a_scale: Any = nnx.data(None)
        if output_format == "fp8_block":
            blocks = [fp8.quantize(kernel, "block", ue8m0=True) for kernel in kernels]
            self.wo_a = Frozen(jnp.stack([codes for codes, _ in blocks]))
            self.wo_a_scale = Frozen(jnp.stack([scale for _, scale in blocks]))
        self.compressor, self.indexer = nnx.data(None), nnx.data(None)
        if ratio > 1:
            self.compressor = Compressor(features, D, ratio, eps=eps, dtype=dtype, rngs=rngs)
        if ratio == 4:
            index: dict[str, Any] = {"heads": index_heads, "dim": index_dim, "topk": index_topk}
            index |= {"linear_format": linear_format, "implementation": index_implementation}
            self.indexer = Indexer(features, q_rank, **index, eps=eps, dtype=dtype, rngs=rngs)
        self.table = table if isinstance(table, nnx.Variable) else nnx.Variable(table)
        self.features, self.heads, self.groups, self.ratio, self.window = features, heads, groups, ratio, window
        self.eps, self.implementation = eps, implementation

    def __call__(self, x: Float[Array, "N M"], cache: V4Cache, batch: V4Batch) -> Float[Array, "N M"]:
        """Attention output of every packed token; `cache` is updated with their rows and entries first.

        Raises:
            TypeError: x is not in the parameters' dtype; ValueError: x, cache and batch disagree.
        """
        dtype, table = self.q_norm.dtype, self.table[...]
        _checks.check_shapes(_OP, x=(x, "N M"), positions=(batch.positions, "N"))
        _checks.check_dtype(_OP, "x", x, (jnp.dtype(dtype).name,), "cast it to the layer's dtype")
        if x.shape[1] != self.features or cache.ratio != self.ratio:
            raise ValueError(
                f"{_OP}: this layer takes M={self.features} and a cache of ratio {self.ratio}, got M={x.shape[1]} and "
                f"ratio {cache.ratio}"
            )
        q, kv = q_kv_rms_norm(
            project(self.wq_a, x), project(self.wkv, x), self.q_norm[...], self.kv_norm[...], eps=self.eps
        )
        place: dict[str, Any] = {"format": cache.format, "page": WINDOW_PAGE if cache.format == "v4" else None}
        heads, cache.window[...] = qnorm_rope_kv_insert(
            project(self.wq_b, q).reshape(len(x), self.heads, D),
            kv,
            batch.positions,
            table,
            cache.window[...],
            batch.window_slots_of_tokens(),
            **place,
            eps=self.eps,
        )
        indices, counts = window_slots(
            batch.window_table, batch.request, batch.positions, window=self.window, page=WINDOW_PAGE
        )
        o = sparse_mla(
            heads,
            _rows(cache.window[...]),
            indices,
            counts=counts,
            sinks=self.attn_sink[...],
            **self._entries(x, q, table, cache, batch),
            **place,
            implementation=self.implementation,
        )
        return project(self.wo_b, self._grouped(o, batch.positions, table))

    def _grouped(self, o, positions, table) -> Float[Array, "N G*Ro"]:
        """The heads turned back, each group projected by `wo_a`."""
        N, dtype = len(o), self.q_norm.dtype
        if self.wo_a_scale is None:
            o = rope(o, positions, table, inverse=True).reshape(N, self.groups, self.wo_a.shape[2])
            y = _products.einsum("ngw,grw->ngr", o, self.wo_a[...]).astype(dtype)
        else:
            codes, scale = inv_rope_fp8_quant(o, positions, table, groups=self.groups)
            y = grouped_projection(codes, scale, self.wo_a[...], self.wo_a_scale[...], dtype=jnp.dtype(dtype).name)
        return y.reshape(N, y.shape[1] * y.shape[2])

    def _entries(self, x, q, table, cache: V4Cache, batch: V4Batch) -> dict[str, Any]:
        """The second cache of the attention, after it was updated: nothing on window-only layers."""
        if self.compressor is None or cache.main is None:
            return {}
        self.compressor(x, table, cache.main, batch)
        page = TOKENS_PER_PAGE // self.ratio
        if self.indexer is not None and cache.index is not None:
            chosen = self.indexer(x, q, table, cache.index, batch)
        else:
            chosen, _ = all_entries(batch.positions, ratio=self.ratio, most=batch.entry_table.shape[1] * page)
        slots, counts = entry_slots(batch.entry_table, batch.request, chosen, page=page)
        more = {"extra_cache": _rows(cache.main.entries[...]), "extra_indices": slots, "extra_counts": counts}
        return more | ({"extra_page": page} if cache.format == "v4" else {})


def _rows(pages: Array) -> Array:
    """A plain cache as `sparse_mla` takes it, its slots in a row; packed pages as they are."""
    return pages.reshape(-1, pages.shape[2]) if pages.ndim == 3 else pages
