"""Top-k routing on Mosaic GPU (Hopper): scores, groups, choice and weights of a few tokens in a warpgroup's registers.

A token's logits lie in eight parts of two or four neighbouring lanes; the parts are also the groups of DeepSeek's
models. Experts are chosen one after the other: the largest choice, the
lowest id that has it, then that one is struck out.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic, _router_heads

PARTS, WARPS, LANES = 8, 4, 32
MOST_EXPERTS, MOST_CHOSEN = 512, 16
NARROW = 384
"""Experts that fit two lanes a part."""
STEPS = 4096.0
_FROM = 20.0
"""From here on softplus(x) is x."""
_LARGE = 3.4028234663852886e38
_TINY = 2.0**-126
"""The smallest normal number; less may be 0."""

f32, i32 = jnp.float32, jnp.int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the numbers of a token lie and leave."""

    lanes: int = 4
    """That hold one of the eight parts of a token's experts: 2 or 4."""
    rows_out: bool = False
    """Results leave token by token, at most eight of each, instead of slot by slot to be transposed by XLA."""
    heads: int = 0
    """Lanes keep their two best numbers of 1 or 2 tokens a warp, and one kernel does everything: see `_router_heads`.

    For four lanes a part. 0: each choice looks through all numbers.
    """

    def __post_init__(self):
        if self.lanes not in (2, 4):
            raise ValueError(f"lanes must be 2 or 4, got {self.lanes}")
        if self.heads not in (0, 1, 2):
            raise ValueError(f"heads must be 0, 1 or 2, got {self.heads}")
        if self.heads and (self.lanes != 4 or self.rows_out):
            raise ValueError(f"heads goes with lanes=4 and rows_out=False, got {self}")

    @property
    def rows(self) -> int:
        """Tokens of a thread block."""
        return WARPS * (self.heads or LANES // (PARTS * self.lanes))


def why_not(*, logits, top_k, num_groups, table, **_) -> str | None:
    """None if the kernel can run these arguments, else one sentence."""
    (T, E), dtype = logits.shape, jnp.dtype(logits.dtype).name
    if dtype != "float32":
        return f"logits must be float32, got {dtype}"
    if table is not None:
        return "routing by a table is a gather, which is left to XLA"
    if E > MOST_EXPERTS:
        return f"the number of experts must be at most {MOST_EXPERTS}, got {E}"
    if num_groups not in (1, PARTS):
        return f"num_groups must be 1 or {PARTS}, got {num_groups}"
    if num_groups > 1 and E % LANES:
        return f"in groups the number of experts must be a multiple of {LANES}, got {E}"
    if top_k > MOST_CHOSEN:
        return f"top_k must be at most {MOST_CHOSEN}, got {top_k}"
    return None if T else "there are no tokens"


def default_config(*, logits, num_groups, **_) -> Config:
    """Two tokens a warp where few maxima follow each other, else one, so that more warps hide the latency.

    H200, 8192 tokens, 256 experts: 18.5 and 19.2 us without groups, 25.2 and 23.3 us with them.
    """
    return Config(lanes=2 if num_groups == 1 and logits.shape[1] <= NARROW else 4)


def configs(*, logits, top_k, **_) -> Iterator[Config]:
    """Those whose numbers fit into registers."""
    for lanes in (2, 4):
        for rows_out in (False, True):
            config = Config(lanes=lanes, rows_out=rows_out)
            if _illegal(config, logits.shape[1], top_k) is None:
                yield config
    for heads in (1, 2):
        if _illegal(config := Config(heads=heads), logits.shape[1], top_k) is None:
            yield config


def _illegal(config: Config, E: int, top_k: int) -> str | None:
    if config.rows_out and top_k > PARTS:
        return f"rows_out=True is for top_k up to {PARTS}, got {top_k}"
    for name in ("lanes", "heads"):
        if getattr(config, name) == 2 and E > NARROW:
            return f"{name}=2 holds at most {NARROW} experts, got {E}"
    return None


def _layout(config: Config, width: int) -> Any:
    """[rows, 8, width]: `lanes` lanes a part."""
    per_warp = config.rows // WARPS
    vec = next(v for v in (4, 2, 1) if width % (config.lanes * v) == 0)
    tile, piece = (config.rows, PARTS, width), config.lanes * vec
    if config.heads == 2:  # both tokens in the registers of every lane
        tiling = plgpu.Tiling((tile, (2, PARTS, piece), (vec,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1)
    if per_warp == 1 and piece == width:  # one layout must not have two names
        return plgpu.Layout.TILED(plgpu.Tiling((tile, (vec,))), warp_dims=(-4,), lane_dims=(-3, -2), vector_dim=-1)
    if per_warp == 1:
        tiling = plgpu.Tiling((tile, (piece,), (vec,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-4, -2), vector_dim=-1)
    tiling = plgpu.Tiling((tile, (per_warp, 1, piece), (vec,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-7,), lane_dims=(-4, -6, -2), vector_dim=-1)


def router(
    *, config: Config, logits, top_k, scoring, renormalize, scaling, bias, num_groups, kept_groups, tokens, table
):
    """Run the kernel on prepared arguments of `jaxattn.router`.

    Raises:
        ValueError: `config` does not fit so many experts.
    """
    del tokens, table
    (T, real), block = logits.shape, config.rows
    if reason := _illegal(config, real, top_k):
        raise ValueError(f"router: {reason}")
    E, rows = -(-real // LANES) * LANES, -(-T // block) * block
    width, filled = E // PARTS, real < E
    shape, layout = (block, PARTS, width), _layout(config, width)
    one = layout.reduce(2).reduce(1)
    inputs = [jnp.pad(logits, ((0, rows - T), (0, E - real))).reshape(rows, PARTS, width)]
    if bias is not None:
        bias = jnp.pad(bias, (0, E - real)).reshape(PARTS, width)
        inputs.append(bias if config.heads else jnp.broadcast_to(bias, shape))

    def most(x):
        return jnp.max(jnp.max(x, 2), 1)

    def least(x):
        return jnp.min(jnp.min(x, 2), 1)

    def spread(x):
        return lax.broadcast_in_dim(x, shape, [0])

    def struck(x, where):
        return jnp.where(where, -math.inf, x)

    def chosen_by(scores, ref):
        """Finite: with a finite bias the sum of a score, at most 2^64, does not overflow."""
        if not config.heads:
            return _finite(scores + plgpu.load(ref, layout=layout, optimized=False))
        columns = layout.reduce(0)
        finite = _bounded(plgpu.load(ref, layout=columns, optimized=False), columns)
        return scores + lax.broadcast_in_dim(finite, shape, [1, 2])

    def body(logits_ref, *refs):
        bias_ref, (weights_ref, ids_ref, *scratch) = refs[: len(inputs) - 1], refs[len(inputs) - 1 :]
        at = pl.ds(lax.axis_index("block") * block, block)
        x = plgpu.load(logits_ref.at[at], layout=layout, optimized=False)
        x = _bounded(x, layout) if config.heads else _finite(x)
        part = plgpu.broadcasted_iota(i32, shape, 1, layout=layout)
        inside = plgpu.broadcasted_iota(i32, shape, 2, layout=layout)
        number = part * width + inside
        x = struck(x, number >= real) if filled else x
        soft = _router_heads.softplus if config.heads else _softplus
        scores = _scores(x, scoring, most, spread, layout, soft, not renormalize)
        if bias is None:
            rest = jnp.maximum(x - spread(most(x)), -_LARGE) if scoring == "softmax" else x
            choice = jnp.where(scores < _TINY, rest, scores)
        else:
            choice = chosen_by(scores, bias_ref[0])
        choice = struck(choice, number >= real) if filled else choice
        if config.heads:
            options = {"top_k": top_k, "renormalize": renormalize, "scaling": scaling}
            options |= {"kept": kept_groups if num_groups > 1 else None, "pairs": bias is not None}
            to = weights_ref.at[at], ids_ref.at[at]
            _router_heads.choose(*to, scratch[0], scores, choice, layout=layout, **options)
            return
        if num_groups > 1:
            best = jnp.max(choice, 2)
            if bias is not None and width > 1:
                first = jnp.min(jnp.where(choice == lax.broadcast_in_dim(best, shape, [0, 1]), inside, width), 2)
                rest = struck(choice, inside == lax.broadcast_in_dim(first, shape, [0, 1]))
                best = best + jnp.max(rest, 2)
            group = jnp.min(part, 2)
            closed = struck(jnp.zeros_like(best), group < PARTS)
            for _ in range(kept_groups):
                top = lax.broadcast_in_dim(jnp.max(best, 1), best.shape, [0])
                left = (best == top) & (closed < 0)  # sums of two may be -inf, as those struck out are
                mine = lax.broadcast_in_dim(jnp.min(jnp.where(left, group, PARTS), 1), best.shape, [0]) == group
                closed, best = jnp.where(mine, 0.0, closed), struck(best, mine)
            choice = choice + lax.broadcast_in_dim(closed, shape, [0, 1])
        weights, ids = [], []
        for _ in range(top_k):
            top = spread(most(choice))
            chosen = least(jnp.where(choice == top, number, E))
            mine = number == spread(chosen)
            weights.append(most(jnp.where(mine, scores, 0.0)))
            ids.append(chosen)
            choice = struck(choice, mine)
        total = sum(weights[1:], weights[0])
        total = jnp.where(total > 0, total, 1.0)
        if renormalize:
            weights = [_mosaic.divide(w, total, one) for w in weights]
        weights = [w * scaling for w in weights]
        if config.rows_out:
            place = jnp.min(part, 2)
            for ref, values in ((weights_ref, weights), (ids_ref, ids)):
                _mosaic.store(ref.at[at], _side_by_side(values, place))
            return
        for a, (w, chosen) in enumerate(zip(weights, ids, strict=True)):
            _mosaic.store(weights_ref.at[a, at], w)
            _mosaic.store(ids_ref.at[a, at], chosen)

    out = (rows, top_k) if config.heads else (rows, PARTS) if config.rows_out else (top_k, rows)
    weights, ids = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(out, f32), jax.ShapeDtypeStruct(out, i32)],
        scratch_types=[plgpu.SMEM((block, E), f32)] if config.heads else [],
        grid=(rows // block,),
        grid_names=("block",),
        kernel_name="router",
    )(*inputs)
    if config.rows_out or config.heads:
        return weights[:T, :top_k], ids[:T, :top_k]
    return weights[:, :T].T, ids[:, :T].T


def _side_by_side(values, place):
    """[rows, 8] of up to eight [rows]; `place` holds 0 to 7 in every row."""
    out = lax.broadcast_in_dim(values[0], place.shape, [0])
    for a, value in enumerate(values[1:], 1):
        out = jnp.where(place == a, lax.broadcast_in_dim(value, place.shape, [0]), out)
    return out


def _finite(x):
    """NaN becomes the lowest number, infinities the largest."""
    return jnp.where(x == x, jnp.clip(x, -_LARGE, _LARGE), -_LARGE)


def _bounded(x, layout):
    """`_finite` in half the instructions."""
    return jnp.minimum(_mosaic.larger(x, jnp.full_like(x, -_LARGE), layout), _LARGE)


def _scores(x, scoring, most, spread, layout, soft, exact):
    if scoring == "softmax":
        e = jnp.exp(x - spread(most(x)))
        return _mosaic.divide(e, spread(_total(e) if exact else _sum(e)), layout)
    if scoring == "sigmoid":
        return 1 / (1 + jnp.exp(-x))
    return jnp.sqrt(jnp.where(x > _FROM, x, soft(x, layout)))


def _softplus(x, _):
    """log1p(u) of u = exp(x) up to e^20: log(w) * u / (w - 1) with w = 1 + u, and u where w is 1."""
    u = jnp.exp(jnp.minimum(x, _FROM))
    w = 1 + u
    return jnp.where(w == 1, u, jnp.log(w) * (u / jnp.where(w == 1, 1.0, w - 1)))


def _sum(x):
    return jnp.sum(jnp.sum(x, 2), 1)


def _total(e):
    """The sum of numbers from 0 to 1 whose largest is 1, to half a unit in the last place and a twentieth of one.

    Multiples of 2^-12 up to 512 add up without rounding in any order. What remains of each number is below 2^-12, so
    its sum is below 2^-3, and the 16 additions of a lane and 5 between lanes that a number passes err by less than
    21 * 2^-24 * 2^-3 in the worst case, by less than a twentieth of 2^-24 on average.
    """
    whole = (e * STEPS).astype(i32).astype(f32) * (1 / STEPS)
    return _sum(whole) + _sum(e - whole)
