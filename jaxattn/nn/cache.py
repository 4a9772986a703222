"""The paged key/value cache of one attention layer, and the tables that place a ragged batch of requests in it."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxattn import _checks
from jaxattn.ops._paged_attention_cache import PER_HEAD
from jaxattn.ops.cache_write import cache_write
from jaxattn.ops.paged_attention import FP8, check_paging, paged_attention

_INT32_MAX = 2**31 - 1


@nnx.register_variable_name("kv_pages")
class KVPages(nnx.Variable):
    """A pool of pages `[P, page, K, D]`, or its scale; the collection `kv_pages` under Linen's bridge."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedBatch:
    """Where the packed tokens of one step belong; a pytree, so its values may change without a recompilation.

    All arrays are int32: `page_table [B, pages]`, `lengths [B]` (this step's tokens included), `query_start [B+1]` as
    in `jaxattn.paged_attention`; `slots [N]` (page * page size + place in the page, negative = do not write) and
    `positions [N]` (index of the token in its request, 0 for padding) of the packed tokens.
    """

    page_table: Int32[Array, "B pages"]
    lengths: Int32[Array, " B"]
    query_start: Int32[Array, " B+1"]
    slots: Int32[Array, " N"]
    positions: Int32[Array, " N"]

    @classmethod
    def from_lengths(
        cls,
        page_table: Int32[Array, "B pages"],
        lengths: Int32[Array, " B"],
        query_start: Int32[Array, " B+1"],
        *,
        tokens: int,
        page: int,
    ) -> Self:
        """Work out `slots` and `positions`: row `query_start[b] + i` is token `lengths[b] - T_b + i` of request b.

        Rows from `query_start[B]` on are padding, with slot -1; so is a row whose token has no place in the table.
        The values may be traced.

        Args:
            page_table: page numbers; only the first `ceil(lengths[b] / page)` of each row are used.
            lengths: keys per request after this step.
            query_start: exclusive prefix sums of this step's tokens per request.
            tokens: N, the packed rows, padding included.
            page: slots per page.

        Raises:
            TypeError: a table is not int32; ValueError: shapes disagree, or `tokens` or `page` is out of range.
        """
        op = "PagedBatch"
        dims = _checks.check_shapes(
            op, page_table=(page_table, "B pages"), lengths=(lengths, "B"), query_start=(query_start, "B+1")
        )
        for name, x in (("page_table", page_table), ("lengths", lengths), ("query_start", query_start)):
            _checks.check_dtype(op, name, x, ("int32",))
        if tokens < 0 or page < 1 or dims["pages"] < 1:
            raise ValueError(
                f"{op}: tokens must be at least 0, page and the table's width at least 1, "
                f"got tokens={tokens}, page={page}, width {dims['pages']}"
            )
        if dims["B"] == 0:
            nowhere = jnp.full(tokens, -1, jnp.int32)
            return cls(page_table, lengths, query_start, nowhere, jnp.zeros(tokens, jnp.int32))
        row = jnp.arange(tokens, dtype=jnp.int32)
        request = jnp.searchsorted(query_start, row, side="right", method="compare_all").astype(jnp.int32) - 1
        live = (request >= 0) & (request < dims["B"])
        request = jnp.clip(request, 0, dims["B"] - 1)
        position = lengths[request] - query_start[request + 1] + row
        column = position // page
        number = page_table[request, jnp.clip(column, 0, dims["pages"] - 1)]
        live &= (position >= 0) & (column < dims["pages"])
        fits = (number >= 0) & (number <= _INT32_MAX // page - 1)  # a wild entry must not wrap around into the pool
        slot = jnp.where(live & fits, number * page + position % page, -1)
        return cls(page_table, lengths, query_start, slot, jnp.where(live, position, 0))


class PagedKVCache(nnx.Module):
    """Key and value pools of one attention layer, `k` and `v` `[P, page, K, D]`, zero at first.

    Pages belong to requests through the page table alone: handing them out and taking them back is the caller's. With
    `dtype=float8_e4m3fn` the pools hold `e4m3(x / scale)`, saturated at +-448, NaN kept; attention reads `code * scale`
    rounded to the dtype of its queries. With `per_head` there is one scale per token and head, in `k_scale_pages` and
    `v_scale_pages` `[P, page, K]`, for codes in float8_e4m3fn, int8, or uint8 (rotated numbers, two in a byte).

    Under `nnx.jit` the pools are updated in place if the cache is donated (`donate_argnames="cache"`), copied if not.
    """

    def __init__(
        self,
        num_pages: int,
        page: int,
        kv_heads: int,
        head_dim: int,
        dtype: Any = jnp.bfloat16,
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
        per_head: bool = False,
        rngs: nnx.Rngs | None = None,
    ):
        """Allocate the pools.

        Args:
            num_pages: P.
            page: slots per page.
            kv_heads: K.
            head_dim: D.
            dtype: of the attention layer, or float8_e4m3fn; with `per_head` float8_e4m3fn, int8 or uint8.
            k_scale: what key codes are multiplied with; float8 caches only, None = 1.
            v_scale: the same for values.
            per_head: keep one scale per token and head.
            rngs: not used; accepted for the Linen bridge.

        Raises:
            TypeError: dtype; ValueError: a size or scale is not positive, or a scale was given without float8.
        """
        del rngs
        op = "PagedKVCache"
        _checks.check_count(op, num_pages=num_pages, page=page, kv_heads=kv_heads, head_dim=head_dim)
        shape = (num_pages, page, kv_heads, head_dim)
        allowed = PER_HEAD if per_head else (*_checks.FLOATS, FP8)
        stored = _checks.check_dtype(op, "dtype", jax.ShapeDtypeStruct((), dtype), allowed)
        if stored == "uint8":
            if head_dim % 2:
                raise ValueError(f"{op}: uint8 holds two numbers in a byte, head_dim must be even, got {head_dim}")
            shape = (*shape[:3], head_dim // 2)
        fp8 = stored == FP8 and not per_head
        _checks.check_positive(op, k_scale=k_scale, v_scale=v_scale)
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if scale is not None and per_head:
                raise ValueError(f"{op}: with per_head=True every token and head has its own scale; leave {name} out")
            if scale is not None and not fp8:
                raise ValueError(
                    f"{op}: {name} belongs to a {FP8} cache, but dtype is {jnp.dtype(dtype).name}; leave it out"
                )
        self.k = KVPages(jnp.zeros(shape, dtype))
        self.v = KVPages(jnp.zeros(shape, dtype))
        self.k_scale = KVPages(jnp.float32(1 if k_scale is None else k_scale)) if fp8 else nnx.data(None)
        self.v_scale = KVPages(jnp.float32(1 if v_scale is None else v_scale)) if fp8 else nnx.data(None)
        self.k_scale_pages = KVPages(jnp.zeros(shape[:3], jnp.float32)) if per_head else nnx.data(None)
        self.v_scale_pages = KVPages(jnp.zeros(shape[:3], jnp.float32)) if per_head else nnx.data(None)
        self.head_dim = head_dim

    def update(
        self,
        k: Float[Array, "N K D"],
        v: Float[Array, "N K D"],
        slots: Int32[Array, " N"],
        *,
        implementation: str | None = None,
    ) -> None:
        """Write this step's keys and values; rows with a slot outside the pool (-1 by convention) are not written.

        `implementation` goes to `jaxattn.cache_write`.

        Raises:
            TypeError: `slots` is not int32, or k or v is not in the cache's dtype (any float dtype for float8);
            ValueError: shapes disagree with the pool.
        """
        op = "PagedKVCache.update"
        pool = self.k[...]
        head = "C" if pool.shape[3] != self.head_dim else "D"
        _checks.check_shapes(op, pool=(pool, f"P page K {head}"), k=(k, "N K D"), v=(v, "N K D"), slots=(slots, "N"))
        _checks.check_dtype(op, "slots", slots, ("int32",))
        own = _checks.dtype_name(pool)
        for name, x in (("k", k), ("v", v)):
            _checks.check_dtype(op, name, x, _checks.FLOATS if own in PER_HEAD else (own,), "cast it or the cache")
        written = cache_write(k, v, pool, self.v[...], slots, **self.scales, implementation=implementation)
        for pages, new in zip((self.k, self.v, self.k_scale_pages, self.v_scale_pages), written, strict=False):
            assert pages is not None
            pages[...] = new

    @property
    def scales(self) -> dict[str, Any]:
        """The cache's scales as arguments of `cache_write` and `paged_attention`; empty for plain pools."""
        named = {name: getattr(self, name) for name in ("k_scale", "v_scale", "k_scale_pages", "v_scale_pages")}
        return {name: x[...] for name, x in named.items() if x is not None}

    @property
    def heads(self) -> tuple[int, int]:
        """K and D."""
        return self.k.shape[2], self.head_dim

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
        """`jaxattn.paged_attention` over this cache, after `update` with the same `k` and `v` (which are not read)."""
        del k, v
        o = paged_attention(
            q,
            self.k[...],
            self.v[...],
            batch.page_table,
            batch.lengths,
            batch.query_start,
            sinks=sinks,
            **self.scales,
            scale=scale,
            window=window,
            softcap=softcap,
            implementation=implementation,
        )
        assert not isinstance(o, tuple)
        return o

    def check(self, batch: PagedBatch) -> None:
        """Read a batch's tables and raise `ValueError` unless they fit this pool; for use outside `jit`."""
        num_pages, page, _, _ = self.k.shape
        check_paging(
            batch.page_table,
            batch.lengths,
            batch.query_start,
            tokens=batch.slots.shape[0],
            pool=num_pages,
            page=page,
        )
