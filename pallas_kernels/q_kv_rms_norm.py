"""RMSNorm of q's and kv's latents on Mosaic GPU: one pass and one launch, see `jaxattn.ops.q_kv_rms_norm`.

A warpgroup norms the same tokens' rows of both, short ones as tiles, or both as lines.
"""

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from pallas_kernels import _frames, _mosaic, _rows
from pallas_kernels import _plans as plans
from pallas_kernels._frames import Frame, Line
from pallas_kernels._plans import Rows
from pallas_kernels.rms_norm_quant import inverse_root


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """`rows`: tokens of one warpgroup."""

    rows: int

    def __post_init__(self):
        plans.check_rows(self.rows)


def why_not(*, q, kv, **_) -> str | None:
    """None if the kernel can run these arguments, else one sentence."""
    if jnp.dtype(q.dtype).name not in plans.DTYPES:
        return f"q and kv must be {_mosaic.either(plans.DTYPES)}, got {jnp.dtype(q.dtype).name}"
    if _tiles(q, kv):
        return None
    for name, x in (("q", q), ("kv", kv)):
        line = _frames.line(x.shape[1], x.dtype)
        if isinstance(line, str):
            return f"{name}: {line}"
        if x.shape[1] > _frames.LINE_VALUES:
            return f"rows must hold at most {_frames.LINE_VALUES} values, got {name} with {x.shape[1]}"
    return None


def _tiles(q, kv) -> bool:
    vec = _rows.vector(q.dtype)
    return all(_frames.is_tile(x.shape[1], vec) for x in (q, kv))


def _least(q, kv) -> int:
    """Tokens of the smallest tile of both."""
    vec = _rows.vector(q.dtype)
    return max(_rows.smallest(x.shape[1], vec) for x in (q, kv)) if _tiles(q, kv) else 1


def _legal(q, kv) -> list[int]:
    least, width = _least(q, kv), q.shape[1] + kv.shape[1]
    return [least << i for i in range(4) if i == 0 or (least << i) * width <= _frames.LINE_VALUES]


def default_config(*, q, kv, **_) -> Config:
    """The smallest tile: rows are long."""
    return Config(rows=_legal(q, kv)[0])


def configs(*, q, kv, **_) -> Iterable[Config]:
    """All legal heights."""
    return [Config(rows=r) for r in _legal(q, kv)]


def q_kv_rms_norm(*, config: Config, q, kv, q_weight, kv_weight, eps):
    """Launch; arguments as prepared by `jaxattn.ops.q_kv_rms_norm`."""
    vec, least = _rows.vector(q.dtype), _least(q, kv)
    if config.rows % least:
        raise ValueError(f"q_kv_rms_norm: rows={config.rows} must be a multiple of {least}, the smallest tile")
    widths = q.shape[1], kv.shape[1]
    lines = None if _tiles(q, kv) else [_frames.line(x.shape[1], x.dtype) for x in (q, kv)]

    def rows_of(first, count: int, which: int) -> Rows:
        if lines is None:
            return Rows(Frame((count, widths[which]), vec, _frames.is_narrow(q.dtype)), first)
        line = lines[which]
        assert isinstance(line, Line)
        return Rows(line.frame, first, line)

    def process(first, count, q_ref, kv_ref, q_weight_ref, kv_weight_ref, q_out, kv_out):
        both = [rows_of(first, count, i) for i in (0, 1)]
        loaded = [rows.load(ref) for rows, ref in zip(both, (q_ref, kv_ref), strict=True)]
        weights = [rows.load_each(ref) for rows, ref in zip(both, (q_weight_ref, kv_weight_ref), strict=True)]
        for i, (rows, out) in enumerate(zip(both, (q_out, kv_out), strict=True)):
            z = [_frames.wide(a) for a in loaded[i]]
            r = rows.frame.spread(inverse_root(rows, z, widths[i], eps))
            for k, (a, w) in enumerate(zip(z, weights[i], strict=True)):
                rows.store(out, k, a * r * w)

    arrays, shared = [q, kv], [q_weight, kv_weight]
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    name = "q_kv_rms_norm"
    if lines is None:
        return tuple(
            _frames.launch_tiles(process, arrays, types, rows=config.rows, least=least, name=name, shared=shared)
        )

    def each(tokens, *refs):
        for token in tokens:
            process(token, 1, *refs)

    return tuple(_frames.launch_lines(each, arrays, types, rows=config.rows, name=name, shared=shared))
