"""Attention layers for requests that share prefixes."""

import dataclasses
from typing import Any, Self

import jax
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxattn import _checks
from jaxattn.nn.attention import PagedAttention
from jaxattn.nn.cache import PagedBatch, PagedKVCache
from jaxattn.nn.turboquant_cache import TurboQuantKVCache
from jaxattn.ops.cascade_attention import cascade_attention, check_groups, prefix_tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedPrefixes:
    """Which requests of a batch share how many leading tokens, level by level; a pytree of int32 arrays.

    `group_start [L, G+1]` and `shared [L, G]` as in `jaxattn.cascade_attention`; its values may change without a
    recompilation, L and G may not.
    """

    group_start: Int32[Array, "L G+1"]
    shared: Int32[Array, "L G"]

    @classmethod
    def find(cls, batch: PagedBatch, page: int, *, levels: int = 1, min_pages: int = 1) -> Self:
        """What neighbouring requests of a batch have in common, from its tables; for use outside `jit`.

        Args:
            batch: with concrete arrays.
            page: slots per page.
            levels: L, the depth of the tree.
            min_pages: pages that are worth a group.
        """
        computed = np.asarray(batch.lengths) - np.diff(np.asarray(batch.query_start))
        found = prefix_tree(np.asarray(batch.page_table), computed, page, levels=levels, min_pages=min_pages)
        return cls(*(jax.numpy.asarray(x) for x in found))

    def check(self, batch: PagedBatch, page: int) -> None:
        """Read the tables and raise `ValueError` unless the requests share what is said; for use outside `jit`."""
        tables = batch.page_table, batch.lengths, batch.query_start
        check_groups(*tables, self.group_start, self.shared, page=page)


class CascadeAttention(PagedAttention):
    """`PagedAttention` that reads shared prefixes once, over the same `PagedKVCache`; parameters as there.

    The two layers may take turns on one cache: what a step of either writes, the other reads.
    """

    def __init__(self, features: int, heads: int, kv_heads: int, head_dim: int, *, window: None = None, **options: Any):
        """Draw the parameters; arguments as for `PagedAttention`, without a window.

        Raises:
            ValueError: a window was given; else as `PagedAttention`.
        """
        if window is not None:
            raise ValueError(
                f"CascadeAttention: a window hides what requests share, got window={window}; use PagedAttention"
            )
        super().__init__(features, heads, kv_heads, head_dim, **options)

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        x: Float[Array, "N M"],
        cache: PagedKVCache | TurboQuantKVCache,
        batch: PagedBatch,
        prefixes: SharedPrefixes | None = None,
    ) -> Float[Array, "N M"]:
        """Attention output of every packed token; `cache` is updated with their keys and values first.

        Args:
            x: packed tokens.
            cache: of plain or float8 numbers, where there are prefixes.
            batch: where the tokens belong.
            prefixes: what requests share; None = nothing, as `PagedAttention`.

        Raises:
            as `PagedAttention`; ValueError: the cache has scales per token and head, or is a `TurboQuantKVCache`.
        """
        if prefixes is None:
            return super().__call__(x, cache, batch)
        if isinstance(cache, TurboQuantKVCache):
            raise ValueError("CascadeAttention: a TurboQuantKVCache cannot be read in parts; leave prefixes out")
        if cache.k_scale_pages is not None:
            raise ValueError(
                "CascadeAttention: a cache with scales per token and head cannot be read in parts; leave prefixes out"
            )
        _checks.check_shapes(
            "CascadeAttention", group_start=(prefixes.group_start, "L G+1"), shared=(prefixes.shared, "L G")
        )
        return super().__call__(x, _Shared(cache, prefixes), batch)  # pyright: ignore[reportArgumentType]


class _Shared:
    """A cache that attends with knowledge of shared prefixes."""

    def __init__(self, cache: PagedKVCache, prefixes: SharedPrefixes):
        self.heads, self.update = cache.heads, cache.update
        self._cache, self._prefixes = cache, prefixes

    def attend(self, q, k, v, batch: PagedBatch, *, window, **options):
        del k, v, window
        tables = batch.page_table, batch.lengths, batch.query_start
        groups = self._prefixes.group_start, self._prefixes.shared
        o = cascade_attention(
            q, self._cache.k[...], self._cache.v[...], *tables, *groups, **self._cache.scales, **options
        )
        assert not isinstance(o, tuple)
        return o
