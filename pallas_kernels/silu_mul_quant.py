"""SwiGLU's product with FP8 quantization on Mosaic GPU: one pass over memory, see `jaxattn.ops.silu_mul_quant`."""

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _codes, _exact, _frames, _mosaic
from pallas_kernels import _plans as plans
from pallas_kernels import rms_norm_quant as norm
from pallas_kernels._frames import Frame
from pallas_kernels._plans import Plan, Rows

_SHRINK = 1 / 16
"""Numerator and denominator of the quotient, so that neither 1 / (1 + exp) nor its remainders become denormal."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """`rows`: rows of one warpgroup."""

    rows: int

    def __post_init__(self):
        plans.check_rows(self.rows)


def why_not(*, x, mode, group, **_) -> str | None:
    """None if the kernel can run these arguments, else one sentence."""
    found = _found(x, mode, group)
    return found if isinstance(found, str) else None


def default_config(*, x, mode, group, **_) -> Config:
    """Tiles as large as still fill the card, lines one by one."""
    return Config(rows=_plan(x, mode, group).default_rows())


def configs(*, x, mode, group, **_) -> Iterable[Config]:
    """All legal heights."""
    return [Config(rows=r) for r in _plan(x, mode, group).choices()]


def _found(x, mode: str, group: int) -> Plan | str:
    most = _frames.LINE_VALUES if mode == "token" else None
    return norm.found(x.shape[0], x.shape[1] // 2, x.dtype, mode, group, most)


def _plan(x, mode: str, group: int) -> Plan:
    found = _found(x, mode, group)
    assert not isinstance(found, str), found
    return found


def silu_mul_quant(*, config: Config, x, limit, mode, scale, upper_bound, group):
    """Launch; arguments as prepared by `jaxattn.ops.silu_mul_quant`."""
    plan, N, F, dtype = _plan(x, mode, group), x.shape[0], x.shape[1] // 2, x.dtype
    plan.check("silu_mul_quant", config.rows)
    number = {"static": scale, "token": upper_bound}.get(mode)
    shared = [] if number is None else [number.astype(jnp.float32).reshape(1)]

    def process(rows: Rows, x_ref, *refs):
        frame, refs = rows.frame, list(refs)
        s_ref = None if number is None else refs.pop(0)

        def load(pieces):
            return [rows.load(x_ref.at[:, half], pieces) for half in range(2)]

        def finish(loaded, first):
            y = []
            for gate, up in zip(*loaded, strict=True):
                gate, up = _frames.wide(gate), _frames.wide(up)
                if limit is not None:
                    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
                y.append(_codes.rounded(silu(frame, gate), dtype) * up)
            norm.finish(rows, mode, y, dtype, refs, None if s_ref is None else s_ref[0], first)

        some, count = _together(rows), len(rows.pieces)
        if some >= count:
            loaded = load(None)
            yield
            finish(loaded, 0)
            return
        yield
        turns = (count - 1) // some  # the last piece may overlap the one before
        lax.fori_loop(0, turns, lambda i, _: finish(load([i * some + k for k in range(some)]), i * some), None)
        finish(load(range(turns * some, count)), turns * some)

    types = norm.finished_types(mode, N, plan.D, plan, dtype)
    arrays = [plan.view(plans.widened(x.reshape(N, 2, F), plan.D))]
    done = plans.run(plan, process, arrays, types, rows=config.rows, name="silu_mul_quant", shared=shared)
    out = norm.finished(mode, N, F, done)
    return out[0] if len(out) == 1 else out


def _together(rows: Rows) -> int:
    """Pieces that registers hold at once: all, or half of what they can hold."""
    count = len(rows.pieces)
    if rows.line is None or count * rows.line.width <= _frames.LINE_VALUES:
        return count
    return max(1, _frames.LINE_VALUES // 2 // rows.line.width)


def silu(frame: Frame, gate: jax.Array) -> jax.Array:
    """`gate / (1 + exp(-gate))` in float32; the quotient is that of IEEE division but for one case in millions.

    The approximate reciprocal is refined once, and the quotient once with its exact remainder. Where the exponential
    overflows, the quotient is -0, as it is by division.
    """
    power = jnp.exp(-gate)
    if _mosaic.interpreting():
        return _exact.divide(gate, 1 + power)
    below = power * _SHRINK + _SHRINK
    above = gate * _SHRINK
    r = frame.each("rcp.approx.ftz.f32", lambda x: 1 / x, below)
    lost = frame.each("fma.rn.f32", _fma, -below, r, jnp.ones_like(r))
    r = frame.each("fma.rn.f32", _fma, lost, r, r)
    q = frame.each("mul.rn.f32", jnp.multiply, above, r)
    rest = frame.each("fma.rn.f32", _fma, q, below, -above)
    q = frame.each("fma.rn.f32", _fma, rest, -r, q)
    return jnp.where(power < jnp.inf, q, gate * 0.0)


def _fma(x, y, z):
    return x * y + z
