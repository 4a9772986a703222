"""What the models have in common: embedding, layers, head, paged caches, loading."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jaxattn.models.checkpoint import Checkpoint, CheckpointError, Rules, load
from jaxattn.nn.cache import PagedBatch
from jaxattn.nn.linear import make_linear, project
from jaxattn.nn.norm import RMSNorm

DTYPES = ("bfloat16", "float32", "float64")
PAGE = 64
"""Tokens of a page."""


class DecoderLayer(nnx.Module):
    """`x + self_attn(input_layernorm(x))`, then `x + mlp(post_attention_layernorm(x))`."""

    def __init__(self, features: int, attention: nnx.Module, mlp: nnx.Module, *, eps: float, dtype: DTypeLike):
        """Put the parts together; `eps` is that of the norms."""
        self.input_layernorm = RMSNorm(features, eps=eps, dtype=dtype)
        self.self_attn: Any = attention
        self.post_attention_layernorm = RMSNorm(features, eps=eps, dtype=dtype)
        self.mlp: Any = mlp

    def __call__(self, x: Float[Array, "N M"], cache: Any, batch: PagedBatch) -> Float[Array, "N M"]:
        """The tokens after the layer; `cache` is updated."""
        x = x + self.self_attn(self.input_layernorm(x), cache, batch)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nnx.Module):
    """Embedding, layers and the last norm."""

    def __init__(
        self, vocab: int, features: int, layers: Sequence[Any], *, eps: float, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        """Put the parts together; draws the embedding."""
        self.embed_tokens = nnx.Embed(vocab, features, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(layers)
        self.norm = RMSNorm(features, eps=eps, dtype=dtype)

    def __call__(
        self, tokens: Int32[Array, " N"], cache: Any, batch: PagedBatch, rows: Int32[Array, " R"] | None = None
    ) -> Float[Array, "R M"]:
        """The normed last state of the named rows; `cache` has one entry for each layer."""
        x = self.embed_tokens(tokens)
        for layer, own in zip(self.layers, cache, strict=True):
            x = layer(x, own, batch)
        return self.norm(x if rows is None else x[rows])


class CausalModel(nnx.Module):
    """A decoder and the head of its vocabulary: what `jaxattn.models.generate` takes.

    Subclasses give `Config`, whose `from_hf` reads a `config.json`, `rules` and `ignored` for their checkpoints, and
    `layer_cache`.
    """

    Config: ClassVar[Any]

    def __init__(self, config: Any, decoder: Decoder, *, features: int, dtype: DTypeLike, rngs: nnx.Rngs):
        """Put the parts together; draws the head."""
        self.config = config
        self.model = decoder
        self.lm_head: Any = make_linear(features, config.vocab_size, dtype=dtype, rngs=rngs)
        self.dtype = jnp.dtype(dtype).name

    @classmethod
    def from_pretrained(
        cls, folder: str | Path | Checkpoint, *, dtype: DTypeLike | None = None, progress: bool = True
    ) -> Self:
        """The model of a Hugging Face checkpoint.

        Args:
            folder: with `config.json` and safetensors files, or an opened checkpoint.
            dtype: of activations and of parameters that are not quantized; None = the configuration's. A wider dtype
                than the checkpoint's is exact.
            progress: show a bar.

        Raises:
            CheckpointError: files or tensors are missing, broken or unknown; ValueError: the configuration is that of
            another architecture, or has options that this one does not.
        """
        checkpoint = folder if isinstance(folder, Checkpoint) else Checkpoint.open(folder)
        try:
            config = cls.Config.from_hf(checkpoint.config)
            dtype = stored_dtype(checkpoint.config) if dtype is None else dtype
        except ValueError as e:
            raise CheckpointError(f"{checkpoint.folder / 'config.json'}: {e}") from e

        def make() -> Self:
            return cls(config, dtype=dtype, rngs=nnx.Rngs(0), **cls.options(checkpoint))  # type: ignore[call-arg]

        return load(make, checkpoint, rules=cls.rules(config), ignore=cls.ignored(config), progress=progress)

    @classmethod
    def options(cls, checkpoint: Checkpoint) -> dict[str, Any]:
        """Options of the model that follow from how tensors are stored."""
        del checkpoint
        return {}

    @classmethod
    def rules(cls, config: Any) -> Rules:
        """How modules are stored that `load` does not know."""
        del config
        return {}

    @classmethod
    def ignored(cls, config: Any) -> tuple[str, ...]:
        """Patterns of stored tensors that the model does not want."""
        del config
        return ("*.rotary_emb.inv_freq",)

    def layer_cache(self, pages: int) -> nnx.Module:
        """The cache of one layer."""
        raise NotImplementedError

    def make_cache(self, requests: int, capacity: int) -> tuple[nnx.Module, Int32[Array, "B pages"]]:
        """A cache of each layer, and a page table that gives each request `capacity` tokens, rounded up to pages."""
        pages = -(-capacity // PAGE)
        cache = nnx.List([self.layer_cache(requests * pages) for _ in range(len(self.model.layers))])
        return cache, jnp.arange(requests * pages, dtype=jnp.int32).reshape(requests, pages)

    def make_batch(
        self, tables: Int32[Array, "B pages"], lengths: Int32[Array, " B"], query_start: Int32[Array, " B+1"], *, tokens
    ) -> PagedBatch:
        """The batch of a step of `tokens` packed rows."""
        return PagedBatch.from_lengths(tables, lengths, query_start, tokens=tokens, page=PAGE)

    def __call__(
        self, tokens: Int32[Array, " N"], cache: Any, batch: PagedBatch, *, rows: Int32[Array, " R"] | None = None
    ) -> Float[Array, "R V"]:
        """Logits of the named packed rows (None = all), in the model's dtype; `cache` is updated."""
        return project(self.lm_head, self.model(tokens, cache, batch, rows))


def stored_dtype(config: dict[str, Any]) -> str:
    """`dtype` or `torch_dtype` of a `config.json`, bfloat16 without.

    Raises:
        ValueError: another one than bfloat16 and float32.
    """
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if name not in DTYPES[:2]:
        raise ValueError(f"the model's dtype must be {' or '.join(DTYPES[:2])}, got {name!r}; name one with dtype=")
    return name


def check_model_type(op: str, config: Any, *known: str) -> str:
    """The `model_type`.

    Raises:
        ValueError: it is none of those that are known.
    """
    kind = config.get("model_type")
    if kind not in known:
        raise ValueError(f"{op}: model_type must be {' or '.join(map(repr, known))}, got {kind!r}")
    return kind
