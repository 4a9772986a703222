"""Top-k routing on Mosaic GPU (Hopper): scores, groups, choice and weights of a token in a warp's registers.

A token's logits lie in eight parts of four neighbouring lanes; the parts are also the groups of DeepSeek's models.
Scores are computed here; `_router_heads` chooses.
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

PARTS, LANES, PART_LANES = 8, 32, 4
TOKENS = 4
"""Of a thread block: one a warp."""
MOST_EXPERTS, MOST_CHOSEN = 512, 16
STEPS = 4096.0
_FROM = 20.0
"""From here on softplus(x) is x."""
_LARGE = 3.4028234663852886e38
_TINY = 2.0**-126
"""The smallest normal number; less may be 0."""

f32, i32 = jnp.float32, jnp.int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Nothing to choose."""


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


def default_config(**_) -> Config:
    """The only one."""
    return Config()


def configs(**_) -> Iterator[Config]:
    """The only one."""
    yield Config()


def _layout(width: int) -> Any:
    """[4, 8, width]: a token a warp, four lanes a part."""
    vec = next(v for v in (4, 2, 1) if width % (PART_LANES * v) == 0)
    tile, piece = (TOKENS, PARTS, width), PART_LANES * vec
    if piece == width:  # one layout must not have two names
        return plgpu.Layout.TILED(plgpu.Tiling((tile, (vec,))), warp_dims=(-4,), lane_dims=(-3, -2), vector_dim=-1)
    tiling = plgpu.Tiling((tile, (piece,), (vec,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-4, -2), vector_dim=-1)


def router(
    *, config: Config, logits, top_k, scoring, renormalize, scaling, bias, num_groups, kept_groups, tokens, table
):
    """Run the kernel on prepared arguments of `jaxattn.router`."""
    del config, tokens, table
    (T, real), block = logits.shape, TOKENS
    E, rows = -(-real // LANES) * LANES, -(-T // block) * block
    width, filled = E // PARTS, real < E
    shape, layout = (block, PARTS, width), _layout(width)
    inputs = [jnp.pad(logits, ((0, rows - T), (0, E - real))).reshape(rows, PARTS, width)]
    if bias is not None:
        inputs.append(jnp.pad(bias, (0, E - real)).reshape(PARTS, width))

    def most(x):
        return jnp.max(jnp.max(x, 2), 1)

    def spread(x):
        return lax.broadcast_in_dim(x, shape, [0])

    def struck(x, where):
        return jnp.where(where, -math.inf, x)

    def chosen_by(scores, ref):
        """Finite: with a finite bias the sum of a score, at most 2^64, does not overflow."""
        columns = layout.reduce(0)
        finite = _bounded(plgpu.load(ref, layout=columns, optimized=False), columns)
        return scores + lax.broadcast_in_dim(finite, shape, [1, 2])

    def body(logits_ref, *refs):
        bias_ref, (weights_ref, ids_ref, scratch) = refs[: len(inputs) - 1], refs[len(inputs) - 1 :]
        at = pl.ds(lax.axis_index("block") * block, block)
        x = _bounded(plgpu.load(logits_ref.at[at], layout=layout, optimized=False), layout)
        beyond = None
        if filled:
            part = plgpu.broadcasted_iota(i32, shape, 1, layout=layout)
            beyond = part * width + plgpu.broadcasted_iota(i32, shape, 2, layout=layout) >= real
            x = struck(x, beyond)
        scores = _scores(x, scoring, most, spread, layout, not renormalize)
        if bias is None:
            rest = jnp.maximum(x - spread(most(x)), -_LARGE) if scoring == "softmax" else x
            choice = jnp.where(scores < _TINY, rest, scores)
        else:
            choice = chosen_by(scores, bias_ref[0])
        choice = choice if beyond is None else struck(choice, beyond)
        options = {"top_k": top_k, "renormalize": renormalize, "scaling": scaling}
        options |= {"kept": kept_groups if num_groups > 1 else None, "pairs": bias is not None}
        _router_heads.choose(weights_ref.at[at], ids_ref.at[at], scratch, scores, choice, layout=layout, **options)

    weights, ids = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((rows, top_k), f32), jax.ShapeDtypeStruct((rows, top_k), i32)],
        scratch_types=[plgpu.SMEM((block, E), f32)],
        grid=(rows // block,),
        grid_names=("block",),
        kernel_name="router",
    )(*inputs)
    return weights[:T], ids[:T]


def _bounded(x, layout):
    """NaN becomes the lowest number, infinities the largest."""
    return jnp.minimum(_mosaic.larger(x, jnp.full_like(x, -_LARGE), layout), _LARGE)


def _scores(x, scoring, most, spread, layout, exact):
    if scoring == "softmax":
        e = jnp.exp(x - spread(most(x)))
        return _mosaic.divide(e, spread(_total(e) if exact else _sum(e)), layout)
    if scoring == "sigmoid":
        return 1 / (1 + jnp.exp(-x))
    return jnp.sqrt(jnp.where(x > _FROM, x, _router_heads.softplus(x, layout)))


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
