"""Combination of N partial attention results on Mosaic GPU: one pass, see `jaxattn.ops.combine_partials`."""

import dataclasses
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from pallas_kernels import _mosaic, _rows

_DTYPES = ("bfloat16", "float16", "float32")
_MAX_RANKS = 16
"""Ranks are unrolled; each holds one log-sum-exp a row in registers."""
_ELEMENTS = 4096
"""Elements of one tile: the sum stays in registers beside two ranks' values."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """`rows`: (sequence, head) rows of one tile; a multiple of the smallest tile, `_rows.smallest`."""

    rows: int

    def __post_init__(self):
        _rows.check_rows(self.rows)


def why_not(*, o, **_) -> str | None:
    """None if the kernel can run these arguments, else one sentence."""
    if jnp.dtype(o.dtype).name not in _DTYPES:
        return f"o must be {', '.join(_DTYPES)}, got {jnp.dtype(o.dtype).name}"
    N, B, H, D = o.shape
    if N > _MAX_RANKS:
        return f"at most {_MAX_RANKS} ranks, got N={N}; combine groups of them one after the other"
    return _rows.why_not(B * H, D, _rows.vector(o.dtype))


def default_config(*, o, **_) -> Config:
    """The largest tile that still fills the card."""
    _, B, H, D = o.shape
    return Config(rows=_rows.default_rows(B * H, D, _rows.vector(o.dtype), _mosaic.num_sms(), _ELEMENTS))


def configs(*, o, **_) -> Iterable[Config]:
    """All legal tile heights."""
    return [Config(rows=r) for r in _rows.choices(o.shape[-1], _rows.vector(o.dtype), 2 * _ELEMENTS)]


def combine_partials(*, config: Config, o, lse, base, return_corrected, last=None, dtype=None):
    """Launch; arguments as prepared by `jaxattn.ops.combine_partials`.

    `last` may hold o [B, H, D] and lse [B, H] of one rank more, that of the highest number; not with corrected ranks.
    `dtype` of the combined o, None = that of its parts.
    """
    N, B, H, D = o.shape
    rows, vec = B * H, _rows.vector(o.dtype)
    if reason := _rows.why_not_rows(config.rows, D, vec):
        raise ValueError(f"combine_partials: {reason}")
    lse = _rows.padded(lse.reshape(N, rows), D, vec)
    out_type = [jax.ShapeDtypeStruct((rows, 1, D), dtype or o.dtype), jax.ShapeDtypeStruct(lse.shape[1:], jnp.float32)]
    if return_corrected:
        # padded: a TMA copy knows the ranks' rows as one dimension and would run on into the next rank
        out_type.append(jax.ShapeDtypeStruct((N, *lse.shape[1:], 1, D), o.dtype))
    exp, log = (jnp.exp, jnp.log) if base == "e" else (jnp.exp2, jnp.log2)

    inputs = [o.reshape(N, rows, 1, D), lse]
    if last is not None:
        inputs += [last[0].reshape(rows, 1, D), _rows.padded(last[1].reshape(rows), D, vec)]

    def process(tile: _rows.Tile, o_ref, lse_ref, *refs):
        more, outs = (refs[:2], refs[2:]) if last is not None else ((), refs)
        parts = [(o_ref.at[r], lse_ref.at[r]) for r in range(N)] + ([more] if more else [])
        lses = [tile.load(ref) for _, ref in parts]
        lses = [jnp.where(jnp.abs(x) < math.inf, x, -math.inf) for x in lses]  # NaN compares false
        top = lses[0]
        for x in lses[1:]:
            top = jnp.maximum(top, x)
        top = jnp.where(top == -math.inf, 0.0, top)
        total = exp(lses[0] - top)
        for x in lses[1:]:
            total += exp(x - top)
        total = log(total) + top
        tile.store(outs[1], total)
        o = jnp.float32(-0.0)  # the neutral element: adding +0 would lose a sum's sign
        for r, x in enumerate(lses):
            factor = tile.spread(jnp.where(x == -math.inf, 0.0, exp(x - total)))
            # selected, not multiplied: an empty rank may hold NaN, and a zero factor gives +0
            part = jnp.where(factor == 0.0, 0.0, tile.load(parts[r][0]).astype(jnp.float32) * factor)
            if return_corrected:
                tile.store(outs[2].at[r], part)
            o = o + part
        tile.store(outs[0], o)

    done = _rows.launch(process, inputs, out_type, N=rows, D=D, vec=vec, rows=config.rows, name="combine_partials")
    outputs = done[0].reshape(B, H, D), done[1][:rows].reshape(B, H)
    return (*outputs, done[2][:, :rows].reshape(N, B, H, D)) if return_corrected else outputs
