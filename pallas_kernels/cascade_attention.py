"""Cascade attention from kernels that exist: paged attention over shared prefixes and own suffixes, and a merge.

Requests that share a prefix become one request of all their rows, without a causal mask, so that a tile of rows reads
the prefix once. A long prefix is cut into `splits` segments that further rows attend to, as many as fill the card, in
the same launch; so are the levels of a tree. The partial results of all segments and of the suffixes meet in one pass.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _cascade_tables as tables_of
from pallas_kernels import _mosaic, combine_partials, merge_states, paged_attention
from pallas_kernels._cascade_tables import Table, levels
from pallas_kernels.paged_attention import decode as paged_decode
from pallas_kernels.paged_attention import prefill as paged_prefill
from pallas_kernels.paged_attention._decode_joined import Joined

__all__ = ["Config", "cascade_attention", "configs", "default_config", "levels", "why_not", "with_sink"]

_SPLITS = (1, 2, 4, 8, 16)
_TILE = 64
"""Rows of a tile of paged attention's kernel."""
_SEGMENT = 512
"""The fewest keys that are worth a partial result."""
_PROMPT = 128
"""Query rows a request, on average, from which on flat attention is no slower: four tiles, of which at most one has
rows to spare."""
_MAX = float(jnp.finfo(jnp.float32).max)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the prefix is cut, and the configurations of the kernels that do the work."""

    splits: int
    """Segments of every shared prefix."""
    prefix: Any
    """Of paged attention over prefixes."""
    suffix: Any
    """Of paged attention over suffixes."""
    merge: Any
    """Of `merge_states` for two partial results, else of `combine_partials`."""
    flat: Any = None
    """Of paged attention over whole requests, which is then all that runs: where each fills tiles of its own anyhow,
    these read a prefix as often as shared ones would, and there is nothing to merge."""
    joined: bool = False
    """The suffixes' kernel takes in the results of prefixes, so that nothing is merged afterwards; tables are one small
    kernel for each of the two launches. `prefix` is prefill's, `suffix` the decoding kernel's."""

    def __post_init__(self):
        if self.splits not in _SPLITS:
            raise ValueError(f"splits must be {_mosaic.either(_SPLITS)}, got {self.splits}")
        kinds = isinstance(self.prefix, paged_prefill.Config), isinstance(self.suffix, paged_decode.Config)
        if self.joined and not all(kinds):
            raise ValueError("joined needs a prefix of prefill's kernel and a suffix of the decoding kernel's")


def with_sink(lse, sinks):
    """The log-sum-exp of keys and sink; finite for an infinite sink, whose weight must win a merge, not vanish."""
    if sinks is None:
        return lse
    return jnp.minimum(jnp.logaddexp(lse, sinks.astype(lse.dtype)), _MAX)


# ---------------------------------------------------------------- configuration and legality
def _parts(*, q, page_table, group_start, shared, splits: int, **args) -> tuple[dict, dict, dict]:
    """Arguments, as shapes, of the two attention launches and of the merge."""
    (N, H, _), (L, G) = q.shape, shared.shape
    pieces = max(1, L * splits)

    def like(x, *shape):
        return jax.ShapeDtypeStruct(shape, x.dtype)

    common = {k: v for k, v in args.items() if k not in ("lengths", "query_start", "return_lse", "sinks")}
    common |= {"window": None, "return_lse": True}
    requests = pieces * (G + 1)
    prefix = common | {
        "q": like(q, pieces * N, *q.shape[1:]),
        "page_table": like(page_table, requests, page_table.shape[1]),
        "lengths": like(args["lengths"], requests),
        "query_start": like(args["lengths"], requests + 1),
        "sinks": None,
        "causal": False,
    }
    suffix = common | {
        "q": q,
        "page_table": page_table,
        "lengths": args["lengths"],
        "query_start": args["query_start"],
        "sinks": args["sinks"],
        "causal": True,
    }
    lse = jax.ShapeDtypeStruct((pieces + 1, N, H), jnp.float32)
    merge: dict[str, Any] = {"o": like(q, pieces + 1, *q.shape), "lse": lse, "base": "e", "return_corrected": False}
    if pieces == 1:
        one = jax.ShapeDtypeStruct((N, H), jnp.float32)
        merge = {"prefix_o": q, "prefix_lse": one, "suffix_o": q, "suffix_lse": one}
        merge |= {"out_scale": None, "return_lse": False}
    return prefix, suffix, merge


def _merger(merge: dict) -> Any:
    return merge_states if "prefix_o" in merge else combine_partials


def why_not(**args) -> str | None:
    """None if the kernels can run these arguments, else one sentence."""
    if 0 in (args["q"].shape[0], args["page_table"].shape[0], *args["shared"].shape):
        return "needs a query row, a request, a level and a group"
    prefix, suffix, merge = _parts(splits=_splits(**args), **args)
    return paged_attention.why_not(**prefix) or paged_attention.why_not(**suffix) or _merger(merge).why_not(**merge)


def _splits(*, q, k_pages, page_table, shared, **_) -> int:
    """Segments that fill the card with tiles, each of at least `_SEGMENT` keys; by shapes alone."""
    (N, H, _), (L, _) = q.shape, shared.shape
    K, keys = k_pages.shape[2], page_table.shape[1] * k_pages.shape[1]
    tiles = max(1, L * K * -(-N * (H // K) // _TILE))
    wanted = min(2 * _mosaic.num_sms() // tiles, keys // _SEGMENT, 15 // L)
    return max(s for s in _SPLITS if s <= max(1, wanted))


def default_config(**args) -> Config:
    """Flat for long prompts, else enough segments to fill the card twice over; the other kernels' own defaults.

    Prefixes take prefill's kernel where it can run: their rows fill its tiles. Suffixes of the decoding kernel take in
    their results where they can, each with a thread block of its own where these are many, see `_whole`. Measured on an
    H200, 128 requests with 256 keys each behind 8192 that all share, 32/8 heads of 128: 76 us joined in four segments
    (vLLM's cascade 103), in eight 6 us more; with the suffixes in equal shares 97, and then merged 106.
    """
    splits = _splits(**args)
    config = _config(splits, args)
    prefix, suffix, _ = _parts(splits=splits, **args)
    if args["q"].shape[0] >= _PROMPT * args["page_table"].shape[0] and paged_prefill.why_not(**suffix) is None:
        return dataclasses.replace(config, flat=paged_prefill.default_config(**suffix))
    if paged_prefill.why_not(**prefix) is None:
        config = dataclasses.replace(config, prefix=paged_prefill.default_config(**prefix))
        if isinstance(config.suffix, paged_decode.Config) and _why_not_joined(config, args) is None:
            config = _whole(dataclasses.replace(config, joined=True), suffix)
    return config


def _whole(config: Config, suffix: dict) -> Config:
    """Joined suffixes of the decoding kernel without shares, where their tiles fill the card twice over.

    The table's columns hold the prefixes, too: whether suffixes are short cannot be seen from shapes. Of so many tiles
    it does not matter: a short suffix costs its latencies, which other thread blocks hide, all the more with one stage
    and so with little memory; a long one keeps its multiprocessor busy with little to wait for at the end. Fewer tiles
    keep their shares, without which long suffixes would leave multiprocessors idle. Measured on an H200, 128 requests
    of 256 keys with 8 KV heads: 76 us with one stage, 80 with two, 97 in shares; behind two prefixes 83, 87 and 105.
    """
    tiles = (
        min(suffix["q"].shape[0], suffix["page_table"].shape[0]) * paged_decode._plan(config.suffix, **suffix).chunks
    )
    if tiles < 4 * _mosaic.num_sms():
        return config
    return dataclasses.replace(config, suffix=dataclasses.replace(config.suffix, num_shares=None, num_stages=1))


def configs(**args) -> Iterable[Config]:
    """Every number of segments that the merge can take, with the other kernels' defaults and with prefill's; flat."""
    L = args["shared"].shape[0]
    found = []
    for splits in _SPLITS:
        if splits * L > 15:
            continue
        found.append(_config(splits, args))
        prefix, suffix, _ = _parts(splits=splits, **args)
        quick = {
            name: paged_prefill.default_config(**part)
            for name, part in (("prefix", prefix), ("suffix", suffix))
            if paged_prefill.why_not(**part) is None
        }
        if quick:
            found.append(dataclasses.replace(found[-1], **quick))
        found += _joinable(found[-1], args)
        if splits == 1 and "suffix" in quick:
            found.append(dataclasses.replace(found[-1], flat=quick["suffix"]))
    return list(dict.fromkeys([*found, default_config(**args)]))


def _joinable(config: Config, args: dict) -> list[Config]:
    """Variants of a configuration whose suffixes take in the results of prefixes."""
    _, suffix, _ = _parts(splits=config.splits, **args)
    if not isinstance(config.prefix, paged_prefill.Config) or paged_decode.why_not(**suffix) is not None:
        return []
    best = paged_decode.default_config(**suffix)
    ways = [{}, {"num_stages": 1}, {"swapped": True}, {"swapped": True, "num_stages": 1}]
    ways += [{"num_shares": best.num_shares, "swapped": swapped} for swapped in (False, True)]
    found = []
    for way in ways:
        own = paged_decode.Config(**{"num_stages": best.num_stages} | way)
        joined = dataclasses.replace(config, suffix=own, joined=True)
        if _why_not_joined(joined, args) is None:
            found.append(joined)
    return found


def _why_not_joined(config: Config, args: dict) -> str | None:
    """None if the suffixes' kernel can take in the results of prefixes, else why not."""
    _, suffix, _ = _parts(splits=config.splits, **args)
    joined = _layout(config.prefix, config.splits, args["shared"])
    return paged_decode.illegal(paged_decode._plan(config.suffix, **suffix, joined=joined))


def _layout(prefix: Any, splits: int, shared) -> Joined:
    """How prefill's kernel leaves its results."""
    L, G = shared.shape
    return Joined(levels=L, splits=splits, groups=G, block_q=prefix.block_q, block_g=prefix.block_g)


def _config(splits: int, args: dict) -> Config:
    prefix, suffix, merge = _parts(splits=splits, **args)
    return Config(
        splits=splits,
        prefix=paged_attention.default_config(**prefix),
        suffix=paged_attention.default_config(**suffix),
        merge=_merger(merge).default_config(**merge),
    )


# ---------------------------------------------------------------- launch
def cascade_attention(
    *,
    config: Config,
    q,
    k_pages,
    v_pages,
    page_table,
    lengths,
    query_start,
    group_start,
    shared,
    sinks,
    k_scale,
    v_scale,
    scale,
    softcap,
    return_lse,
):
    """Launch; arguments as prepared by `jaxattn.ops.cascade_attention`."""
    N, page = q.shape[0], k_pages.shape[1]
    cache = {"k_pages": k_pages, "v_pages": v_pages, "k_scale": k_scale, "v_scale": v_scale}
    cache |= {"scale": scale, "softcap": softcap, "window": None}

    def attend(config, q, table: Table, return_lse=True, **options):
        named = dict(zip(("page_table", "lengths", "query_start"), table, strict=True))
        return paged_attention.paged_attention(config=config, q=q, return_lse=return_lse, **named, **cache, **options)

    if config.flat is not None:
        return attend(config.flat, q, (page_table, lengths, query_start), return_lse, causal=True, sinks=sinks)
    if config.joined:
        spans, done = tables_of.spans(lengths, query_start, group_start, shared, page=page)
        options = {"splits": config.splits, "N": N, "page": page, "block_q": config.prefix.block_q}
        o, rows = paged_prefill.segments_attention(
            config=config.prefix,
            q=q,
            page_table=page_table,
            segments=tables_of.segments(query_start, group_start, spans, **options),
            copies=shared.shape[0] * config.splits,
            k_pages=k_pages,
            v_pages=v_pages,
            scale=scale,
            softcap=softcap,
        )
        return paged_decode.paged_attention(
            config=config.suffix,
            q=q,
            page_table=page_table,
            lengths=lengths,
            query_start=query_start,
            return_lse=return_lse,
            causal=True,
            sinks=sinks,
            joined=_layout(config.prefix, config.splits, shared),
            own=tables_of.own(query_start, group_start, done, B=page_table.shape[0]),
            prefix_o=o,
            prefix_lse=rows,
            **cache,
        )
    prefixes, suffix = levels(page_table, lengths, query_start, group_start, shared, page=page)

    table = tables_of.stacked(prefixes, config.splits, N, page)
    pieces = len(prefixes) * config.splits
    if isinstance(config.prefix, paged_prefill.Config):
        o, lse = attend(config.prefix, q, table, causal=False, sinks=None, copies=pieces)
    else:
        rows = q if pieces == 1 else jnp.tile(q, (pieces, 1, 1))
        o, lse = attend(config.prefix, rows, table, causal=False, sinks=None)
    own_o, own_lse = attend(config.suffix, q, suffix, causal=True, sinks=sinks)
    weight = with_sink(own_lse, sinks)
    if pieces == 1:
        merged = merge_states.merge_states(
            config=config.merge,
            prefix_o=o,
            prefix_lse=lse,
            suffix_o=own_o,
            suffix_lse=weight,
            out_scale=None,
            return_lse=False,
        )
        return (merged, jnp.logaddexp(lse, own_lse)) if return_lse else merged
    lse = lse.reshape(pieces, N, -1)
    merged = combine_partials.combine_partials(
        config=config.merge,
        o=o.reshape(pieces, *q.shape),
        lse=lse,
        base="e",
        return_corrected=False,
        last=(own_o, weight),
    )[0]
    return (merged, jax.nn.logsumexp(jnp.concatenate([lse, own_lse[None]]), 0)) if return_lse else merged
