"""Caches of a DeepSeek-V4 layer and the tables that place a batch in them."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Int32

from jaxattn import _checks, _latent_cache
from jaxattn.nn.cache import KVPages
from jaxattn.ops.sparse_indices import places
from jaxattn.ops.window_cache import slot_mapping

WINDOW_PAGE, TOKENS_PER_PAGE = 64, 256
"""Rows of a window page; tokens whose entries share a compressed page."""


def state_page(ratio: int) -> int:
    """Tokens of a page of compressor states."""
    return 4 if ratio == 4 else 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class V4Batch:
    """Where the packed tokens of one step belong, for every kind of cache; a pytree of int32 arrays.

    `lengths [B]` count this step's tokens, `query_start [B+1]`; `request [N]` and `positions [N]` of packed tokens,
    positions negative for padding. `window_table` has pages of 64 tokens, `entry_table` pages of 256 tokens (64 entries
    of ratio 4, 2 of ratio 128; the indexer's cache has the same pages), `state_table` pages of 4 (ratio 4) or 8 tokens.
    Pages out of the window, and state pages before the last 8 or 128 tokens, may be freed: negative.
    """

    lengths: Int32[Array, " B"]
    query_start: Int32[Array, " B+1"]
    window_table: Int32[Array, "B wpages"]
    entry_table: Int32[Array, "B epages"]
    state_table: Int32[Array, "B spages"]
    request: Int32[Array, " N"]
    positions: Int32[Array, " N"]

    @classmethod
    def from_lengths(cls, lengths, query_start, window_table, entry_table, state_table, *, tokens: int) -> Self:
        """Work out `request` and `positions` of `tokens` packed rows; those from `query_start[B]` on are padding.

        Raises:
            TypeError: a table is not int32; ValueError: shapes disagree.
        """
        op = "V4Batch"
        named = {"lengths": (lengths, "B"), "query_start": (query_start, "B+1"), "window_table": (window_table, "B w")}
        named |= {"entry_table": (entry_table, "B e"), "state_table": (state_table, "B s")}
        _checks.check_shapes(op, **named)
        for name, (x, _) in named.items():
            _checks.check_dtype(op, name, x, ("int32",))
        request, position, live = places(query_start, lengths, tokens)
        positions = jnp.where(live, position, -1)
        return cls(lengths, query_start, window_table, entry_table, state_table, request, positions)

    def window_slots_of_tokens(self) -> Int32[Array, " N"]:
        """Slot of each token in the window cache."""
        return slot_mapping(self.window_table, self.request, self.positions, page=WINDOW_PAGE)

    def entry_slots_of_tokens(self, ratio: int) -> Int32[Array, " N"]:
        """Slot of the entry that each token ends, -1 for those that end none."""
        ends = (self.positions + 1) % ratio == 0
        entry = jnp.where(ends & (self.positions >= 0), self.positions // ratio, -1)
        return slot_mapping(self.entry_table, self.request, entry, page=TOKENS_PER_PAGE // ratio)


class CompressorState(nnx.Module):
    """What a compressor keeps: the states of its last tokens and its entries; zero at first."""

    def __init__(
        self, num_pages: int, state_pages: int, *, ratio: int, dim: int, format: str, dtype: DTypeLike = jnp.bfloat16
    ):
        """Allocate.

        Args:
            num_pages: of 256 tokens each.
            state_pages: of 4 (ratio 4) or 8 tokens each.
            ratio: tokens per entry.
            dim: D of an entry.
            format: of the entries, as in `jaxattn.compressor`.
            dtype: of entries of format "plain".
        """
        width, page = dim * (2 if ratio == 4 else 1), TOKENS_PER_PAGE // ratio
        if format == "plain":
            self.entries = KVPages(jnp.zeros((num_pages, page, dim), dtype))
        else:
            size = _latent_cache.v4_page_bytes(page) if format == "v4" else _latent_cache.PAGED[format].least(page)
            self.entries = KVPages(jnp.zeros((num_pages, size), jnp.uint8))
        wide = jnp.promote_types(dtype, jnp.float32)
        self.state = KVPages(jnp.zeros((state_pages, state_page(ratio), 2 * width), wide))
        self.format, self.page = format, page


class V4Cache(nnx.Module):
    """The caches of one DeepSeek-V4 layer: window, compressed entries with their states, and those of the indexer.

    Under `nnx.jit` they are updated in place if the cache is donated, copied if not.
    """

    def __init__(
        self,
        ratio: int,
        *,
        window_pages: int,
        entry_pages: int = 1,
        state_pages: int = 1,
        index_dim: int = 128,
        format: str = "v4",
        index_format: str | None = None,
        dtype: DTypeLike = jnp.bfloat16,
    ):
        """Allocate.

        Args:
            ratio: of the layer: 1 (window only), 4 (with an indexer) or 128.
            window_pages: pages of 64 tokens.
            entry_pages: pages of 256 tokens.
            state_pages: pages of 4 or 8 tokens.
            index_dim: width of an indexer key.
            format: of rows and entries: "v4" (FP8, 584 bytes) or "plain", numbers of `dtype` that no cache rounds.
            index_format: "indexer_fp8" or "indexer_mxfp4", "plain" with format "plain"; None = FP8, or plain.
            dtype: of a plain cache, that of the layer; its state is float32 at least.

        Raises:
            ValueError: sizes, ratio or formats.
        """
        op = "V4Cache"
        _checks.check_count(op, window_pages=window_pages, entry_pages=entry_pages, state_pages=state_pages)
        if ratio not in (1, 4, 128):
            raise ValueError(f"{op}: ratio must be 1, 4 or 128, got {ratio}")
        plain = format == "plain"
        index_format = ("plain" if plain else "indexer_fp8") if index_format is None else index_format
        if format not in ("v4", "plain"):
            raise ValueError(f"{op}: format must be v4 or plain, got {format!r}")
        if index_format not in (("plain",) if plain else ("indexer_fp8", "indexer_mxfp4")):
            allowed = "plain" if plain else "indexer_fp8 or indexer_mxfp4"
            raise ValueError(f"{op}: with format {format!r}, index_format must be {allowed}, got {index_format!r}")
        shape = (window_pages, WINDOW_PAGE, _latent_cache.LATENT)
        packed = (window_pages, _latent_cache.v4_page_bytes(WINDOW_PAGE))
        self.window = KVPages(jnp.zeros(shape, dtype) if plain else jnp.zeros(packed, jnp.uint8))
        self.main, self.index = nnx.data(None), nnx.data(None)
        sizes = {"num_pages": entry_pages, "state_pages": state_pages, "ratio": ratio, "dtype": dtype}
        if ratio > 1:
            self.main = CompressorState(**sizes, dim=_latent_cache.LATENT, format=format)
        if ratio == 4:
            self.index = CompressorState(**sizes, dim=index_dim, format=index_format)
        self.ratio, self.format = ratio, format
