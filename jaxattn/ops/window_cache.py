"""Management of a sliding-window layer's paged cache: what to free, what a prefix hit needs, where tokens go."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jaxattn import _checks, _mechanism
from jaxattn._mechanism import Args, Case, Mechanism

_OP = "window_cache"


def window_cache(
    computed: Int32[Array, " B"],
    new: Int32[Array, " B"],
    *,
    window: int,
    page: int,
    retained: int = 0,
    implementation: str | None = None,
    config: Any = None,
) -> tuple[Int32[Array, " B"], Int32[Array, " B"], Int32[Array, " B"]]:
    """For every request: tokens that no later query sees, pages to free, and pages that the next step needs.

    A query at position p sees positions `max(0, p - window + 1)` to p. With `computed` tokens in the cache the next
    query stands at position `computed`, so the first `max(0, computed - window + 1)` tokens are never read again. Their
    pages may be freed once all their tokens are; the page that holds the window's first token stays whole.

    Args:
        computed: int32, tokens whose keys and values are cached.
        new: int32, tokens of the next step; their pages must exist.
        window: visible positions, the token itself included.
        page: slots per page.
        retained: tokens in front of the window to keep although nobody sees them (speculative decoding that computes
            its last tokens again).
        implementation: None or "reference", there is no kernel.
        config: None, for the same reason.

    Returns:
        `skipped` tokens, `freeable` leading pages, and `needed` pages that hold the tokens from the first live page to
        token `computed + new - 1`; int32 each.

    Raises:
        TypeError: dtypes; ValueError: shapes, or a window or page below 1.

    Source: vLLM 0.26.0 `v1/core/single_type_kv_cache_manager.py` (`SlidingWindowManager.get_num_skipped_tokens`).
    """
    args = prepare(computed, new, window=window, page=page, retained=retained)
    return _mechanism.run(MECHANISM, args, implementation, config)


def prepare(computed, new, *, window, page, retained=0) -> Args:
    """Validate the arguments of `window_cache`; raises as it does."""
    _checks.check_shapes(_OP, computed=(computed, "B"), new=(new, "B"))
    for name, x in (("computed", computed), ("new", new)):
        _checks.check_dtype(_OP, name, x, ("int32",))
    _checks.check_count(_OP, window=window, page=page)
    if retained < 0:
        raise ValueError(f"{_OP}: retained must not be negative, got {retained}")
    return {"computed": computed, "new": new, "window": int(window), "page": int(page), "retained": int(retained)}


def _reference(computed, new, *, window, page, retained):
    skipped = jnp.maximum(computed - window + 1 - retained, 0)
    freeable = skipped // page
    return skipped, freeable, -(-(computed + new) // page) - freeable


def pages_for_hit(window: int, page: int, *, extra: bool = False) -> int:
    """Consecutive cached pages at the end of a prefix that make it usable: `ceil((window - 1) / page)`, at least one.

    The next query computes its own key, so it needs `window - 1` old ones.

    Args:
        window: visible positions, the token itself included.
        page: slots per page.
        extra: one page more, because a draft model (EAGLE, MTP) needs the hidden states of the last one, which is
            dropped from the hit.
    """
    _checks.check_count("pages_for_hit", window=window, page=page)
    return max(-(-(window - 1) // page), 1) + extra


def longest_hit(cached: Sequence[bool], *, window: int, page: int, max_tokens: int, extra: bool = False) -> int:
    """Pages of the longest prefix that a window layer can continue from the cache.

    The longest n with `n * page <= max_tokens` whose last `pages_for_hit` pages are all cached; a prefix with fewer
    pages than that needs all of its pages. Pages in front of those may be missing: no query sees them any more.

    Args:
        cached: for each full page of the prompt, whether the cache holds it.
        window: visible positions, the token itself included.
        page: slots per page.
        max_tokens: the prefix must not be longer, usually the prompt's length - 1.
        extra: as for `pages_for_hit`; the last matching page is not part of the hit.

    Source: vLLM 0.26.0 `SlidingWindowManager.find_longest_cache_hit`.
    """
    need = pages_for_hit(window, page, extra=extra)
    run = 0
    limit = min(len(cached), max(max_tokens, 0) // page)
    for i in range(limit - 1, -1, -1):
        run = run + 1 if cached[i] else 0
        if run == need:
            return i + run - extra
    return max(run - extra, 0)  # the run that is left starts at page 0


def admission_pages(*, window: int, page: int, in_flight: int, max_tokens: int) -> int:
    """Pages that one request can hold at once: `ceil(min(window - 1 + in_flight, max_tokens) / page) + 1`.

    Args:
        window: visible positions, the token itself included.
        page: slots per page.
        in_flight: most tokens that one step adds.
        max_tokens: longest request.

    One more page, because the window need not start at a page's first slot.
    Source: vLLM 0.26.0 `v1/kv_cache_interface.py` (`SlidingWindowSpec`).
    """
    _checks.check_count("admission_pages", window=window, page=page, in_flight=in_flight, max_tokens=max_tokens)
    return -(-min(window - 1 + in_flight, max_tokens) // page) + 1


def slot_mapping(
    page_table: Int32[Array, "B pages"], request: Int32[Array, " N"], position: Int32[Array, " N"], *, page: int
) -> Int32[Array, " N"]:
    """Slot of each token: `page_table[request, position // page] * page + position % page`, for `cache_write`.

    Args:
        page_table: int32 page numbers; a negative entry is a freed page.
        request: int32 row of the table for each token.
        position: int32 position of each token, negative = padding.
        page: slots per page.

    Returns:
        int32 slots; -1 for padding, freed pages and positions behind the table.

    Raises:
        TypeError: dtypes; ValueError: shapes, or a page below 1.
    """
    op = "slot_mapping"
    dims = _checks.check_shapes(
        op, page_table=(page_table, "B pages"), request=(request, "N"), position=(position, "N")
    )
    for name, x in (("page_table", page_table), ("request", request), ("position", position)):
        _checks.check_dtype(op, name, x, ("int32",))
    _checks.check_count(op, page=page)
    column = position // page
    known = (position >= 0) & (column < dims["pages"])
    number = page_table[request, jnp.where(known, column, 0)] if dims["pages"] else jnp.full_like(position, -1)
    return jnp.where(known & (number >= 0), number * page + position % page, -1)


def _case(name: str, requests: int, most: int, **options: Any) -> Case:
    def make(rng: np.random.Generator) -> Args:
        computed, new = (jnp.asarray(rng.integers(0, n, requests), jnp.int32) for n in (most, 40))
        return {"computed": computed, "new": new, **options}

    return Case(name=name, make=make, tags=frozenset({"smoke"}))


MECHANISM = Mechanism(
    name=_OP,
    source="vLLM 0.26.0 vllm/v1/core/single_type_kv_cache_manager.py",
    op=window_cache,
    prepare=prepare,
    reference=_reference,
    outputs=lambda **_: ("skipped", "freeable", "needed"),
    kernels={},
    cases=(
        _case("window4-page1", 9, 20, window=4, page=1),
        _case("window128-page64", 31, 1000, window=128, page=64),
        _case("window1-page16", 5, 100, window=1, page=16),
        _case("window100-page16-retained3", 17, 500, window=100, page=16, retained=3),
    ),
    support=(
        (
            "any number of requests",
            {name: jax.ShapeDtypeStruct((8,), jnp.int32) for name in ("computed", "new")} | {"window": 128, "page": 64},
        ),
    ),
    cost=lambda *, computed, **_: (0, 5 * 4 * computed.shape[0]),
)
