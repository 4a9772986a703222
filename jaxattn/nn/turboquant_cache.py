"""A key/value cache whose pages hold TurboQuant's packed slots, and the choice of layers that get one."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxattn import _checks
from jaxattn.nn.cache import KVPages, PagedBatch, PagedKVCache
from jaxattn.ops.merge_states import merge_states
from jaxattn.ops.paged_attention import check_paging, paged_attention
from jaxattn.ops.turboquant_attention import turboquant_attention
from jaxattn.ops.turboquant_write import turboquant_write
from jaxattn.quant import turboquant

CONTINUATION = 128
"""A request with more new tokens than this attends to their own keys and values as they are."""
_PAGE = 16


class TurboQuantKVCache(nnx.Module):
    """Packed keys and values of one attention layer, `pages` uint8 `[P, page, K, slot]`; `PagedAttention` takes it.

    Like `PagedKVCache`: pages belong to requests through the page table alone, and are updated in place if the cache is
    donated. What a request's new tokens attend to depends on how many they are:

    | new tokens | their own keys and values | those before |
    |---|---|---|
    | the whole request, or more than 128 | as they are | packed |
    | others (decode, short continuations) | packed | packed |

    as in vLLM 0.26.0 `turboquant_attn.py`.
    """

    def __init__(
        self,
        num_pages: int,
        page: int,
        kv_heads: int,
        head_dim: int,
        preset: Literal["k8v4", "4bit_nc", "k3v4_nc", "3bit_nc"] = "4bit_nc",
        *,
        rngs: nnx.Rngs | None = None,
    ):
        """Allocate the pool.

        Args:
            num_pages: P.
            page: slots per page.
            kv_heads: K.
            head_dim: D, a power of two.
            preset: how keys and values are packed; `jaxattn.quant.turboquant`.
            rngs: not used; accepted for the Linen bridge.

        Raises:
            TypeError: a size is no integer; ValueError: a size is not positive, D or preset.
        """
        del rngs
        op = "TurboQuantKVCache"
        _checks.check_count(op, num_pages=num_pages, page=page, kv_heads=kv_heads, head_dim=head_dim)
        try:
            slot = turboquant.find(preset, head_dim).slot_bytes(head_dim)
        except ValueError as e:
            raise ValueError(f"{op}: {e}") from e
        self.pages = KVPages(jnp.zeros((num_pages, page, kv_heads, slot), jnp.uint8))
        self.preset, self.head_dim = preset, head_dim

    @property
    def heads(self) -> tuple[int, int]:
        """K and D."""
        return self.pages.shape[2], self.head_dim

    def update(
        self,
        k: Float[Array, "N K D"],
        v: Float[Array, "N K D"],
        slots: Int32[Array, " N"],
        *,
        implementation: str | None = None,
    ) -> None:
        """Write this step's keys and values; rows with a slot outside the pool (-1 by convention) are not written.

        Raises:
            TypeError: dtypes; ValueError: shapes disagree with the pool.
        """
        self.pages[...] = turboquant_write(
            k, v, self.pages[...], slots, preset=self.preset, implementation=implementation
        )

    def attend(
        self,
        q: Float[Array, "N H D"],
        k: Float[Array, "N K D"],
        v: Float[Array, "N K D"],
        batch: PagedBatch,
        *,
        sinks: Float[Array, " H"] | None = None,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        implementation: str | None = None,
    ) -> Float[Array, "N H D"]:
        """Causal attention of the batch's queries, after `update` with the same `k` and `v`.

        Raises:
            NotImplementedError: sinks, a window or a soft cap, which packed caches do not have; else as
            `jaxattn.turboquant_attention`.
        """
        for name, x in (("sinks", sinks), ("window", window), ("softcap", softcap)):
            if x is not None:
                raise NotImplementedError(
                    f"TurboQuantKVCache: attention over packed slots has no {name}; use PagedKVCache"
                )
        options: dict[str, Any] = {"scale": scale, "implementation": implementation}

        def packed(**more: Any) -> Any:
            return turboquant_attention(
                q,
                self.pages[...],
                batch.page_table,
                batch.lengths,
                batch.query_start,
                preset=self.preset,
                **options,
                **more,
            )

        if q.shape[0] <= batch.lengths.shape[0]:  # at most one token each: decode
            return packed()
        new = jnp.diff(batch.query_start)
        raw = (new == batch.lengths) | (new > CONTINUATION)
        before_o, before_lse = packed(stored=jnp.where(raw, batch.lengths - new, batch.lengths), return_lse=True)
        own_o, own_lse = _own(q, k, v, batch.query_start, jnp.where(raw, new, 0), options)
        o = merge_states(before_o, before_lse, own_o, own_lse, return_lse=False, implementation=implementation)
        assert not isinstance(o, tuple)
        return o

    def check(self, batch: PagedBatch) -> None:
        """Read a batch's tables and raise `ValueError` unless they fit this pool; for use outside `jit`."""
        num_pages, page = self.pages.shape[:2]
        check_paging(
            batch.page_table, batch.lengths, batch.query_start, tokens=batch.slots.shape[0], pool=num_pages, page=page
        )


def _own(q, k, v, query_start, lengths, options) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp of each request's new tokens among themselves; length 0 leaves a request out.

    The packed rows are laid out in pages of their own for it.
    """
    (N, K, D), B = k.shape, lengths.shape[0]
    width = -(-N // _PAGE)
    row = jnp.arange(N, dtype=jnp.int32)
    request = jnp.searchsorted(query_start[1:], row, side="right", method="compare_all").astype(jnp.int32)
    live = request < B
    request = jnp.minimum(request, B - 1)
    first = query_start[:-1] // _PAGE + jnp.arange(B, dtype=jnp.int32)
    place = jnp.where(live, first[request] * _PAGE + row - query_start[request], (width + B) * _PAGE)
    k_pool, v_pool = (
        jnp.zeros(((width + B) * _PAGE, K, D), x.dtype).at[place].set(x, mode="drop").reshape(-1, _PAGE, K, D)
        for x in (k, v)
    )
    table = jnp.minimum(first[:, None] + jnp.arange(width, dtype=jnp.int32), width + B - 1)
    o = paged_attention(q, k_pool, v_pool, table, lengths, query_start, return_lse=True, **options)
    assert isinstance(o, tuple)
    return o


def turboquant_caches(
    layers: int,
    num_pages: int,
    page: int,
    kv_heads: int,
    head_dim: int,
    preset: Literal["k8v4", "4bit_nc", "k3v4_nc", "3bit_nc"] = "4bit_nc",
    *,
    dtype: Any = jnp.bfloat16,
    hybrid: bool = False,
    edge: int = 2,
) -> list[PagedKVCache | TurboQuantKVCache]:
    """One cache for each of a model's attention layers: packed, but the first and last `edge` layers in `dtype`.

    Args:
        layers: attention layers of the model.
        num_pages: P, of each.
        page: slots per page.
        kv_heads: K.
        head_dim: D.
        preset: of the packed caches.
        dtype: of the others.
        hybrid: the model has other kinds of layers between; then all are packed.
        edge: how many layers at either end stay uncompressed.

    Raises:
        TypeError, ValueError: as the caches.
    """
    plain = turboquant.boundary_layers(layers, hybrid=hybrid, edge=edge)
    return [
        PagedKVCache(num_pages, page, kv_heads, head_dim, dtype)
        if i in plain
        else TurboQuantKVCache(num_pages, page, kv_heads, head_dim, preset)
        for i in range(layers)
    ]
