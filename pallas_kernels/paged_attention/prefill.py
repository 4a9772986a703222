"""Paged attention for many query tokens, whole prompts or chunks of them, on Mosaic GPU (Hopper).

The device code is that of packed attention, `pallas_kernels.attention._flash`, with keys and values fetched page by
page. Requests of one token may share the launch; if there is nothing else, `decode` is faster.
"""

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp

from pallas_kernels import _mosaic
from pallas_kernels.attention import _choice, _flash, _plan
from pallas_kernels.attention._plan import DTYPES, HEAD_DIMS, Plan
from pallas_kernels.paged_attention import _common as common
from pallas_kernels.paged_attention._common import PAGES

LEAST_TOKENS = 16
"""Query rows a request, on average, from which on this is the kernel to take."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(common.Config, _plan.Config):
    """As that of packed attention."""


def _make(config: Config, *, q, k_pages, page_table, scale, causal, window, softcap, copies=1, **_) -> Plan:
    (rows, H, D), (pool, page, K, _), (B, pages) = q.shape, k_pages.shape, page_table.shape
    return Plan(
        N=rows * copies,
        H=H,
        K=K,
        D=D,
        Dv=D,
        B=B,
        S=pages * page,
        dtype=jnp.dtype(q.dtype),
        scale=scale,
        causal=causal,
        window=None if window is None else min(window, _plan.FAR),
        softcap=softcap,
        config=config,
        page=page,
        pool=pool,
        q_rows=rows,
        interpreted=_mosaic.interpreting(),
        num_sms=_mosaic.num_sms(),
    )


def why_not(**args) -> str | None:
    """None if the kernel can run these arguments, else one sentence; shapes, dtypes and options are enough."""
    x = _make(Config(), **args)
    cache = jnp.dtype(args["k_pages"].dtype)
    if x.dtype.name not in DTYPES:
        return f"q must be {_mosaic.either(DTYPES)}, got {x.dtype.name}"
    if cache != x.dtype:
        return f"the cache must be {x.dtype.name} as q, got {cache.name}"
    if x.D not in HEAD_DIMS:
        return f"the head dim must be {_mosaic.either(HEAD_DIMS)}, got {x.D}"
    if x.page not in PAGES:
        return f"the page size must be {_mosaic.either(PAGES)}, got {x.page}"
    if 0 in (x.N, x.B, x.S):
        return f"needs a query row, a request and a table column, got N={x.N}, B={x.B} and {x.S} slots"
    if x.N < LEAST_TOKENS * x.B:
        return f"prefill begins at {LEAST_TOKENS} query rows a request, got N={x.N} and B={x.B}"
    return None


def default_config(**args) -> Config:
    """Measured on an H200, see docs/attention.md."""
    return Config(**dataclasses.asdict(_choice.default(_make(Config(), **args))))


def configs(**args) -> Iterator[Config]:
    """Every configuration that fits shared memory and registers."""
    for config in _choice.candidates(_make(Config(), **args)):
        yield Config(**dataclasses.asdict(config))


def segments_attention(*, config: Config, segments, copies: int, **args):
    """As `paged_attention` with `copies`, of requests whose tables are the columns of `segments`.

    Args:
        config: of this kernel.
        segments: int32 [requests + 2, 5], see `attention._tiles.SEGMENTS`.
        copies: of q.
        **args: `q`, `k_pages`, `v_pages`, `page_table`, `scale`, `softcap`.

    Returns:
        o [copies N, H, D] and lse as rows of tiles, see `attention._flash.launch`.
    """
    x = _segmented(config, segments=segments, copies=copies, **args)
    if reason := _choice.illegal(x):
        raise ValueError(f"paged_attention: {reason}")
    names = {"k": "k_pages", "v": "v_pages"} | {n: n for n in ("q", "page_table")}
    inputs = {name: args[given] for name, given in names.items()} | {"segments": segments}
    return _flash.launch(x, inputs, True, "paged_attention", as_rows=True)


def _segmented(config: Config, *, segments, **args) -> Plan:
    x = _make(config, causal=False, window=None, **args)
    return dataclasses.replace(x, B=segments.shape[0] - 2)


def paged_attention(*, config: Config, return_lse: bool, **args):
    """Run the kernel on prepared arguments of `jaxattn.paged_attention`, all by name.

    One more, `copies`, stands for so many q's one behind the other, of which only one is there; no request may lie in
    two of them.

    Returns:
        o [N, H, D] in q's dtype, and with `return_lse` the natural-log lse [N, H] in float32.

    Raises:
        ValueError: `config` does not fit these shapes.
    """
    x = _make(config, **args)
    if reason := _choice.illegal(x):
        raise ValueError(f"paged_attention: {reason}")
    names = {"k": "k_pages", "v": "v_pages"} | {n: n for n in ("q", "page_table", "lengths", "query_start")}
    inputs = {name: args[given] for name, given in names.items()}
    if args["sinks"] is not None:
        inputs["sinks"] = _flash.sink_rows(x, args["sinks"])
    o, lse = _flash.launch(x, inputs, return_lse, "paged_attention")
    return o if lse is None else (o, lse)
