"""DeepSeek-V4 as a Flax NNX model: embedding, hyper-connected layers, head, and blocks that predict further tokens."""

import dataclasses
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jaxattn import _checks, _products
from jaxattn.models import _deepseek_v4_weights as weights
from jaxattn.models._causal import stored_dtype
from jaxattn.models.checkpoint import Checkpoint, CheckpointError, load
from jaxattn.models.deepseek_v4_config import DeepseekV4Config
from jaxattn.nn.deepseek_v4_cache import TOKENS_PER_PAGE, WINDOW_PAGE, V4Batch, V4Cache, state_page
from jaxattn.nn.deepseek_v4_layer import DeepseekV4DecoderLayer, MTPBlock
from jaxattn.nn.hyper import HyperHead
from jaxattn.ops.rms_norm_quant import rms_norm_quant

_OP = "DeepseekV4ForCausalLM"
type Batches = dict[int, V4Batch]
"""The batch of a step for layers of each ratio: they differ in the pages of compressor states."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class V4Tables:
    """Pages of every request, int32 `[B, pages]`; window and state pages are used again in turn."""

    window: Int32[Array, "B wpages"]
    entries: Int32[Array, "B epages"]
    states: dict[int, Int32[Array, "B spages"]]
    """By the ratio of the layers."""


class V4Caches(nnx.Module):
    """Caches of all layers, `layers`, and of the blocks that predict further tokens, `mtp`."""

    def __init__(self, layers: list[V4Cache], mtp: list[V4Cache]):
        """Keep them."""
        self.layers, self.mtp = nnx.List(layers), nnx.List(mtp)


class DeepseekV4ForCausalLM(nnx.Module):
    """Logits of packed tokens; a `CausalLM` for `jaxattn.models.generate`.

    The tree is the checkpoint's: `embed`, `layers.0.attn.wq_a` and so on, `norm`, `head`, `mtp.0.e_proj`. Hyper-
    connections are modules, `layers.0.attn_hc.fn` for `layers.0.hc_attn_fn`; matrices [out, in] of checkpoints stand
    here as [in, out], experts are stacked.

    Example:
        model = DeepseekV4ForCausalLM.from_pretrained("DeepSeek-V4-Flash", max_positions=65536)
        generate(model, [[0, 100, 200]], max_new_tokens=32)
    """

    def __init__(self, config: DeepseekV4Config, *, dtype: DTypeLike = jnp.bfloat16, rngs: nnx.Rngs):
        """Draw the parameters.

        Args:
            config: sizes and formats.
            dtype: of activations and unquantized parameters.
            rngs: source of the parameters.

        Raises:
            TypeError: dtype; ValueError: sizes that a layer does not take.
        """
        c = config
        _checks.check_dtype(_OP, "dtype", jax.ShapeDtypeStruct((), dtype), _checks.FLOATS)
        plain, compressed = (nnx.Variable(rope.table()) for rope in (c.window_rope, c.rope))
        M = c.features
        self.embed = nnx.Embed(c.vocab_size, M, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.head = nnx.Param((jax.random.normal(rngs.params(), (c.vocab_size, M)) * M**-0.5).astype(dtype))

        def layer(i: int, ratio: int) -> DeepseekV4DecoderLayer:
            return DeepseekV4DecoderLayer(
                M,
                c.heads,
                c.moe[i],
                ratio=ratio,
                table=plain if ratio == 1 else compressed,
                streams=c.streams,
                hc_iters=c.hc_iters,
                hc_eps=c.hc_eps,
                eps=c.eps,
                dtype=dtype,
                rngs=rngs,
                **c.attention,
            )

        def block(i: int) -> MTPBlock:
            how: dict[str, Any] = {"streams": c.streams, "hc_eps": c.hc_eps, "eps": c.eps, "dtype": dtype}
            return MTPBlock(M, layer(i, 1), linear_format=c.linear_format, rngs=rngs, **how)

        count = len(c.ratios)
        self.layers = nnx.List([layer(i, ratio) for i, ratio in enumerate(c.ratios)])
        self.mtp = nnx.List([block(i) for i in range(count, count + c.mtp_blocks)])
        self.hc_head = HyperHead(M, c.streams, eps=c.hc_eps, rms_eps=c.eps, rngs=rngs)
        self.norm = nnx.Param(jnp.ones(M, dtype))
        self.config, self.dtype = c, jnp.dtype(dtype).name

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path | Checkpoint,
        *,
        dtype: DTypeLike | None = None,
        exact: bool = False,
        progress: bool = True,
        **changes: Any,
    ) -> Self:
        """The model of a checkpoint folder: bfloat16, or FP8 linears with MXFP4 (or FP8) experts, kept as stored.

        Args:
            folder: with `config.json`, the shards and their index, under DeepSeek's names; or an opened checkpoint.
            dtype: of activations and unquantized parameters; None = the configuration's.
            exact: dequantize linears, quantize no activations and no cache, see `dequantized`.
            progress: show a bar.
            **changes: fields of `DeepseekV4Config`, such as `max_positions`, which sizes the tables of rotations.

        Raises:
            CheckpointError: files or tensors are missing, broken or unknown, or the configuration has another
            architecture or options that no module here has.
        """
        checkpoint = folder if isinstance(folder, Checkpoint) else Checkpoint.open(folder)
        try:
            config = DeepseekV4Config.from_hf(checkpoint.config, **changes)
        except ValueError as e:
            raise CheckpointError(f"{checkpoint.folder / 'config.json'}: {e}") from e
        dtype = stored_dtype(checkpoint.config) if dtype is None else dtype
        model = load(
            lambda: cls(config, dtype=dtype, rngs=nnx.Rngs(0)),
            checkpoint,
            rules=weights.rules(cls),
            rename=weights.rename,
            ignore=() if config.mtp_blocks else ("mtp.*",),
            progress=progress,
        )
        return model.dequantized() if exact else model

    def dequantized(self) -> Self:
        """The model with nothing rounded but to its dtype, changed in place: what float implementations compute.

        FP8 linears become matrices in the model's dtype, caches are plain, activations stay as they are; MXFP4 experts
        keep their format, which is exact. For comparisons: it is slower and needs up to twice the memory.
        """
        weights.dequantize(self, self.dtype)
        self.config = dataclasses.replace(
            self.config, linear_format="none", output_format="none", cache_format="plain", index_format=None
        )
        return self

    # ---------------------------------------------------------------- caches
    def make_cache(self, requests: int, capacity: int) -> tuple[V4Caches, V4Tables]:
        """Caches with room for `capacity` tokens of each request, and their tables.

        Entries of all tokens are kept; of window rows and states only what a step of `config.chunk` rows can read.

        Raises:
            ValueError: sizes.
        """
        _checks.check_count(f"{_OP}.make_cache", requests=requests, capacity=capacity)
        c = self.config

        def pages(page: int, reach: int) -> tuple[int, Array]:
            """Pages of a pool and their table, for rows of which the last `reach` before a step are still read."""
            columns = -(-capacity // page)
            used = min(columns, -(-(c.chunk + reach - 1) // page) + 1)
            turn = jnp.arange(columns, dtype=jnp.int32) % used
            return requests * used, jnp.arange(requests, dtype=jnp.int32)[:, None] * used + turn

        window, window_table = pages(WINDOW_PAGE, c.window)
        entries, entry_table = pages(TOKENS_PER_PAGE, capacity)
        states = {ratio: pages(state_page(ratio), 8 if ratio == 4 else ratio) for ratio in sorted({*c.ratios} - {1})}

        def cache(ratio: int) -> V4Cache:
            return V4Cache(
                ratio,
                window_pages=window,
                entry_pages=entries,
                state_pages=states[ratio][0] if ratio > 1 else 1,
                index_dim=c.index_dim,
                format=c.cache_format,
                index_format=c.index_format,
                dtype=self.dtype,
            )

        caches = V4Caches([cache(ratio) for ratio in c.ratios], [cache(1) for _ in range(c.mtp_blocks)])
        return caches, V4Tables(window_table, entry_table, {ratio: table for ratio, (_, table) in states.items()})

    def make_batch(
        self, tables: V4Tables, lengths: Int32[Array, " B"], query_start: Int32[Array, " B+1"], *, tokens: int
    ) -> Batches:
        """Where the `tokens` packed rows of a step belong; values may be traced.

        Raises:
            ValueError: more rows than `config.chunk`, for which the caches keep too little.
        """
        if tokens > self.config.chunk:
            raise ValueError(
                f"{_OP}.make_batch: a step may have at most chunk={self.config.chunk} rows, got {tokens}; make the "
                "model with a larger chunk"
            )
        none = jnp.zeros((lengths.shape[0], 1), jnp.int32)
        start = (lengths, query_start, tables.window, tables.entries)
        found = {1: V4Batch.from_lengths(*start, none, tokens=tokens)}
        return found | {
            ratio: dataclasses.replace(found[1], state_table=table) for ratio, table in tables.states.items()
        }

    # ---------------------------------------------------------------- steps
    def __call__(
        self, tokens: Int32[Array, " N"], cache: V4Caches, batch: Batches, *, rows: Int32[Array, " R"] | None = None
    ) -> Float[Array, "R V"]:
        """Logits of the named packed rows, None = all, float32 (float64 for float64); updates the cache."""
        streams = self.streams(tokens, cache, batch)
        return self.logits(streams if rows is None else streams[rows])

    def streams(self, tokens: Int32[Array, " N"], cache: V4Caches, batch: Batches) -> Float[Array, "N C M"]:
        """Residual streams of every packed row after the last layer; updates the cache."""
        x = self.embed(tokens)
        streams = jnp.broadcast_to(x[:, None], (x.shape[0], self.config.streams, x.shape[1]))
        for layer, pages in zip(self.layers, cache.layers, strict=True):
            streams = layer(streams, pages, batch[pages.ratio], tokens if layer.ffn.table is not None else None)
        return streams

    def logits(self, streams: Float[Array, "R C M"]) -> Float[Array, "R V"]:
        """Logits of the rows' streams."""
        return self._logits(rms_norm_quant(self.hc_head(streams), self.norm[...], eps=self.config.eps))

    def predict(
        self,
        block: int,
        tokens: Int32[Array, " N"],
        streams: Float[Array, "N C M"],
        cache: V4Caches,
        batch: Batches,
        *,
        rows: Int32[Array, " R"] | None = None,
    ) -> tuple[Float[Array, "N C M"], Float[Array, "R V"]]:
        """Multi-token prediction: from a position's streams and the token after it, logits of the token after that.

        Args:
            block: of `mtp`; the step after the first takes the next block, or the same one again.
            tokens: row n is the token at `position[n] + 1`.
            streams: of the model (`streams`), or of the step before.
            cache: of the model; only the block's own pages are updated.
            batch: of the positions, not those after them.
            rows: of the logits, None = all.

        Returns:
            streams for the next step, and the logits of the rows.
        """
        streams, x = self.mtp[block](self.embed(tokens), streams, cache.mtp[block], batch[1])
        return streams, self._logits(x if rows is None else x[rows])

    def _logits(self, x: Float[Array, "R M"]) -> Float[Array, "R V"]:
        return _products.einsum("rm,vm->rv", x, self.head[...])
