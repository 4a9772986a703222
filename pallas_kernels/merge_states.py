"""Merge of two partial attention results on Mosaic GPU: one pass over memory, see `jaxattn.ops.merge_states`."""

import dataclasses
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _mosaic, _rows

_DTYPES = ("bfloat16", "float16", "float32")
_FP8_MAX = 448.0
_ELEMENTS = 1024
"""Elements of one array in a default tile: two 16-byte loads a thread, and as many thread blocks as there are."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """`rows`: (token, head) rows of one tile; a multiple of the smallest tile, `_rows.smallest`."""

    rows: int

    def __post_init__(self):
        _rows.check_rows(self.rows)


def why_not(*, prefix_o, **_) -> str | None:
    """None if the kernel can run these arguments, else one sentence."""
    if jnp.dtype(prefix_o.dtype).name not in _DTYPES:
        return f"outputs must be {', '.join(_DTYPES)}, got {jnp.dtype(prefix_o.dtype).name}"
    T, H, D = prefix_o.shape
    return _rows.why_not(T * H, D, _rows.vector(prefix_o.dtype))


def default_config(*, prefix_o, **_) -> Config:
    """The largest tile of 1024 elements: small ones hide more of the memory's latency than wide ones."""
    T, H, D = prefix_o.shape
    return Config(rows=_rows.default_rows(T * H, D, _rows.vector(prefix_o.dtype), _mosaic.num_sms(), _ELEMENTS))


def configs(*, prefix_o, **_) -> Iterable[Config]:
    """All legal tile heights."""
    D = prefix_o.shape[-1]
    return [Config(rows=r) for r in _rows.choices(D, _rows.vector(prefix_o.dtype))]


def merge_states(*, config: Config, prefix_o, prefix_lse, suffix_o, suffix_lse, out_scale, return_lse):
    """Launch; arguments as prepared by `jaxattn.ops.merge_states`."""
    T, H, D = prefix_o.shape
    N, vec = T * H, _rows.vector(prefix_o.dtype)
    if reason := _rows.why_not_rows(config.rows, D, vec):
        raise ValueError(f"merge_states: {reason}")
    lses = [_rows.padded(x.reshape(N), D, vec) for x in (prefix_lse, suffix_lse)]
    inputs = [prefix_o.reshape(N, 1, D), lses[0], suffix_o.reshape(N, 1, D), lses[1]]
    if out_scale is not None:
        inputs.append(out_scale.astype(jnp.float32).reshape(1))
    o_type = prefix_o.dtype if out_scale is None else jnp.float8_e4m3fn
    out_type = [jax.ShapeDtypeStruct((N, 1, D), o_type)]
    if return_lse:
        out_type.append(jax.ShapeDtypeStruct(lses[0].shape, jnp.float32))

    def process(tile: _rows.Tile, p_ref, p_lse_ref, s_ref, s_lse_ref, *refs):
        scale_ref, outs = (refs[0], refs[1:]) if out_scale is not None else (None, refs)
        p_lse, s_lse = tile.load(p_lse_ref), tile.load(s_lse_ref)
        p, s = tile.load(p_ref).astype(jnp.float32), tile.load(s_ref).astype(jnp.float32)
        no_p, no_s = jnp.abs(p_lse) == math.inf, jnp.abs(s_lse) == math.inf
        p_lse, s_lse = jnp.where(no_p, -math.inf, p_lse), jnp.where(no_s, -math.inf, s_lse)
        top = jnp.maximum(p_lse, s_lse)
        top = jnp.where(top == -math.inf, 0.0, top)
        p_weight, s_weight = jnp.exp(p_lse - top), jnp.exp(s_lse - top)
        total = p_weight + s_weight
        if return_lse:
            tile.store(outs[1], jnp.log(total) + top)
        p_weight, s_weight = tile.divide(p_weight, total), tile.divide(s_weight, total)
        o = p * tile.spread(p_weight) + s * tile.spread(s_weight)
        # selected, not multiplied by zero: what an empty side holds may be NaN
        o = jnp.where(tile.spread(no_s), p, o)
        o = jnp.where(tile.spread(no_p), jnp.where(tile.spread(no_s), 0.0, s), o)
        if scale_ref is not None:
            inverse = tile.divide(jnp.ones_like(total), lax.broadcast(scale_ref[0], total.shape))
            o = jnp.clip(o * tile.spread(inverse), -_FP8_MAX, _FP8_MAX)
        tile.store(outs[0], o)

    done = _rows.launch(process, inputs, out_type, N=N, D=D, vec=vec, rows=config.rows, name="merge_states")
    o = done[0].reshape(T, H, D)
    return (o, done[1][:N].reshape(T, H)) if return_lse else o
